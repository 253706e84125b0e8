"""Whose line a warning and a message name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from accel_state import warn_user
from accel_state.callsite import call_chain, call_site


def in_module(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as if it were defined in another module."""
    return type(function)(function.__code__, {**function.__globals__, "__name__": name}, closure=function.__closure__)


def inner() -> None:
    warn_user("has no effect", RuntimeWarning)


def calling(function: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        function()

    return call


def line_here() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_warning_names_the_users_line_through_any_number_of_our_frames() -> None:
    ours = in_module("accel_data.metrics", inner)
    through_torch = in_module("torch.nn.modules.module", calling(ours))

    def steps() -> Any:
        in_module("accel_parallel.sync", calling(through_torch))()
        yield

    block = contextmanager(in_module("accel.accelerator", steps))
    with pytest.warns(RuntimeWarning, match="has no effect") as caught, block():
        line = line_here() - 1
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, line)]


def test_filters_by_module_and_the_once_per_line_of_python_hold() -> None:
    ours = in_module("accel", inner)
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        for _ in range(3):
            ours()
        ours()
    assert len(caught) == 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("ignore", module=__name__.replace(".", r"\.") + "$")
        ours()
    assert not caught


def test_where_all_frames_are_ours_the_nearest_is_named() -> None:
    sites: list[str] = []
    in_module("accel_state.loggers", lambda: sites.append(call_site()))()
    assert sites == [f"{__file__}:{line_here() - 1}"]
    assert call_chain().startswith(f"{__file__}:{line_here()}, from ")


def test_hooks_that_torch_calls_are_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    layer = torch.nn.Linear(1, 1)
    sites: list[str] = []
    layer.register_forward_hook(lambda *_: sites.append(call_site()))
    layer(torch.ones(1))
    assert sites[0].startswith(f"{__file__}:")
