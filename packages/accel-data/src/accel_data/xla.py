"""Loaders on XLA devices, whose batches torch_xla copies ahead in threads of its own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from accel_state.errors import MissingExtraError

from .loader import DataLoaderShard


class MpDeviceLoaderWrapper:
    """A prepared loader whose batches torch_xla's `MpDeviceLoader` puts on the device; all else is the loader's.

    torch_xla reads ahead, so a position counts what it has read, not what was received.

    Args:
        dataloader: prepared.
        device: of XLA.

    Raises:
        MissingExtraError: torch_xla is not installed.
    """

    def __init__(self, dataloader: DataLoaderShard, device: torch.device) -> None:
        try:
            parallel_loader = importlib.import_module("torch_xla.distributed.parallel_loader")
        except ImportError as error:
            raise MissingExtraError(
                "MpDeviceLoaderWrapper needs torch_xla, which is not installed: pip install torch_xla"
            ) from error
        self.dataloader = dataloader
        self.device = device
        self._on_device = parallel_loader.MpDeviceLoader(dataloader, device)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._on_device)

    def __len__(self) -> int:
        return len(self.dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":  # not set yet: a copy or a pickle under way
            raise AttributeError(name)
        return getattr(self.dataloader, name)
