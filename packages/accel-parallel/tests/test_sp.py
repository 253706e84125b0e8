"""Sequence parallelism: the exchange of heads for positions, batches cut for it, and models trained with it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_parallel import Plan, PlanContext, sequence_parallel, shard_batch
from accel_state.errors import PlanError
from accel_testkit.nets import TinyTransformer
from accel_testkit.training import single_truth

# ---------------------------------------------------------------- the exchange


@pytest.mark.parametrize("n", [2, 4])
def test_ulysses_equals_attention_over_the_whole_sequence(ranks, n):
    def body():
        import torch.distributed as dist

        from accel_parallel import ulysses_attention
        from accel_state import PartialState

        state = PartialState(cpu=True)
        worst = 0.0
        for heads, key_heads in [(4, 4), (8, 2), (4, 1), (12, 6)]:  # of the keys more than ranks, fewer, not divisible
            torch.manual_seed(0)
            q, grad = torch.randn(2, heads, 8, 4).double().requires_grad_(), torch.randn(2, heads, 8, 4).double()
            k, v = (torch.randn(2, key_heads, 8, 4).double().requires_grad_() for _ in range(2))

            def attention(q, k, v):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            def mine(x):
                return x.chunk(state.num_processes, 2)[state.process_index]

            whole = attention(q, k, v)
            part = ulysses_attention(mine(q), mine(k), mine(v), attention, dist.group.WORLD)
            wanted = torch.autograd.grad(whole, (q, k, v), grad)
            got = torch.autograd.grad(part, (q, k, v), mine(grad))
            pairs = [(part, mine(whole)), *((mine(a), mine(b)) for a, b in zip(got, wanted, strict=True))]
            worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
        return worst

    assert max(ranks(body, n)) < 1e-13


def test_heads_that_cannot_be_dealt_are_refused(ranks):
    def body():
        import torch.distributed as dist

        from accel_parallel import ulysses_attention
        from accel_state import PartialState

        PartialState(cpu=True)
        errors = []
        for heads, key_heads in [(3, 3), (4, 3)]:
            q, k = torch.ones(1, heads, 2, 2), torch.ones(1, key_heads, 2, 2)
            try:
                ulysses_attention(q, k, k, lambda q, _k, _v: q, dist.group.WORLD)
            except PlanError as error:
                errors.append(str(error))
        return errors

    for odd, shared in ranks(body, 2):
        assert "3 heads cannot be dealt to sp_size=2" in odd
        assert "4 heads of queries cannot share 3 heads of keys" in shared


# ---------------------------------------------------------------- batches


def test_labels_are_shifted_before_a_batch_is_cut():
    ids = torch.arange(8).reshape(1, 8)
    batch = {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": torch.ones_like(ids),
        "weight": torch.ones(1),
        "id": "a",
    }
    first, second = (shard_batch(batch, 2, rank) for rank in range(2))
    assert first["input_ids"].tolist() == [[0, 1, 2, 3]]
    assert first["shift_labels"].tolist() == [[1, 2, 3, 4]]
    assert second["shift_labels"].tolist() == [[5, 6, 7, -100]]
    assert second["position_ids"].tolist() == [[4, 5, 6, 7]]
    assert second["attention_mask"].shape == (1, 4)
    assert (second["weight"], second["id"]) == (batch["weight"], "a")
    assert "labels" not in first
    assert "labels" in batch


@pytest.mark.parametrize(
    ("batch", "length", "message"),
    [
        (torch.ones(2, 8), None, "batch of type Tensor cannot be cut.*dict with 'input_ids'"),
        ({"tokens": torch.ones(2, 8)}, None, "batch of type dict cannot be cut"),
        ({"input_ids": torch.ones(2, 7)}, None, "7 positions cannot be dealt to sp_size=2 evenly.*such as 8"),
        (
            {"input_ids": torch.ones(1, 4), "attention_mask": torch.tensor([[1, 1, 1, 0]])},
            None,
            "attention_mask was given that is not plainly causal",
        ),
        ({"input_ids": torch.ones(2, 8)}, 16, "sequences of 8 positions, and sp_seq_length=16 is fixed"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch, length, message):
    with pytest.raises(PlanError, match=message):
        shard_batch(batch, 2, 0, length=length)


# ---------------------------------------------------------------- the step


class Axis:
    def size(self):
        return 2


class Mesh(dict):
    mesh_dim_names = ("sp",)


CONTEXT = PlanContext(device=torch.device("cpu"), world_size=2, mesh=Mesh(sp=Axis()))


def test_the_plan_explains_it():
    text = Plan([sequence_parallel()]).explain(TinyTransformer(), CONTEXT)
    assert "sequences shared over 2 ranks; around each attention queries, keys, values and its result" in text


def with_config(**values):
    model = nn.Linear(1, 1)
    model.config = type("Config", (), values)()
    return model


@pytest.mark.parametrize(
    ("model", "step", "message"),
    [
        (with_config(_attn_implementation="eager"), sequence_parallel(), "attention is 'eager', which wants a mask"),
        (with_config(num_attention_heads=3), sequence_parallel(), "3 attention heads cannot be dealt to 2 ranks"),
        (TinyTransformer(), sequence_parallel("flash_attention_2"), "can be chosen for models of the transformers"),
        (nn.Sequential(nn.MultiheadAttention(8, 2)), sequence_parallel(), "0 is a torch.nn.MultiheadAttention"),
    ],
)
def test_models_whose_attention_cannot_be_shared_are_refused(model, step, message):
    with pytest.raises(PlanError, match=message):
        Plan([step]).validate(model, CONTEXT)


def test_without_an_axis_it_is_refused():
    with pytest.raises(PlanError, match="no axis 'sp' in the mesh"):
        Plan([sequence_parallel()]).validate(TinyTransformer(), PlanContext(device=torch.device("cpu")))


class Recomputed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("n", "sizes", "shards"),
    [
        (2, {"sp_size": 2}, False),
        (4, {"sp_size": 4}, True),
        (4, {"dp_replicate_size": 2, "sp_size": 2}, False),
        (4, {"dp_shard_size": 2, "sp_size": 2}, True),
    ],
)
def test_it_equals_one_device(ranks, n, sizes, shards):
    def body(sizes, shards):
        from dataclasses import replace

        from accel_parallel import ParallelismConfig, ddp, full_state_dict, fully_shard_blocks, loss_group, single
        from accel_state import PartialState
        from accel_testkit.training import tied_net, tokens, train_sequences

        state, config = PartialState(cpu=True), ParallelismConfig(**sizes)
        mesh = config.build_device_mesh("cpu")
        context = PlanContext(device=state.device, world_size=state.num_processes, mesh=mesh)
        context = replace(context, process_group=loss_group(context))
        steps = [sequence_parallel(), fully_shard_blocks()] if shards else [single(), sequence_parallel(), ddp()]
        model = tied_net()
        if not shards:  # what is recomputed in backward is shared as well
            model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
        plan = Plan(steps)
        model = plan.apply(model, context)
        plan.steps[-2].apply(model, context)

        def step_of(model, batch, total):
            whole = batch.chunk(config.data_parallel_size)[state.process_index // config.sp_size]
            mine = shard_batch({"input_ids": whole, "labels": whole}, config.sp_size, mesh.get_local_rank("sp"))
            logits = model(mine["input_ids"], mine["position_ids"][0])
            loss = F.cross_entropy(logits.flatten(0, 1), mine["shift_labels"].flatten(), reduction="sum")
            (loss * state.num_processes / total).backward()

        norms = train_sequences(model, step_of, tokens())
        return norms, {name.replace("block.", ""): value for name, value in full_state_dict(model).items()}

    want_norms, want = single_truth()
    got = ranks(body, n, sizes, shards)
    for norms, _ in got:
        assert norms == pytest.approx(want_norms, rel=1e-5)
    for name, value in want.items():
        assert (got[0][1][name] - value).abs().max() < 1e-6, name


def test_attention_outside_of_the_model_and_after_an_error_is_left_alone(ranks):
    def body():
        from accel_parallel import ParallelismConfig
        from accel_state import PartialState

        PartialState(cpu=True)

        class Attention(nn.Module):
            def forward(self, q, mask=None):
                return F.scaled_dot_product_attention(q, q, q, mask)

        mesh = ParallelismConfig(sp_size=2).build_device_mesh("cpu")
        context = PlanContext(device=torch.device("cpu"), world_size=2, mesh=mesh)
        model = Plan([sequence_parallel()]).apply(nn.Sequential(nn.Sequential(Attention())), context)
        q = torch.randn(1, 2, 4, 8)
        alone = F.scaled_dot_product_attention(q, q, q)
        try:
            model[0][0].register_forward_pre_hook(lambda _module, args: (args[0], torch.ones(4, 4)))
            model(q)
        except PlanError as error:
            assert torch.equal(F.scaled_dot_product_attention(q, q, q), alone)
            return str(error)

    assert all("under sp attention got a mask of shape (4, 4)" in text for text in ranks(body, 2))
