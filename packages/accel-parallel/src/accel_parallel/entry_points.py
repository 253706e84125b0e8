"""Methods other than forward, run through whatever parallel wrapper a model has."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel_state.errors import PlanError

from .sync import pause_of
from .unwrap import inner_model, inside_compiled


def route_method(model: nn.Module, name: str) -> None:
    """Make `model.<name>` run the method of that name of the model inside, through the parallel wrapper.

    Afterwards gradients of what it returns are reduced over the ranks as those of forward are, sharded parameters are
    gathered for it, and `no_sync` and accumulation hold for it. On a model without a wrapper there is nothing to do.

    Args:
        model: prepared; under `torch.compile` the method itself runs uncompiled.
        name: of the method.

    Raises:
        PlanError: the model inside has no such method.

    Cost: what a forward costs. Every rank has to call the method, as it has to call forward.
    """
    inner = inner_model(model)
    if not callable(getattr(type(inner), name, vars(inner).get(name))):
        raise PlanError(
            f"{type(inner).__name__} has no method {name!r} that could run through its parallel wrapper: name one of "
            "its own methods."
        )
    wrapper = inside_compiled(model)
    if pause_of(wrapper) is None and not isinstance(wrapper, DataParallel):
        return
    present = vars(wrapper).get(name)
    if isinstance(present, EntryPoint) or isinstance(getattr(present, "__wrapped__", None), EntryPoint):
        return
    if hasattr(present, "bare_view"):  # accel-precision's, met by shape, which goes around the entry point anew
        present = present.__wrapped__
    vars(wrapper)[name] = EntryPoint(wrapper, name, present)


class EntryPoint:
    """A method of a model, called as if it were its forward.

    The wrapper is called as ever, with its hooks, its buffers' broadcast and its preparation of backward; where it
    comes to the model's forward, the method runs instead. Calls of forward inside the method reach the real one.

    Args:
        wrapper: what is called, held weakly; pickles and deep copies bind to the copy.
        name: of the method.
        behind: what to run where the wrapper is the model itself and this object took the method's place; None means
            the class's method.
    """

    __slots__ = ("_behind", "_name", "_wrapper")

    def __init__(self, wrapper: nn.Module, name: str, behind: Callable[..., Any] | None = None) -> None:
        self._wrapper, self._name, self._behind = weakref.ref(wrapper), name, behind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrapper = self._alive()
        attributes, method = vars(_called_by(wrapper)), self.__wrapped__
        before = {"forward": attributes["forward"]} if "forward" in attributes else {}

        def restore() -> None:
            attributes.pop("forward", None)
            attributes.update(before)

        def instead(*args: Any, **kwargs: Any) -> Any:
            restore()
            return method(*args, **kwargs)

        attributes["forward"] = instead
        try:
            return wrapper(*args, **kwargs)
        finally:
            restore()

    @property
    def __wrapped__(self) -> Any:
        """The method that runs, which `inspect.signature` reads."""
        wrapper = self._alive()
        inner = _called_by(wrapper)
        if inner is not wrapper:
            return getattr(inner, self._name)
        return self._behind or MethodType(getattr(type(inner), self._name), inner)

    @property
    def __name__(self) -> str:
        return self._name

    @property
    def __self__(self) -> Any:
        return self._wrapper()

    def _alive(self) -> nn.Module:
        wrapper = self._wrapper()
        if wrapper is None:
            raise ReferenceError(
                f"{self._name!r} was taken from a prepared model that is gone: keep the model while you use its "
                "methods."
            )
        return wrapper

    def __getstate__(self) -> tuple[nn.Module | None, str, Callable[..., Any] | None]:
        return (self._wrapper(), self._name, self._behind)

    def __setstate__(self, state: tuple[nn.Module, str, Callable[..., Any] | None]) -> None:
        self._wrapper, self._name, self._behind = weakref.ref(state[0]), state[1], state[2]


def _called_by(wrapper: nn.Module) -> nn.Module:
    """The module whose forward the wrapper calls; under `fully_shard` that is itself."""
    inner = wrapper.module if isinstance(wrapper, DistributedDataParallel | DataParallel) else wrapper
    assert isinstance(inner, nn.Module)
    return inner


def explain_hidden(wrapper: str, inner: nn.Module, name: str) -> str:
    """The message for an attribute that a wrapper does not have, with how to reach that of the model inside."""
    message = f"{wrapper!r} object has no attribute {name!r}"
    places = ("_parameters", "_buffers", "_modules")
    has_it = hasattr(type(inner), name) or name in vars(inner) or any(name in vars(inner)[place] for place in places)
    if not has_it:
        return message
    return (
        f"{message}, but the {type(inner).__name__} inside has. To call a method on all ranks, its gradients averaged "
        f"over them: accelerator.register_forward_method(model, {name!r}) once, then model.{name}(...). For anything "
        f"else: accelerator.unwrap_model(model).{name}"
    )
