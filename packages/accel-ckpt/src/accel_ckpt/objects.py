"""What each kind of object gives to a checkpoint, how it is compared with one, and how it takes its state back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accel_state.errors import CheckpointError
from accel_state.protocols import Stateful

from .boxes import class_of, has_flat_parameters
from .codec import Codec, Encoder, decode
from .manifest import ObjectEntry
from .stored import Stored, Wholes


@dataclass(frozen=True, kw_only=True)
class Captured:
    """An object's state, referring to its live tensors: written before anything changes them.

    Args:
        kind: see `ObjectEntry`.
        type: its class's name.
        tree: the JSON part.
        bulk: tensors for the object's own file.
        side: tensors for the file that all objects share.
        aliases: see `ObjectEntry`.
        shapes: see `ObjectEntry`.
        own: keys of tensors that may differ between ranks, so that rank 0's are saved.
        whole: None where every rank has all of the object; else this is a part of it, and these are the names that the
            parts have to make up together (models) or that give them their order (optimizers).
    """

    kind: str
    type: str
    tree: Any
    bulk: Mapping[str, Tensor] = field(default_factory=dict)
    side: Mapping[str, Tensor] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    own: Collection[str] = ()
    whole: Sequence[str] | None = None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All of them."""
        return {**self.bulk, **self.side}

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold other tensors of the object."""
        return self.whole is not None


def kind_of(value: Any) -> str:
    """model, optimizer or stateful, by shape; an empty string for what cannot be saved."""
    if isinstance(value, nn.Module):
        return "model"
    if not isinstance(value, Stateful):
        return ""
    return "optimizer" if hasattr(value, "param_groups") else "stateful"


def check_objects(objects: Mapping[str, Any]) -> None:
    """Refuse what has no state, all at once.

    Raises:
        CheckpointError: names every object that cannot be saved, and why.
    """
    wrong = [f"{name} ({type(value).__name__})" for name, value in objects.items() if not kind_of(value)]
    if wrong:
        raise CheckpointError(
            f"no state_dict and load_state_dict: {', '.join(wrong)}. Save objects that have both; plain values go into "
            "metadata={...}."
        )
    if flat := [name for name, value in objects.items() if isinstance(value, nn.Module) and has_flat_parameters(value)]:
        raise CheckpointError(
            f"{', '.join(flat)}: under FSDP version 1, whose flat parameters are no parameters of the model. Save what "
            "accel_parallel's NativeEngine.state gives for it, as Accelerator.save_state does, or use fully_shard"
        )
    if odd := [name for name in objects if not isinstance(name, str) or not name or "/" in name]:
        raise CheckpointError(f"objects need names that are non-empty strings without '/', not {odd!r}")
    by_id: dict[int, str] = {}
    for name, value in objects.items():
        if (first := by_id.setdefault(id(value), name)) != name:
            raise CheckpointError(f"{first!r} and {name!r} are the same object; pass it once")


def check_models(objects: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse names, given by a callback, of what is no model among the objects.

    Raises:
        CheckpointError: names them.
    """
    if wrong := [name for name in names if kind_of(objects.get(name)) != "model"]:
        models = ", ".join(name for name, value in objects.items() if kind_of(value) == "model") or "none"
        raise CheckpointError(f"no models of these names: {', '.join(wrong)}; there are: {models}")


def plain_model(model: nn.Module) -> nn.Module:
    """The module inside wrappers that prefix its parameters' names: data parallel ones and torch.compile's."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):  # noqa: SLF001 - torch.compile's mark
            model = inner
        else:
            return model


def type_name(value: Any) -> str:
    """The class's name; of a wrapped model, optimizer or scheduler that of the innermost one."""
    if isinstance(value, nn.Module):
        inner = plain_model(value)
        return _short(
            getattr(inner, "model_class", None) or class_of(inner)
        )  # of what is a part of another, or stands for it
    if hasattr(value, "param_groups"):
        while hasattr(value, "optimizer"):
            value = value.optimizer
    else:
        while isinstance(getattr(value, "scheduler", None), Stateful):
            value = value.scheduler
    return _short(type(value))


def _short(kind: type) -> str:
    return kind.__qualname__.rpartition("<locals>.")[2]


# ---------------------------------------------------------------- anything with a state


def capture_stateful(name: str, value: Stateful, codecs: Sequence[Codec]) -> Captured:
    """The state of a scheduler, loader, scaler or object of the user's."""
    encoder = Encoder(codecs)
    tree = encoder.encode(value.state_dict(), name)
    return Captured(kind="stateful", type=type_name(value), tree=tree, side=encoder.tensors)


def compare_stateful(name: str, value: Stateful, entry: ObjectEntry) -> list[str]:
    """Differences between the checkpoint and the object: only its type is known before it loads."""
    here = type_name(value)
    return [] if here == entry.type else [f"{name}: {entry.type} in the checkpoint, {here} here"]


def load_stateful(
    name: str, value: Stateful, tree: Any, tensors: Mapping[str, Stored], codecs: Sequence[Codec]
) -> None:
    """Give an object its state back; tensors are whole copies, on the CPU."""
    value.load_state_dict(decode(tree, Wholes(tensors), codecs, where=name))


def shape_text(shape: Sequence[int]) -> str:
    return str(tuple(shape))


def shared_shape(tensor: Tensor) -> tuple[int, ...] | None:
    """The shape, or None while a lazy parameter has none."""
    return None if torch.nn.parameter.is_lazy(tensor) else tuple(tensor.shape)
