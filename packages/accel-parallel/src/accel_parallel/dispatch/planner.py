"""Which device holds which part of a model.

The model is walked once, in the order in which its parts are registered, and the devices are filled one after the
other. What does not fit as a whole is split into its parts, down to the layers (modules without submodules, modules of
classes that are not split, tensors that a module with submodules holds itself). Layers that share a tensor go to one
device. The first accelerator keeps room for the largest layer that comes later, which may be stored elsewhere and
brought there to compute. What is stored on the CPU or on disk needs no such room there: files are memory-mapped.

Cost: linear in the number of modules and tensors.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from accel_state.callsite import warn_user

from .device_maps import OFFLOADED, clean_device_map
from .numbers import Dtype, as_dtype
from .sizes import MaxMemory, Memory, as_class_names, compute_module_sizes, get_max_memory, tensor_bytes

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Part:
    """A module or tensor: the tensors `first` to `end` of the walk, and what it is split into (nothing: a layer)."""

    name: str
    first: int
    end: int = 0
    parts: list[_Part] = field(default_factory=list)


class _Walk:
    """A model in order: its tensors by position, and its parts.

    Args:
        kept: classes that are not split.
        dtype, special: see `infer_auto_device_map`.

    Attributes:
        root: all of it.
        layers: the parts that are not split and have tensors, in order.
        totals: bytes of the tensors before each position; a shared tensor counts where it comes first.
        shared: position of a shared tensor -> all its positions.
        buffer_bytes: by position, 0 for parameters.
    """

    def __init__(
        self, model: nn.Module, kept: frozenset[str], dtype: Dtype | None, special: Mapping[str, Dtype] | None
    ) -> None:
        self._kept, self._dtype, self._special = kept, dtype, special
        self._firsts: dict[int, int] = {}
        self._groups: dict[int, list[int]] = {}
        self.layers: list[_Part] = []
        self.totals, self.buffer_bytes = [0], list[int]()
        self.root = self._module("", model)
        self.shared = {position: group for group in self._groups.values() for position in group}
        self.shared_positions = sorted(self.shared)

    def size(self, part: _Part) -> int:
        return self.totals[part.end] - self.totals[part.first]

    def _module(self, name: str, module: nn.Module) -> _Part:
        part = _Part(name, len(self.buffer_bytes))
        prefix = f"{name}." if name else ""
        if not module._modules or type(module).__name__ in self._kept:  # noqa: SLF001 - torch has no quicker way
            self._layer(prefix, module)
            part.end = len(self.buffer_bytes)
            if part.end > part.first:
                self.layers.append(part)
            return part
        for key, parameter in module._parameters.items():  # noqa: SLF001
            part.parts += self._own_tensor(prefix + key, parameter, False)
        for key, child in module._modules.items():  # noqa: SLF001
            if child is not None:
                part.parts.append(self._module(prefix + key, child))
        for key, buffer in module._buffers.items():  # noqa: SLF001
            part.parts += self._own_tensor(prefix + key, buffer, True)
        part.end = len(self.buffer_bytes)
        return part

    def _layer(self, prefix: str, module: nn.Module) -> None:
        """The tensors of a module that is not split."""
        for key, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is not None:
                self._tensor(prefix + key, parameter, False)
        for key, child in module._modules.items():  # noqa: SLF001
            if child is not None:
                self._layer(f"{prefix}{key}.", child)
        for key, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None:
                self._tensor(prefix + key, buffer, True)

    def _own_tensor(self, name: str, tensor: Tensor | None, is_buffer: bool) -> list[_Part]:
        """A tensor that a module with submodules holds itself, a layer of its own."""
        if tensor is None:
            return []
        part = _Part(name, len(self.buffer_bytes), len(self.buffer_bytes) + 1)
        self._tensor(name, tensor, is_buffer)
        self.layers.append(part)
        return [part]

    def _tensor(self, name: str, tensor: Tensor, is_buffer: bool) -> None:
        position = len(self.buffer_bytes)
        first = self._firsts.setdefault(id(tensor), position)
        if first == position:
            size = tensor_bytes(name, tensor, self._dtype, self._special)
        else:
            size = 0
            self._groups.setdefault(first, [first]).append(position)
        self.totals.append(self.totals[-1] + size)
        self.buffer_bytes.append(size if is_buffer else 0)


class _Plan:
    """The state of filling devices."""

    def __init__(self, walk: _Walk, memory: MaxMemory, fallback: bool, verbose: bool) -> None:
        self.walk, self.memory, self.fallback, self.verbose = walk, memory, fallback, verbose
        self.devices: list[int | str] = [device for device in memory if device != "disk"] + ["disk"]
        accelerators = [device for device in self.devices if device not in OFFLOADED]
        self.main = accelerators[0] if accelerators else None
        self.current = 0
        self.used = dict.fromkeys(self.devices, 0)
        self.map: OrderedDict[str, int | str] = OrderedDict()
        self.early: dict[int, tuple[_Part, int | str]] = {}  # layers placed before their turn, by first position
        self.early_order: list[int] = []
        self.refused: dict[int | str, int] = {}  # device that got nothing -> the room that would have been needed
        self._firsts = [layer.first for layer in walk.layers]
        self._later = self._largest_later()

    def _largest_later(self) -> list[int]:
        """For each layer the size of the largest one from it on."""
        found = [0]
        for layer in reversed(self.walk.layers):
            found.append(max(found[-1], self.walk.size(layer)))
        return found[::-1]

    # ---- what a part needs

    def early_in(self, part: _Part) -> list[tuple[_Part, int | str]]:
        return [self.early[first] for first in _between(self.early_order, part)]

    def partners(self, part: _Part) -> list[_Part]:
        """Layers after `part` that share tensors with it, and with each other, so that they go where it goes."""
        found: dict[int, _Part] = {}
        to_look_at = [part]
        while to_look_at:
            one = to_look_at.pop()
            for shared in _between(self.walk.shared_positions, one):
                for position in self.walk.shared[shared]:
                    layer = self.layer_at(position)
                    if layer.first >= part.end and layer.first not in found and layer.first not in self.early:
                        found[layer.first] = layer
                        to_look_at.append(layer)
        return [found[first] for first in sorted(found)]

    def layer_at(self, position: int) -> _Part:
        return self.walk.layers[bisect_left(self._firsts, position + 1) - 1]

    def need(self, part: _Part, partners: Sequence[_Part]) -> int:
        early = sum(self.walk.size(layer) for layer, _ in self.early_in(part))
        return self.walk.size(part) - early + sum(self.walk.size(partner) for partner in partners)

    def room(self, device: int | str, part: _Part | None) -> int | None:
        """Bytes that are left for a part; None without limit."""
        if device == "disk":
            return None
        later = 0
        if device == self.main:
            later = self._later[0 if part is None else bisect_left(self._firsts, part.end)]
        return self.memory[device] - self.used[device] - later

    # ---- placing

    def place(self, part: _Part) -> None:
        """Give `part`, and what shares tensors with it, a device: the current one, or split it, or go on."""
        if part.end == part.first:  # nothing to store: it runs beside its neighbours
            self.map[part.name] = self.devices[self.current]
            return None
        while True:
            early = self.early_in(part)
            if early and early[0][0].first == part.first and early[0][0].end == part.end:
                return None
            device = self.devices[self.current]
            partners = self.partners(part)
            need, room = self.need(part, partners), self.room(device, part)
            is_mixed = any(where != device for _, where in early)
            if not is_mixed and (room is None or need <= room):
                return self.put(part, partners, device, need)
            if part.parts:
                for inner in part.parts:
                    self.place(inner)
                return None
            self.go_on(need, room)

    def put(self, part: _Part, partners: Sequence[_Part], device: int | str, need: int) -> None:
        if self.verbose:
            print(f"{part.name or 'the model'} ({need} bytes) goes to {device}")
        for layer, _ in self.early_in(part):
            self.map.pop(layer.name, None)
        self.map[part.name] = device
        self.used[device] += need
        for partner in partners:
            self.map[partner.name] = device
            self.note_early(partner, device)

    def note_early(self, layer: _Part, device: int | str) -> None:
        self.early[layer.first] = (layer, device)
        insort(self.early_order, layer.first)

    def go_on(self, need: int, room: int | None) -> None:
        device = self.devices[self.current]
        if not self.used[device]:
            if self.fallback and self.fill_any(device):
                return
            self.refused[device] = need + (self.memory[device] - (room or 0))
        self.current += 1

    def fill_any(self, device: int | str) -> bool:
        """Put the first part that fits, in breadth-first order, on a device that would stay empty."""
        reserve = self._later[0] if device == self.main else 0
        queue = [self.walk.root]
        for part in queue:
            queue += part.parts
            is_open = not self.early_in(part) and self.is_unplaced(part)
            if part is self.walk.root or part.end == part.first or not is_open:
                continue
            shared = _between(self.walk.shared_positions, part)
            if any(self.walk.shared[position][0] < part.first for position in shared):
                continue  # goes where the first user of its tensor goes
            partners = self.partners(part)
            need = self.need(part, partners)
            if need + reserve <= self.memory[device]:
                self.put(part, partners, device, need)
                self.note_early(part, device)
                return True
        return False

    def is_unplaced(self, part: _Part) -> bool:
        return all(name not in self.map for name in _ancestors(part.name))


def _between(positions: Sequence[int], part: _Part) -> Sequence[int]:
    """Those of some sorted positions that lie in a part."""
    return positions[bisect_left(positions, part.first) : bisect_left(positions, part.end)]


def _ancestors(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Memory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> OrderedDict[str, int | str]:
    """A device map that fills accelerators first, then the CPU, then the disk; see the module's text for how.

    Args:
        model: with tensors anywhere, the meta device too.
        max_memory: device -> bytes or a size such as "10GB"; None means what is free here, see `get_max_memory`.
        no_split_module_classes: names of classes whose modules stay whole: blocks with residual connections.
        dtype: that the weights will be loaded in, if smaller than theirs.
        special_dtypes: name of a tensor -> the dtype that it will have.
        verbose: print each decision.
        clean_result: name whole modules where all their parts have one device.
        offload_buffers: whether buffers of offloaded layers are offloaded too; else a warning tells when they may not
            fit on the accelerator that computes.
        fallback_allocation: on a device that would stay empty, put the first part that fits, out of order.

    Raises:
        DeviceMapError, SettingError: max_memory that no plan can have.
    """
    walk = _Walk(model, as_class_names(no_split_module_classes), as_dtype(dtype) if dtype else None, special_dtypes)
    plan = _Plan(walk, get_max_memory(max_memory), fallback_allocation, verbose)
    plan.place(walk.root)
    _report_refused(plan)
    if not offload_buffers:
        _report_buffers(plan)
    return clean_device_map(plan.map) if clean_result else plan.map  # type: ignore[return-value] # the same object


def _report_refused(plan: _Plan) -> None:
    empty = [f"{device} (at least {size} bytes)" for device, size in plan.refused.items() if not plan.used[device]]
    if empty:
        _log.warning(
            "Nothing was put on these devices for insufficient memory: %s. Give them more in max_memory, let smaller "
            "modules be split, or try fallback_allocation=True.",
            ", ".join(empty),
        )


def _report_buffers(plan: _Plan) -> None:
    """Buffers of offloaded layers stay where the layers compute, which the plan has not counted."""
    accelerators = [device for device in plan.devices if device not in OFFLOADED and plan.memory[device] > 0]
    if not accelerators or not any(plan.walk.buffer_bytes):
        return
    stored = [part for part in plan.walk.layers if _stored(part, plan.map)]
    size = sum(sum(plan.walk.buffer_bytes[part.first : part.end]) for part in stored)
    if size > max(plan.memory[device] - plan.used[device] for device in accelerators):
        warn_user(
            f"The offloaded layers have {size} bytes of buffers, which stay on an accelerator and may not fit into "
            "what is left of any. Offload them too by offload_buffers=True.",
        )


def _stored(part: _Part, placed: Mapping[str, int | str]) -> bool:
    for name in (*_ancestors(part.name), ""):
        if name in placed:
            return placed[name] in OFFLOADED
    return False


def layer_sizes(
    model: nn.Module, no_split_module_classes: Collection[str] | str | None = None
) -> list[tuple[str, int]]:
    """The layers of a model that hold tensors, in order, with their bytes; a shared tensor counts once, first."""
    walk = _Walk(model, as_class_names(no_split_module_classes), None, None)
    return [(layer.name, walk.size(layer)) for layer in walk.layers]


def get_balanced_memory(
    model: nn.Module,
    max_memory: Memory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> MaxMemory:
    """Memory per device that spreads a model evenly over the accelerators, for `infer_auto_device_map`.

    Each gets its share and a quarter more than the larger of the average layer and the largest module that is not
    split; the last one keeps all it has.

    Args:
        low_zero: leave as much as possible of accelerator 0 free, for what generation does with the outputs.
    """
    memory = get_max_memory(max_memory)
    accelerators = [device for device, size in memory.items() if device not in OFFLOADED and size > 0]
    if not accelerators:
        return memory
    if len(accelerators) == 1:
        low_zero = False
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    count = len(accelerators) - (1 if low_zero else 0)
    layers = [name for name, module in model.named_modules() if not module._modules and name in sizes]  # noqa: SLF001
    average = int(sum(sizes[name] for name in layers) / max(len(layers), 1))
    kept = as_class_names(no_split_module_classes)
    whole = [sizes.get(name, 0) for name, module in model.named_modules() if name and type(module).__name__ in kept]
    share = sizes[""] // count + int(1.25 * max(average, *whole, 0))
    for device in accelerators[:-1]:
        memory[device] = min(memory[device], share)
    if low_zero:
        elsewhere = sum(memory[device] for device in accelerators[1:])
        memory[accelerators[0]] = min(memory[accelerators[0]], max(0, sizes[""] - elsewhere))
    return memory
