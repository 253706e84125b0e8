"""What a torch DataLoader was told, so that another one can be told the same."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def loader_settings(loader: DataLoader) -> dict[str, Any]:
    """Keyword arguments that make a loader like `loader`, without data set, order and batching."""
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
        "persistent_workers": loader.persistent_workers,
        "pin_memory_device": loader.pin_memory_device,
        "in_order": loader.in_order,
    }
    if loader.num_workers > 0:
        settings["prefetch_factor"] = loader.prefetch_factor
        settings["multiprocessing_context"] = loader.multiprocessing_context
    return settings
