"""Weights on disk: a folder with a file per tensor and an index, read by memory-mapping.

The form is the one that Accelerate reads and writes: `NAME.dat` is the tensor's bytes in row-major order, and
`index.json` gives each name its dtype and shape, or a safetensors file that holds it. A file per tensor lets one tensor
be replaced without copying the others, and each one be mapped by itself.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from accel_state.errors import MissingExtraError, OffloadFolderError

from .module_tensors import set_module_tensor_to_device
from .numbers import as_dtype

Index = MutableMapping[str, dict[str, Any]]
"""Name -> {"dtype", "shape"}, or {"safetensors_file", "weight_name", "dtype"}."""

INDEX_NAME = "index.json"


# ---- writing


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: Index | None = None
) -> Index | None:
    """Write a tensor's file, whole or not at all.

    Args:
        offload_folder: an existing directory, or one that is made.
        index: gets the tensor's entry.

    Returns:
        `index`.

    Raises:
        OffloadFolderError: it cannot be written.
    """
    path = _file_of(weight_name, offload_folder)
    values = weight.detach().cpu().contiguous()
    if index is not None:
        index[weight_name] = {"dtype": str(values.dtype).removeprefix("torch."), "shape": list(values.shape)}

    def write(stream: IO[bytes]) -> None:
        if values.nbytes:
            stream.write((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))

    _write_whole(path, write)
    return index


def save_offload_index(index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to a folder's index. An empty `index` changes nothing.

    Raises:
        OffloadFolderError: it cannot be written, or the index that is there cannot be read.
    """
    if not index:
        return
    path = Path(offload_folder, INDEX_NAME)
    entries = {**(read_offload_index(offload_folder) if path.exists() else {}), **index}
    _write_whole(path, lambda stream: stream.write(json.dumps(entries, indent=2).encode()))


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write all tensors of a state dict, and their index.

    Raises:
        OffloadFolderError: they cannot be written.
    """
    index: Index = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def make_offload_folder(folder: str | os.PathLike[str]) -> Path:
    """The directory, made if it is not there.

    Raises:
        OffloadFolderError: it cannot be made or written to.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise _not_writable(path, error) from error


