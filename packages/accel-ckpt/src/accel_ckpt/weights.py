"""Reading weights that `save_model`, torch or others wrote, one tensor at a time; and the peer's small helpers.

Safetensors files are mapped; torch's are read weights-only, which builds tensors and plain containers but runs no code.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from accel_state.protocols import Stateful

from .codec import load_json
from .commit import real_directory
from .durable import read_json_bytes
from .export import ALIASES_KEY, save
from .manifest import check_file_name
from .names import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from .shards import split_aliases

_OPEN_ATTEMPTS = 6
_IN_ORDER = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


def read_weights(checkpoint: str | os.PathLike[str], place: Callable[[str, Tensor], None]) -> dict[str, str]:
    """Hand every weight of a model to a function, one after the other.

    A tied weight is handed out under its further names too, as the same tensor object.

    Args:
        checkpoint: a weights file, an index, or a directory with either.
        place: gets a name and a tensor on the CPU, which may be a view of the mapped file: copy it, or move it to its
            device, and let it go.

    Returns:
        Further names of tied weights, each with the name that it is stored under, as far as the files record them.

    Raises:
        CheckpointNotFoundError: nothing to read there; says what is there instead.
        CheckpointCorruptError: a file is missing, damaged, or holds something else than its index says.
        CheckpointError: the weights are being replaced again and again.

    Cost: reads each file once; memory for the largest tensor with safetensors, for a whole file with torch's format.
    """
    aliases: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for path, (file, names) in _opened_set(real_directory(checkpoint), stack).items():
            found, own = set(), _aliases(path, file)
            further: dict[str, list[str]] = {}
            for alias, first in own.items():
                further.setdefault(first, []).append(alias)
            for name, tensor in _tensors(path, file):
                found.add(name)
                place(name, tensor)
                for alias in further.get(name, ()):
                    place(alias, tensor)
            if lost := sorted(((names or set()) | set(own.values())) - found - own.keys()):
                raise CheckpointCorruptError(f"{path} lacks {', '.join(lost[:5])}, which should be in it")
            aliases |= own
    return aliases


def locate_weights(checkpoint: str | os.PathLike[str]) -> dict[str, tuple[Path, str]]:
    """Where weights lie in safetensors files, which can be read, or mapped, a tensor at a time.

    Args:
        checkpoint: as of `read_weights`.

    Returns:
        Name -> file, and the name that the tensor has in it; tied weights by all their names. Those in torch's files
        are not among them.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError, CheckpointError: as `read_weights`.
    """
    found: dict[str, tuple[Path, str]] = {}
    with contextlib.ExitStack() as stack:
        for path, (file, _) in _opened_set(real_directory(checkpoint), stack).items():
            if path.suffix == ".safetensors":
                found |= {name: (path, name) for name in file.keys()}  # noqa: SIM118 - not a mapping
                found |= {alias: (path, first) for alias, first in _aliases(path, file).items()}
    return found


def _opened_set(checkpoint: Path, stack: contextlib.ExitStack) -> dict[Path, tuple[Any, set[str] | None]]:
    """All files of one set, and the names that are expected in each.

    Files that an index names are not written over while it is in force (see `export`): if it is the same after they
    were opened as before, they are one set, and open files stay what they are.
    """
    for attempt in range(_OPEN_ATTEMPTS):
        time.sleep(0.01 * attempt)
        before = _in_force(checkpoint)
        with contextlib.ExitStack() as these:
            try:
                files = {path: (_open(path, these), names) for path, names in weight_files(checkpoint).items()}
            except CheckpointError:
                if _in_force(checkpoint) == before and (before or attempt):
                    raise
                continue
            if _in_force(checkpoint) == before:
                stack.push(these.pop_all())
                return files
    raise CheckpointError(f"{checkpoint} is being replaced again and again; read it when its writer is done.")


def _in_force(checkpoint: Path) -> tuple[Any, ...] | None:
    """What tells the weights that are in force now from others that had the same names."""
    try:
        path = _in_directory(checkpoint) if checkpoint.is_dir() else checkpoint
        found = path.stat()
    except (CheckpointNotFoundError, FileNotFoundError):
        return None
    return path, found.st_ino, found.st_mtime_ns, found.st_size


def _open(path: Path, stack: contextlib.ExitStack) -> Any:
    if path.suffix != ".safetensors":
        return stack.enter_context(path.open("rb"))
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointCorruptError(f"{path} is not a readable safetensors file: {error}") from error


def weight_files(checkpoint: Path) -> dict[Path, set[str] | None]:
    """The files that hold a model's weights, each with the names that an index expects in it."""
    if checkpoint.is_dir():
        checkpoint = _in_directory(checkpoint)
    if not checkpoint.exists():
        raise CheckpointNotFoundError(f"there is no {checkpoint}; pass a weights file, an index or their directory")
    if checkpoint.suffix != ".json":
        return {checkpoint: None}
    index = load_json(_index_bytes(checkpoint), str(checkpoint))
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointCorruptError(f"{checkpoint} is not an index: it has no weight_map of names to files")
    files: dict[Path, set[str] | None] = {}
    for file in dict.fromkeys(where.values()):
        path = checkpoint.parent / _name_in_index(file, checkpoint)
        if not path.is_file():
            raise CheckpointCorruptError(f"{path} is missing, though {checkpoint.name} lists it")
        files[path] = {name for name, other in where.items() if other == file}
    return files


