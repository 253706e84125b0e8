"""A model in a checkpoint: weights under their own names, tied ones once, everything else in the JSON part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_state import warn_user
from accel_state.protocols import Parted

from .boxes import is_sharded, settle
from .codec import Codec, Encoder, decode
from .manifest import ObjectEntry
from .names import STATE_TENSORS_NAME
from .objects import Captured, plain_model, shape_text, shared_shape, type_name
from .stored import Stored, Wholes
from .tensors import TensorEntry, check_storable, same_memory_key


def capture_model(
    name: str, model: nn.Module, codecs: Sequence[Codec], weights: Mapping[str, Any] | None = None
) -> Captured:
    """The model's state_dict, or the weights given in its place, without copying them."""
    inner = plain_model(model)
    settle(inner)
    state = inner.state_dict() if weights is None else weights
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
    return Captured(
        kind="model",
        type=type_name(model),
        tree=tree,
        bulk=bulk,
        side=encoder.tensors,
        aliases=aliases,
        own=bulk if weights is not None else [key for key, _ in inner.named_buffers()],
        whole=(inner.state_names if weights is None else ()) if isinstance(inner, Parted) else None,
    )


def join_trees(trees: Sequence[Any]) -> Any:
    """The JSON part of a model, given those of its parts."""
    return {field: {key: value for tree in trees for key, value in tree[field].items()} for field in trees[0]}


def _entries(entry: ObjectEntry, tree: Any) -> dict[str, TensorEntry | None]:
    """Every name that the checkpoint knows: its tensor's entry (through aliases), or None for extra state."""
    main = {key: value for key, value in entry.tensors.items() if value.file != STATE_TENSORS_NAME}
    return {**main, **{alias: main[first] for alias, first in entry.aliases.items()}, **dict.fromkeys(tree["extra"])}


def compare_model(
    name: str, model: nn.Module, entry: ObjectEntry, tree: Any, tensors: Mapping[str, Stored]
) -> tuple[list[str], set[str]]:
    """Differences in words, and the names that cannot be loaded because their shape or kind differs."""
    inner = plain_model(model)
    saved, here = _entries(entry, tree), inner.state_dict()
    known = {*here, *inner.state_names} if isinstance(inner, Parted) else here
    lines = [f"{name}.{key}: missing in the checkpoint" for key in here if key not in saved]
    lines += [f"{name}.{key}: only in the checkpoint" for key in saved if key not in known]
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
    name: str, here: Mapping[str, Any], entry: ObjectEntry, tensors: Mapping[str, Stored]
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
        if tensors[one].shape == tensors[two].shape and not torch.equal(tensors[one].whole(), tensors[two].whole()):
            lines.append(f"{name}.{key}: tied to {first} here, another weight in the checkpoint")
    return lines


def load_model(
    name: str,
    model: nn.Module,
    entry: ObjectEntry,
    tree: Any,
    tensors: Mapping[str, Stored],
    codecs: Sequence[Codec],
    unfit: set[str],
) -> None:
    """Copy the weights into the model's own parameters and buffers, one after the other.

    Sharded ones, here or in the checkpoint, are written straight into the part that this rank holds. Warns where a
    weight changes its type on the way.
    """
    target = plain_model(model)
    here = target.state_dict()
    stored = {key: tensor for key, tensor in tensors.items() if entry.tensors[key].file != STATE_TENSORS_NAME}
    stored |= {alias: stored[first] for alias, first in entry.aliases.items() if first in stored}
    if is_part := isinstance(target, Parted):  # the rest is for other ranks
        stored = {key: tensor for key, tensor in stored.items() if key in here}
    _warn_of_other_types(name, here, {key: tensor for key, tensor in stored.items() if key not in unfit})
    state: OrderedDict[str, Any] = OrderedDict()
    filled: dict[Any, Tensor] = {}
    for key, tensor in stored.items():
        if key in unfit:
            continue
        live = here.get(key)
        memory = same_memory_key(live) if tensor.has_shape_of(live) else None
        state[key] = filled[memory] if memory in filled else _value(live, tensor)
        if memory is not None:
            filled[memory] = state[key]
    extra = decode(tree["extra"], Wholes(tensors), codecs, where=name)
    state.update((key, value) for key, value in extra.items() if key not in unfit and (key in here or not is_part))
    versions = decode(tree["versions"], {}, where=name)
    state._metadata = {prefix: {"version": version} for prefix, version in versions.items()}  # type: ignore[attr-defined] # noqa: SLF001
    target.load_state_dict(state, strict=False)


def _value(live: Any, stored: Stored) -> Tensor:
    """What `load_state_dict` gets: a mapped view to copy, or the live tensor itself, already filled."""
    if stored.is_whole and not is_sharded(live):
        return stored.whole()
    return stored.fill(live) if stored.has_shape_of(live) else stored.whole()


def _warn_of_other_types(name: str, here: Mapping[str, Any], stored: Mapping[str, Stored]) -> None:
    changed = [
        f"{key} ({stored[key].dtype} to {now.dtype})"
        for key, now in here.items()
        if isinstance(now, Tensor) and key in stored and stored[key].dtype != now.dtype
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        warn_user(
            f"{name}: converted while loading: {', '.join(changed[:3])}{more}. The resumed run is not bit-exact.",
            RuntimeWarning,
        )
