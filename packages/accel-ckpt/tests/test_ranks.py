"""Several ranks save and load as one."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from accel_ckpt import Checkpointer, latest, load_checkpoint, save_checkpoint
from accel_state import PartialState, current_seed, seed_for_rank, set_seed
from accel_state.errors import CheckpointError
from accel_testkit.faults import message_of


class Momentum:
    """An optimizer by shape: torch.optim's would import the compiler in each rank's process."""

    def __init__(self, parameters) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]
        self.state = {p: torch.zeros_like(p) for p in self.param_groups[0]["params"]}

    def step(self) -> None:
        (group,) = self.param_groups
        with torch.no_grad():
            for p in group["params"]:
                self.state[p].mul_(0.9).add_(p.grad)
                p.sub_(self.state[p], alpha=group["lr"])
                p.grad = None

    def state_dict(self):
        (group,) = self.param_groups
        numbers = list(range(len(group["params"])))
        state = {number: {"momentum": self.state[group["params"][number]]} for number in numbers}
        return {"state": state, "param_groups": [{**group, "params": numbers}]}

    def load_state_dict(self, state):
        (group,) = self.param_groups
        self.state = {group["params"][number]: values["momentum"] for number, values in state["state"].items()}


class Run:
    """Whole-batch regression, each rank on its part of the batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)
        self.opt = Momentum(self.net.parameters())

    @property
    def objects(self):
        return {"net": self.net, "opt": self.opt}

    def train(self, steps: int, rank: int = 0, world: int = 1) -> None:
        rows = torch.arange(18.0).reshape(6, 3)[rank::world] / 9 - 1
        for _ in range(steps):
            (self.net(rows) - rows.sum(1, keepdim=True)).pow(2).mean().backward()
            for p in self.net.parameters():
                if world > 1:
                    torch.distributed.all_reduce(p.grad)
                    p.grad /= world
            self.opt.step()

    def weights(self) -> list[float]:
        return [v for p in self.net.parameters() for v in p.reshape(-1).tolist()]


def constant(value: float) -> nn.Module:
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, value)
    return net


def train_and_save(directory):
    state = PartialState(cpu=True)
    run = Run()
    run.train(3, state.process_index, state.num_processes)
    set_seed(7, device_specific=True)
    save_checkpoint(directory, run.objects, step=3)
    return torch.rand(1).item()


def load_and_train(directory):
    state = PartialState(cpu=True)
    run = Run()
    torch.manual_seed(55)
    loaded = load_checkpoint(directory, run.objects)
    draw = torch.rand(1).item()
    run.train(1, state.process_index, state.num_processes)
    return run.weights(), draw, loaded.world_size, current_seed()


def test_any_number_of_ranks_saves_and_any_loads(tmp_path, ranks):
    whole = Run()
    whole.train(4)
    for before, afters in ((2, (1, 3)), (1, (2,))):
        directory = tmp_path / f"by-{before}"
        saved = ranks(train_and_save, before, directory)
        assert len(list(directory.glob("random_states_*.json"))) == before
        for after in afters:
            results = ranks(load_and_train, after, directory)
            for weights, _, world_size, seed in results:
                torch.testing.assert_close(weights, whole.weights(), rtol=0, atol=1e-6)
                assert (world_size, seed) == (before, 7)
            draws = [draw for _, draw, _, _ in results]
            derived = [
                torch.rand(1, generator=torch.Generator().manual_seed(seed_for_rank(7, rank))).item()
                for rank in range(before, after)
            ]
            assert draws == saved[:after] + derived
            assert len(set(draws)) == after


def load_without_seed(directory):
    PartialState(cpu=True)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        load_checkpoint(directory, {"net": constant(0)})
    return [str(w.message) for w in heard if w.category is RuntimeWarning]


def test_a_rank_without_generators_and_without_a_seed_says_so(tmp_path, ranks):
    ranks(lambda path: save_checkpoint(path, {"net": constant(1)}), 1, tmp_path / "c")
    first, second = ranks(load_without_seed, 2, tmp_path / "c")
    assert first == []
    assert len(second) == 1
    assert "records no seed (call set_seed before saving): the random generators of rank 1 go on" in second[0]


def fail_everywhere(directory):
    """Each phase fails once on each rank; what every rank is told."""
    here = PartialState(cpu=True).process_index
    failing: dict[str, int] = {}

    class Fails:
        def state_dict(self):
            if failing.get("state_dict") == here:
                raise ValueError("no state today")
            return {}

        def load_state_dict(self, state):
            if failing.get("load") == here:
                raise ValueError("not this state")

    def hook(path):
        if failing.get("hook") == here:
            raise OSError(28, "No space left on device", "file")

    said = {}
    for where in ("state_dict", "hook", "load"):
        for rank in (0, 1):
            failing = {where: rank}
            target = directory / f"{where}-{rank}"
            said[where, rank] = message_of(lambda: save_checkpoint(target, {"it": Fails()}, before_commit=hook))  # noqa: B023
            if where == "load":
                said[where, rank] = message_of(lambda: load_checkpoint(target, {"it": Fails()}))  # noqa: B023
    return said


