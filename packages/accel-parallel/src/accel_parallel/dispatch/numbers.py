"""Sizes of dtypes, and sizes as people write them."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any

import torch

from accel_state.errors import SettingError


class CustomDtype(enum.Enum):
    """Formats of weights that torch has no dtype for, in plans for models that are quantised later."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


Dtype = torch.dtype | str | CustomDtype

_CUSTOM_BYTES: Mapping[CustomDtype, float] = {CustomDtype.FP8: 1, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", re.IGNORECASE)


def as_dtype(dtype: Dtype) -> torch.dtype | CustomDtype:
    """A dtype by itself or by its name, as in "float16".

    Raises:
        SettingError: no dtype is called so.
    """
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if isinstance(found, torch.dtype):
        return found
    raise SettingError(f"dtype={dtype!r} is none of torch's: give torch.float16, or its name")


def dtype_byte_size(dtype: Dtype) -> float:
    """Bytes per number: 4 for float32, 0.5 for `CustomDtype.INT4`.

    `torch.bool` gives 1/8, the information in it; what a tensor of it takes in memory is `element_bytes`.
    """
    if dtype is torch.bool:
        return 1 / 8
    return element_bytes(dtype)


def element_bytes(dtype: Dtype) -> float:
    """Bytes that a number of this dtype takes in a tensor."""
    dtype = as_dtype(dtype)
    return _CUSTOM_BYTES[dtype] if isinstance(dtype, CustomDtype) else dtype.itemsize


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of a size such as "5GB" (powers of 1000), "5GiB" (powers of 1024) or "8Gb" (bits); an int is bytes already.

    Raises:
        SettingError: not such a size.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    fit = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if fit is None:
        raise SettingError(
            f'size={size!r} is no size: give bytes as an int, or a number and a unit, as in "5GB", "5GiB"'
        )
    number, unit = fit.groups()
    in_bits = unit.endswith("b") and "i" not in unit.lower()
    found = float(number) * _UNITS[unit.upper()]
    return int(found / 8 if in_bits else found)


def any_to_device(device: Any) -> torch.device:
    """The torch device of an entry in a device map: an accelerator's number, a name or a device; "disk" is the CPU."""
    if device == "disk":
        return torch.device("cpu")
    return torch.device(device)
