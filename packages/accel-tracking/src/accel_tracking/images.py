"""Pictures without an imaging library: any array to bytes, bytes to PNG.

Shape suffixes: n images, c channels, h rows, w columns.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.errors import TrackerError

if TYPE_CHECKING:
    from torch import Tensor

_COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # channels -> PNG colour type: grey, RGB, RGBA


def split_images(images: Any, dataformats: str = "NCHW") -> list[Tensor]:
    """Each picture as bytes of shape [H, W, C].

    Args:
        images: a tensor or array of bytes, or of numbers from 0 to 1 (what lies outside is clipped).
        dataformats: what its axes mean: `H` and `W`, with or without `N` and `C`, in any order.

    Raises:
        TrackerError: the axes do not fit the shape, or there are not 1, 3 or 4 channels.
    """
    import torch

    pixels = torch.as_tensor(images).detach().cpu()
    axes = dataformats.upper()
    if not {"H", "W"} <= set(axes) <= set("NCHW") or len(set(axes)) != len(axes) or len(axes) != pixels.dim():
        raise TrackerError(
            f"images of shape {tuple(pixels.shape)} do not fit dataformats={dataformats!r}: it needs one letter per "
            'axis out of N, C, H and W, for example "NCHW", "NHWC", "CHW" or "HW"'
        )
    for missing in set("NC") - set(axes):
        pixels, axes = pixels.unsqueeze(0), missing + axes
    pixels_nhwc = pixels.permute([axes.index(axis) for axis in "NHWC"])
    if pixels_nhwc.shape[-1] not in _COLOR_TYPES:
        raise TrackerError(
            f"images have {pixels_nhwc.shape[-1]} channels; allowed are 1, 3 and 4 (C in {dataformats!r})"
        )
    if pixels_nhwc.dtype == torch.bool:
        pixels_nhwc = pixels_nhwc.to(torch.uint8) * 255
    elif pixels_nhwc.is_floating_point():
        pixels_nhwc = pixels_nhwc.float().nan_to_num().clamp(0, 1).mul(255).round()
    return list(pixels_nhwc.clamp(0, 255).to(torch.uint8))


def pictures(images: Any, dataformats: str = "NCHW") -> list[Any]:
    """Pictures for a library: one tensor or array cut into arrays of bytes of shape [H, W, C].

    A list or tuple is passed on as it is: what a library takes beside arrays (its own images, files) is its matter.

    Raises:
        TrackerError: the axes do not fit the shape.
    """
    if isinstance(images, list | tuple):
        return list(images)
    return [picture_hwc.numpy() for picture_hwc in split_images(images, dataformats)]


def pillow(picture: Any) -> Any:
    """A picture as Pillow's: one that is an array of shape [H, W, C] or [H, W] is converted, others pass through."""
    if not hasattr(picture, "shape"):
        return picture
    from PIL import Image

    (picture_hwc,) = split_images(picture, "HWC" if len(picture.shape) == 3 else "HW")
    return Image.fromarray(picture_hwc.numpy().squeeze())


def encode_png(picture_hwc: Tensor) -> bytes:
    """A PNG file (ISO/IEC 15948: one IDAT chunk, no filter) of a picture of bytes with 1, 3 or 4 channels."""
    height, width, channels = picture_hwc.shape
    pixels = bytes(picture_hwc.contiguous().flatten().tolist())
    stride = width * channels
    rows = b"".join(b"\0" + pixels[row * stride : (row + 1) * stride] for row in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(rows)), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def write_atomically(path: Path, content: bytes) -> None:
    """Makes the file appear at once with all its content, with the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