def test_a_failure_on_any_rank_is_raised_on_all_and_names_it(tmp_path, ranks):
    one, two = ranks(fail_everywhere, 2, tmp_path)
    assert one == two
    for rank in (0, 1):
        assert f"rank {rank}: ValueError: no state today" in one["state_dict", rank]
        assert f"rank {rank}: the disk is full; free some space and save again (file)" in one["hook", rank]
        assert f"rank {rank}: ValueError: not this state" in one["load", rank]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load-0", "load-1"]


def save_elsewhere(directory):
    """Rank 1 sees another file system, in effect: its files do not arrive where rank 0 looks."""
    import accel_ckpt.saving as module

    rank = PartialState(cpu=True).process_index
    original = module.write_snapshot

    def write(path, *args, **kwargs):
        if rank == 1:
            path = directory / "elsewhere"
            path.mkdir(parents=True)
        return original(path, *args, **kwargs)

    module.write_snapshot = write
    return message_of(lambda: save_checkpoint(directory / "c", {}))


def test_ranks_without_a_common_file_system_are_found_out(tmp_path, ranks):
    one, two = ranks(save_elsewhere, 2, tmp_path)
    assert one == two
    assert "seen by rank 0: random_states_1.json. All ranks need one file system" in one
    assert not (tmp_path / "c").exists()


def load_the_unfit_and_the_damaged(directory):
    state = PartialState(cpu=True)
    ckpt = Checkpointer(directory)
    for step in (1, 2):
        ckpt.save(step, net=constant(step))
    unfit = message_of(lambda: load_checkpoint(directory / "step-2", {"net": nn.Linear(9, 1)}))
    if state.is_main_process:
        (directory / "step-2" / "random_states_1.json").write_text("{}")
    state.wait_for_everyone()
    net = constant(0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        step = ckpt.restore(net=net)
    fallbacks = [str(w.message) for w in heard if "falling back" in str(w.message)]
    return unfit, step, net.weight[0, 0].item(), fallbacks


def test_errors_of_loading_are_common_too(tmp_path, ranks):
    one, two = ranks(load_the_unfit_and_the_damaged, 2, tmp_path)
    assert one[:3] == two[:3]
    assert one[0].startswith("CheckpointMismatchError: ")
    assert "rank 0: " in one[0]
    assert "rank 1: " in one[0]
    assert one[1:3] == (1, 1.0)
    assert two[3] == []
    assert len(one[3]) == 1
    assert "random_states_1.json has 2 bytes" in one[3][0]


def save_in_background(directory):
    state = PartialState(cpu=True)
    net = constant(0)
    ckpt = Checkpointer(directory, keep=latest(1))
    for step in (1, 2, 3):
        nn.init.constant_(net.weight, step)
        handle = ckpt.save(step, blocking=False, net=net)
        nn.init.constant_(net.weight, -1)
    path = handle.wait()
    if state.is_main_process:
        (directory / "file").write_text("in the way")
    state.wait_for_everyone()
    blocked = message_of(lambda: Checkpointer(directory / "file" / "c").save(1, blocking=False, net=net))
    ckpt.restore(net=net)
    return path.name, handle.done(), net.weight[0, 0].item(), blocked


def test_saves_in_the_background_on_two_ranks(tmp_path, ranks):
    one, two = ranks(save_in_background, 2, tmp_path / "c")
    assert one == two
    assert one[:3] == ("step-3", True, 3.0)
    assert "a part of the path is a file" in one[3]
    assert [path.name for path in (tmp_path / "c").glob("step-*")] == ["step-3"]


def save_wrapped(directory):
    PartialState(cpu=True)
    save_checkpoint(directory, {"net": nn.parallel.DistributedDataParallel(constant(4))})


def test_distributed_data_parallel_changes_no_names(tmp_path, ranks):
    ranks(save_wrapped, 2, tmp_path / "c")
    net = constant(0)
    load_checkpoint(tmp_path / "c", {"net": net})
    assert net.weight[0, 0] == 4


def _save_elsewhere(folder):
    state = PartialState(cpu=True)
    try:
        save_checkpoint(folder / f"rank-{state.process_index}", {"net": nn.Linear(1, 1)})
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_ranks_that_name_different_directories_all_hear_of_it(ranks, tmp_path):
    for said in ranks(_save_elsewhere, 2, tmp_path):
        assert "the ranks name different directories" in said
        assert "rank-1" in said
    assert list(tmp_path.iterdir()) == []
