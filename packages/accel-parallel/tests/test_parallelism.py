import json

import pytest

from accel_parallel import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accel_state.errors import PlanError, SettingError


def test_sizes_and_names():
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2, tp_size=3)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (24, 4, 6)
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp", "cp"]
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp", "cp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config.tp_handler == TorchTensorParallelConfig()
    assert config.cp_handler.cp_comm_strategy == "allgather"
    assert json.loads(config.to_json())["cp_handler"] == {"cp_comm_strategy": "allgather"}


def test_nothing_asked_for_is_one_rank():
    config = ParallelismConfig()
    assert set(config.sizes.values()) == {1}
    assert config.total_size == 1
    assert config.sp_backend == "native"
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert not config.active_mesh_dims
    assert config.tp_handler is config.cp_handler is config.sp_handler is None


@pytest.mark.parametrize("axis", ["pp", "dp_replicate", "dp_shard", "cp", "sp", "tp"])
def test_the_environment_fills_what_was_not_given(monkeypatch, axis):
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{axis.upper()}_SIZE", "4")
    assert ParallelismConfig() == ParallelismConfig(**{f"{axis}_size": 4})
    assert ParallelismConfig(**{f"{axis}_size": 2}).total_size == 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tp_size": 0}, "tp_size=0 is not a number of ranks"),
        ({"tp_size": "2"}, "tp_size='2' is not a number of ranks"),
        ({"dp_shard_size": True}, "dp_shard_size=True is not"),
        ({"cp_size": 2, "sp_size": 2}, "both share the sequence"),
        ({"cp_backend": "ring"}, "cp_backend='ring' does not exist: use one of torch"),
        ({"sp_backend": "x"}, "use one of native, deepspeed"),
    ],
)
def test_bad_fields_are_refused(fields, reason):
    with pytest.raises(SettingError, match=reason):
        ParallelismConfig(**fields)


def test_handlers_refuse_what_does_not_exist():
    with pytest.raises(SettingError, match="allgather, alltoall"):
        TorchContextParallelConfig("bogus")
    with pytest.raises(SettingError, match="needs the length"):
        DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)
    with pytest.raises(SettingError, match="eager"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager")
    with pytest.warns(UserWarning, match="enable_async_tp=True has no effect"):
        TorchTensorParallelConfig(enable_async_tp=True)


@pytest.mark.parametrize(
    ("sizes", "world_size", "product", "nearest"),
    [
        ({"tp_size": 3}, 2, r"3 \(tp\) = 3", "tp_size=2"),
        ({"tp_size": 2}, 8, r"2 \(tp\) = 2", "dp_shard_size=4, tp_size=2"),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, 16, r"2 \(dp_replicate\) x 4 \(dp_shard\) = 8", "dp_.*=.*dp_"),
        ({"dp_shard_size": 4, "tp_size": 2}, 4, r"4 \(dp_shard\) x 2 \(tp\) = 8", "dp_shard_size=2, tp_size=2"),
        ({"dp_shard_size": 2}, 1, r"2 \(dp_shard\) = 2 ranks, and there is 1", "no axis above 1"),
    ],
)
def test_a_misfit_names_the_product_and_the_nearest_plan(sizes, world_size, product, nearest):
    (complaint,) = ParallelismConfig(**sizes).check(world_size)
    assert str(world_size) in complaint
    with pytest.raises(AssertionError, match=f"{product}.*Nearest plan.*{nearest}"):
        raise AssertionError(complaint)


def test_a_plan_that_fits_has_no_complaints():
    assert ParallelismConfig(dp_shard_size=2, tp_size=2).check(4) == []


def test_explain_shows_who_is_where():
    lines = ParallelismConfig(dp_shard_size=2, tp_size=2).explain().splitlines()
    assert lines[0] == "mesh of 2 (dp_shard) x 2 (tp) = 4 ranks, data cut into 2 parts"
    assert [line.split() for line in lines[1:]] == [
        ["rank", "dp_shard", "tp"], ["0", "0", "0"], ["1", "0", "1"], ["2", "1", "0"], ["3", "1", "1"],
    ]  # fmt: skip
    assert ParallelismConfig(tp_size=128).explain().endswith("rank 127: the last axis changes fastest")


def test_a_mesh_needs_a_process_group_and_a_device_type():
    with pytest.raises(PlanError, match="needs a process group"):
        ParallelismConfig(tp_size=2).build_device_mesh("cpu")
    with pytest.raises(SettingError, match="give device_type"):
        ParallelismConfig(tp_size=2).get_device_mesh()


def test_the_mesh_of_four_ranks(ranks):
    def body():
        from accel_parallel import ParallelismConfig, PlanContext, data_parallel_size, fsdp_mesh, loss_group, loss_size
        from accel_state import PartialState

        state = PartialState(cpu=True)
        config = ParallelismConfig(dp_replicate_size=2, tp_size=2)
        mesh = config.build_device_mesh("cpu")
        assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
        assert config.get_device_mesh() is config.get_mesh("cpu") is mesh
        context = PlanContext(device=state.device, world_size=4, mesh=mesh)
        sharing = fsdp_mesh(context)
        whole = ParallelismConfig(dp_shard_size=4).build_device_mesh("cpu")
        return (
            mesh.mesh.tolist(),
            tuple(sharing.mesh.shape),
            data_parallel_size(context),
            loss_size(context),
            loss_group(context).size(),
            fsdp_mesh(PlanContext(device=state.device, world_size=4, mesh=whole)).size(),
            mesh["dp"].size(),
            mesh["dp_shard_cp"].size(),
        )

    for answer in ranks(body, 4):
        assert answer == ([[[0, 1]], [[2, 3]]], (2, 1), 2, 2, 2, 4, 2, 1)


def test_a_mesh_that_does_not_fit_is_refused_on_every_rank(ranks):
    def body():
        from accel_parallel import ParallelismConfig
        from accel_state import PartialState

        PartialState(cpu=True)
        try:
            ParallelismConfig(tp_size=3).build_device_mesh("cpu")
        except ValueError as error:
            return str(error)

    assert all("3 (tp) = 3 ranks, and there are 2" in text for text in ranks(body, 2))
