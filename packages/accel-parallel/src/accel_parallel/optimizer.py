"""An optimizer that steps when the accumulation window ends, through a loss scaler where there is one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel_state import GradientState
from accel_state.errors import PrecisionError


class Scaler(Protocol):
    """The four methods of a loss scaler that are needed here; torch's GradScaler has them."""

    def scale(self, outputs: Any, /) -> Any: ...
    def unscale_(self, optimizer: Optimizer, /) -> None: ...
    def step(self, optimizer: Optimizer, /) -> Any: ...
    def update(self) -> None: ...


class _StepRecord:
    """Notes whether the inner optimizer's step ran, and the overflow flag that a fused step looks at itself.

    A step hook of the inner optimizer, held by it and by the wrapper, so that these two need not refer to each other.
    """

    __slots__ = ("found_inf", "ran")

    def __init__(self) -> None:
        self.ran, self.found_inf = True, None

    def __call__(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.ran, self.found_inf = True, getattr(optimizer, "found_inf", None)

    def skipped(self) -> bool:
        found_inf: Tensor | None = self.found_inf
        return not self.ran or (found_inf is not None and bool(found_inf))


class AcceleratedOptimizer(Optimizer):
    """A torch optimizer whose `step` and `zero_grad` do nothing inside an accumulation window.

    Everything else is the inner optimizer's: `param_groups`, `state`, hooks, and any attribute that is not found here.

    Args:
        optimizer: the one to wrap.
        device_placement: move state that exists already to the devices of the parameters.
        scaler: anything with `scale`, `unscale_`, `step` and `update`; None steps directly.
        gradient_state: tells whether this is an update; the current one if None.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        scaler: Scaler | None = None,
        *,
        gradient_state: GradientState | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self.gradient_state = GradientState() if gradient_state is None else gradient_state
        self._attach()
        if device_placement:
            place_state(optimizer)

    def _attach(self) -> None:
        self._is_unscaled = False
        self._record = None if self.scaler is None else _StepRecord()
        if self._record is not None:
            self.optimizer.register_step_post_hook(self._record)
        self._zero_grad_takes_set_to_none = "set_to_none" in inspect.signature(self.optimizer.zero_grad).parameters

    # ---- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters if the window ends here.

        Args:
            closure: evaluated by the inner optimizer, whose return value is returned.

        Raises:
            PrecisionError: a closure together with a loss scaler, which could not unscale between its evaluations.
        """
        if not self.gradient_state.sync_gradients:
            return None
        if self.scaler is None:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        return self._scaled_step(closure)

    def _scaled_step(self, closure: Callable[[], Any] | None) -> Any:
        if closure is not None:
            raise PrecisionError(
                "optimizer.step(closure) cannot be combined with a loss scaler (mixed_precision='fp16'): call backward "
                "first and step() without a closure, or use 'bf16' or 'no'."
            )
        assert self.scaler is not None and self._record is not None
        self._record.ran, self._record.found_inf = False, None
        result = self.scaler.step(self.optimizer)
        self.scaler.update()
        self._is_unscaled = False
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients if the window ends here.

        Args:
            set_to_none: passed on if the inner optimizer knows it; None keeps that one's default.
        """
        if not self.gradient_state.sync_gradients:
            return
        if self._is_unscaled:  # gradients that are thrown away unused: the scaler has to begin anew too
            assert self.scaler is not None
            self.scaler.update()
            self._is_unscaled = False
        if set_to_none is None:
            self.optimizer.zero_grad()
        elif self._zero_grad_takes_set_to_none:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        else:
            raise TypeError(f"{type(self.optimizer).__name__}.zero_grad does not take set_to_none={set_to_none}.")

    def unscale_gradients(self) -> None:
        """Divide gradients by the loss scale, at most once per update; nothing without a scaler or inside a window."""
        if self.scaler is None or self._is_unscaled or not self.gradient_state.sync_gradients:
            return
        self.scaler.unscale_(self.optimizer)
        self._is_unscaled = True

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because gradients overflowed. Waits for the device if it is fused."""
        return self._record is not None and self._record.skipped()

    # ---- the inner optimizer's own

    @property
    def state(self) -> Any:
        """Per-parameter state of the inner optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the inner optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Default options of the inner optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, in torch's format."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; no step is run."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch a schedule-free optimizer to its training weights; nothing for others."""
        self._switch("train")

    def eval(self) -> None:
        """Switch a schedule-free optimizer to its evaluation weights; nothing for others."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Hook of the inner optimizer; see torch."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Hook of the inner optimizer; see torch."""
        return self.optimizer.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Hook of the inner optimizer; see torch."""
        return self.optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Hook of the inner optimizer; see torch."""
        return self.optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Hook of the inner optimizer; see torch."""
        return self.optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Hook of the inner optimizer; see torch."""
        return self.optimizer.register_load_state_dict_post_hook(hook, prepend)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("optimizer")
        if inner is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optimizer", "scaler", "device_placement", "gradient_state")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def patch_optimizer_step(accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, which also tells the wrapper that its step ran: for steps that replace the inner optimizer's own.

    Args:
        accelerated_optimizer: whose `step_was_skipped` is meant.
        method: what steps.
    """

    @functools.wraps(method)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        record = accelerated_optimizer._record  # noqa: SLF001 - of this module
        if record is not None:
            record(accelerated_optimizer.optimizer, args, kwargs)
        return result

    return stepped


def move_to_device(state: Any, device: torch.device) -> Any:
    """A nesting of lists, tuples and mappings with every tensor on `device`; the containers are new."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, list | tuple):
        return type(state)(move_to_device(item, device) for item in state)
    if isinstance(state, Mapping):
        return type(state)({key: move_to_device(item, device) for key, item in state.items()})  # type: ignore[call-arg]
    return state


def place_state(optimizer: Optimizer) -> None:
    """Bring state that was made before the model moved to where its parameters are now.

    Step counts (scalars) stay where the optimizer keeps them, which is the CPU unless it is capturable or fused.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.device != parameter.device:
                state[key] = value.to(parameter.device)
