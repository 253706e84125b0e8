"""Where the sizes of a model's weights come from: files, a builder, a configuration, or the Hub."""

from __future__ import annotations

import importlib
import json
import math
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from accel_state.errors import MissingExtraError, SettingError

_MAX_HEADER_BYTES = 100_000_000  # as the format's own readers


class Weight(NamedTuple):
    """A tensor of a model: its name, how many numbers it has, and whether it is trained."""

    name: str
    num_items: int
    is_trained: bool = True


def find_weights(name: str, library: str | None = None, *, trust_remote_code: bool = False) -> list[Weight]:
    """The weights of the model that `name` means, none of which are loaded.

    Args:
        name: a safetensors file or a folder of them, a config.json or its folder, `module:function`, or a name on the
            Hub.
        library: "timm" allows a name on the Hub without `timm/`.
        trust_remote_code: whether code that a config.json names may run.

    Raises:
        SettingError: nothing is found there, it cannot be read, or it may not be.
        MissingExtraError: transformers or huggingface_hub is needed and not installed.
    """
    path = Path(name)
    if path.is_file() and path.suffix == ".safetensors":
        return _in_files([path])
    if path.is_dir() and (files := sorted(path.glob("*.safetensors"))):
        return _in_files(files)
    config = path / "config.json" if path.is_dir() else path
    if config.is_file():
        return _by_transformers(config, trust_remote_code)
    if path.exists():
        raise SettingError(f"{name} holds neither *.safetensors nor a config.json")
    module, colon, function = name.partition(":")
    if colon:
        return _by_builder(module, function)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise SettingError(f"there is no file or folder {name!r}")
    return _on_the_hub(f"timm/{name}" if library == "timm" and "/" not in name else name)


def _in_files(paths: Iterable[Path]) -> list[Weight]:
    return [
        Weight(name, math.prod(entry["shape"]))
        for path in paths
        for name, entry in _header(path).items()
        if name != "__metadata__"
    ]


def _header(path: Path) -> dict[str, Any]:
    """A safetensors file begins with the length of its header (uint64) and the header as JSON."""
    with path.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        text = stream.read(length) if 0 < length <= _MAX_HEADER_BYTES else b""
    try:
        header: dict[str, Any] = json.loads(text)
        if len(text) == length and all("shape" in entry for name, entry in header.items() if name != "__metadata__"):
            return header
    except (ValueError, AttributeError, TypeError):
        pass
    raise SettingError(f"{path} is not a whole safetensors file: its header cannot be read")


def _by_builder(module_name: str, function_name: str) -> list[Weight]:
    import torch

    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        build = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise SettingError(
            f"{module_name}:{function_name} cannot be found from {folder}: {error}. Give MODULE:FUNCTION, a function "
            "without arguments that returns the model"
        ) from error
    finally:
        sys.path.remove(folder)
    with torch.device("meta"):
        model = build()
    return _of_model(model, f"{module_name}:{function_name}")


def _of_model(model: Any, source: str) -> list[Weight]:
    import torch

    if not isinstance(model, torch.nn.Module):
        raise SettingError(f"{source} returned a {type(model).__name__}, not a torch.nn.Module")
    trained = [Weight(name, tensor.numel(), tensor.requires_grad) for name, tensor in model.named_parameters()]
    return trained + [Weight(name, tensor.numel(), False) for name, tensor in model.named_buffers()]


def _by_transformers(config: Path, trust_remote_code: bool) -> list[Weight]:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError(
            f"{config} needs transformers to build its model: pip install transformers. Safetensors files need nothing"
        ) from error
    import torch

    try:
        settings = transformers.AutoConfig.from_pretrained(str(config.parent), trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(settings, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise SettingError(f"{config}: transformers builds no model from it: {error}") from error
    return _of_model(model, str(config))


def _on_the_hub(name: str) -> list[Weight]:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        raise MissingExtraError(
            f"{name!r} is no file, folder or MODULE:FUNCTION, and names on the Hub need huggingface_hub: pip install "
            '"accel[hub]"'
        ) from error
    try:
        found = hub.get_safetensors_metadata(name)
    except errors.GatedRepoError as error:
        raise SettingError(
            f"{name!r} is gated: accept its terms on its page, then log in (`hf auth login`) or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise SettingError(
            f"{name!r} is neither here nor on the Hub; a private one needs `hf auth login` or HF_TOKEN"
        ) from error
    except errors.NotASafetensorsRepoError as error:
        raise SettingError(
            f"{name!r} holds no safetensors on the Hub: download it, and give the folder with its config.json"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise SettingError(
            f"{name!r} is not here, and the Hub may not be asked: HF_HUB_OFFLINE is set. Unset it, or give a file"
        ) from error
    except Exception as error:
        raise SettingError(
            f"{name!r} is not here, and the Hub cannot be reached ({type(error).__name__}: {error}). Give a local "
            "file, or try again when online"
        ) from error
    return [
        Weight(tensor, math.prod(info.shape))
        for file in found.files_metadata.values()
        for tensor, info in file.tensors.items()
    ]