def _in_directory(directory: Path) -> Path:
    for name in _IN_ORDER:
        if (directory / name).is_file():
            return directory / name
    there = sorted(path.name for path in directory.iterdir())
    alone = [name for name in there if name.endswith(".index.json")] or [
        name for name in there if name.endswith((".safetensors", ".bin"))
    ]
    if len(alone) == 1:
        return directory / alone[0]
    shown = ", ".join(there[:8]) + (", …" if len(there) > 8 else "") if there else "nothing"
    raise CheckpointNotFoundError(
        f"{directory} holds none of {', '.join(_IN_ORDER)}, nor a single other index or weights file. Found: {shown}"
    )


def _index_bytes(path: Path) -> bytes:
    try:
        return read_json_bytes(path)
    except OSError as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {error}") from error


def _name_in_index(file: str, index: Path) -> str:
    try:
        return check_file_name(file)
    except CheckpointError as error:
        raise CheckpointCorruptError(f"{index}: {error}") from error


def _aliases(path: Path, file: Any) -> dict[str, str]:
    text = (file.metadata() or {}).get(ALIASES_KEY) if path.suffix == ".safetensors" else None
    found = load_json(text.encode(), f"{path}: {ALIASES_KEY}") if text else {}
    if not isinstance(found, dict) or not all(isinstance(first, str) for first in found.values()):
        raise CheckpointCorruptError(f"{path}: {ALIASES_KEY} is not a mapping of names to names: {found!r}")
    return found


def _tensors(path: Path, file: Any) -> Iterator[tuple[str, Tensor]]:
    if path.suffix == ".safetensors":
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)
        return
    state = _torch_load(file, str(path), map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointCorruptError(f"{path} does not hold a dict of tensors, but a {type(state).__name__}")
    yield from state.items()


# ---------------------------------------------------------------- the peer's helpers


def load(f: str | os.PathLike[str] | Any, map_location: Any = None, **kwargs: Any) -> Any:
    """`torch.load`, weights-only unless `weights_only=False` is given, with errors that say what to do.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointCorruptError: damaged, or it holds something that could run code.
    """
    return _torch_load(f, str(f), map_location=map_location, **{"weights_only": True, **kwargs})


def _torch_load(f: Any, shown: str, **kwargs: Any) -> Any:
    try:
        return torch.load(f, **kwargs)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no {shown}") from error
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0] if kwargs["weights_only"] else str(error)
        raise CheckpointCorruptError(
            f"{shown} cannot be read weights-only: {reason} If you trust where it comes from, pass weights_only=False."
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # torch's reader meets damage with whatever it runs into
        raise CheckpointCorruptError(f"{shown} is damaged or not a file of torch's: {error}") from error


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """All tensors of one weights file, safetensors or torch's.

    Args:
        device_map: module name -> device, "" for all; "disk" stays on the CPU. None puts everything on the CPU.
    """
    path = real_directory(checkpoint_file)
    if not path.is_file():
        raise CheckpointNotFoundError(f"there is no file {path}")
    with contextlib.ExitStack() as stack:
        tensors = _tensors(path, _open(path, stack))
        return {name: tensor.to(_device_of(name, device_map or {})) for name, tensor in tensors}


def _device_of(name: str, device_map: Mapping[str, Any]) -> torch.device:
    covering = [module for module in device_map if module == "" or name == module or name.startswith(f"{module}.")]
    device = device_map[max(covering, key=len)] if covering else "cpu"
    return torch.device("cpu" if device == "disk" else device)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict, each once and contiguous, as safetensors wants them."""
    return {name: tensor.contiguous() for name, tensor in split_aliases(state_dict, "").tensors.items()}


def save_custom_state(
    obj: Stateful, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False
) -> None:
    """Write one object's state to `custom_checkpoint_<index>.pkl`, in torch's format."""
    save(obj.state_dict(), Path(path) / f"custom_checkpoint_{index}.pkl", save_on_each_node)


def load_custom_state(obj: Stateful, path: str | os.PathLike[str], index: int = 0) -> None:
    """Give an object the state that `save_custom_state` wrote, read weights-only."""
    obj.load_state_dict(load(Path(path) / f"custom_checkpoint_{index}.pkl", map_location="cpu"))
