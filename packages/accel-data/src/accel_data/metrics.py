"""Gathering results of evaluation: every sample once, however the last batch was filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel_state import gather, gather_object, recursively_apply, reduce, warn_user

from .feeds import Tail


def gather_for_metrics(
    input_data: Any, *, gradient_state: Any, use_gather_object: bool = False, is_copy: bool = False
) -> Any:
    """Every rank's results for the current batch, without those of samples that only fill up the last one.

    Of a last batch that is shorter than the others, values as many as others have are cut to its length.

    Args:
        input_data: any nesting of tensors whose first dimension is the batch (or a multiple of it, sample by sample);
            or a list of objects, one per sample. Input with a leaf that is no tensor is gathered as objects: in
            dicts, and in tuples and mixed lists of values as long as the batch, each value is cut by itself.
        gradient_state: knows the loader that is being iterated, or gave the batch at hand before its loop was left.
        use_gather_object: gather tensors as objects too: neither padded nor joined; for tensors of unequal shapes.
        is_copy: this rank's samples are another's too (of its tp group, say) and are left out.

    Returns:
        Tensors joined along the first dimension, in rank order, in the input's structure; objects as one plain list,
        in rank order. An object that is no list counts as one item.

    Warns:
        UserWarning: on a padded last batch, a value without dimensions or of a length that is no multiple of the
            batch: fill-up samples are in it and cannot be taken out. `weighted_mean` is exact.

    Cost: what `accel_state.gather` or `gather_object` costs; nothing on one process.
    """
    loader = gradient_state.latest_dataloader
    cut = _tail_to_cut(loader)
    longest = None if use_gather_object else _longest(input_data)
    if longest is None:
        if is_copy:
            return gather_object([])
        if cut is not None:
            input_data = _real_part(input_data, cut) if cut.tail.real else []
        return gather_object(_as_items(input_data))
    if is_copy:
        input_data = recursively_apply(_nothing_of, input_data)
    elif cut is not None:
        input_data = recursively_apply(_cutter(cut), input_data)
    elif longest > getattr(loader, "longest_gathered", longest):
        loader.longest_gathered = longest
    return gather(input_data)


def _nothing_of(leaf: Tensor) -> Tensor:
    return (leaf if leaf.dim() else leaf.reshape(1))[:0]


def weighted_mean(value: Tensor | float, count: Tensor | float) -> Tensor:
    """The mean over all ranks of values that are means themselves, each weighted by what it is the mean of.

    Args:
        value: this rank's mean; any shape.
        count: how many samples (or tokens) it is the mean of; may be 0 on some ranks, not on all.

    Returns:
        (sum of value * count) / (sum of count), float32 or the dtype of `value`; the same on every rank.

    Cost: one `accel_state.reduce` of the value and one number.
    """
    value = value if isinstance(value, Tensor) else torch.tensor(value)
    weight = torch.as_tensor(count, dtype=torch.float64 if value.dtype is torch.float64 else torch.float32)
    weight = weight.to(value.device)
    contribution = torch.where(weight > 0, value * weight, torch.zeros_like(value * weight))
    total, weights = reduce([contribution, weight], reduction="sum")
    return total / weights  # type: ignore[no-any-return]


def _tail_to_cut(loader: Any) -> _Cut | None:
    """The last batch of the loader being read, if it was handed out and is padding in part, or shorter than others."""
    tail: Tail | None = getattr(loader, "tail", None)
    if tail is None:
        return None
    ordinary = loader.rank_batch_size or 0
    return _Cut(tail, ordinary, loader.longest_gathered) if tail.is_padded or tail.size < ordinary else None


@dataclass(frozen=True)
class _Cut:
    """A last batch of which not all values count.

    Args:
        tail: the batch.
        ordinary: this rank's samples in any other batch. Values of that many, such as a loss that was repeated for
            each sample of a batch, were made without a look at the last one.
        longest: values that came for another batch of the pass: with several for each sample, as many as an ordinary
            batch has may belong to a shorter one.
    """

    tail: Tail
    ordinary: int
    longest: int

    def kept(self, length: int) -> int | None:
        """How many of `length` values belong to real samples; None, with a warning, where that cannot be told."""
        tail = self.tail
        if not tail.real:
            return 0
        each, rest = divmod(length, tail.size)
        if length == self.ordinary and tail.size < length and (rest or self.longest < each * length):
            return tail.real
        if not rest:
            return each * tail.real
        if tail.is_padded:
            warn_user(
                f"gather_for_metrics got {length} values for a last batch of {tail.size} samples, {tail.real} of them "
                "real: which values belong to the samples that only fill it up cannot be told, so all are kept.",
            )
        return None


def _longest(data: Any) -> int | None:
    """The longest first dimension of a nesting of tensors; None where a leaf is no tensor."""
    lengths = [0]

    def note(leaf: Tensor) -> Tensor:
        if leaf.ndim:
            lengths.append(leaf.shape[0])
        return leaf

    try:
        recursively_apply(note, data, error_on_other_type=True)
    except TypeError:
        return None
    return max(lengths)


def _as_items(data: Any) -> list[Any]:
    if isinstance(data, list | tuple) or (isinstance(data, Tensor) and data.ndim > 0):
        return list(data)
    return [data]


def _real_part(data: Any, cut: _Cut) -> Any:
    """Objects without what belongs to fill-up samples."""
    if isinstance(data, Tensor):
        return _cutter(cut)(data)
    if isinstance(data, dict):
        return {key: _real_part(value, cut) for key, value in data.items()}
    if _is_structure(data, cut.tail.size):
        parts = [_real_part(value, cut) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    if isinstance(data, list | tuple):
        kept = cut.kept(len(data))
        return data if kept is None else list(data[:kept])
    if not isinstance(data, str | bytes | bool | None):
        cut.kept(1)  # which warns, unless it is that of a single sample
    return data


def _is_structure(data: Any, size: int) -> bool:
    """Whether a list or tuple holds values of the whole batch, rather than one item per sample.

    A tuple does where all its tensors, lists and dicts are as long as the batch; a list where it mixes their kinds.
    """
    if not isinstance(data, list | tuple):
        return False
    held = [value for value in data if isinstance(value, Tensor | list | tuple | dict)]
    if isinstance(data, list) and len({type(value) for value in held}) < 2:
        return False
    return bool(held) and all(_is_batch(value, size) for value in held)


def _is_batch(value: Any, size: int) -> bool:
    if isinstance(value, Tensor):
        return value.ndim > 0 and len(value) % size == 0
    if isinstance(value, dict):
        return any(_is_batch(inner, size) for inner in value.values())
    if isinstance(value, list | tuple):
        return (bool(value) and len(value) % size == 0) or _is_structure(value, size)
    return False


def _cutter(cut: _Cut) -> Callable[[Tensor], Tensor]:
    def shortened(leaf: Tensor) -> Tensor:
        if leaf.ndim == 0:
            if not cut.tail.is_padded:
                return leaf
            warn_user(
                "gather_for_metrics got a 0-d value on a last batch that was filled up: the fill-up samples are in it. "
                "Gather the values per sample, or use weighted_mean(value, count).",
            )
            return leaf
        kept = cut.kept(leaf.shape[0])
        return leaf if kept is None else leaf[:kept]

    return shortened