def _write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """The file appears at once, in place of an older one, which stays what it is for those who have mapped it."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as stream:
            temporary = stream.name
            write(stream)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise _not_writable(path.parent, error) from error


def _not_writable(folder: Path, error: OSError) -> OffloadFolderError:
    return OffloadFolderError(
        f"offloaded weights cannot be written to {folder}: {error.strerror or error}. Give a folder on a disk with "
        "room for them, in which this process may write"
    )


def _file_of(name: str, folder: str | os.PathLike[str]) -> Path:
    if not name or os.sep in name or name.startswith("."):
        raise OffloadFolderError(f"{name!r} cannot be the name of an offloaded weight: its file would be {name}.dat")
    return Path(folder, f"{name}.dat")


# ---- reading


def read_offload_index(offload_folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """A folder's index.

    Raises:
        OffloadFolderError: there is none, or it is damaged.
    """
    path = Path(offload_folder, INDEX_NAME)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OffloadFolderError(f"{path.parent} holds no {INDEX_NAME}, so no offloaded weights") from error
    except (OSError, ValueError) as error:
        raise OffloadFolderError(f"{path} cannot be read: {error}. Offload the weights anew") from error
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise OffloadFolderError(f"{path} is no index of weights: its entries are not names with dtype and shape")
    return found


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """The tensor in a file, memory-mapped: read as it is used, and changes to it never reach the file.

    Args:
        weight_info: its entry of the index.

    Raises:
        OffloadFolderError: the file is missing or has another size than its entry says.
    """
    path = Path(weight_file)
    try:
        shape, dtype = [int(size) for size in weight_info["shape"]], as_dtype(weight_info["dtype"])
        assert isinstance(dtype, torch.dtype)
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise OffloadFolderError(f"{path} is missing, though the index lists it. Offload the weights anew") from error
    except (KeyError, TypeError, ValueError) as error:
        raise OffloadFolderError(
            f"the index says {dict(weight_info)!r} of {path}, which is no dtype and shape"
        ) from error
    wanted = math.prod(shape) * dtype.itemsize
    if size != wanted:
        raise OffloadFolderError(
            f"{path} has {size} bytes, and {wanted} by its entry in the index. Offload the weights anew"
        )
    if not wanted:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=wanted, dtype=torch.uint8).view(dtype).view(shape)


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Put offloaded weights into a model, on the CPU.

    Args:
        index: the folder's; None or empty changes nothing.
    """
    for name, entry in (index or {}).items():
        value = load_offloaded_weight(_file_of(name, offload_folder), entry)
        set_module_tensor_to_device(model, name, "cpu", value=value)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Weights by name, from memory, an offload folder, or safetensors files.

    What lies in files is mapped, once, and mapped anew when its file was replaced.

    Args:
        state_dict: weights in memory.
        save_folder: of `offload_state_dict`.
        index: entries to use instead of the folder's index; those with "safetensors_file" and "weight_name" need no
            folder.
        device: where weights from files are put; None leaves them on the CPU.

    Raises:
        ValueError: none of the three is given.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError(
                "Need either a `state_dict`, a `save_folder` or an `index` containing offloaded weights: give one"
            )
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = read_offload_index(save_folder)
        self.index = {} if index is None else index
        self.device = device
        self.all_keys = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]
        self._mapped: dict[str, tuple[Any, Tensor]] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        path = self.path_of(key)
        version = _version(path)
        known = self._mapped.get(key)
        if known is not None and known[0] == version:
            tensor = known[1]
        else:
            tensor = (
                _from_safetensors(path, entry) if "safetensors_file" in entry else load_offloaded_weight(path, entry)
            )
            self._mapped[key] = version, tensor
        return tensor if self.device is None else tensor.to(self.device)

    def path_of(self, key: str) -> Path:
        """The file that holds a weight."""
        entry = self.index[key]
        if "safetensors_file" in entry:
            return Path(entry["safetensors_file"])
        if self.save_folder is None:
            raise OffloadFolderError(f"the index has {key!r} in a file of its own: give save_folder, where it lies")
        return _file_of(key, self.save_folder)

    def is_on_disk(self, key: str) -> bool:
        """Whether a weight is read from a file."""
        return key not in self.state_dict

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}}


class PrefixedDataset(Mapping[str, Any]):
    """The entries of another mapping whose names begin with a prefix, by what follows it.

    Iteration gives whole names, as that of the peer's class of this name.

    Args:
        dataset: the other mapping.
        prefix: with its dot.
    """

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset, self.prefix = dataset, prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def is_on_disk(self, key: str) -> bool:
        """Whether a weight is read from a file."""
        ask: Callable[[str], bool] | None = getattr(self.dataset, "is_on_disk", None)
        return ask is not None and ask(f"{self.prefix}{key}")


def _version(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise OffloadFolderError(f"{path}, which holds offloaded weights, cannot be read: {error.strerror}") from error
    return found.st_ino, found.st_mtime_ns, found.st_size


def _from_safetensors(path: Path, entry: Mapping[str, Any]) -> Tensor:
    try:
        safetensors: Any = importlib.import_module("safetensors")
    except ImportError as error:
        raise MissingExtraError(
            f"weights offloaded to {path.name} need safetensors: pip install 'accel-parallel[safetensors]'"
        ) from error
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(entry["weight_name"])
    except (safetensors.SafetensorError, OSError, KeyError) as error:
        raise OffloadFolderError(f"{entry.get('weight_name')!r} cannot be read from {path}: {error}") from error
    dtype = as_dtype(entry.get("dtype", tensor.dtype))
    assert isinstance(dtype, torch.dtype)
    return tensor.to(dtype)
