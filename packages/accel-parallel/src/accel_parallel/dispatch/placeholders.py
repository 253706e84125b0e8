"""What stands for an offloaded weight between forwards.

It looks like a tensor on the meta device, so that shapes, dtypes and state dicts can be asked for without reading
anything. Any operation on it reads the weight and uses that; changing it in place is an error, since the change would
be lost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_state import honor_type
from accel_state.errors import OffloadError

_PLAIN = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_shared", "data_ptr"),
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "untyped_storage"),
        *("__len__", "__hash__"),
    )
)
"""Methods that read no numbers."""

_READING = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
"""Attributes that do; the others are shapes, dtypes and the like."""

_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
_IN_PLACE = frozenset(("__setitem__", *(f"__i{operator}__" for operator in _OPERATORS)))


class OffloadedWeight(Tensor):
    """A parameter or buffer whose numbers lie elsewhere. Made by `stand_in`; called as a class it makes a parameter.

    Attributes:
        weights, key: `weights[key]` has the numbers.
        execution_device: where the weight's module computes.
        shown_name: for messages.
        restored: what has taken the place of this for good, kept so that tied weights stay one.
        is_view: whether it was detached from another one, as state dicts do.
    """

    weights: Mapping[str, Tensor]
    key: str
    execution_device: torch.device
    shown_name: str
    restored: Tensor | None
    is_view: bool
    _is_param: bool  # torch's own mark: with it, isinstance(…, nn.Parameter) holds

    def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """A plain parameter: what takes the place of one of these has its numbers."""
        return nn.Parameter(torch.empty(0) if data is None else data, requires_grad)

    def load_now(self, device: torch.device | None = None) -> Tensor:
        """The numbers, on the device where the weight's module computes, or another one."""
        return self.stored().to(device or self.execution_device)

    def stored(self) -> Tensor:
        """The numbers where they lie, in the dtype that the weight has in its module."""
        value = self.weights[self.key].detach()
        return value.to(self.dtype) if self.dtype.is_floating_point and value.dtype != self.dtype else value

    def is_on_disk(self) -> bool:
        """Whether the numbers are read from a file."""
        ask: Callable[[str], bool] | None = getattr(self.weights, "is_on_disk", None)
        return ask is not None and ask(self.key)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"OffloadedWeight({self.shown_name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedWeight:
        known = memo.get(id(self))
        if known is None:
            known = memo[id(self)] = _like(self, copy.deepcopy(self.weights, memo))
        return known

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In a model it stays what it is; in a state dict its numbers are saved."""
        if self.is_view:
            return self.load_now(torch.device("cpu")).__reduce_ex__(protocol)
        parts = (tuple(self.shape), self.dtype, self.requires_grad, self._is_param, self.weights)
        return _rebuilt, (*parts, self.key, self.execution_device, self.shown_name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Numbers are read for what needs numbers."""
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        held: Any = getattr(func, "__self__", None)
        attribute = getattr(held, "__name__", "") if name in ("__get__", "__set__") else ""
        is_plain = name in _PLAIN or (attribute != "" and attribute not in _READING)
        if is_plain:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
                return func(*args, **kwargs)
        if name == "detach" or (attribute == "data" and name == "__get__"):
            view = _like(args[0], args[0].weights, is_parameter=False)
            view.is_view = True
            return view
        changed = kwargs.get("out", args[0] if name == "__set__" or _changes_in_place(name) else None)
        if isinstance(changed, cls):
            raise OffloadError(
                f"{changed.shown_name} is offloaded, and {attribute or name} would change a copy that is let go: "
                "bring it back by remove_hook_from_submodules, or change it before the model is dispatched"
            )
        device = _device_of([args, kwargs])
        read: dict[int, Tensor] = {}
        return func(*_loaded(args, device, read), **_loaded(kwargs, device, read))


def stand_in(
    old: Tensor, weights: Mapping[str, Tensor], key: str, execution_device: torch.device, shown_name: str
) -> OffloadedWeight:
    """What takes the place of a tensor whose numbers `weights[key]` has.

    Args:
        old: the tensor; gives shape, dtype and whether it is a parameter.
        execution_device: where numbers go that are read without another tensor to tell.
        shown_name: for messages.
    """
    is_parameter = isinstance(old, nn.Parameter)
    return _make(old, is_parameter, weights, key, execution_device, shown_name)


def _like(old: OffloadedWeight, weights: Mapping[str, Tensor], is_parameter: bool | None = None) -> OffloadedWeight:
    is_parameter = old._is_param if is_parameter is None else is_parameter  # noqa: SLF001
    return _make(old, is_parameter, weights, old.key, old.execution_device, old.shown_name)


def _make(
    old: Tensor,
    is_parameter: bool,
    weights: Mapping[str, Tensor],
    key: str,
    execution_device: torch.device,
    shown_name: str,
) -> OffloadedWeight:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        meta = torch.empty(old.shape, dtype=old.dtype, device="meta")
        wants_gradient = is_parameter and old.requires_grad
        made: OffloadedWeight = torch.Tensor._make_subclass(OffloadedWeight, meta, wants_gradient)  # noqa: SLF001
    made.weights, made.key, made.execution_device, made.shown_name = weights, key, execution_device, shown_name
    made.restored, made.is_view, made._is_param = None, False, is_parameter  # noqa: SLF001
    return made


def _rebuilt(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool, *rest: Any
) -> OffloadedWeight:
    """Of a pickled model."""
    empty = torch.empty(shape, dtype=dtype, device="meta")
    return _make(empty.requires_grad_(requires_grad), is_parameter, *rest)


def _changes_in_place(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _device_of(tree: Any) -> torch.device | None:
    """That of the first real tensor among some arguments."""
    if isinstance(tree, Tensor) and not isinstance(tree, OffloadedWeight):
        return tree.device
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return next((found for value in values if (found := _device_of(value)) is not None), None)


def _loaded(tree: Any, device: torch.device | None, read: dict[int, Tensor]) -> Any:
    if isinstance(tree, OffloadedWeight):
        if id(tree) not in read:
            read[id(tree)] = tree.load_now(device)
        return read[id(tree)]
    if isinstance(tree, dict):
        return {key: _loaded(value, device, read) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        found = [_loaded(value, device, read) for value in tree]
        if all(new is old for new, old in zip(found, tree, strict=True)):
            return tree
        return honor_type(tree, found)
    return tree
