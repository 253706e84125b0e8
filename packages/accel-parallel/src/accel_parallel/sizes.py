"""Sizes for people."""

from __future__ import annotations

from torch import nn


def parameter_bytes(model: nn.Module, *, trained_only: bool = False) -> int:
    """Bytes of the model's parameters, or of those that get gradients."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not trained_only)


def format_bytes(size_bytes: float) -> str:
    """ "1.5 MB" and the like, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"
