"""An optimizer in a checkpoint: its state by parameter name, so that order and number of ranks do not matter.

The JSON part is torch's own layout with names for numbers:

    {"state": {"model.encoder.weight": {"step": ..., "exp_avg": <tensor>}},
     "groups": [{"lr": ..., "params": [names]}],
     "rest": {}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from accel_state.errors import CheckpointError
from accel_state.protocols import Parted

from .boxes import is_sharded, settle
from .codec import MARK, Codec, Encoder, decode
from .manifest import ObjectEntry
from .objects import Captured, plain_model, shape_text, shared_shape, type_name
from .stored import Stored, Wholes


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """The name of each parameter of the models among the objects, by the parameter's identity."""
    names: dict[int, str] = {}
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            settle(plain_model(value))
            for key, parameter in plain_model(value).named_parameters():
                names.setdefault(id(parameter), f"{name}.{key}")
    return names


def names_in_parts(objects: Mapping[str, Any]) -> list[str] | None:
    """What the parameters are called of models that ranks hold in parts; None where there is no such model."""
    parted = {name: inner for name, value in objects.items() if isinstance(inner := _inner(value), Parted)}
    return [f"{name}.{key}" for name, model in parted.items() for key in model.state_names] if parted else None


def _inner(value: Any) -> Any:
    return plain_model(value) if isinstance(value, nn.Module) else None


