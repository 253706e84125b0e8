"""PartialState and AcceleratorState in one process."""

from __future__ import annotations

import copy
import gc
import pickle
from types import SimpleNamespace

import pytest
import torch

from accel_state import (
    AcceleratorState,
    DistributedType,
    PartialState,
    gather,
    is_initialized,
    set_numa_affinity,
)
from accel_state.errors import AccelError, NoAcceleratorError, ProcessGroupError, SettingError, StateResetError

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_one_process_without_a_launcher() -> None:
    state = PartialState(cpu=True)
    assert (state.process_index, state.num_processes, state.local_process_index) == (0, 1, 0)
    assert state.device == torch.device("cpu") and state.backend is None
    assert state.distributed_type == DistributedType.NO and not state.use_distributed
    assert state.is_main_process and state.is_local_main_process and state.is_last_process
    state.wait_for_everyone()
    with state.main_process_first(), state.local_main_process_first():
        pass
    assert "Num processes: 1" in repr(state)


def test_all_handles_share_one_state() -> None:
    first, second = PartialState(cpu=True), PartialState()
    assert first.__dict__ is second.__dict__
    assert pickle.loads(pickle.dumps(first)).__dict__ is first.__dict__
    assert copy.deepcopy(first).__dict__ is first.__dict__


def test_a_handle_after_a_reset_says_what_and_why() -> None:
    state = PartialState(cpu=True)
    PartialState._reset_state()
    with pytest.raises(AttributeError, match=r"`device`.*the state was reset") as caught:
        _ = state.device
    assert isinstance(caught.value, StateResetError) and isinstance(caught.value, AccelError)
    assert not state.initialized
    PartialState(cpu=True)
    assert state.device.type == "cpu"


def test_an_unknown_attribute_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'colour'") as caught:
        _ = PartialState(cpu=True).colour
    assert not isinstance(caught.value, StateResetError)


def test_decorators_run_where_they_should() -> None:
    state = PartialState(cpu=True)

    @state.on_main_process
    def on_main(x: int) -> int:
        """Doc."""
        return x

    @state.on_process(process_index=1)
    def on_one(x: int) -> int:
        return x

    assert on_main(3) == 3 and on_one(3) is None
    assert on_main.__name__ == "on_main" and on_main.__doc__ == "Doc."
    assert state.on_last_process(lambda: 1)() == 1
    assert state.on_local_main_process(lambda: 1)() == 1
    assert state.on_local_process(lambda: 1, local_process_index=2)() is None
    assert state.on_main_process()(lambda: 1)() == 1


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    PartialState(cpu=True).print("a", "b", sep="-")
    assert capsys.readouterr().out == "a-b\n"


def test_settings_choose_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TORCH_DEVICE", "cpu")
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    state = PartialState()
    assert state.device == torch.device("cpu") and state.debug is True


def test_a_partial_launcher_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        PartialState(cpu=True)


# ---------------------------------------------------------------- AcceleratorState


def make(**kwargs: object) -> AcceleratorState:
    return AcceleratorState(cpu=True, _from_accelerator=True, **kwargs)  # type: ignore[arg-type]


def test_two_states_side_by_side() -> None:
    first, second = make(), make(mixed_precision="bf16")
    assert (first.mixed_precision, second.mixed_precision) == ("no", "bf16")
    assert AcceleratorState() is second
    assert first.device == second.device == torch.device("cpu")
    del second
    gc.collect()
    assert AcceleratorState() is first and first.mixed_precision == "no"
    del first
    gc.collect()
    assert not is_initialized()


def test_without_an_accelerator_there_is_no_current_state() -> None:
    assert not is_initialized()
    with pytest.raises(ValueError, match="there is none") as caught:
        AcceleratorState()
    assert isinstance(caught.value, NoAcceleratorError)


def test_the_current_state_refuses_other_settings() -> None:
    state = make(mixed_precision="bf16")
    assert AcceleratorState(mixed_precision="bf16") is state
    with pytest.raises(SettingError, match="mixed_precision='bf16'"):
        AcceleratorState(mixed_precision="fp16")


def test_the_current_state_refuses_other_plugins() -> None:
    mine, other = SimpleNamespace(name="mine"), SimpleNamespace(name="other")
    state = make(fsdp_plugin=mine, deepspeed_plugin={"a": mine})
    assert AcceleratorState(fsdp_plugin=SimpleNamespace(name="mine")) is state
    assert AcceleratorState(deepspeed_plugin={"a": mine}) is state and AcceleratorState(deepspeed_plugin=mine) is state
    names = ["dynamo_plugin", "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin"]
    for name in [*names, "parallelism_config"]:
        with pytest.raises(SettingError, match=rf"has {name}=.*, which {name}=namespace\(name='other'\) cannot change"):
            AcceleratorState(**{name: other})


