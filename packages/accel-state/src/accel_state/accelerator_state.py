"""`AcceleratorState`: the settings of one Accelerator, beside the facts of the process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch

from accel_state.enums import DistributedType
from accel_state.errors import NoAcceleratorError, SettingError, StateResetError
from accel_state.process_facts import ProcessFacts
from accel_state.process_state import PartialState
from accel_state.settings import UNSET, setting
from accel_state.topology import Topology


class AcceleratorState(ProcessFacts):
    """Precision and plugins of one Accelerator; each has its own, and several live side by side.

    `AcceleratorState()` is that of the most recently constructed live Accelerator. `_reset_state()` ends all; those
    that still live hold again, with their own settings, once another is made on the same ranks and device: clients
    reset the state for a new run and go on with the objects of the old one. Plugins are opaque: one that changes what
    the job is called declares `distributed_type`.

    Args:
        mixed_precision: `no`, `bf16`, `fp16` or `fp8`; from the settings by default.
        cpu: ignore every accelerator.
        dynamo_plugin: kept for the Accelerator.
        deepspeed_plugin: one, or a dict of several by name, of which the first is selected.
        fsdp_plugin: kept; its `fsdp_version` decides `is_fsdp2`.
        torch_tp_plugin: kept.
        megatron_lm_plugin: kept.
        parallelism_config: kept.
        _from_accelerator: make a new state, rather than find the current one.
        kwargs: of `torch.distributed.init_process_group`.

    Raises:
        NoAcceleratorError: there is no live Accelerator.
        SettingError: settings were given that differ from those of the current one.
        StateResetError: on reading an attribute after `_reset_state()`, until another Accelerator is made.
    """

    _made: ClassVar[list[weakref.ref[AcceleratorState]]] = []  # in order; dead ones are dropped when they are met
    _ended: ClassVar[list[tuple[weakref.ref[AcceleratorState], dict[str, Any]]]] = []  # by a reset, and what they held

    device: torch.device
    num_processes: int
    process_index: int
    local_process_index: int
    topology: Topology
    distributed_type: DistributedType
    backend: str | None
    debug: bool
    fork_launched: bool
    dynamo_plugin: Any
    deepspeed_plugins: dict[str, Any] | None
    fsdp_plugin: Any
    torch_tp_plugin: Any
    megatron_lm_plugin: Any
    parallelism_config: Any
    device_mesh: Any

    def __new__(cls, *_args: Any, _from_accelerator: bool = False, **_kwargs: Any) -> AcceleratorState:
        if _from_accelerator:
            return super().__new__(cls)
        current = cls._live()
        if current is None:
            raise NoAcceleratorError(
                "AcceleratorState() is that of the current Accelerator, and there is none: make one first, "
                "`accelerator = Accelerator()`, and keep it. For ranks and devices alone use PartialState()"
            )
        return current

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        if vars(self):
            self._check_same(
                mixed_precision,
                cpu,
                dynamo_plugin=dynamo_plugin,
                deepspeed_plugin=deepspeed_plugin,
                fsdp_plugin=fsdp_plugin,
                torch_tp_plugin=torch_tp_plugin,
                megatron_lm_plugin=megatron_lm_plugin,
                parallelism_config=parallelism_config,
            )
            return
        process = PartialState(cpu, **kwargs)
        self._revive(process.topology, process.device)
        vars(self).update(process.__dict__)  # plain values: hot paths read them
        self._mixed_precision = str(setting("mixed_precision", UNSET if mixed_precision is None else mixed_precision))
        self.dynamo_plugin = dynamo_plugin
        self.deepspeed_plugins = _by_name(deepspeed_plugin)
        self._deepspeed_name = next(iter(self.deepspeed_plugins), None) if self.deepspeed_plugins else None
        self.fsdp_plugin = fsdp_plugin
        self.torch_tp_plugin = torch_tp_plugin
        self.megatron_lm_plugin = megatron_lm_plugin
        self.parallelism_config = parallelism_config
        self.device_mesh = None
        for plugin in (self.deepspeed_plugin, fsdp_plugin, megatron_lm_plugin):
            self.distributed_type = getattr(plugin, "distributed_type", self.distributed_type)
        AcceleratorState._made.append(weakref.ref(self))

    @classmethod
    def _live(cls) -> AcceleratorState | None:
        """The one made last of those that live and were not reset."""
        made = AcceleratorState._made
        while made:
            state = made[-1]()
            if state is not None and vars(state):
                return state
            made.pop()
        return None

    @staticmethod
    def _revive(topology: Topology, device: torch.device) -> None:
        """Let the states that a reset ended, and that are of these ranks and this device, hold again."""
        for reference, values in AcceleratorState._ended:
            state = reference()
            if state is not None and (values["topology"], values["device"]) == (topology, device):
                vars(state).update(values)
                AcceleratorState._made.append(reference)
        AcceleratorState._ended.clear()

    def _check_same(self, mixed_precision: str | None, cpu: bool, **given: Any) -> None:
        if mixed_precision is not None and mixed_precision != self.mixed_precision:
            raise SettingError(
                f"the current Accelerator has mixed_precision={self.mixed_precision!r}, which mixed_precision="
                f"{mixed_precision!r} cannot change. Pass it to a new Accelerator: several may live side by side"
            )
        if cpu and self.device.type != "cpu":
            raise SettingError(f"the current Accelerator runs on {self.device}, which cpu=True cannot change")
        for name, value in given.items():
            mine = self.deepspeed_plugins if isinstance(value, dict) else getattr(self, name)
            if value is not None and value is not mine and value != mine:
                raise SettingError(
                    f"the current Accelerator has {name}={mine!r:.200}, which {name}={value!r:.200} cannot change. "
                    "Pass it to a new Accelerator: several may live side by side"
                )

    def __getattr__(self, name: str) -> Any:  # only for what is not there
        if not vars(self) and not name.startswith("__"):
            raise StateResetError(
                f"`AcceleratorState` object has no attribute `{name}`: the state was reset "
                "(`AcceleratorState._reset_state()`) since this handle was made. Make a new `Accelerator`"
            )
        raise AttributeError(f"'AcceleratorState' object has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (dict(vars(self)),)

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratorState:
        return self

    # ---- settings

    @property
    def initialized(self) -> bool:
        """Whether this state holds (it was not reset)."""
        return bool(vars(self))

    @property
    def mixed_precision(self) -> str:
        """`no`, `bf16`, `fp16` or `fp8`."""
        return self._mixed_precision

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by FSDP2."""
        return self.distributed_type == DistributedType.FSDP and getattr(self.fsdp_plugin, "fsdp_version", 1) == 2

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected DeepSpeed plugin, or None."""
        return None if not self.deepspeed_plugins else self.deepspeed_plugins[self._deepspeed_name or ""]

    def get_deepspeed_plugin(self, name: str) -> Any:
        """The DeepSpeed plugin of a name.

        Raises:
            KeyError: there is none of that name.
        """
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            raise KeyError(f"there is no DeepSpeed plugin {name!r}; there are {sorted(plugins)}")
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Make the DeepSpeed plugin of a name the selected one; calls its `select`.

        Raises:
            KeyError: there is none of that name.
        """
        selected = self.get_deepspeed_plugin(name or "")
        for key, plugin in (self.deepspeed_plugins or {}).items():
            if key != name and hasattr(plugin, "_unselect"):
                plugin._unselect()  # noqa: SLF001  (the peer's protocol between state and plugin)
        self._deepspeed_name = name
        selected.select(_from_accelerator_state=True)

    # ---- the process: as PartialState

    def wait_for_everyone(self) -> None:
        """As `PartialState.wait_for_everyone`."""
        PartialState().wait_for_everyone()

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """As `PartialState.split_between_processes`."""
        return PartialState().split_between_processes(inputs, apply_padding)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """As `PartialState.main_process_first`."""
        with PartialState().main_process_first():
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """As `PartialState.local_main_process_first`."""
        with PartialState().local_main_process_first():
            yield

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine; works after the process group has ended, too."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def destroy_process_group(self, group: Any = None) -> None:
        """As `PartialState.destroy_process_group`."""
        PartialState().destroy_process_group(group)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """End every state, for tests, notebooks and the next run; handles raise until another Accelerator is made."""
        for reference in AcceleratorState._made:
            state = reference()
            if state is not None:
                AcceleratorState._ended.append((reference, dict(vars(state))))
                vars(state).clear()
        AcceleratorState._made.clear()
        if reset_partial_state:
            PartialState._reset_state()  # noqa: SLF001  (named by the peer; clients call it)

    def __repr__(self) -> str:
        return f"{PartialState()!r}\nMixed precision type: {self.mixed_precision}\n"


def is_initialized() -> bool:
    """Whether an Accelerator lives."""
    return AcceleratorState._live() is not None  # noqa: SLF001


def _by_name(deepspeed_plugin: Any) -> dict[str, Any] | None:
    if deepspeed_plugin is None or isinstance(deepspeed_plugin, dict):
        return deepspeed_plugin
    return {"default": deepspeed_plugin}


def _restored(values: dict[str, Any]) -> AcceleratorState:
    """A state from another process, without touching the current one."""
    state = object.__new__(AcceleratorState)
    vars(state).update(values)
    return state
