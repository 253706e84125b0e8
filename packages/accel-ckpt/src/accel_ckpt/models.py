"""A model in a checkpoint: weights under their own names, tied ones once, everything else in the JSON part."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .codec import Codec, Encoder, decode
from .manifest import ObjectEntry
from .names import STATE_TENSORS_NAME
from .objects import Captured, plain_model, shape_text, shared_shape, type_name
from .tensors import TensorEntry, check_storable, same_memory_key


def capture_model(
    name: str, model: nn.Module, codecs: Sequence[Codec], weights: Mapping[str, Any] | None = None
) -> Captured:
    """The model's state_dict, or the weights given in its place, without copying them."""
    state = plain_model(model).state_dict() if weights is None else weights
    bulk: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_by_memory: dict[Any, str] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        tensor = check_storable(value, f"{name}.{key}")
        memory = same_memory_key(tensor)
        first = key if memory is None else first_by_memory.setdefault(memory, key)
        if first == key:
            bulk[key] = tensor
        else:
            aliases[key] = first
    encoder = Encoder(codecs)
    extra = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    versions = {
        prefix: local["version"] for prefix, local in getattr(state, "_metadata", {}).items() if "version" in local
    }
    tree = {"extra": encoder.encode(extra, name), "versions": encoder.encode(versions, name)}
    return Captured(kind="model", type=type_name(model), tree=tree, bulk=bulk, side=encoder.tensors, aliases=aliases)


def _entries(entry: ObjectEntry, tree: Any) -> dict[str, TensorEntry | None]:
    """Every name that the checkpoint knows: its tensor's entry (through aliases), or None for extra state."""
    main = {key: value for key, value in entry.tensors.items() if value.file != STATE_TENSORS_NAME}
    return {**main, **{alias: main[first] for alias, first in entry.aliases.items()}, **dict.fromkeys(tree["extra"])}


def compare_model(
    name: str, model: nn.Module, entry: ObjectEntry, tree: Any, tensors: Mapping[str, Tensor]
) -> tuple[list[str], set[str]]:
    """Differences in words, and the names that cannot be loaded because their shape or kind differs."""
    saved, here = _entries(entry, tree), plain_model(model).state_dict()
    lines = [f"{name}.{key}: missing in the checkpoint" for key in here if key not in saved]
    lines += [f"{name}.{key}: only in the checkpoint" for key in saved if key not in here]
    unfit: set[str] = set()
    for key in here.keys() & saved.keys():
        was, now = saved[key], here[key]
        if (was is None) == isinstance(now, Tensor):
            lines.append(f"{name}.{key}: a tensor on one side, other data on the other")
        elif was is not None and (shape := shared_shape(now)) not in (None, was.shape):
            lines.append(
                f"{name}.{key}: shape {shape_text(was.shape)} in the checkpoint, {shape_text(shape or ())} here"
            )
        else:
            continue
        unfit.add(key)
    return lines + _ties_that_differ(name, here, entry, tensors), unfit


def _ties_that_differ(
    name: str, here: Mapping[str, Any], entry: ObjectEntry, tensors: Mapping[str, Tensor]
) -> list[str]:
    """Names that are one weight here, but two with different values in the checkpoint."""
    lines: list[str] = []
    first_by_memory: dict[Any, str] = {}
    for key, value in here.items():
        memory = same_memory_key(value) if isinstance(value, Tensor) and not value.is_meta else None
        first = key if memory is None else first_by_memory.setdefault(memory, key)
        one, two = entry.aliases.get(first, first), entry.aliases.get(key, key)
        if one == two or one not in tensors or two not in tensors:
            continue
        if tensors[one].shape == tensors[two].shape and not torch.equal(tensors[one], tensors[two]):
            lines.append(f"{name}.{key}: tied to {first} here, another weight in the checkpoint")
    return lines


def load_model(
    name: str,
    model: nn.Module,
    entry: ObjectEntry,
    tree: Any,
    tensors: Mapping[str, Tensor],
    codecs: Sequence[Codec],
    unfit: set[str],
) -> None:
    """Copy the weights into the model's own parameters and buffers, one after the other.

    Warns where a weight changes its type on the way.
    """
    target = plain_model(model)
    state: OrderedDict[str, Any] = OrderedDict()
    for key, tensor in tensors.items():
        if key not in unfit and entry.tensors[key].file != STATE_TENSORS_NAME:
            state[key] = tensor
    for alias, first in entry.aliases.items():
        if alias not in unfit and first in tensors:
            state[alias] = tensors[first]
    extra = decode(tree["extra"], tensors, codecs, where=name)
    state.update((key, value) for key, value in extra.items() if key not in unfit)
    versions = decode(tree["versions"], {}, where=name)
    state._metadata = {prefix: {"version": version} for prefix, version in versions.items()}  # type: ignore[attr-defined] # noqa: SLF001
    _warn_of_other_types(name, target.state_dict(), state)
    target.load_state_dict(state, strict=False)


def _warn_of_other_types(name: str, here: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    changed = [
        f"{key} ({state[key].dtype} to {now.dtype})"
        for key, now in here.items()
        if isinstance(now, Tensor) and isinstance(state.get(key), Tensor) and state[key].dtype != now.dtype
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        warnings.warn(
            f"{name}: converted while loading: {', '.join(changed[:3])}{more}. The resumed run is not bit-exact.",
            RuntimeWarning,
            stacklevel=2,
        )
