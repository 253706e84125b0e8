"""Models of which no rank has all: whole weights for other readers, hooks, and what is refused."""

import pytest
import torch
from torch import nn

from accel_ckpt import read_weights
from accel_state.errors import CheckpointError


def spread(kind):
    """On a rank: an Accelerator, a prepared model with tied weights, and the state that it had before."""
    from accel import Accelerator
    from accel_parallel import FullyShardedDataParallelPlugin, ParallelismConfig, PipelineConfig
    from accel_testkit.nets import chain_net
    from accel_testkit.training import tied_net

    plugin = config = None
    if kind in ("fsdp1", "fsdp2"):
        model = tied_net()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(kind[-1]), auto_wrap_policy="TRANSFORMER_BASED_WRAP", activation_checkpointing=True
        )
    else:
        model = chain_net()
        model[5].bias = model[5].weight
        more = {"dp_shard_size": 2} if kind == "pp+fsdp2" else {}
        handler = PipelineConfig(schedule="interleaved_1f1b" if more else "1f1b")
        config = ParallelismConfig(pp_size=2, pp_handler=handler, **more)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    return accelerator, accelerator.prepare(model), before


def write_whole(kind, directory):
    accelerator, model, want = spread(kind)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert list(state) == list(want)
        assert all(torch.equal(state[name], value) for name, value in want.items())
        tied = ("logits.weight", "embedding.weight") if "fsdp" in kind[:4] else ("5.bias", "5.weight")
        assert state[tied[0]] is state[tied[1]]
    else:
        assert state == {}
    accelerator.save_model(model, directory / "model", max_shard_size="20KB")
    return want


@pytest.mark.parametrize(("kind", "n"), [("fsdp1", 2), ("fsdp2", 2), ("pp", 2), ("pp+fsdp2", 4)])
def test_the_main_process_has_and_writes_all_weights(tmp_path, ranks, kind, n):
    want = ranks(write_whole, n, kind, tmp_path)[0]
    found = {}
    aliases = read_weights(tmp_path / "model", found.__setitem__)
    assert aliases == ({"logits.weight": "embedding.weight"} if "fsdp" in kind[:4] else {"5.bias": "5.weight"})
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], value) for name, value in want.items())


def refuse_torch_files(kind, directory):
    accelerator, _, _ = spread(kind)
    with pytest.raises(CheckpointError, match=r"the peer's files cannot be written or read where models are sharded"):
        accelerator.save_state(directory / "mine", safe_serialization=False)
    with pytest.raises(CheckpointError, match=r"to read theirs, load them on one process"):
        accelerator.load_state(directory / "theirs")


def test_the_peers_files_are_refused(tmp_path, ranks):
    from accel import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "theirs", safe_serialization=False)
    for kind in ("fsdp1", "fsdp2", "pp"):
        ranks(refuse_torch_files, 2, kind, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def with_hooks(kind, directory):
    """Hooks see weights by the model's own names, of a pipeline those of the rank; what they do to them is written."""
    accelerator, model, want = spread(kind)
    seen = []

    def negate(models, weights, output_dir):
        assert models == [model]
        seen.extend(weights[0])
        weights[0] = {name: -value for name, value in weights[0].items()}

    accelerator.register_save_state_pre_hook(negate).remove()
    handle = accelerator.register_save_state_pre_hook(negate)
    accelerator.save_state(directory / "negative")
    handle.remove()
    accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: weights.pop())
    accelerator.save_state(directory / "without")
    popping = accelerator.register_load_state_pre_hook(lambda models, input_dir: models.pop())
    accelerator.load_state(directory / "without")
    popping.remove()
    accelerator.load_state(directory / "negative")
    state = accelerator.get_state_dict(model)
    assert all(torch.equal(state[name], -value) for name, value in want.items() if name in state)
    return seen


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "pp"])
def test_hooks_work_on_the_models_own_names(tmp_path, ranks, kind):
    first, second = ranks(with_hooks, 2, kind, tmp_path)
    if kind == "pp":
        assert {name.split(".")[0] for name in first} | {name.split(".")[0] for name in second} == set("0123456")
        assert not set(first) & set(second)
    else:
        assert first == second
        assert {"embedding.weight", "blocks.0.up.bias"} <= set(first)


def overflow_on_one_rank(version):
    from accel import Accelerator
    from accel_parallel import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, use_orig_params=None if version == 2 else False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="fp16")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    if accelerator.is_main_process:  # in its part of the parameters
        gradient = next(model.parameters()).grad
        (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(float("inf"))
    optimizer.step()
    return accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale()


@pytest.mark.parametrize("version", [1, 2])
def test_an_overflow_in_one_ranks_part_is_skipped_by_all(ranks, version):
    assert ranks(overflow_on_one_rank, 2, version) == [(True, 2.0**15)] * 2
