"""What a tree looks like, as a text that ranks can compare, and which of its leaves can be sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from accel_state.collectives.trees import children, leaves_with_paths, refuse_loops, unsupported_leaf

_BRACKETS: dict[type, tuple[str, str]] = {dict: ("{", "}"), list: ("[", "]"), tuple: ("(", ")")}

Shape = Callable[[torch.Size], tuple[Any, ...]]


def any_first(shape: torch.Size) -> tuple[Any, ...]:
    """Shape of a leaf whose first dimension may differ between ranks."""
    return ("*", *shape[1:])


def whole(shape: torch.Size) -> tuple[Any, ...]:
    """Shape of a leaf that is the same on all ranks."""
    return shape


def rank_only(shape: torch.Size) -> tuple[Any, ...]:
    """Number of dimensions: all of them may differ between ranks."""
    return ("*",) * len(shape)


class _CannotSend(Exception):  # noqa: N818  (never leaves this module)
    """A leaf was met that the operation cannot take; its place is found when the message is written."""


def flatten(
    tree: Any, operation: str, shape: Shape, takes: Callable[[torch.Tensor], str | None] | None = None
) -> tuple[list[torch.Tensor], str]:
    """The tensors of a tree in order, and the text `operation {'x': float32[*, 3]}`.

    Args:
        tree: any nesting of tensors.
        operation: its name, for the text and for messages.
        shape: which dimensions have to agree.
        takes: a text for tensors other than plain dense ones that the operation can take, None for those it cannot.

    Raises:
        TypeError: a leaf that cannot be sent; names its place.
        ValueError: a container that holds itself; names its place.
    """
    leaves: list[torch.Tensor] = []
    try:
        text = _describe(tree, shape, takes, leaves)
    except _CannotSend:
        raise TypeError(_refusal(tree, operation, takes)) from None
    except RecursionError:
        refuse_loops(operation, tree)
        raise
    return leaves, f"{operation} {text}"


def _describe(node: Any, shape: Shape, takes: Any, leaves: list[torch.Tensor]) -> str:
    if isinstance(node, torch.Tensor):
        if not is_plain(node):
            text = takes(node) if takes else None
            if text is None:
                raise _CannotSend
            leaves.append(node)
            return str(text)
        leaves.append(node)
        return leaf_text(node.dtype, shape(node.shape), node.device.type)
    found = children(node)
    if found is None:
        raise _CannotSend
    if isinstance(node, (list, tuple)):
        inner = [_describe(value, shape, takes, leaves) for _, value in found]
    else:
        inner = [f"{key!r}: {_describe(value, shape, takes, leaves)}" for key, value in found]
    opening, closing = _BRACKETS.get(type(node)) or (f"{type(node).__name__}(", ")")
    return f"{opening}{', '.join(inner)}{closing}"


@lru_cache(maxsize=4096)
def leaf_text(dtype: torch.dtype, dims: tuple[Any, ...], device_type: str) -> str:
    """`float32[*, 3] on cuda`."""
    place = "" if device_type == "cpu" else f" on {device_type}"
    return f"{str(dtype)[6:]}[{', '.join(map(str, dims))}]{place}"


def is_plain(leaf: torch.Tensor) -> bool:
    """Whether a tensor is dense, whole and has data."""
    if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested or leaf.is_meta:
        return False
    return type(leaf) in _PLAIN_TYPES or not is_dtensor(leaf)


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def is_dtensor(leaf: torch.Tensor) -> bool:
    """Whether a tensor is spread over several ranks, as torch.distributed.tensor does it."""
    return hasattr(leaf, "full_tensor")


def _refusal(tree: Any, operation: str, takes: Any) -> str:
    """Why the first leaf that cannot be sent cannot, and where it is."""
    for path, leaf in leaves_with_paths(tree):
        if not isinstance(leaf, torch.Tensor):
            return unsupported_leaf(path, leaf, operation)
        if not is_plain(leaf) and not (takes and takes(leaf)):
            return f"{operation}: the tensor at {path or 'the top'} {_why_not(leaf)}"
    raise AssertionError("every leaf can be sent")


def _why_not(leaf: torch.Tensor) -> str:
    if is_dtensor(leaf):
        return "is a DTensor; send .full_tensor() or .to_local() of it"
    if leaf.is_nested:
        return "is a nested tensor; send its .values(), or .to_padded_tensor(...) of it"
    if leaf.is_meta:
        return "is on the meta device and has no data"
    if leaf.is_quantized:
        return "is quantised; send .int_repr() of it, or .dequantize()"
    return f"has layout {leaf.layout}, but only dense ones can be sent: use .to_dense(), or send its parts"


def same_everywhere(sizes_by_rank: Sequence[Any]) -> bool:
    """Whether all ranks have equally much of everything."""
    return all(sizes == sizes_by_rank[0] for sizes in sizes_by_rank)
