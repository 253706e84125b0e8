"""Sequences shared over ranks equal a loop by hand in raw torch on one device with the same global batch.

Compared are the gradient's norm before clipping, per update, and after five updates the way that all weights together
have gone, as one vector.

fp32, 1e-5 of each: both sum the same numbers in another order, some hundred of them one after the other, each rounded
by 2^-24 (6e-8); a factor of 100 is left for that to grow over the updates, and for AdamW, which divides small sums by
small sums. bf16: twin and ranks round activations to 8 bits at the same places, but of different sums, and FSDP rounds
parameters and summed gradients as well: norms within one unit in the last place (2^-7), ways within two (2^-6), and
within 2^-4 under AdamW, which takes full steps where a gradient is hardly more than its rounding.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from accel_state.testing import run_ranks
from accel_testkit.training import tied_net

GLOBAL_BATCH, LENGTH, UPDATES = 8, 16, 5
STRATEGIES = {
    "cp": (2, {"cp_size": 2}),
    "fsdp2+cp": (4, {"dp_shard_size": 2, "cp_size": 2}),
    "sp": (2, {"sp_size": 2}),
    "fsdp2+sp": (4, {"dp_shard_size": 2, "sp_size": 2}),
}
SETTINGS = list(itertools.product(["no", "bf16"], [1, 3], [None, 0.5], ["adamw", "sgd"]))
ROWS = [
    pytest.param(strategy, *setting, marks=() if index % 10 == 0 else pytest.mark.parity)
    for index, (strategy, setting) in enumerate(itertools.product(STRATEGIES, SETTINGS))
]


def examples(accumulation: int) -> list[dict[str, torch.Tensor]]:
    """Rows for five updates, whose labels end early here and there; with accumulation the last window is ragged."""
    micro_batches = UPDATES if accumulation == 1 else (UPDATES - 1) * accumulation + 1
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (micro_batches * GLOBAL_BATCH, LENGTH))
    ends = torch.randint(2, LENGTH + 1, (len(ids), 1))
    labels = ids.masked_fill(torch.arange(LENGTH) >= ends, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def items_of(rows: list[dict[str, torch.Tensor]], accumulation: int) -> list[int]:
    """The labels that count in each window, over all ranks."""
    per_window = accumulation * GLOBAL_BATCH
    return [
        sum(int((row["labels"][1:] != -100).sum()) for row in rows[start : start + per_window])
        for start in range(0, len(rows), per_window)
    ]


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@cache
def by_hand(precision: str, accumulation: int, clip: float | None, optimizer_name: str):
    """The norms and the weights of five updates in raw torch."""
    model, rows = tied_net(), examples(accumulation)
    optimizer, norms = optimizer_of(optimizer_name, model), []
    per_window = accumulation * GLOBAL_BATCH
    for window, items in enumerate(items_of(rows, accumulation)):
        mine = rows[window * per_window : (window + 1) * per_window]
        for start in range(0, len(mine), GLOBAL_BATCH):
            ids, labels = (
                torch.stack([row[name] for row in mine[start : start + GLOBAL_BATCH]])
                for name in ("input_ids", "labels")
            )
            with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
                logits = model(ids)
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            (loss / items).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.clone() for name, value in model.state_dict().items()}


def through_accel(sizes, precision: str, accumulation: int, clip: float | None, optimizer_name: str):
    """The same through `Accelerator`, where each rank sees a part of each sequence."""
    from accel import Accelerator
    from accel_parallel import ParallelismConfig, shift_labels

    config = ParallelismConfig(**sizes)
    accelerator = Accelerator(
        cpu=True, parallelism_config=config, mixed_precision=precision, gradient_accumulation_steps=accumulation
    )
    model, rows = tied_net(), examples(accumulation)
    items = iter(items_of(rows, accumulation))
    loader = torch.utils.data.DataLoader(rows, batch_size=GLOBAL_BATCH // config.data_parallel_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(optimizer_name, model), loader)
    norms, window_items = [], next(items)
    for batch in loader:
        ids = batch["input_ids"]
        labels = batch["shift_labels"] if config.sp_enabled else shift_labels(batch["labels"])
        positions = batch["position_ids"] if config.sp_enabled else torch.arange(LENGTH).expand_as(ids).contiguous()
        buffers = [ids, labels, positions]
        with accelerator.accumulate(model), accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
            loss = F.cross_entropy(model(ids, positions).flatten(0, 1), labels.flatten(), reduction="sum")
            accelerator.backward(loss * accumulation * accelerator.num_processes / window_items)
            norm = accelerator.clip_grad_norm_(model.parameters(), clip or torch.inf)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            norms.append(norm.item())
            window_items = next(items, None)
    return norms, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize(("strategy", "precision", "accumulation", "clip", "optimizer"), ROWS)
def test_it_equals_a_loop_by_hand(strategy, precision, accumulation, clip, optimizer):
    n, sizes = STRATEGIES[strategy]
    want_norms, want = by_hand(precision, accumulation, clip, optimizer)
    got = run_ranks(through_accel, n, sizes, precision, accumulation, clip, optimizer)
    if precision == "no":
        of_norm, of_way = 1e-5, 1e-5
    else:
        of_norm, of_way = 2**-7, 2**-4 if optimizer == "adamw" else 2**-6
    for norms, _ in got:
        assert norms == pytest.approx(want_norms, rel=of_norm)
    begin = tied_net().state_dict()
    apart, way = (
        torch.cat([(weights[name] - want[name]).flatten() for name in want]).norm() for weights in (got[0][1], begin)
    )
    assert apart <= of_way * way
