"""Context parallelism: ring attention, the block that cuts sequences, and models trained inside it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accel_parallel import Plan, PlanContext, context_parallel, load_balanced_positions, shift_labels
from accel_parallel.attention_routing import RoutedAttention
from accel_parallel.ring import blocks
from accel_state.errors import PlanError
from accel_testkit.nets import TinyTransformer
from accel_testkit.training import single_truth

# ---------------------------------------------------------------- the ring


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
@pytest.mark.parametrize("n", [2, 4])
def test_ring_attention_equals_attention_over_the_whole_sequence(ranks, rotation, n):
    def body(rotation):
        import itertools

        import torch.distributed as dist

        from accel_parallel import Ring, ring_attention
        from accel_state import PartialState

        state = PartialState(cpu=True)
        mine = load_balanced_positions(16, state.num_processes, state.process_index)
        worst = 0.0
        for is_causal, key_heads in itertools.product([True, False], [4, 2]):
            torch.manual_seed(0)
            q, grad = torch.randn(2, 4, 16, 8).double().requires_grad_(), torch.randn(2, 4, 16, 6).double()
            k = torch.randn(2, key_heads, 16, 8).double().requires_grad_()
            v = torch.randn(2, key_heads, 16, 6).double().requires_grad_()
            whole = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=key_heads < 4)
            part = ring_attention(
                *(x[:, :, mine] for x in (q, k, v)), Ring(dist.group.WORLD, rotation), is_causal=is_causal, scale=0.3
            )
            pairs = [(part, whole[:, :, mine])]
            wanted = torch.autograd.grad(whole, (q, k, v), grad)
            got = torch.autograd.grad(part, (q, k, v), grad[:, :, mine])
            pairs += [(ours[:, :, mine], theirs[:, :, mine]) for ours, theirs in zip(got, wanted, strict=True)]
            worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
        return worst

    assert max(ranks(body, n, rotation)) < 1e-13


def test_half_precision_and_autocast_compute_as_attention_does(ranks):
    def body():
        import torch.distributed as dist

        from accel_parallel import Ring, ring_attention
        from accel_state import PartialState

        mine = load_balanced_positions(16, 2, PartialState(cpu=True).process_index)
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 2, 16, 8) for _ in range(3))
        want = F.scaled_dot_product_attention(*(x.bfloat16().float() for x in (q, k, v)), is_causal=True)[:, :, mine]
        with torch.autocast("cpu", torch.bfloat16):
            got = ring_attention(*(x[:, :, mine] for x in (q, k, v)), Ring(dist.group.WORLD), is_causal=True)
        assert got.dtype is torch.bfloat16
        return float((got - want).abs().max())

    assert max(ranks(body, 2)) < 2**-7


def test_every_rank_has_equally_much_to_do_in_every_step():
    def work(own, source):
        covered = torch.zeros(8, 8)
        for queries, keys, on_diagonal in blocks(own, source, 8, True):
            seen = torch.ones_like(covered[queries, keys])
            covered[queries, keys] += seen.tril() if on_diagonal else seen
        mine, theirs = (load_balanced_positions(32, 4, rank) for rank in (own, source))
        assert torch.equal(covered, (mine[:, None] >= theirs[None]).float())
        return covered.sum().item()

    assert {work(own, own) for own in range(4)} == {36}
    assert {work(own, source) for own in range(4) for source in range(4) if own != source} == {32}


def test_positions_are_those_of_torch(ranks):
    def body():
        from torch.distributed.tensor.experimental import context_parallel

        from accel_parallel import ParallelismConfig
        from accel_state import PartialState

        rank = PartialState(cpu=True).process_index
        mesh = ParallelismConfig(cp_size=2).build_device_mesh("cpu")
        x = torch.arange(12)
        with context_parallel(mesh["cp"], buffers=[x], buffer_seq_dims=[0]):
            assert torch.equal(x, load_balanced_positions(12, 2, rank))

    ranks(body, 2)


def test_a_length_that_cannot_be_dealt_is_refused_with_one_that_can():
    with pytest.raises(PlanError, match=r"10 positions cannot be dealt to cp_size=2.*multiple of 4, such as 12"):
        load_balanced_positions(10, 2, 0)


def test_labels_are_shifted_with_nothing_after_the_last():
    assert shift_labels(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, -100]]


# ---------------------------------------------------------------- the block


def in_context(ranks, body):
    """Run `body(context, rank)` on two ranks, where `context(...)` opens a block over both."""

    def on_rank(body):
        from functools import partial

        from accel_parallel import ParallelismConfig, sequence_context
        from accel_state import PartialState

        rank = PartialState(cpu=True).process_index
        mesh = ParallelismConfig(cp_size=2).build_device_mesh("cpu")
        return body(partial(sequence_context, mesh["cp"]), rank)

    return ranks(on_rank, 2, body)


def test_buffers_are_cut_in_place_and_restored(ranks):
    def body(context, rank):
        base = torch.arange(20).reshape(2, 10)
        tokens, labels = base[:, :-2], base[:, 2:]  # views of one memory
        kept = torch.arange(8)
        mine = [0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]
        with context([tokens, labels, kept], [1, -1, 0], {kept}):
            assert tokens.tolist() == [mine, [x + 10 for x in mine]]
            assert labels[0].tolist() == [x + 2 for x in mine]
            assert kept.tolist() == mine
        assert kept.tolist() == mine
        assert torch.equal(base, torch.arange(20).reshape(2, 10))
        tokens.add_(100)
        assert base[0].tolist() == [*range(100, 108), 8, 9]  # still a view
        try:
            with context([labels], [1]):
                raise KeyError("inside")
        except KeyError:
            pass
        assert labels.shape == (2, 8)

    in_context(ranks, body)


def test_a_backward_over_restored_buffers_fails_instead_of_going_wrong(ranks):
    def body(context, rank):
        tokens, embedding = torch.arange(8), nn.Embedding(8, 2)
        with context([tokens], [0]):
            loss = embedding(tokens).sum()
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)

    assert all("modified by an inplace operation" in text for text in in_context(ranks, body))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (lambda x: ([x], [0, 1]), ValueError, "1 buffers have 2 buffer_seq_dims"),
        (lambda x: ([x], [1], {x.clone()}), ValueError, "1 of 1 no_restore_buffers are not among the buffers"),
        (lambda x: ([x, x], [1, 1]), ValueError, "stands twice"),
        (lambda x: ([x], [2]), ValueError, "buffer 0 has 2 dims, so its buffer_seq_dims cannot be 2"),
        (lambda x: ([x, x[:, :4]], [1, 1]), PlanError, r"lengths \[8, 4\]"),
        (lambda x: ([x[:, :6]], [1]), PlanError, "6 positions cannot be dealt"),
        (lambda x: ([x.float().requires_grad_()], [1]), PlanError, "buffer 0 requires a gradient"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_is(ranks, arguments, kind, message):
    def body(context, rank):
        x = torch.arange(16).reshape(2, 8)
        try:
            with context(*arguments(x)):
                pass
        except kind as error:
            assert torch.equal(x, torch.arange(16).reshape(2, 8))
            return str(error)

    import re

    assert all(re.search(message, text) for text in in_context(ranks, body))


def test_contexts_do_not_nest(ranks):
    def body(context, rank):
        with context():
            try:
                with context():
                    pass
            except PlanError as error:
                return str(error)

    assert all("open already" in text for text in in_context(ranks, body))


def test_attention_that_cannot_be_shared_is_refused(ranks):
    def body(context, rank):
        q = torch.randn(1, 2, 4, 8)
        errors = []
        for arguments in (
            (q, q, q, torch.ones(4, 4, dtype=torch.bool)),
            (q, q, q, None, 0.1),
            (q, q[:, :, :2], q[:, :, :2]),
            (q[:, :, :2], q[:, :, :2], q[:, :, :2]),
            (q, q[:, :1], q[:, :1]),
        ):
            try:
                with context([torch.arange(8)], [0]):
                    F.scaled_dot_product_attention(*arguments)
            except PlanError as error:
                errors.append(str(error))
        return errors

    mask, dropout, cross, short, groups = in_context(ranks, body)[0]
    assert "got a mask of shape (4, 4)" in mask
    assert "dropout_p=0.1" in dropout
    assert "4 positions over 2 others" in cross
    assert "sequence of 2 positions was given to a model in a context that cut sequences of 8" in short
    assert "2 heads of queries over 1 of keys needs enable_gqa=True" in groups


def test_multi_head_attention_of_torch_is_refused_where_it_is_called():
    attention = nn.MultiheadAttention(8, 2)
    x = torch.randn(4, 1, 8)
    with (
        RoutedAttention(lambda *_args, **_kwargs: x, "here"),
        pytest.raises(PlanError, match=r"here .*MultiheadAttention"),
    ):
        attention(x, x, x)


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_on_cuda_torch_is_called_as_it_says(monkeypatch, rotation):
    import inspect
    from contextlib import nullcontext

    import torch.distributed.tensor.experimental as experimental
    from torch.distributed.tensor.experimental import _attention

    from accel_parallel import sequence_context
    from accel_parallel.context_block import open_context

    class Mesh:
        device_type = "cuda"

        def size(self):
            return 2

        def get_group(self):
            return None

    calls, rotations = [], []
    signature = inspect.signature(experimental.context_parallel)

    def recorded(*args, **kwargs):
        calls.append(signature.bind(*args, **kwargs).arguments)
        return nullcontext()

    monkeypatch.setattr(experimental, "context_parallel", recorded)
    monkeypatch.setattr(_attention, "set_rotate_method", rotations.append)
    mesh, x = Mesh(), torch.arange(8)
    with sequence_context(mesh, [x], [0], {x}, rotation=rotation):
        assert open_context().attention_calls is None
    assert open_context() is None
    assert calls == [{"mesh": mesh, "buffers": [x], "buffer_seq_dims": [0], "no_restore_buffers": {x}}]
    assert rotations == [rotation]


# ---------------------------------------------------------------- the step


def context_of_two():
    class Axis:
        def size(self):
            return 2

    class Mesh(dict):
        mesh_dim_names = ("cp",)

    return PlanContext(device=torch.device("cpu"), world_size=2, mesh=Mesh(cp=Axis()))


def test_the_plan_explains_it():
    text = Plan([context_parallel("alltoall")]).explain(TinyTransformer(), context_of_two())
    assert "sequences shared over 2 ranks" in text
    assert "passed on from rank to rank" in text


def test_models_whose_attention_cannot_be_shared_are_refused():
    class Config:
        _attn_implementation = "eager"

    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    model.config = Config()
    with pytest.raises(PlanError, match=r"(?s)attention is 'eager'.*attn_implementation='sdpa'.*0 is a torch.nn.Multi"):
        Plan([context_parallel()]).validate(model, context_of_two())
    with pytest.raises(PlanError, match="no axis 'cp' in the mesh"):
        Plan([context_parallel()]).validate(TinyTransformer(), PlanContext(device=torch.device("cpu")))


@pytest.mark.parametrize(
    ("n", "sizes", "shards", "rotation"),
    [
        (2, {"cp_size": 2}, False, "allgather"),
        (4, {"cp_size": 4}, False, "alltoall"),
        (4, {"dp_replicate_size": 2, "cp_size": 2}, False, "alltoall"),
        (4, {"dp_shard_size": 2, "cp_size": 2}, True, "alltoall"),
        (2, {"cp_size": 2}, True, "allgather"),
    ],
)
def test_it_equals_one_device(ranks, n, sizes, shards, rotation):
    def body(sizes, shards, rotation):
        from dataclasses import replace

        from accel_parallel import (
            ParallelismConfig,
            ddp,
            full_state_dict,
            fully_shard_blocks,
            loss_group,
            sequence_context,
            single,
        )
        from accel_state import PartialState
        from accel_testkit.training import tied_net, tokens, train_sequences

        state, config = PartialState(cpu=True), ParallelismConfig(**sizes)
        mesh = config.build_device_mesh("cpu")
        context = PlanContext(device=state.device, world_size=state.num_processes, mesh=mesh)
        context = replace(context, process_group=loss_group(context))
        steps = [context_parallel(rotation), fully_shard_blocks()] if shards else [single(), context_parallel(), ddp()]
        model = Plan(steps).apply(tied_net(), context)

        def step_of(model, batch, total):
            mine = batch.chunk(config.data_parallel_size)[state.process_index // config.cp_size].clone()
            labels, positions = shift_labels(mine), torch.arange(mine.shape[1])
            with sequence_context(mesh["cp"], [mine, labels, positions], [1, 1, 0], rotation=rotation):
                logits = model(mine, positions)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                (loss * state.num_processes / total).backward()

        norms = train_sequences(model, step_of, tokens())
        return norms, full_state_dict(model)

    want_norms, want = single_truth()
    got = ranks(body, n, sizes, shards, rotation)
    for norms, _ in got:
        assert norms == pytest.approx(want_norms, rel=1e-5)
    for name, value in want.items():
        assert (got[0][1][name] - value).abs().max() < 1e-6, name


def test_to_apply_it_twice_is_as_good_as_once():
    model = TinyTransformer()
    for _ in range(2):
        assert Plan([context_parallel()]).apply(model, context_of_two()) is model
    assert len(model._forward_hooks) == 1


def test_a_model_that_calls_no_attention_is_refused_in_a_context(ranks):
    def body(context, rank):
        from accel_parallel import ParallelismConfig

        mesh = ParallelismConfig(cp_size=2).build_device_mesh("cpu")
        plan_context = PlanContext(device=torch.device("cpu"), world_size=2, mesh=mesh)
        model = Plan([context_parallel()]).apply(nn.Linear(1, 1), plan_context)
        model(torch.ones(8, 1))
        try:
            with context():
                model(torch.ones(4, 1))
        except PlanError as error:
            return str(error)

    assert all("Linear ran under cp and called no scaled_dot_product" in text for text in in_context(ranks, body))
