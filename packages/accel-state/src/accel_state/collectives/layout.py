"""What a tree looks like, as a text that ranks can compare, and its tensors as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from accel_state.collectives.trees import children, unsupported_leaf

ALIGNMENT = 16  # bytes: complex128, the widest dtype, needs it for a view

_BRACKETS: dict[type, tuple[str, str]] = {dict: ("{", "}"), list: ("[", "]"), tuple: ("(", ")")}

Shape = Callable[[torch.Tensor], str]


def any_first(leaf: torch.Tensor) -> str:
    """Shape of a leaf whose first dimension may differ between ranks."""
    return f"[*, {', '.join(map(str, leaf.shape[1:]))}]" if leaf.ndim > 1 else "[*]"


def whole(leaf: torch.Tensor) -> str:
    """Shape of a leaf that is the same on all ranks."""
    return f"[{', '.join(map(str, leaf.shape))}]"


def rank_only(leaf: torch.Tensor) -> str:
    """Number of dimensions: all of them may differ between ranks."""
    return f"[{', '.join('*' * leaf.ndim)}]"


def flatten(tree: Any, operation: str, shape: Shape) -> tuple[list[torch.Tensor], str]:
    """The tensors of a tree in order, and the text `operation {'x': float32[*, 3]}`.

    Raises:
        TypeError: a leaf that is not a dense tensor; names its place.
    """
    leaves: list[torch.Tensor] = []
    text = _describe(tree, "", operation, shape, leaves)
    return leaves, f"{operation} {text}"


def _describe(node: Any, path: str, operation: str, shape: Shape, leaves: list[torch.Tensor]) -> str:
    if isinstance(node, torch.Tensor):
        if node.layout != torch.strided or node.is_quantized:
            raise TypeError(
                f"{operation}: the tensor at {path or 'the top'} has layout {node.layout}, but only dense ones can be "
                "sent: use .to_dense() or send its parts"
            )
        if hasattr(node, "full_tensor"):
            raise TypeError(
                f"{operation}: the tensor at {path or 'the top'} is a DTensor; send .full_tensor() or .to_local() of it"
            )
        leaves.append(node)
        place = "" if node.device.type == "cpu" else f" on {node.device.type}"
        return f"{str(node.dtype)[6:]}{shape(node)}{place}"
    found = children(node)
    if found is None:
        raise TypeError(unsupported_leaf(path, node, operation))
    inner = [
        f"{key!r}: {_describe(value, f'{path}[{key!r}]', operation, shape, leaves)}"
        if not isinstance(node, (list, tuple))
        else _describe(value, f"{path}[{key}]", operation, shape, leaves)
        for key, value in found
    ]
    opening, closing = _BRACKETS.get(type(node)) or (f"{type(node).__name__}(", ")")
    return f"{opening}{', '.join(inner)}{closing}"


def as_bytes(leaf: torch.Tensor) -> torch.Tensor:
    """A dense tensor as flat uint8, without a copy where it is contiguous."""
    plain = leaf.detach()
    if plain.is_complex():
        plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The opposite of `as_bytes`, a view; the bytes have to be aligned."""
    return data.view(dtype).view(shape)


def padding(num_bytes: int) -> int:
    """Bytes to the next aligned offset."""
    return -num_bytes % ALIGNMENT


def as_message(parts: Sequence[torch.Tensor], num_bytes: int) -> torch.Tensor:
    """Flat uint8 tensors one after the other, each at an aligned offset, filled up to `num_bytes`.

    A single one that is as long as that is taken as it is, without a copy.
    """
    if len(parts) == 1 and parts[0].numel() == num_bytes:
        return parts[0]
    pieces, at = [], 0
    for part in parts:
        pieces.append(part)
        at += part.numel()
        if padding(at):
            pieces.append(part.new_empty(padding(at)))
            at += padding(at)
    like = parts[0] if parts else torch.empty(0, dtype=torch.uint8)
    return torch.cat([*pieces, like.new_empty(num_bytes - at)])
