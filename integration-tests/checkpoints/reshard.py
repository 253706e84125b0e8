"""A run on any strategy: what its checkpoint holds, and how it goes on.

The network is a plain chain, so that it can be cut into stages, with a weight tied inside of a block and a buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_testkit.nets import chain_net

GLOBAL_BATCH = 8
_TP_PLAN = {
    "0": "embedding_rowwise",
    "*.query": "colwise",
    "*.key": "colwise",
    "*.value": "colwise",
    "*.out": "rowwise",
    "*.up": "colwise",
    "*.down": "rowwise",
    "6": "colwise_rep",
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a run is spread.

    Args:
        ranks: how many.
        sizes: of the mesh's axes; empty for DDP, or a single device.
        pipeline: options of `PipelineConfig`.
        fsdp_version: 0 unless a plugin shares parameters over all ranks.
        flat: the optimizer of FSDP version 1 trains flat parameters.
    """

    ranks: int
    sizes: dict[str, int] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    fsdp_version: int = 0
    flat: bool = False


WAYS = {
    "single": Way(ranks=1),
    "ddp": Way(ranks=2),
    "fsdp1": Way(ranks=2, fsdp_version=1),
    "fsdp1 flat": Way(ranks=4, fsdp_version=1, flat=True),
    "fsdp2": Way(ranks=2, fsdp_version=2),
    "fsdp2 on 4": Way(ranks=4, fsdp_version=2),
    "hsdp": Way(ranks=4, sizes={"dp_replicate_size": 2, "dp_shard_size": 2}),
    "tp": Way(ranks=2, sizes={"tp_size": 2}),
    "fsdp2+tp": Way(ranks=4, sizes={"dp_shard_size": 2, "tp_size": 2}),
    "pp": Way(ranks=2, sizes={"pp_size": 2}),
    "pp on 4": Way(ranks=4, sizes={"pp_size": 4}),
    "pp interleaved": Way(ranks=2, sizes={"pp_size": 2}, pipeline={"schedule": "interleaved_1f1b"}),
    "pp in a V": Way(ranks=2, sizes={"pp_size": 2}, pipeline={"schedule": "zbv_zero_bubble"}),
    "pp traced": Way(
        ranks=2,
        sizes={"pp_size": 2},
        pipeline={"example": (torch.zeros(GLOBAL_BATCH // 4, 16, dtype=torch.long),), "cuts": ["3"]},
    ),
    "pp+ddp": Way(ranks=4, sizes={"pp_size": 2, "dp_replicate_size": 2}),
    "pp+fsdp2": Way(ranks=4, sizes={"pp_size": 2, "dp_shard_size": 2}),
}


def _net(tied: bool) -> nn.Module:
    net = chain_net()
    if tied:
        net[2].norm2.weight = net[2].norm1.weight
    net[3].register_buffer("seen", torch.tensor([3.0, 1.0]))
    return net


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _whole(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _contents(objects: Mapping[str, Any]) -> dict[str, Any]:
    """All that this rank has of weights and optimizer state, by the model's names, sharded tensors as a whole."""
    model, optimizer = objects["Sequential-0"], objects["AdamW-0"]
    found = {f"weight {name}": _whole(value) for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    in_order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    for number, fields in optimizer.state_dict()["state"].items():
        found |= {f"{key} {in_order[number]}": _whole(value) for key, value in fields.items()}
    return found


def run(
    way: Way, folder: Path, *, save: bool, tied: bool, updates: int
) -> tuple[dict[str, Any], list[float | None], list[float]]:
    """On a rank: train and save, or load and train on.

    Args:
        save: train two updates and save before anything else; False loads what was saved, into other weights.
        tied: with the tied weight, which zero-bubble schedules cannot train.
        updates: that are made after it.

    Returns:
        What the checkpoint holds as this rank has it; the losses of the updates after it, where they are; and the
        learning rates of those.
    """
    from accel import Accelerator, set_seed
    from accel_parallel import (
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        PipelineConfig,
        Prepared,
        TorchTensorParallelConfig,
    )

    config = plugin = None
    if way.sizes:
        tp, pp = TorchTensorParallelConfig(plan=_TP_PLAN), PipelineConfig(num_microbatches=4, **way.pipeline)
        config = ParallelismConfig(**way.sizes, tp_handler=tp, pp_handler=pp)
    if way.fsdp_version:
        policy: dict[str, Any] = {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_cls_names_to_wrap": ["Block"],
        }
        if way.fsdp_version == 1:
            policy["use_orig_params"] = not way.flat
        plugin = FullyShardedDataParallelPlugin(fsdp_version=way.fsdp_version, **policy)
    accelerator = Accelerator(
        cpu=True, parallelism_config=config, fsdp_plugin=plugin, step_scheduler_with_optimizer=False
    )
    set_seed(1 if save else 99)
    model = _net(tied)
    if not save:
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        model[3].seen.zero_()
    rows = torch.randint(0, 64, (8 * GLOBAL_BATCH, 16), generator=torch.Generator().manual_seed(5))
    parts = 2 if config is None and way.ranks == 2 else way.ranks if config is None else config.data_parallel_size
    loader = DataLoader(TensorDataset(rows, rows), batch_size=GLOBAL_BATCH // parts, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    prepared = Prepared(models=(model,), optimizers=(optimizer,))
    losses: list[float | None] = []
    rates: list[float] = []
    contents: dict[str, Any] = {}
    if not save:
        accelerator.load_state(folder)
        contents = _contents(accelerator.engine.state(prepared))
    for batch in loader:
        loss = accelerator.forward_backward(batch, _loss)
        rates.append(schedule.get_last_lr()[0])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(None if loss is None else float(loss))
        if save and len(losses) == 2:
            accelerator.save_state(folder)
            contents = _contents(accelerator.engine.state(prepared))
        if len(losses) == updates + (2 if save else 0):
            break
    return contents, losses[-updates:], rates[-updates:]
