"""The two loops that are compared: by hand in raw torch on one device, and through `Accelerator` on any ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_testkit.parity.table import (
    GLOBAL_BATCH,
    IGNORED,
    LENGTH,
    NETS,
    STRATEGIES,
    Data,
    Net,
    Setting,
    Strategy,
    optimizer_for,
)


class Outcome(NamedTuple):
    """Five updates: the norm of each gradient before clipping, and the weights that this rank can tell in the end."""

    norms: list[float]
    weights: dict[str, Tensor]


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over labels that count, whichever shape they have."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def by_hand(net_name: str, data: Data, setting: Setting) -> Outcome:
    """In raw torch, the whole global batch on one device."""
    net = NETS[net_name]
    model = net.build()
    optimizer, norms = optimizer_for(setting.optimizer, model), []
    batches = [
        {name: values[start : start + GLOBAL_BATCH] for name, values in data.items()}
        for start in range(0, setting.examples, GLOBAL_BATCH)
    ]
    for start in range(0, len(batches), setting.accumulation):
        window = [_by_hand_pair(net, batch) for batch in batches[start : start + setting.accumulation]]
        items = sum(int((labels != IGNORED).sum()) for _, labels in window)
        for inputs, labels in window:
            with torch.autocast("cpu", torch.bfloat16) if setting.precision == "bf16" else nullcontext():
                logits = model(inputs)
            if net.has_sequences:
                logits = logits[:, :-1]
            (loss_sum(logits, labels) / items).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), net.clip if setting.clips else torch.inf).item())
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(norms, {name: value.clone() for name, value in model.state_dict().items()})


def _by_hand_pair(net: Net, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs, and the labels of all positions but the last, which has no next token."""
    return batch[net.inputs], batch["labels"][:, 1:] if net.has_sequences else batch["labels"]


# ---------------------------------------------------------------- through Accelerator, on a rank


def through_accelerator(strategy_name: str, net_name: str, data: Data, settings: Sequence[Setting]) -> list[Outcome]:
    """All settings one after the other, in the group of processes that there is."""
    from accel_parallel import ParallelismConfig, TorchTensorParallelConfig

    strategy, net = STRATEGIES[strategy_name], NETS[net_name]
    config = None
    if strategy.sizes:
        handler = TorchTensorParallelConfig(plan=net.tp_plans[strategy.tp_plan]) if strategy.tp_plan else None
        config = ParallelismConfig(**strategy.sizes, tp_handler=handler)
    return [_train(strategy, net, data, config, setting) for setting in settings]


def _train(strategy: Strategy, net: Net, data: Data, config: Any, setting: Setting) -> Outcome:
    from accel import Accelerator
    from accel_parallel import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, LocalSGD

    accelerator = Accelerator(
        cpu=True,
        parallelism_config=config,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=strategy.fsdp, **net.wrap) if strategy.fsdp else None,
        kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=strategy.hook)] if strategy.hook else None,
        mixed_precision="no" if setting.precision == "fp32" else setting.precision,
        gradient_accumulation_steps=setting.accumulation,
    )
    model = net.build()
    rows = [{name: values[index] for name, values in data.items()} for index in range(setting.examples)]
    parts = accelerator.num_processes if config is None else config.data_parallel_size
    loader = torch.utils.data.DataLoader(rows, batch_size=GLOBAL_BATCH // parts)
    model, optimizer, loader = accelerator.prepare(model, optimizer_for(setting.optimizer, model), loader)
    norms = []
    with LocalSGD(accelerator, model, 1, enabled=strategy.is_local) as local:
        for batch in loader:
            with accelerator.accumulate(model):
                _backward(accelerator, strategy, net, model, batch)
                norm = accelerator.clip_grad_norm_(model.parameters(), net.clip if setting.clips else torch.inf)
                optimizer.step()
                local.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                norms.append(norm.item())
    return Outcome(norms, _weights(accelerator, model))


def _backward(accelerator: Any, strategy: Strategy, net: Net, model: nn.Module, batch: dict[str, Tensor]) -> None:
    from accel_parallel import shift_labels

    inputs, labels = batch[net.inputs], batch.get("shift_labels")
    if labels is None:  # else the loader has shifted them, before it cut sequences for the ranks of sp
        labels = shift_labels(batch["labels"]) if net.has_sequences else batch["labels"]
    if strategy.has("pp"):
        items = (labels != IGNORED).sum()
        accelerator.forward_backward((inputs, labels), loss_sum, num_items=items, model=model)
        return
    run = model
    buffers = [inputs, labels]
    if strategy.has("cp") or strategy.has("sp"):
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(LENGTH).expand_as(inputs).contiguous()
        run = functools.partial(model, positions=positions)
        buffers.append(positions)
    with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
        loss = loss_sum(run(inputs), labels)
        accelerator.backward(loss, num_items=(labels != IGNORED).sum())


def _weights(accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
    """What this rank can tell: the whole on rank 0, or its own stages of a pipeline."""
    from accel_parallel import is_pipelined

    if not is_pipelined(model):
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    state: dict[str, Any] = model.state_dict()
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for n, v in state.items()}
