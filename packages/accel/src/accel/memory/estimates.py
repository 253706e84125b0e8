"""From the sizes of weights to bytes on a rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from accel.memory.weights import Weight
from accel_state import convert_bytes
from accel_state.errors import SettingError

_BITS: Final = {"float32": 32, "float16": 16, "int8": 8, "int4": 4}


class Axes(NamedTuple):
    """The axes of a mesh that make a rank's share of a model smaller, as in `ParallelismConfig`."""

    dp_shard_size: int = 1
    cp_size: int = 1
    sp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1

    @property
    def shards(self) -> int:
        """Into how many pieces a layer is cut that is made whole again to compute."""
        return self.dp_shard_size * self.cp_size * self.sp_size

    @property
    def stored(self) -> int:
        """Into how many pieces the model is cut where it is stored: FSDP shards over dp_shard, cp and sp."""
        return self.shards * self.tp_size * self.pp_size


WHOLE: Final = Axes()
"""One rank that holds all."""


class Estimate(NamedTuple):
    """Bytes in one dtype, all of a rank's share.

    Attributes:
        dtype: of everything counted here.
        largest_layer: of the weights of one module, which has to be whole to compute.
        weights: what inference needs beside activations.
        gradients: None for dtypes that are not trained in.
        optimizer: AdamW's two moments; None likewise.
        training: weights, gradients, moments, and where weights are sharded one layer whole; without activations.
    """

    dtype: str
    largest_layer: int
    weights: int
    gradients: int | None
    optimizer: int | None
    training: int | None


def parse_axes(text: str | None) -> Axes:
    """The axes that `dp_shard_size=8,tp_size=2` names; sizes that replicate change nothing and are not known here.

    Raises:
        SettingError: an unknown axis, or a size below 1.
    """
    sizes: dict[str, int] = {}
    for part in (text or "").split(","):
        name, equals, number = part.strip().partition("=")
        if not part.strip():
            continue
        if name not in Axes._fields or not equals or not number.isdigit() or int(number) < 1:
            raise SettingError(
                f"--parallelism {text}: {part.strip()!r} is not allowed; give {', '.join(Axes._fields)} with a number "
                "of at least 1, as in dp_shard_size=8,tp_size=2"
            )
        sizes[name] = int(number)
    return Axes(**sizes)


def estimate(weights: Sequence[Weight], dtype: str, axes: Axes = WHOLE) -> Estimate:
    """What a rank needs in one dtype.

    Args:
        weights: of the whole model.
        dtype: "float32", "float16" (bfloat16 is the same), "int8" or "int4".
        axes: of the mesh.
    """
    layers: defaultdict[str, int] = defaultdict(int)
    for weight in weights:
        layers[weight.name.rpartition(".")[0]] += weight.num_items
    bits = _BITS[dtype]
    largest = max(layers.values(), default=0) * bits // 8 // axes.tp_size
    held = sum(weight.num_items for weight in weights) * bits // 8 // axes.stored
    if bits < 16:
        return Estimate(dtype, largest, held, None, None, None)
    trained = sum(weight.num_items for weight in weights if weight.is_trained) * bits // 8 // axes.stored
    gathered = largest if axes.shards > 1 else 0
    return Estimate(dtype, largest, held, trained, 2 * trained, held + 3 * trained + gathered)


def table(name: str, weights: Sequence[Weight], rows: Sequence[Estimate], axes: Axes) -> str:
    """For people."""
    num_items = sum(weight.num_items for weight in weights)
    ranks = (
        ""
        if axes.stored == 1
        else ", one rank's share of " + " ".join(f"{axis}={size}" for axis, size in axes._asdict().items() if size > 1)
    )
    heads = ("dtype", "largest layer", "weights", "gradients", "AdamW", "training")
    lines = [heads, *((row.dtype, *(_shown(size) for size in row[1:])) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    body = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    notes = "Without activations. With mixed precision the weights stay float32: read that row."
    return "\n".join([f"{name}: {num_items:,} weights{ranks}", *body, notes])


def _shown(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else str(convert_bytes(size_bytes))