def test_precision_comes_from_the_environment_only_where_it_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    from_environment, given = make(), make(mixed_precision="no")
    assert (from_environment.mixed_precision, given.mixed_precision) == ("bf16", "no")
    with pytest.raises(SettingError, match=r"mixed_precision.*'fp12'"):
        make(mixed_precision="fp12")


def test_reset_makes_handles_stale() -> None:
    state = make()
    AcceleratorState._reset_state()
    assert not state.initialized
    with pytest.raises(StateResetError, match="mixed_precision"):
        _ = state.mixed_precision
    with pytest.raises(StateResetError, match="`device`"):
        _ = state.device


def test_handles_hold_again_once_another_accelerator_is_made_on_the_same_device() -> None:
    older = make(mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    newer = make()
    assert older.mixed_precision == "bf16" and older.device == newer.device and AcceleratorState() is newer
    AcceleratorState._reset_state(reset_partial_state=True)
    AcceleratorState._ended[0][1]["device"] = torch.device("meta")  # as if it had run elsewhere
    last = make()
    assert newer.initialized and AcceleratorState() is last
    with pytest.raises(StateResetError, match="mixed_precision"):
        _ = older.mixed_precision


def test_plugins_are_opaque_and_say_what_the_job_is() -> None:
    plugin = SimpleNamespace(distributed_type=DistributedType.FSDP, fsdp_version=2)
    state = make(fsdp_plugin=plugin)
    assert state.distributed_type == DistributedType.FSDP and state.is_fsdp2 and state.fsdp_plugin is plugin
    assert make().distributed_type == DistributedType.NO


def test_several_deepspeed_plugins() -> None:
    chosen: list[str] = []
    plugins = {
        name: SimpleNamespace(select=lambda _from_accelerator_state, name=name: chosen.append(name)) for name in "ab"
    }
    state = make(deepspeed_plugin=plugins)
    assert state.deepspeed_plugin is plugins["a"]
    state.select_deepspeed_plugin("b")
    assert state.deepspeed_plugin is plugins["b"] and chosen == ["b"]
    with pytest.raises(KeyError, match=r"\['a', 'b'\]"):
        state.get_deepspeed_plugin("c")
    assert make().deepspeed_plugin is None


def test_pickling_keeps_values_and_leaves_the_current_state_alone() -> None:
    state = make(mixed_precision="bf16")
    twin = pickle.loads(pickle.dumps(state))
    assert twin is not state and twin.mixed_precision == "bf16" and AcceleratorState() is state
    assert copy.deepcopy(state) is state


def test_process_control_is_that_of_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    state = make()
    state.wait_for_everyone()
    with state.split_between_processes([1, 2]) as part, state.main_process_first(), state.local_main_process_first():
        state.print(part)
    assert capsys.readouterr().out == "[1, 2]\n"
    assert state.is_main_process and state.is_local_main_process and state.is_last_process
    assert not state.use_distributed and "Mixed precision type: no" in repr(state)
    state.destroy_process_group()


def test_the_current_state_is_the_last_one_that_lives() -> None:
    older = AcceleratorState(mixed_precision="bf16", cpu=True, _from_accelerator=True)
    newer = AcceleratorState(cpu=True, _from_accelerator=True)
    assert AcceleratorState() is newer
    del newer
    gc.collect()
    assert AcceleratorState() is older
    AcceleratorState._reset_state()
    with pytest.raises(AttributeError, match="`device`: the state was reset"):
        _ = older.device


def test_after_the_group_was_destroyed_a_collective_says_so_and_a_new_state_begins_anew(ranks) -> None:
    def body():
        state = AcceleratorState(cpu=True, _from_accelerator=True)
        state.destroy_process_group()
        state.print("works")
        try:
            gather(torch.ones(1))
        except ProcessGroupError as error:
            said = str(error)
        PartialState(cpu=True)
        return said, gather(torch.ones(1)).tolist()

    for said, gathered in ranks(body, 2):
        assert "was destroyed" in said
        assert gathered == [1.0, 1.0]


def test_cpu_affinity_is_never_ignored(monkeypatch):
    monkeypatch.setenv("ACCEL_CPU_AFFINITY", "1")
    set_numa_affinity.cache_clear()
    with pytest.warns(UserWarning, match="set_numa_affinity has no effect here"):
        PartialState(cpu=True)
