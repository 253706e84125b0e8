"""Attaching `AlignDevicesHook` to all modules of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .align import AlignDevicesHook, Device
from .device_maps import place_of
from .hooks import add_hook_to_module, hooks_of
from .module_tensors import TiedMap, named_module_tensors
from .offload_files import PrefixedDataset
from .placeholders import OffloadedWeight
from .prefetch import Prefetcher


@dataclass(frozen=True)
class Place:
    """What a device map means for a module or tensor.

    Args:
        device: where it computes; None for where its inputs are.
        is_stored: whether its weights lie elsewhere.
    """

    device: Device | None
    is_stored: bool


@dataclass(frozen=True, kw_only=True)
class Attaching:
    """What the hooks of one model have in common.

    Args:
        weights_map: where stored weights are, by their names in the model.
        offload_buffers, skip_keys, tied_params_map: of `AlignDevicesHook`.
        preload: classes whose modules bring the weights of all their submodules at once.
    """

    weights_map: Mapping[str, Tensor] | None = None
    offload_buffers: bool = False
    skip_keys: str | list[str] | None = None
    preload: Collection[str] = ()
    tied_params_map: TiedMap | None = None
    prefetcher: Prefetcher = field(default_factory=Prefetcher)
    stand_ins: MutableMapping[int, OffloadedWeight] = field(default_factory=dict)
    replaced: list[Tensor] = field(default_factory=list)  # kept, so that an id in `stand_ins` stays that of its tensor

    def hook(self, device: Device | None, **options: Any) -> AlignDevicesHook:
        """One that offloads nothing."""
        return AlignDevicesHook(
            device,
            offload_buffers=self.offload_buffers,
            skip_keys=self.skip_keys,
            tied_params_map=self.tied_params_map,
            **options,
        )

    def offloading(
        self,
        module: nn.Module,
        name: str,
        device: Device | None,
        recurse: bool = False,
        only: Collection[str] | None = None,
    ) -> None:
        """Attach the hook that brings a module's stored weights.

        Args:
            recurse: those of its submodules too.
            only: names of the module's own tensors that are meant; None for all.
        """
        prefix = f"{name}." if name else ""
        weights = None if self.weights_map is None else PrefixedDataset(self.weights_map, prefix)
        hook = self.hook(device, offload=True, weights_map=weights, place_submodules=recurse)
        hook.only, hook.prefetcher, hook.stand_ins = only, self.prefetcher, self.stand_ins
        self.replaced.extend(tensor for _, tensor in named_module_tensors(module, recurse=recurse))
        add_hook_to_module(module, hook, append=True)
        self.prefetcher.add(hook)

    def done(self) -> None:
        """All hooks are attached: let the replaced tensors go."""
        self.replaced.clear()
        self.stand_ins.clear()

    # ---- one device for a module and all inside

    def resident(self, module: nn.Module, device: Device | None, io_same_device: bool = False) -> None:
        """Weights and inputs of a block are on its device; those of its submodules, called by themselves, too."""
        hook = self.hook(device, place_submodules=True, io_same_device=io_same_device)
        add_hook_to_module(module, hook, append=True)
        for child in module.children():
            self.execution(child, device)

    def execution(self, module: nn.Module, device: Device | None) -> None:
        """Inputs of a module with weights, and of those inside, come to the device."""
        if not any(isinstance(hook, AlignDevicesHook) for hook in hooks_of(module)) and _has_state(module):
            add_hook_to_module(module, self.hook(device), append=True)
        if type(module).__name__ in self.preload:
            return
        for child in module.children():
            self.execution(child, device)

    def stored(self, module: nn.Module, name: str, device: Device | None) -> None:
        """Each module with weights brings its own for its forward."""
        is_whole = type(module).__name__ in self.preload
        if is_whole or any(True for _ in named_module_tensors(module)):
            self.offloading(module, name, device, recurse=is_whole)
        if is_whole:
            return
        for key, child in module.named_children():
            self.stored(child, f"{name}.{key}" if name else key, device)

    # ---- several devices

    def by_places(
        self, module: nn.Module, name: str, places: Mapping[str, Place], split: Collection[str], above: Place | None
    ) -> None:
        """Attach what a device map needs, whose names may be modules, tensors, and modules inside others.

        Args:
            split: names of modules in which the map names something.
            above: the place of the module around this one.
        """
        place = places.get(name, above)
        if name not in split:
            if place is not None:
                self._block(module, name, place)
            return
        prefix = f"{name}." if name else ""
        self._own_tensors(module, prefix, name, places, place)
        if name in places and not any(True for _ in hooks_of(module)):
            add_hook_to_module(module, self.hook(places[name].device), append=True)
        for key, child in module.named_children():
            self.by_places(child, f"{prefix}{key}", places, split, place)

    def _block(self, module: nn.Module, name: str, place: Place) -> None:
        if not place.is_stored:
            self.resident(module, place.device)
            return
        self.stored(module, name, place.device)
        self.execution(module, place.device)

    def _own_tensors(
        self, module: nn.Module, prefix: str, name: str, places: Mapping[str, Place], above: Place | None
    ) -> None:
        """The tensors that a module with parts on several devices holds itself: each where the map says."""
        found = {key: places.get(prefix + key, above) for key, _ in named_module_tensors(module)}
        given = {key: place for key, place in found.items() if place is not None}
        if not given:
            return
        resident = [key for key, place in given.items() if not place.is_stored]
        stored = [key for key, place in given.items() if place.is_stored]
        device = next((given[key].device for key in resident), given[next(iter(given))].device)
        if resident:
            hook = self.hook(device)
            hook.only = [key for key in resident if given[key].device == device]
            add_hook_to_module(module, hook, append=True)
        apart = [key for key in resident if given[key].device != device]
        if stored:
            self.offloading(module, name, device, only=stored)
        if apart:  # on another accelerator than where the module computes
            weights = {key: getattr(module, key).detach().to(given[key].device) for key in apart}
            hook = AlignDevicesHook(device, offload=True, weights_map=weights, offload_buffers=True)
            hook.only = apart
            add_hook_to_module(module, hook, append=True)


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


# ---- the peer's functions


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach a hook to a module and all inside that have weights, so that their inputs come to a device.

    Args:
        execution_device: the device.
        skip_keys: of `AlignDevicesHook`.
        preload_module_classes: classes inside which no hooks are attached.
        tied_params_map: of `AlignDevicesHook`.
    """
    attaching = Attaching(skip_keys=skip_keys, preload=preload_module_classes or (), tied_params_map=tied_params_map)
    attaching.execution(module, execution_device)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach a hook to each module that holds tensors itself.

    Args:
        module_name: the module's name in the model whose names `weights_map` has.
        preload_module_classes: classes whose modules bring the weights of all their submodules at once.
        execution_device, offload, weights_map, offload_buffers, skip_keys, tied_params_map: of `AlignDevicesHook`.
    """
    attaching = Attaching(
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload=preload_module_classes or (),
        tied_params_map=tied_params_map,
    )
    if offload:
        attaching.stored(module, module_name, execution_device)
    else:
        for part in _holders(module, attaching.preload):
            is_whole = type(part).__name__ in attaching.preload
            add_hook_to_module(part, attaching.hook(execution_device, place_submodules=is_whole), append=True)
    attaching.done()


def _holders(module: nn.Module, preload: Collection[str]) -> Iterator[nn.Module]:
    is_whole = type(module).__name__ in preload
    if is_whole or any(True for _ in named_module_tensors(module)):
        yield module
    if not is_whole:
        for child in module.children():
            yield from _holders(child, preload)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach the hooks that a device map needs; the outputs of the whole come back to where its inputs were.

    Args:
        execution_device: where each block computes: one device for all, or by name of a module or tensor.
        offload: whether its weights are stored elsewhere: for all, or by name.
        module_name: the module's name in the names of these mappings.
        weights_map, offload_buffers, skip_keys, tied_params_map: of `AlignDevicesHook`.
        preload_module_classes: see `attach_align_device_hook`.
    """
    attaching = Attaching(
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload=preload_module_classes or (),
        tied_params_map=tied_params_map,
    )
    if isinstance(execution_device, Mapping):
        devices: Mapping[str, Device | None] = execution_device
    else:
        names = offload if isinstance(offload, Mapping) else [module_name]
        devices = dict.fromkeys(names, execution_device)
    stored = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    places = {name: Place(device, bool(place_of(name, stored))) for name, device in devices.items()}
    attach_by_places(module, places, attaching, main_device=devices.get(module_name), module_name=module_name)


def attach_by_places(
    module: nn.Module,
    places: Mapping[str, Place],
    attaching: Attaching,
    main_device: Device | None,
    module_name: str = "",
) -> None:
    """Attach the hooks of a model.

    Args:
        places: name of a module or tensor -> where it computes, and whether it is stored elsewhere.
        main_device: where the inputs of the whole go first; None leaves them.
    """
    if set(places) == {module_name} and not places[module_name].is_stored:
        attaching.resident(module, places[module_name].device, io_same_device=True)
    else:
        root = attaching.hook(main_device, io_same_device=True)
        root.only, root.prefetcher = (), attaching.prefetcher
        add_hook_to_module(module, root, append=True)
        split = {parent for name in places if name != module_name for parent in _parents(name, module_name)}
        attaching.by_places(module, module_name, places, split, None)
    attaching.done()


def _parents(name: str, root: str) -> Iterator[str]:
    while name and name != root:
        name = name.rpartition(".")[0]
        yield name
