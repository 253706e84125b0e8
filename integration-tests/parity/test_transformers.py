"""A causal language model of the transformers library, sequences or matrices shared over ranks, equals one device."""

from __future__ import annotations

import pytest

from accel_state.testing import run_ranks

ELSEWHERE = pytest.mark.parity


def llama(key_heads: int = 2, attention: str = "sdpa"):
    """A small one with values of its own on every call alike."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=key_heads, max_position_embeddings=64, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(sizes: dict[str, int], key_heads: int, rotation: str = "allgather"):
    """The gradient norms and the weights of three updates, the same script on any mesh."""
    import torch

    from accel import Accelerator
    from accel_parallel import ParallelismConfig, TorchContextParallelConfig, shift_labels

    config = ParallelismConfig(**sizes, cp_handler=TorchContextParallelConfig(rotation))
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model = llama(key_heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    rows = [
        {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in torch.randint(64, (24, 16))
    ]
    loader = torch.utils.data.DataLoader(rows, batch_size=8 // config.data_parallel_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    labels_per_update, norms = torch.tensor(8 * 15), []
    for batch in loader:
        if "shift_labels" not in batch:
            batch["shift_labels"] = shift_labels(batch.pop("labels"))
        buffers = list(batch.values())
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
            loss = model(**batch, labels=batch["shift_labels"], num_items_in_batch=labels_per_update).loss
            accelerator.backward(loss * config.total_size / config.tp_size)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize(
    ("n", "sizes", "key_heads", "rotation"),
    [
        (2, {"cp_size": 2}, 2, "alltoall"),
        (2, {"sp_size": 2}, 1, "allgather"),
        (4, {"dp_shard_size": 2, "tp_size": 2}, 2, "allgather"),  # by the model's own plan
        pytest.param(2, {"tp_size": 2}, 2, "allgather", marks=ELSEWHERE),
        pytest.param(4, {"sp_size": 4}, 2, "allgather", marks=ELSEWHERE),
        pytest.param(4, {"cp_size": 4}, 4, "allgather", marks=ELSEWHERE),
        pytest.param(4, {"dp_shard_size": 2, "cp_size": 2}, 2, "alltoall", marks=ELSEWHERE),
        pytest.param(4, {"dp_shard_size": 2, "sp_size": 2}, 1, "allgather", marks=ELSEWHERE),
        pytest.param(4, {"dp_replicate_size": 2, "sp_size": 2}, 2, "allgather", marks=ELSEWHERE),
    ],
)
def test_a_model_that_is_shared_trains_as_on_one_device(n, sizes, key_heads, rotation):
    ((want_norms, want),) = run_ranks(train, 1, {}, key_heads)
    for norms, _ in (got := run_ranks(train, n, sizes, key_heads, rotation)):
        assert norms == pytest.approx(want_norms, rel=1e-5)
    for name, value in want.items():
        assert (got[0][1][name] - value).abs().max() < 1e-6, name


def refusals(axis: str):
    """What a prepared model says to calls that would go wrong, and that it is the old one outside of a context."""
    from contextlib import nullcontext

    import torch
    from transformers import MistralConfig, MistralForCausalLM

    from accel import Accelerator
    from accel_parallel import ParallelismConfig, shard_batch
    from accel_state.errors import PlanError

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**{f"{axis}_size": 2}))
    window = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    windowed = MistralForCausalLM(window)
    model, windowed = accelerator.prepare(llama(), windowed)
    ids = torch.arange(8).reshape(1, 8)
    padding = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    if axis == "cp":
        with torch.no_grad():
            assert torch.equal(model(ids, attention_mask=padding).logits, llama()(ids, attention_mask=padding).logits)
    whole = {"input_ids": torch.arange(16).reshape(1, 16), "attention_mask": torch.ones(1, 16, dtype=torch.long)}
    whole["attention_mask"][0, -1] = 0  # of which one rank alone has a part

    def with_padding():
        if axis == "sp":
            shard_batch(whole, 2, accelerator.process_index)
        with accelerator.maybe_context_parallel(list(whole.values()), [1, 1]):
            model(**whole)

    try:
        with_padding()
    except PlanError as error:
        said = [str(error)]
    for call in (
        lambda: model(ids, labels=ids),
        lambda: model(ids, attention_mask=padding),
        lambda: model(ids, attention_mask=torch.zeros(1, 1, 8, 8)),
        lambda: windowed(ids),
        lambda: accelerator.prepare(llama(attention="eager")),
    ):
        try:
            with accelerator.maybe_context_parallel() if axis == "cp" else nullcontext():
                call()
        except PlanError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_calls_that_would_go_wrong_are_refused(axis):
    for uneven, labels, padding, mask, window, eager in run_ranks(refusals, 2, axis):
        assert f"under {axis} labels were given" in labels
        assert "shift_labels=labels" in labels
        assert f"under {axis} an attention_mask was given that is not plainly causal" in padding
        assert uneven == padding == mask
        assert f"under {axis} attention in a window of 4 positions cannot be shared, and the sequence has 16" in window
        assert "the model's attention is 'eager'" in eager
