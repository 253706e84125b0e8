"""How the Accelerator chooses mesh and plugin, and that its models, loaders and schedules follow."""

import pytest

from accel import Accelerator
from accel_parallel import FullyShardedDataParallelPlugin, ParallelismConfig, TorchTensorParallelPlugin
from accel_state.errors import PlanError, SettingError


@pytest.mark.parametrize("argument", ["fsdp_plugin", "torch_tp_plugin", "parallelism_config"])
def test_objects_of_another_type_are_refused(argument):
    with pytest.raises(SettingError, match=rf"{argument}='yes' is a str: give a"):
        Accelerator(cpu=True, **{argument: "yes"})


def test_one_process_fits_a_plan_of_one_and_no_other():
    assert Accelerator(cpu=True, parallelism_config=ParallelismConfig()).torch_device_mesh is None
    with pytest.raises(PlanError, match=r"does not fit this run.*2 \(tp\) = 2 ranks, and there is 1"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))


def test_what_a_pipeline_cannot_be_combined_with_is_refused():
    with pytest.raises(SettingError, match=r"pp_size=2 and a shared sequence"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, cp_size=2))
    with pytest.raises(SettingError, match=r"mixed_precision='fp8' with pp_size=2: .*Use 'bf16' or 'fp16'"):
        Accelerator(cpu=True, mixed_precision="fp8", parallelism_config=ParallelismConfig(pp_size=2))


def test_deepspeed_as_the_backend_of_sequences_is_refused_with_a_way_out():
    with pytest.raises(SettingError, match=r"sp_backend='deepspeed': .*Way out: sp_backend='native'"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2, sp_backend="deepspeed"))


def test_a_context_without_cp_is_harmless():
    import torch

    tokens = torch.arange(5)
    with Accelerator(cpu=True).maybe_context_parallel([tokens], [0], {tokens}):
        assert tokens.tolist() == [0, 1, 2, 3, 4]


def test_fsdp_on_one_process_without_a_group_is_refused_not_ignored():
    import torch

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    with pytest.raises(PlanError, match="no process group to shard over"):
        accelerator.prepare(torch.nn.Linear(1, 1))


def test_contradictions_are_refused():
    config = ParallelismConfig(dp_shard_size=2)
    with pytest.raises(SettingError, match="fsdp_version=1 cannot follow a parallelism_config"):
        Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(), parallelism_config=config)
    with pytest.raises(SettingError, match="nothing to share parameters over"):
        Accelerator(
            cpu=True,
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
            parallelism_config=ParallelismConfig(tp_size=2),
        )
    with (
        pytest.warns(FutureWarning, match="torch_tp_plugin=...\\) is deprecated"),
        pytest.raises(SettingError, match="tp_size=4 contradicts parallelism_config with tp_size=2"),
    ):
        Accelerator(
            cpu=True,
            torch_tp_plugin=TorchTensorParallelPlugin(tp_size=4),
            parallelism_config=ParallelismConfig(tp_size=2),
        )


def test_the_launchers_variables_give_what_the_arguments_give(ranks):
    def body(variables):
        import os

        from accel import Accelerator

        os.environ.update(variables)

        accelerator = Accelerator(cpu=True)
        plugin = accelerator.state.fsdp_plugin
        return (
            accelerator.distributed_type.value,
            accelerator.is_fsdp2,
            None if plugin is None else plugin.reshard_after_forward,
            accelerator.parallelism_config and accelerator.parallelism_config.sizes["dp_shard"],
            accelerator.torch_device_mesh and accelerator.torch_device_mesh.mesh_dim_names,
        )

    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    assert ranks(body, 2, variables) == [("FSDP", True, False, None, None)] * 2
    variables |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    assert ranks(body, 2, variables) == [("FSDP", True, False, 2, ("dp_shard",))] * 2


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_sharded_model_trains_as_one_on_one_device(ranks, version, precision):
    def body(version, precision):
        import torch

        from accel import Accelerator
        from accel_parallel import FullyShardedDataParallelPlugin
        from accel_testkit.nets import next_token_loss
        from accel_testkit.training import tied_net, tokens

        plugin = None
        if version is not None:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision)
        model = tied_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer, model = accelerator.prepare(optimizer, model)
        assert accelerator.prepare(model) is model
        for batch in tokens():
            mine = batch.chunk(accelerator.num_processes)[accelerator.process_index]
            loss = next_token_loss(model(mine), mine)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert loss.dtype is torch.float32
        return accelerator.get_state_dict(model)

    (want,) = ranks(body, 1, None, precision)
    got, elsewhere = ranks(body, 2, version, precision)
    assert elsewhere == {}
    bound = 1e-6 if precision == "no" else 5e-3
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name] - value).abs().max() < bound, name


