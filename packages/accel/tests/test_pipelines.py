"""Pipelines through the Accelerator: the loop, loss scaling over stages, whole weights, and what is refused."""

import pytest

from accel_state.errors import PlanError, SettingError
from accel_testkit.nets import chain_net


def test_a_pipeline_trains_as_the_same_script_does_on_one_process(ranks):
    def body(num_ranks):
        import torch
        import torch.nn.functional as F
        from torch.utils.data import DataLoader, TensorDataset

        from accel import Accelerator
        from accel.utils import set_seed
        from accel_parallel import ParallelismConfig, PipelineConfig

        config = ParallelismConfig(pp_size=num_ranks, pp_handler=PipelineConfig(num_microbatches=2))
        accelerator = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=2)
        set_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
        losses, norms = [], []
        for batch in loader:
            with accelerator.accumulate(model):
                losses.append(accelerator.forward_backward(batch, F.cross_entropy))
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                optimizer.zero_grad()
        batch = {"input": torch.ones(4, 4), "labels": torch.zeros(4, dtype=torch.long)}
        last = accelerator.forward_backward(batch, F.cross_entropy)
        for wrong in (torch.ones(4), {"input": torch.ones(4, 4)}):
            with pytest.raises(SettingError, match=r"give a tuple \(arguments\.\.\., target\), or a dict"):
                accelerator.forward_backward(wrong, F.cross_entropy)
        if num_ranks > 1:
            assert "pp" in accelerator.explain()
            with pytest.raises(PlanError, match=r"unwrap_model cannot give back a pipelined model.*get_state_dict"):
                accelerator.unwrap_model(model)
            with pytest.raises(PlanError, match=r"a second model, a Linear, under pp_size above 1"):
                accelerator.prepare(torch.nn.Linear(1, 1))
        return [None if loss is None else float(loss) for loss in (*losses, last)], norms

    ((want, want_norms),) = ranks(body, 1, 1)
    (first, first_norms), (second, second_norms) = ranks(body, 2, 2)
    assert first == [None] * 5
    assert second == pytest.approx(want, rel=1e-5)
    assert first_norms == second_norms == pytest.approx(want_norms, rel=1e-5)


def train_scaled(sizes, options):
    """On a rank: four updates in fp16, of which the third overflows in one layer; what each of them was like."""
    import torch
    import torch.nn.functional as F

    from accel import Accelerator
    from accel.utils import GradScalerKwargs
    from accel_parallel import ParallelismConfig, PipelineConfig
    from accel_testkit.training import tokens

    config = ParallelismConfig(**sizes, pp_handler=PipelineConfig(**options))
    handler = GradScalerKwargs(init_scale=2.0**10, growth_interval=2)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", parallelism_config=config, kwargs_handlers=[handler])
    model = chain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    schedule = accelerator.prepare_scheduler(schedule, per="update")  # else two data ranks count twice

    def loss_of(logits, batch):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    found = []
    for update, batch in enumerate(tokens(4)):
        mine = batch.chunk(config.data_parallel_size)[accelerator.data_parallel_rank]
        loss = accelerator.forward_backward((mine, mine), loss_of)
        first = dict(model.named_parameters()).get("0.weight")
        if update == 2 and first is not None:  # a layer that the first rank of the pipeline has alone
            gradient = first.grad.to_local() if hasattr(first.grad, "to_local") else first.grad
            gradient.fill_(float("inf"))
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped = accelerator.optimizer_step_was_skipped
        found.append((None if loss is None else float(loss), norm, skipped, accelerator.scaler.get_scale()))
    return found, accelerator.get_state_dict(model)


@pytest.mark.parametrize(
    ("sizes", "options", "n"),
    [
        ({"pp_size": 2}, {"num_microbatches": 2}, 2),
        ({"pp_size": 2}, {"schedule": "interleaved_zero_bubble"}, 2),
        ({"pp_size": 2, "dp_replicate_size": 2}, {}, 4),
        ({"pp_size": 2, "dp_shard_size": 2}, {}, 4),
    ],
)
def test_stages_scale_and_skip_as_one_device_does(ranks, sizes, options, n):
    """fp16 sums have about three digits, and micro-batches are summed in another order."""
    ((want, whole),) = ranks(train_scaled, 1, {}, {})
    assert [skipped for _, _, skipped, _ in want] == [False, False, True, False]
    assert [scale for *_, scale in want] == [2.0**10, 2.0**11, 2.0**10, 2.0**10]
    results = ranks(train_scaled, n, sizes, options)
    for found, _ in results:
        assert [row[2:] for row in found] == [row[2:] for row in want]
        norms = [norm for _, norm, *_ in found]
        assert norms[2] == want[2][1] == float("inf")
        assert norms == pytest.approx([row[1] for row in want], rel=5e-3)
    if n == 2:  # elsewhere a loss is of a part of the batch
        assert [loss for loss, *_ in results[-1][0]] == pytest.approx([row[0] for row in want], rel=5e-3)
    state = results[0][1]
    assert list(state) == list(whole)
    before = chain_net().state_dict()
    moved = sum((value - before[name]).square().sum() for name, value in whole.items())
    off = sum((value - state[name]).square().sum() for name, value in whole.items())
    assert (off / moved).sqrt() < 5e-3


def saved_by_stages(directory):
    from accel import Accelerator
    from accel_parallel import ParallelismConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    trained_once(accelerator)
    accelerator.save_state(directory)


def trained_once(accelerator):
    """A chain with an optimizer of two groups that divide its layers crosswise, after an update."""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    weights, biases = [layer.weight for layer in model], [layer.bias for layer in model]
    optimizer = torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.2}], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.forward_backward((torch.ones(4, 4), torch.zeros(4, 4)), F.mse_loss)
    optimizer.step()
    return model, optimizer


def test_what_stages_saved_is_converted_for_accelerate_in_the_models_order(tmp_path, ranks):
    import torch

    from accel import Accelerator
    from accel_ckpt import convert_to_accelerate

    ranks(saved_by_stages, 2, tmp_path / "ours")
    convert_to_accelerate(tmp_path / "ours", tmp_path / "theirs")
    found = []
    for folder in ("ours", "theirs"):
        accelerator = Accelerator(cpu=True)
        model, optimizer = trained_once(accelerator)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
                optimizer.state[parameter]["exp_avg"].zero_()
        accelerator.load_state(tmp_path / folder)
        names = [name for name, _ in model.named_parameters()]
        state = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
        rates = [group["lr"] for group in optimizer.param_groups]
        found.append((dict(zip(names, state, strict=True)), model.state_dict(), rates))
    for ours, theirs in zip(found[0][:2], found[1][:2], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].any() for name in ours)
    assert found[0][2] == found[1][2] == [0.1, 0.2]
