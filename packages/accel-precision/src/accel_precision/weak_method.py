"""A method that does not keep its model alive."""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any

from torch import nn


class WeakMethod:
    """A method of a model's class, bound to the model without keeping it alive.

    Args:
        model: held weakly; pickles and deep copies bind to the copy.
        name: the method's name.
    """

    __slots__ = ("_model", "_name")

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = weakref.ref(model), name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if model is None:
            raise self._gone()
        return getattr(type(model), self._name)(model, *args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """The ordinary bound method, which `inspect.signature` reads."""
        model = self._model()
        if model is None:
            raise self._gone()
        return MethodType(getattr(type(model), self._name), model)

    @property
    def __name__(self) -> str:
        return self._name

    @property
    def __self__(self) -> Any:
        return self._model()

    def _gone(self) -> ReferenceError:
        return ReferenceError(
            f"{self._name!r} was taken from a prepared model that is gone: keep the model while you use its methods."
        )

    def __getstate__(self) -> tuple[nn.Module | None, str]:
        return (self._model(), self._name)

    def __setstate__(self, state: tuple[nn.Module, str]) -> None:
        # A copier sets this state before the model has its own; a reference to the empty model is all that is needed.
        self._model, self._name = weakref.ref(state[0]), state[1]
