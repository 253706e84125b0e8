import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)

from accel_parallel import FullyShardedDataParallelPlugin
from accel_state import DistributedType
from accel_state.errors import PlanError, SettingError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 100)


def plugin(version: int = 2, **fields) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=version, **fields)


def plain(thing):
    """Fields in a form that compares by value."""
    return {name: str(value) for name, value in vars(thing).items()}


def test_defaults_of_version_2():
    made = plugin()
    assert made.reshard_after_forward is True
    assert made.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert not made.offloads
    assert made.use_orig_params is made.sync_module_states is made.forward_prefetch is made.sharding_strategy is None
    assert made.distributed_type is DistributedType.FSDP


def test_defaults_of_version_1_which_is_the_default():
    made = FullyShardedDataParallelPlugin()
    assert made.fsdp_version == 1
    assert made.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert made.state_dict_type is StateDictType.FULL_STATE_DICT
    assert made.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert made.use_orig_params is made.sync_module_states is made.forward_prefetch is False
    assert made.cpu_offload == CPUOffload(offload_params=False)


@pytest.mark.parametrize(
    ("variables", "fields"),
    [
        ({"FSDP_VERSION": "2"}, {"fsdp_version": 2}),
        ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"},
         {"fsdp_version": 2, "reshard_after_forward": False}),
        ({"FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"},
         {"fsdp_version": 2, "reshard_after_forward": False}),
        ({"FSDP_SHARDING_STRATEGY": "2"}, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
        ({"FSDP_SHARDING_STRATEGY": "NO_SHARD"}, {"sharding_strategy": "NO_SHARD"}),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, {"cpu_offload": True}),
        ({"FSDP_BACKWARD_PREFETCH": "BACKWARD_POST"}, {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
        ({"FSDP_BACKWARD_PREFETCH": "NO_PREFETCH"}, {"backward_prefetch": None}),
        ({"FSDP_USE_ORIG_PARAMS": "1", "FSDP_FORWARD_PREFETCH": "1"},
         {"use_orig_params": True, "forward_prefetch": True}),
        ({"FSDP_SYNC_MODULE_STATES": "1", "FSDP_CPU_RAM_EFFICIENT_LOADING": "1"},
         {"sync_module_states": True, "cpu_ram_efficient_loading": True}),
        ({"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, {"state_dict_type": "SHARDED_STATE_DICT"}),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {"activation_checkpointing": True}),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "100"},
         {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100}),
        ({"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block, Linear"},
         {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Block", "Linear"]}),
    ],
)  # fmt: skip
def test_the_environment_gives_field_by_field_what_the_arguments_give(monkeypatch, variables, fields):
    by_argument = FullyShardedDataParallelPlugin(**fields)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert plain(FullyShardedDataParallelPlugin()) == plain(by_argument)


@pytest.mark.parametrize(
    ("version", "fields", "reason"),
    [
        (3, {}, "fsdp_version=3 does not exist"),
        (2, {"sharding_strategy": "HYBRID_SHARD"}, "is for fsdp_version=1.*dp_replicate_size"),
        (2, {"reshard_after_forward": "FULL_SHARD"}, "give True or False"),
        (1, {"reshard_after_forward": True}, "is for fsdp_version=2"),
        (1, {"sharding_strategy": "ALL"}, "use one of FULL_SHARD"),
        (2, {"forward_prefetch": True}, "forward_prefetch=True is for fsdp_version=1"),
        (2, {"state_dict_type": "LOCAL_STATE_DICT"}, "is for fsdp_version=1: use one of SHARDED"),
        (2, {"mixed_precision_policy": MixedPrecision()}, "takes MixedPrecisionPolicy"),
        (1, {"mixed_precision_policy": MixedPrecisionPolicy()}, "takes MixedPrecision,"),
        (2, {"mixed_precision_policy": "int8"}, "'int8' does not exist"),
        (2, {"cpu_offload": CPUOffload()}, "takes a bool or OffloadPolicy"),
        (1, {"auto_wrap_policy": "EVERYTHING"}, "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP"),
    ],
)
def test_what_a_version_has_no_use_for_is_refused(version, fields, reason):
    with pytest.raises(SettingError, match=reason):
        plugin(version, **fields)


def test_the_hybrid_strategies_of_the_environment_are_refused_with_the_mesh_that_replaces_them(monkeypatch):
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "HYBRID_SHARD")
    with pytest.raises(SettingError, match="dp_replicate_size"):
        plugin(2)


def test_fields_without_effect_warn():
    with pytest.warns(UserWarning, match="use_orig_params, backward_prefetch"):
        made = plugin(2, use_orig_params=True, backward_prefetch="BACKWARD_POST")
    assert made.use_orig_params is made.backward_prefetch is None
    with pytest.warns(UserWarning, match="only rank 0 has the weights"):
        assert plugin(1, cpu_ram_efficient_loading=True).sync_module_states is True


def test_offload_and_precision_become_the_versions_classes():
    assert plugin(1, cpu_offload=True).cpu_offload == CPUOffload(offload_params=True)
    assert isinstance(plugin(2, cpu_offload=True).cpu_offload, CPUOffloadPolicy)
    assert plugin(2, cpu_offload=True).offloads
    dtype = torch.bfloat16
    want = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    assert plugin(2, mixed_precision_policy="bf16").mixed_precision_policy == want
    assert plugin(2, mixed_precision_policy={"param_dtype": dtype}).mixed_precision_policy.param_dtype is dtype
    old = plugin(1, mixed_precision_policy="fp16").mixed_precision_policy
    assert old.param_dtype is old.buffer_dtype is torch.float16


def test_mixed_precision_is_set_once_unless_overridden():
    made = plugin(1)
    made.set_mixed_precision("bf16", buffer_autocast=True)
    assert made.mixed_precision_policy.buffer_dtype is torch.float32
    made.set_mixed_precision("fp16")
    assert made.mixed_precision_policy.param_dtype is torch.bfloat16
    made.set_mixed_precision("fp16", override=True)
    assert made.mixed_precision_policy.param_dtype is torch.float16


def test_another_state_dict_type_brings_its_configurations():
    made = plugin(2)
    made.set_state_dict_type("FULL_STATE_DICT")
    assert made.state_dict_type is StateDictType.FULL_STATE_DICT
    assert made.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


def units_of(made, model):
    from accel_parallel.sharding_units import units

    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in units(model, made.policy_for(model), made.ignored_in(model))]


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, []),
        ({"auto_wrap_policy": "NO_WRAP"}, []),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, BLOCKS),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": "Block"}, BLOCKS),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 400}, ["head"]),
        ({"auto_wrap_policy": lambda module: isinstance(module, nn.Linear)},
         ["blocks.0.linear", "blocks.1.linear", "blocks.2.linear", "head"]),
        ({"auto_wrap_policy": lambda module: isinstance(module, Block), "ignored_modules": "blocks.[01]"},
         ["blocks.2"]),
        ({"auto_wrap_policy": functools.partial(
            torch.distributed.fsdp.wrap.size_based_auto_wrap_policy, min_num_params=400)}, ["head"]),
    ],
)  # fmt: skip
def test_which_modules_are_units(fields, want):
    assert units_of(plugin(2, **fields), Net()) == want


def test_a_policy_can_be_fixed_for_a_model():
    made, model = plugin(2, auto_wrap_policy="TRANSFORMER_BASED_WRAP"), Net()
    made.set_auto_wrap_policy(model)
    assert units_of(made, model) == BLOCKS


@pytest.mark.parametrize(
    ("fields", "error", "reason"),
    [
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Blok"]},
         PlanError, "no module of class Blok: its classes are Block, Linear"),
        ({"ignored_modules": "nothing"}, SettingError, "fits no module"),
        ({"auto_wrap_policy": 3}, PlanError, "is no policy"),
    ],
)  # fmt: skip
def test_what_the_model_has_not_is_named(fields, error, reason):
    with pytest.raises(error, match=reason):
        units_of(plugin(2, **fields), Net())
    with pytest.raises(PlanError, match="no repeated blocks"):
        units_of(plugin(2, auto_wrap_policy="TRANSFORMER_BASED_WRAP"), nn.Sequential(nn.Linear(1, 1)))