def _named(optimizer: Any, names: Mapping[int, str]) -> list[list[tuple[str, Tensor]]]:
    """Each group's parameters with their names; those of no saved model are called by their place."""
    return [
        [(names.get(id(p), f"param_groups.{g}.{i}"), p) for i, p in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def capture_optimizer(
    name: str,
    optimizer: Any,
    names: Mapping[int, str],
    codecs: Sequence[Codec],
    in_parts: Sequence[str] | None = None,
) -> Captured:
    """The optimizer's state_dict with parameters called by name, without copying tensors.

    Args:
        names: see `parameter_names`.
        in_parts: see `names_in_parts`; the optimizer is then taken for one in parts too.

    Raises:
        CheckpointError: the state_dict has not torch's layout (`state` by number, `param_groups`).
    """
    packed, named = optimizer.state_dict(), _named(optimizer, names)
    name_of = dict(_numbers(name, packed, named))
    groups = [{**group, "params": [name_of[number] for number in group["params"]]} for group in packed["param_groups"]]
    rest = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    encoder = Encoder(codecs)
    state = {
        name_of[number]: {key: encoder.encode(value, name_of[number], str(key)) for key, value in values.items()}
        for number, values in packed["state"].items()
    }
    tree = {
        "state": state,
        "groups": encoder.encode(groups, "param_groups"),
        "rest": encoder.encode(rest, "rest"),
    }
    shapes = {key: shape for group in named for key, p in group if (shape := shared_shape(p)) is not None}
    return Captured(
        kind="optimizer", type=type_name(optimizer), tree=tree, bulk=encoder.tensors, shapes=shapes, whole=in_parts
    )


def join_trees(trees: Sequence[Any], order: Sequence[str]) -> Any:
    """The JSON part of an optimizer, given those of its parts, with the first one's hyperparameters.

    Args:
        order: in which parameters are listed in their groups.

    Raises:
        CheckpointError: the parts have different numbers of groups.
    """
    if len(counts := {len(tree["groups"]) for tree in trees}) > 1:
        raise CheckpointError(
            f"the ranks have optimizers of {', '.join(map(str, sorted(counts)))} groups, which should be parts of one: "
            "give every rank the same groups, empty ones where it has no parameter of them"
        )
    place = {name: number for number, name in enumerate(order)}
    groups = []
    for parts in zip(*(tree["groups"] for tree in trees), strict=True):
        members = dict.fromkeys(key for part in parts for key in part["params"])
        groups.append({**parts[0], "params": sorted(members, key=lambda key: place.get(key, len(place)))})
    state = {key: fields for tree in reversed(trees) for key, fields in tree["state"].items()}
    return {**trees[0], "state": state, "groups": groups}


def _numbers(
    name: str, packed: Mapping[str, Any], named: Sequence[Sequence[tuple[str, Tensor]]]
) -> Iterator[tuple[Any, str]]:
    """The name behind each number of a packed state."""
    try:
        counts = [len(group["params"]) for group in packed["param_groups"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{name}: its state_dict() has not the layout of torch.optim ('state' and 'param_groups'), so its tensors "
            f"cannot be saved by parameter name; it has {sorted(packed)}."
        ) from error
    if counts != [len(group) for group in named]:
        raise CheckpointError(f"{name}: its state_dict() and its param_groups list different numbers of parameters")
    for group, pairs in zip(packed["param_groups"], named, strict=True):
        yield from ((number, key) for number, (key, _) in zip(group["params"], pairs, strict=True))


def _saved_groups(tree: Any) -> list[list[str]]:
    return [[str(key) for key in group["params"]] for group in tree["groups"]]


def compare_optimizer(
    name: str, optimizer: Any, entry: ObjectEntry, tree: Any, names: Mapping[int, str], in_parts: Sequence[str] | None
) -> tuple[list[str], set[str]]:
    """Differences in words, and the parameters whose state cannot be loaded because their shape differs."""
    elsewhere = set(in_parts or ()) - set(names.values())  # on other ranks, which compare them
    here_groups = _named(optimizer, names)
    here = {key: p for group in here_groups for key, p in group}
    saved_groups = [set(group) - elsewhere for group in _saved_groups(tree)]
    saved = set[str]().union(*saved_groups)
    lines = []
    if (now := type_name(optimizer)) != entry.type:
        lines.append(f"{name}: {entry.type} in the checkpoint, {now} here")
    lines += [f"{name}: {key}: missing in the checkpoint" for key in here if key not in saved]
    lines += [f"{name}: {key}: only in the checkpoint" for key in sorted(saved) if key not in here]
    unfit = set()
    for key, shape in entry.shapes.items():
        if key in here and (now_shape := shared_shape(here[key])) not in (None, shape):
            lines.append(
                f"{name}: {key}: shape {shape_text(shape)} in the checkpoint, {shape_text(now_shape or ())} here"
            )
            unfit.add(key)
    if saved == here.keys() and saved_groups != [{k for k, _ in group} for group in here_groups]:
        lines.append(f"{name}: the parameters are grouped differently in the checkpoint")
    return lines, unfit


def load_optimizer(
    name: str,
    optimizer: Any,
    tree: Any,
    tensors: Mapping[str, Stored],
    names: Mapping[int, str],
    codecs: Sequence[Codec],
    unfit: set[str],
) -> None:
    """Give an optimizer its state back through its own `load_state_dict`, which places it beside the parameters.

    Hyperparameters come from the saved group of the same number; a group that the checkpoint has not keeps its own.
    State that fits no parameter here is left out.
    """
    packed, named = optimizer.state_dict(), _named(optimizer, names)
    name_of = dict(_numbers(name, packed, named))
    parameters = {key: parameter for group in named for key, parameter in group}
    wholes = Wholes(tensors)
    saved = {key for group in _saved_groups(tree) for key in group} - unfit
    state = {}
    for number, key in name_of.items():
        if key in saved and key in tree["state"]:
            values = tree["state"][key]
            where = f"{name}: {key}"
            held = packed["state"].get(number, {})
            state[number] = {
                field: decode(value, wholes, codecs, where=where)
                if (own := _placed(field, held.get(field), parameters[key], value, tensors)) is None
                else own
                for field, value in values.items()
            }
        elif key not in saved and number in packed["state"]:
            state[number] = packed["state"][number]
    groups = decode(tree["groups"], wholes, codecs, where=name)
    merged = [
        {**group, **_on_same_devices(groups[i] if i < len(groups) else {}, group), "params": group["params"]}
        for i, group in enumerate(packed["param_groups"])
    ]
    rest = decode(tree["rest"], wholes, codecs, where=name)
    optimizer.load_state_dict({**rest, "state": state, "param_groups": merged})


def _placed(field: str, held: Any, parameter: Tensor, tree: Any, tensors: Mapping[str, Stored]) -> Tensor | None:
    """A saved tensor where it belongs, or None where that is not told.

    The optimizer's own tensor if it has one that it fits, so that there is no second copy of the state; else, of the
    shape of a sharded parameter, one that is sharded as that is.
    """
    saved = tensors.get(tree.get("key", "")) if isinstance(tree, dict) and tree.get(MARK) == "tensor" else None
    if saved is None:
        return None
    if (type(held) is Tensor or is_sharded(held)) and saved.has_shape_of(held) and held.dtype is saved.dtype:
        return saved.fill(held)
    if field == "step" or not is_sharded(parameter) or not saved.has_shape_of(parameter):
        return None  # torch's optimizers keep their counts plain
    return saved.beside(parameter)


def _on_same_devices(saved: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters that are tensors (a learning rate under CUDA graphs) go where this run's are."""
    return {
        key: value.to(now.device) if isinstance(value, Tensor) and isinstance(now := here.get(key), Tensor) else value
        for key, value in saved.items()
    }
