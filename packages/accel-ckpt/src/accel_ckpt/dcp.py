"""torch.distributed.checkpoint's format: written for its readers, and its tensors read without running code.

Its `.metadata` is a pickle. It is read only if it names nothing but the classes that torch itself writes there.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from accel_state.errors import CheckpointCorruptError, CheckpointError

from .codec import decode, load_json
from .commit import real_directory, written_whole
from .durable import flush_file, read_json_bytes
from .loading import verify_checkpoint
from .manifest import Manifest, data_path
from .names import RNG_STATE_NAME, STATE_NAME, STATE_TENSORS_NAME
from .peer_files import refuse_accelerate_files
from .stored import Wholes, open_tensors

METADATA_NAME = ".metadata"
_ALLOWED = {
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
}


def is_dcp(directory: Path) -> bool:
    """Whether a directory holds a checkpoint of torch.distributed.checkpoint."""
    return (directory / METADATA_NAME).is_file()


def read_dcp_tensors(directory: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The whole tensors of a DCP checkpoint, by flat key. Needs no process group.

    Raises:
        CheckpointCorruptError: the metadata names code, or a file cannot be read.
    """
    metadata = read_metadata(directory)
    try:
        state: dict[str, Any] = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and wanted(key)
        }
        with quiet():
            dcp_load(state, storage_reader=CheckedReader(directory, metadata), no_dist=True)
    except (Exception, CheckpointException) as error:
        raise CheckpointCorruptError(f"{directory} cannot be read: {error}") from error
    return state


class _Strict(pickle.Unpickler):
    """An unpickler that knows nothing but what torch writes into metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointCorruptError(
                f"it names {module}.{name}, which torch.distributed.checkpoint does not write there: it could run code"
            )
        return super().find_class(module, name)


class CheckedReader(FileSystemReader):
    """torch's reader with metadata that was checked, instead of the file's anew."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._checked = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The metadata that was given."""
        return self._checked


def read_metadata(directory: Path) -> Metadata:
    """What a DCP checkpoint holds and where.

    Raises:
        CheckpointCorruptError: it names code, or files elsewhere, or is damaged.
    """
    path = directory / METADATA_NAME
    try:
        with path.open("rb") as file:
            metadata = _Strict(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointCorruptError(f"it holds a {type(metadata).__name__}")
        for stored in (metadata.storage_data or {}).values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise CheckpointCorruptError(f"it names the file {stored.relative_path}, out of the directory")
    except Exception as error:
        reason = str(error) if isinstance(error, CheckpointCorruptError) else repr(error)
        raise CheckpointCorruptError(f"{path} cannot be read: {reason}") from error
    return metadata


def convert_to_dcp(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[str]:
    """Write a checkpoint of ours in the format of torch.distributed.checkpoint.

    The state is a dict by the objects' names: a model's weights by name; an optimizer as torch's
    `get_optimizer_state_dict` gives it (`state` by parameter name, `param_groups` of names); other states as they are.

    Args:
        source: a committed checkpoint, sharded or not.
        target: a new directory.

    Returns:
        What was left out: random generators.

    Raises:
        CheckpointError: the target exists, a state needs a codec, or the state lies in accelerate's files.
        CheckpointNotFoundError, CheckpointCorruptError: as `load_checkpoint`.

    Cost: reads and writes the state once; whole tensors in memory where they were saved in shards.
    """
    path, new = real_directory(source), real_directory(target)
    if os.path.lexists(new):
        raise CheckpointError(f"{new} exists already; name a new directory")
    manifest = verify_checkpoint(path)
    refuse_accelerate_files(path, manifest)
    trees = load_json(read_json_bytes(data_path(path, STATE_NAME)), STATE_NAME)
    state = {name: _state_of(path, manifest, name, trees[name]) for name in manifest.objects}
    with written_whole(new) as folder:
        with quiet():
            dcp_save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        for file in folder.iterdir():
            flush_file(file)
    return ["random generators"] if any(name.startswith(RNG_STATE_NAME) for name in manifest.files) else []


def _state_of(path: Path, manifest: Manifest, name: str, tree: Any) -> Any:
    entry, tensors = manifest.objects[name], Wholes(open_tensors(path, manifest, [name])[name])
    if entry.kind == "model":
        weights = {key: tensors[key] for key in tensors if entry.tensors[key].file != STATE_TENSORS_NAME}
        weights |= {alias: weights[first] for alias, first in entry.aliases.items()}
        return {**weights, **decode(tree["extra"], tensors, where=name)}
    if entry.kind == "optimizer":
        return _optimizer_state(name, tree, tensors)
    return decode(tree, tensors, where=name)


def _optimizer_state(name: str, tree: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    groups = decode(tree["groups"], tensors, where=name)
    keys = [key for group in groups for key in group["params"]]
    models = {key.partition(".")[0] for key in keys}
    prefix = f"{models.pop()}." if len(models) == 1 else ""  # of one model, torch's names are without it

    def short(key: str) -> str:
        return key.removeprefix(prefix)

    return {
        "state": {
            short(key): {field: decode(value, tensors, where=f"{name}: {key}") for field, value in fields.items()}
            for key, fields in tree["state"].items()
        },
        "param_groups": [{**group, "params": [short(key) for key in group["params"]]} for group in groups],
        **decode(tree["rest"], tensors, where=name),
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's remarks that there is no process group, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*(torch\.distributed is disabled|no_dist|TypedStorage).*")
        yield
