"""A process that has touched its accelerator cannot be forked: found out before, with who touched it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from accel_state.errors import LaunchError

_KINDS = ("cuda", "xpu", "npu", "mlu", "musa", "hpu")
_TOUCHING = ("bitsandbytes", "flash_attn", "apex", "xformers", "transformer_engine", "vllm", "triton")
"""Libraries that are known to initialise a device when they are imported."""


def initialised_kind() -> str | None:
    """The kind of accelerator that this process has initialised, or None."""
    import torch

    for kind in _KINDS:
        module = getattr(torch, kind, None)
        ask = getattr(module, "is_initialized", None)
        if ask is not None and ask():
            return kind
    return None


def check_can_fork(modules: Iterable[str] | None = None) -> None:
    """Raise where forked ranks would find a device that they cannot use.

    Raises:
        LaunchError: a device is initialised already; names the likely culprit and the ways out.
    """
    kind = initialised_kind()
    if kind is None:
        return
    loaded = sys.modules if modules is None else modules
    suspects = [name for name in _TOUCHING if name in loaded]
    likely = f" {' or '.join(suspects)}, imported here, may have done it." if suspects else ""
    raise LaunchError(
        f"{kind} was initialised before notebook_launcher was called, and forked ranks cannot use it then.{likely} "
        "Restart the notebook and touch the device (`.to('cuda')`, `Accelerator()`) inside the launched function only, "
        "or give start_method='spawn' with a function from a module"
    )
