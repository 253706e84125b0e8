"""Walking nested data: dicts, mappings, lists, tuples, named tuples, dataclasses, with tensors as leaves."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


class TensorInformation(NamedTuple):
    """Shape and dtype of a tensor, without its data."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> bool:
    """Whether this is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether this is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Whether this is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """A sequence of the same type as `obj` (list, tuple, named tuple) from the items of `generator`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """Keys and values of a container, or None for a leaf."""
    if isinstance(node, (torch.Tensor, TensorInformation)):
        return None
    if isinstance(node, Mapping):
        return list(node.items())
    if isinstance(node, (list, tuple)):
        return list(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def rebuilt(node: Any, values: Sequence[Any]) -> Any:
    """A container like `node` with other values, in the order of `children(node)`."""
    if isinstance(node, Mapping):
        items = dict(zip(node.keys(), values, strict=True))
        return _like_mapping(node, items)
    if isinstance(node, (list, tuple)):
        return honor_type(node, values)
    names = (field.name for field in dataclasses.fields(node))
    twin = copy.copy(node)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(twin, name, value)  # also for frozen ones; __post_init__ has run on the original
    return twin


def _like_mapping(node: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(node) is dict:
        return items
    if isinstance(node, defaultdict):
        return defaultdict(node.default_factory, items)
    return type(node)(items)  # type: ignore[call-arg]


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with `fn` applied to each leaf."""
    found = children(tree)
    if found is None:
        return fn(tree)
    return rebuilt(tree, [map_leaves(fn, value) for _, value in found])


def loop_in(tree: Any) -> str | None:
    """Where a container holds itself, as `['x'][0]`; None where none does."""
    above: list[int] = []

    def look(node: Any, path: str) -> str | None:
        if id(node) in above:
            return path
        above.append(id(node))
        for key, value in children(node) or ():
            found = look(value, f"{path}[{key!r}]")
            if found is not None:
                return found
        above.pop()
        return None

    try:
        return look(tree, "")
    except RecursionError:  # no loop, but deeper than Python can go
        return None


def refuse_loops(operation: str, *trees: Any) -> None:
    """Raise ValueError where one of the trees has no end. For those whose walk has exhausted Python's stack."""
    for tree in trees:
        path = loop_in(tree)
        if path is not None:
            raise ValueError(
                f"{operation}: the data holds itself, at {path}: containers have to end in leaves"
            ) from None


def loops_named(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: where data without an end exhausts Python's stack, raise ValueError that names the loop's place."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except RecursionError:
            refuse_loops(function.__name__, *args, *kwargs.values())
            raise

    return run


def leaves_with_paths(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf with its place, as `['x'][0]`."""
    found = children(tree)
    if found is None:
        yield path, tree
        return
    for key, value in found:
        yield from leaves_with_paths(value, f"{path}[{key!r}]")


@loops_named
def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func(leaf, *args, **kwargs)` to the leaves of `data` that pass `test_type`.

    Args:
        func: gets each matching leaf.
        data: any nesting.
        args: handed on to `func`.
        test_type: which leaves; tensors by default.
        error_on_other_type: refuse other leaves rather than keep them.
        kwargs: handed on to `func`.

    Raises:
        TypeError: a leaf of another type, with `error_on_other_type`; names its place.
    """
    if error_on_other_type:
        for path, leaf in leaves_with_paths(data):
            if not test_type(leaf):
                raise TypeError(unsupported_leaf(path, leaf, getattr(func, "__name__", repr(func))))

    def apply(leaf: Any) -> Any:
        return func(leaf, *args, **kwargs) if test_type(leaf) else leaf

    return map_leaves(apply, data)


def unsupported_leaf(path: str, leaf: Any, operation: str) -> str:
    """The message for a leaf that an operation cannot take."""
    return (
        f"{operation}: the data has a {type(leaf).__name__} at {path or 'its top'} ({leaf!r:.60}); allowed are tensors "
        "in dicts, lists, tuples and dataclasses. Use gather_object or broadcast_object_list for other values"
    )


@loops_named
def send_to_device(
    tensor: Any,
    device: str | int | torch.device,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Any:
    """Move the tensors in any nesting; everything else is kept.

    Args:
        tensor: the data. Objects other than containers that have a `to` method move themselves.
        device: where to.
        non_blocking: do not wait for copies from pinned memory.
        skip_keys: keys of mappings, at any depth, whose values stay where they are.
    """
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or ()
    return _moved(tensor, torch.device(device), non_blocking, skipped)


def _moved(data: Any, device: torch.device, non_blocking: bool, skipped: Sequence[str]) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    if type(data) is list:  # the usual containers first: asking for a Mapping takes longer than moving a tensor
        return [_moved(value, device, non_blocking, skipped) for value in data]
    if type(data) is dict and not skipped:
        return {key: _moved(value, device, non_blocking, skipped) for key, value in data.items()}
    if isinstance(data, Mapping):
        kept = {k: v if k in skipped else _moved(v, device, non_blocking, skipped) for k, v in data.items()}
        return _like_mapping(data, kept)
    if isinstance(data, (list, tuple)):
        return honor_type(data, [_moved(value, device, non_blocking, skipped) for value in data])
    if hasattr(data, "to") and not isinstance(data, type):
        try:
            return data.to(device, non_blocking=non_blocking)
        except TypeError:  # not every `to` knows the flag
            return data.to(device)
    found = children(data)
    if found is None:
        return data
    return rebuilt(data, [_moved(value, device, non_blocking, skipped) for _, value in found])


@loops_named
def find_batch_size(data: Any) -> int:
    """The first dimension of the first tensor.

    Raises:
        ValueError: no leaf at all.
        TypeError: the first leaf is not a tensor, or has no dimension.
    """
    first = next(leaves_with_paths(data), None)
    if first is None:
        raise ValueError(f"cannot find the batch size of an empty {type(data).__name__}")
    path, leaf = first
    if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
        what = "a tensor without dimensions" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
        raise TypeError(f"the batch size is the first dimension of a tensor, but at {path or 'the top'} is {what}")
    return int(leaf.shape[0])


def ignorant_find_batch_size(data: Any) -> int | None:
    """`find_batch_size`, or None where there is none."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


@loops_named
def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor, or None."""
    return next((leaf.device for _, leaf in leaves_with_paths(data) if isinstance(leaf, torch.Tensor)), None)


def slice_tensors(
    data: Any,
    tensor_slice: slice,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> Any:
    """`tensor[tensor_slice]` for every tensor; views, no copies.

    Args:
        data: any nesting.
        tensor_slice: of the first dimension.
        process_index: not used; there so that a function for dispatching loaders may have it.
        num_processes: likewise.
    """
    del process_index, num_processes
    return recursively_apply(lambda leaf: leaf[tensor_slice], data)


@loops_named
def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join trees of one layout, tensor by tensor.

    Args:
        data: the trees.
        dim: along which.

    Raises:
        TypeError: a leaf that is not a tensor.
    """
    first = data[0]
    found = children(first)
    if found is None:
        if not isinstance(first, torch.Tensor):
            raise TypeError(f"only tensors can be concatenated, but here is a {type(first).__name__} ({first!r:.60})")
        return torch.cat(list(data), dim=dim)
    by_tree = [[value for _, value in children(tree) or []] for tree in data]
    return rebuilt(first, [concatenate(column, dim) for column in zip(*by_tree, strict=True)])


def get_data_structure(data: Any) -> Any:
    """The same nesting with a `TensorInformation` for each tensor."""
    return recursively_apply(lambda leaf: TensorInformation(leaf.shape, leaf.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """The opposite of `get_data_structure`: uninitialised tensors."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def listify(data: Any) -> Any:
    """The same nesting with a list of numbers for each tensor."""
    return recursively_apply(lambda leaf: leaf.detach().cpu().tolist(), data)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Repeat the first sample so that a batch divides evenly among the processes.

    Args:
        tensor: any nesting; its first dimension is padded, tensors of another length are kept.
        batch_size: the length that belongs to the batch.
        num_processes: what it is to be divisible by.
        dim: only 0 is meaningful; as in the peer.
    """
    missing = -batch_size % num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.ndim == 0 or leaf.shape[dim] != batch_size:
            return leaf
        return torch.cat([leaf, leaf.narrow(dim, 0, 1).repeat_interleave(missing, dim)], dim=dim)

    return recursively_apply(pad, tensor) if missing else tensor
