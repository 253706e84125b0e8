"""How single modules are shared in tensor parallelism: words for torch's styles, and what each does to parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from accel_state.errors import PlanError

TpPlan = Mapping[str, str | ParallelStyle]
"""Module name, with shell wildcards, to a word of `STYLES` or one of torch's styles."""

STYLES: dict[str, Callable[[], ParallelStyle] | None] = {
    "colwise": ColwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_loss": lambda: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    "colwise_sequence": lambda: ColwiseParallel(input_layouts=Shard(1)),
    "colwise_rep_sequence": lambda: ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_sequence": lambda: RowwiseParallel(output_layouts=Shard(1)),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_sequence": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "position_sequence": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "sequence_parallel": SequenceParallel,
    "replicate": None,
}
"""Words to styles; transformers' words mean the same there. The families:

- colwise: outputs are shared: the first of two matrices. `_rep` gives every rank the whole output, `_loss` leaves it
  shared for `torch.distributed.tensor.parallel.loss_parallel`.
- rowwise: inputs are shared, outputs summed: the second of two. `_rep` takes whole inputs and cuts them itself.
- `embedding_rowwise` shares a vocabulary.
- `_sequence`: activations before and after are shared along the sequence (dimension 1), which `sequence_parallel` does
  for norms and dropout between; `position_sequence` for embeddings of positions without a batch dimension.
- replicate: whole on every rank.
"""

HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads", "n_heads", "heads")
"""Attributes by which modules and transformers' configurations say how many heads they have."""


def resolve_plan(model: nn.Module, plan: Any) -> dict[str, ParallelStyle]:
    """The style of each module that is shared, by name.

    Args:
        plan: a `TpPlan`, a function that gives one for a model, or None for the model's own `tp_plan` or `_tp_plan`.

    Raises:
        PlanError: no plan, a word that does not exist, a pattern that fits no module.
    """
    if plan is None:
        plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
        if not plan:
            raise PlanError(
                f"{type(model).__name__} has no tp_plan of its own: give one, module names to styles, such as "
                '{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'
            )
    elif callable(plan):
        plan = plan(model)
    styles: dict[str, ParallelStyle] = {}
    names = [name for name, _ in model.named_modules()]
    for pattern, style in plan.items():
        fitting = fnmatch.filter(names, pattern)
        if not fitting:
            raise PlanError(f"no module of the model is named like {pattern!r}: see model.named_modules()")
        made = _style(pattern, style)
        if made is not None:
            styles.update(dict.fromkeys(fitting, made))
    return styles


def _style(pattern: str, style: Any) -> ParallelStyle | None:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise PlanError(f"{pattern!r} is to be shared by {style!r}, which does not exist: use {', '.join(STYLES)}")
    make = STYLES[style]
    return None if make is None else make()


def shared_dimension(module: nn.Module, style: ParallelStyle | None) -> int | None:
    """The dimension of the module's weight that is shared, None where it stays whole."""
    is_embedding = isinstance(module, nn.Embedding)
    if isinstance(style, ColwiseParallel):
        return 1 if is_embedding else 0
    if isinstance(style, RowwiseParallel):
        return 0 if is_embedding else 1
    return None


def complaints(model: nn.Module, styles: Mapping[str, ParallelStyle], ranks: int) -> list[str]:
    """What in `model` cannot be divided by so many ranks, or is shared between modules that would differ."""
    return [
        *_indivisible_heads(model, styles, ranks),
        *_indivisible_weights(model, styles, ranks),
        *_ties_that_would_break(model, styles),
    ]


def _indivisible_heads(model: nn.Module, styles: Mapping[str, ParallelStyle], ranks: int) -> list[str]:
    counts: dict[str, int] = {}
    config = getattr(model, "config", None)
    holders: list[tuple[str, Any]] = [("the model's config", config)] if config is not None else []
    parents = {name.rpartition(".")[0] for name, style in styles.items() if isinstance(style, ColwiseParallel)}
    holders += [(name or type(model).__name__, model.get_submodule(name)) for name in sorted(parents)]
    for where, holder in holders:
        for attribute in HEAD_COUNTS:
            count = getattr(holder, attribute, None)
            if isinstance(count, int) and count % ranks:
                counts.setdefault(f"{attribute}={count} of {where}", count)
    return [f"{what} cannot be dealt to {ranks} ranks: choose a tp size that divides it." for what in counts]


def _indivisible_weights(model: nn.Module, styles: Mapping[str, ParallelStyle], ranks: int) -> list[str]:
    found = []
    for name, style in styles.items():
        module = model.get_submodule(name)
        dimension, weight = shared_dimension(module, style), getattr(module, "weight", None)
        if dimension is not None and weight is not None and weight.shape[dimension] % ranks:
            found.append(
                f"{name}.weight has {weight.shape[dimension]} entries along dimension {dimension}, which {ranks} ranks "
                "cannot share evenly: choose a tp size that divides it, or 'replicate' the module."
            )
    return found


def tied_names(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same, together."""
    by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return [names for names in by_identity.values() if len(names) > 1]


def _ties_that_would_break(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> list[str]:
    found = []
    for names in tied_names(model):
        owners = [name.rpartition(".")[0] for name in names]
        if len({shared_dimension(model.get_submodule(owner), styles.get(owner)) for owner in owners}) > 1:
            found.append(
                f"{' and '.join(names)} are one parameter and would be shared differently: an embedding that is tied "
                "to the output layer wants 'embedding_rowwise' where that one has 'colwise' or 'colwise_rep'."
            )
    return found