def test_objects_cannot_stay_elsewhere_under_fsdp(ranks):
    def body():
        import torch

        from accel import Accelerator
        from accel_parallel import FullyShardedDataParallelPlugin

        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        try:
            accelerator.prepare(torch.nn.Linear(1, 1), device_placement=[False])
        except ValueError as error:
            return str(error)

    assert all("not possible under FSDP" in text for text in ranks(body, 2))


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_shard_size": 2, "tp_size": 2}])
def test_a_tensor_parallel_model_trains_by_the_handlers_plan(ranks, sizes):
    def body(sizes):
        import torch

        from accel import Accelerator
        from accel_parallel import ParallelismConfig, TorchTensorParallelConfig
        from accel_testkit.nets import TP_PLAN
        from accel_testkit.training import tied_net, tokens, train

        config = ParallelismConfig(**sizes, tp_handler=TorchTensorParallelConfig(plan=TP_PLAN))
        accelerator = Accelerator(cpu=True, parallelism_config=config)
        model = tied_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        parts = config.data_parallel_size
        mine = [batch.chunk(parts)[accelerator.process_index // 2] for batch in tokens()]
        return train(model, optimizer, mine, accelerator.clip_grad_norm_)

    from accel_testkit.training import single_truth

    want, _ = single_truth()
    for norms in ranks(body, 2 * sizes.get("dp_shard_size", 1), sizes):
        assert norms == pytest.approx(want, rel=1e-5)


CP_FROM_LAUNCHER = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_CP_SIZE": "2",
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall",
}


@pytest.mark.parametrize("n", [2, 4])
def test_sequences_are_shared_inside_the_context(ranks, n):
    def body(variables):
        import os

        import torch
        import torch.nn.functional as F

        from accel import Accelerator
        from accel_parallel import shift_labels
        from accel_testkit.training import tied_net, tokens, train_sequences

        os.environ.update(variables)
        accelerator = Accelerator(cpu=True)
        assert "passed on from rank to rank" in accelerator.explain()
        loader = torch.utils.data.DataLoader(tokens().flatten(0, 1), batch_size=8 // (accelerator.num_processes // 2))
        model, loader = accelerator.prepare(tied_net(), loader)
        batches = iter(loader)

        def step_of(model, _batch, total):
            batch = next(batches)
            labels, positions = shift_labels(batch), torch.arange(batch.shape[1])
            whole = batch.clone()
            with accelerator.maybe_context_parallel([batch, labels, positions], [1, 1, 0], {labels}):
                logits = model(batch, positions)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                accelerator.backward(loss * accelerator.num_processes / total)
            assert torch.equal(batch, whole)
            assert labels.shape[1] * 2 == batch.shape[1]

        return train_sequences(model, step_of, tokens()), len(loader)

    from accel_testkit.training import single_truth

    want, _ = single_truth()
    variables = CP_FROM_LAUNCHER | ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"} if n == 4 else {})
    for norms, length in ranks(body, n, variables):
        assert norms == pytest.approx(want, rel=1e-5)
        assert length == 3


@pytest.mark.parametrize("n", [2, 4])
def test_prepared_loaders_deal_sequences_to_the_ranks_that_share_them(ranks, n):
    def body(variables):
        import os

        import torch
        import torch.nn.functional as F

        from accel import Accelerator
        from accel_testkit.training import tied_net, tokens, train_sequences

        os.environ.update(variables)
        accelerator = Accelerator(cpu=True)
        assert "sequences shared over 2 ranks" in accelerator.explain()
        rows = [{"input_ids": row, "labels": row, "row": index} for index, row in enumerate(tokens().flatten(0, 1))]
        loader = torch.utils.data.DataLoader(rows, batch_size=8 // (accelerator.num_processes // 2))
        model, loader = accelerator.prepare(tied_net(), loader)
        assert accelerator.prepare(loader) is loader
        seen = []

        def step_of(model, _batch, total):
            batch = next(batches)
            assert batch["input_ids"].shape[1] == 8
            logits = model(batch["input_ids"], batch["position_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
            accelerator.backward(loss * accelerator.num_processes / total)
            seen.extend(accelerator.gather_for_metrics(batch["row"]).tolist())

        batches = iter(loader)
        return train_sequences(model, step_of, tokens()), seen

    from accel_testkit.training import single_truth

    want, _ = single_truth()
    variables = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2"}
    for norms, seen in ranks(body, n, variables | ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"} if n == 4 else {})):
        assert norms == pytest.approx(want, rel=1e-5)
        assert sorted(seen) == list(range(24))  # each sample once, though two ranks read it


def test_a_fixed_length_of_sequences_is_held_to(ranks):
    def body():
        import torch

        from accel import Accelerator
        from accel_parallel import DeepSpeedSequenceParallelConfig, ParallelismConfig

        handler = DeepSpeedSequenceParallelConfig(sp_seq_length=16, sp_seq_length_is_variable=False)
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2, sp_handler=handler))
        loader = accelerator.prepare(torch.utils.data.DataLoader([{"input_ids": torch.arange(8)}]))
        try:
            next(iter(loader))
        except ValueError as error:
            return str(error)

    assert all("8 positions, and sp_seq_length=16 is fixed" in text for text in ranks(body, 2))


def test_sequences_are_shared_beside_matrices(ranks):
    def body():
        import torch
        import torch.nn.functional as F

        from accel import Accelerator
        from accel_parallel import ParallelismConfig, TorchTensorParallelConfig, shift_labels
        from accel_testkit.nets import TP_PLAN
        from accel_testkit.training import tied_net, tokens, train_sequences

        handler = TorchTensorParallelConfig(plan=TP_PLAN)
        config = ParallelismConfig(cp_size=2, tp_size=2, tp_handler=handler)
        accelerator = Accelerator(cpu=True, parallelism_config=config)

        def step_of(model, batch, total):
            labels, positions, batch = shift_labels(batch), torch.arange(batch.shape[1]), batch.clone()
            with accelerator.maybe_context_parallel([batch, labels, positions], [1, 1, 0]):
                loss = F.cross_entropy(model(batch, positions).flatten(0, 1), labels.flatten(), reduction="sum")
                accelerator.backward(loss * config.cp_size / total)

        return train_sequences(accelerator.prepare(tied_net()), step_of, tokens())

    from accel_testkit.training import single_truth

    want, _ = single_truth()
    for norms in ranks(body, 4):
        assert norms == pytest.approx(want, rel=1e-5)


def test_ranks_know_their_places_on_the_mesh(ranks):
    def body():
        from accel import Accelerator
        from accel_parallel import ParallelismConfig

        names = ("data", "data_parallel_shard", "tensor", "context", "pipeline")
        attributes = [name if "_" in name else f"{name}_parallel" for name in names]
        plain = Accelerator(cpu=True)
        before = [getattr(plain, f"{name}_rank") for name in attributes]
        config = ParallelismConfig(dp_replicate_size=2, tp_size=2)
        accelerator = Accelerator(cpu=True, parallelism_config=config)
        return before, [getattr(accelerator, f"{name}_rank") for name in attributes]

    for rank, (before, after) in enumerate(ranks(body, 4)):
        assert before == [rank, 0, 0, 0, 0]
        assert after == [rank // 2, 0, rank % 2, 0, 0]
