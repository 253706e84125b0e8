"""The mailbox between loaders and accumulation."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest

from accel_state import GradientState

pytestmark = pytest.mark.usefixtures("fresh_state")


class Plugin:
    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def to_kwargs(self) -> dict[str, Any]:
        return self.kwargs


class Loader:
    end_of_dataloader = False
    remainder = 3


def test_defaults() -> None:
    state = GradientState()
    assert (state.sync_gradients, state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (
        True,
        1,
        False,
        True,
    )
    assert (state.end_of_dataloader, state.remainder, state.in_dataloader) == (False, -1, False)
    assert state.active_dataloader is None and state.dataloader_references == [None]


def test_a_plugin_makes_a_new_one_and_without_it_the_last_live_one_is_meant() -> None:
    first = GradientState(Plugin(num_steps=2))
    second = GradientState(Plugin(num_steps=3, adjust_scheduler=True))
    assert (first.num_steps, second.num_steps, second.adjust_scheduler) == (2, 3, True)
    assert GradientState() is second
    del second
    gc.collect()
    assert GradientState() is first  # the dead one is forgotten
    del first
    gc.collect()
    assert GradientState().num_steps == 1


def test_loaders_nest_and_the_innermost_counts() -> None:
    state, outer, inner = GradientState(), Loader(), Loader()
    inner.end_of_dataloader, inner.remainder = True, 1
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    assert state.active_dataloader is inner and (state.end_of_dataloader, state.remainder) == (True, 1)
    assert state.dataloader_references == [None, outer, inner]
    state._remove_dataloader(inner)
    assert state.active_dataloader is outer and (state.end_of_dataloader, state.remainder) == (False, 3)
    state._remove_dataloader(outer)
    assert not state.in_dataloader


def test_loaders_are_held_weakly() -> None:
    state, loader = GradientState(), Loader()
    state._add_dataloader(loader)
    del loader
    gc.collect()
    assert state.active_dataloader is None and state.end_of_dataloader is False


def test_a_copy_reports_to_the_same_state_and_a_pickled_one_stands_alone() -> None:
    state = GradientState(Plugin(num_steps=4))
    assert copy.deepcopy([state])[0] is state
    state._set_sync_gradients(False)
    twin = pickle.loads(pickle.dumps(state))
    assert twin is not state and twin.num_steps == 4 and twin.sync_gradients is False
    assert twin.active_dataloader is None and GradientState() is state


def test_reset_forgets_the_current_one() -> None:
    state = GradientState(Plugin(num_steps=4))
    GradientState._reset_state()
    assert GradientState() is not state


def test_the_latest_loader_is_the_active_one_or_one_that_was_left_since() -> None:
    state, loader, other = GradientState(), Loader(), Loader()
    assert state.latest_dataloader is None
    state._add_dataloader(loader)
    assert state.latest_dataloader is loader
    state._remove_dataloader(loader)
    assert state.latest_dataloader is None  # read to its end
    state._leave_dataloader(loader)
    assert state.latest_dataloader is loader
    assert state.active_dataloader is None  # accumulation does not ask it any more
    state._add_dataloader(other)
    state._remove_dataloader(other)
    assert state.latest_dataloader is None
