"""Hooks around forwards: attached, run, and taken away; weights that are offloaded."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import threading
import weakref
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from accel_parallel import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    init_empty_weights,
    init_on_device,
    named_module_tensors,
    remove_hook_from_module,
    remove_hook_from_submodules,
    set_module_tensor_to_device,
)
from accel_parallel.dispatch.prefetch import Prefetcher
from accel_state.errors import DeviceMapError, OffloadError
from accel_testkit.nets import BufferedNet


class PlusOne(ModelHook):
    def __init__(self, calls=None):
        self.calls = [] if calls is None else calls

    def init_hook(self, module):
        self.calls.append("init")
        return module

    def pre_forward(self, module, *args, **kwargs):
        return (args[0] + 1, *args[1:]), kwargs

    def post_forward(self, module, output):
        return output + 1

    def detach_hook(self, module):
        self.calls.append("detach")
        return module


@pytest.fixture
def x():
    return torch.randn(2, 3)


# ---- attaching


def test_a_hook_runs_around_the_forward_and_leaves_no_trace(x):
    model = nn.Linear(3, 3)
    want, hook = model(x + 1) + 1, PlusOne()
    add_hook_to_module(model, hook)
    assert torch.equal(model(x), want)
    assert model._hf_hook is hook
    assert inspect.signature(model.forward) == inspect.signature(nn.Linear(1, 1).forward)
    remove_hook_from_module(model)
    assert hook.calls == ["init", "detach"]
    assert {"_hf_hook", "_old_forward", "forward"}.isdisjoint(vars(model))


def test_hooks_are_appended_or_replace_each_other(x):
    model, first, second = nn.Linear(3, 3), PlusOne(), PlusOne()
    want = model(x + 2) + 2
    add_hook_to_module(model, first)
    add_hook_to_module(model, second, append=True)
    assert isinstance(model._hf_hook, SequentialHook)
    assert torch.allclose(model(x), want)
    assert (first.calls, second.calls) == (["init"], ["init"])
    add_hook_to_module(model, ModelHook())
    assert first.calls == second.calls == ["init", "detach"]


def test_a_forward_that_was_patched_is_given_back(x):
    model = nn.Linear(3, 3)
    own = lambda x: x * 2  # noqa: E731
    model.forward = own
    add_hook_to_module(model, PlusOne())
    assert torch.equal(model(x), (x + 1) * 2 + 1)
    remove_hook_from_module(model)
    assert model.forward is own


def test_hooks_go_from_all_submodules(x):
    model = BufferedNet().eval()
    want = model(x)
    attach_execution_device_hook(model, "cpu")
    assert all(hasattr(module, "_hf_hook") for module in model.modules())
    assert torch.equal(model(x), want)
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_a_hook_can_turn_gradients_off(x):
    model, hook = nn.Linear(3, 3), ModelHook()
    hook.no_grad = True
    add_hook_to_module(model, hook)
    assert not model(x).requires_grad


def test_hooked_models_are_copied_and_pickled(x):
    model = cpu_offload(BufferedNet().eval(), "cpu")
    want = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), want)
        assert twin.linear1._hf_hook is not model.linear1._hf_hook
    assert model.linear1.weight.is_meta


# ---- offloaded weights


def test_weights_are_there_for_the_forward_alone(x):
    model = BufferedNet().eval()
    want, state = model(x), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert cpu_offload(model, "cpu") is model
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert has_offloaded_params(model.linear1)
    assert not has_offloaded_params(model)
    for _ in range(2):
        assert torch.equal(model(x), want)
        assert all(parameter.is_meta for parameter in model.parameters())
    whole = get_state_dict_offloaded_model(model)
    assert all(torch.equal(whole[name], tensor) for name, tensor in state.items())
    some = get_state_dict_from_offload(model.linear1, "linear1.weight", {"linear1.weight": "", "linear1.bias": ""})
    assert torch.equal(some["linear1.bias"], state["linear1.bias"])
    remove_hook_from_submodules(model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(x), want)


def test_buffers_are_offloaded_when_asked_for(x):
    model = BufferedNet().eval()
    want = model(x)
    cpu_offload(model, "cpu", offload_buffers=True)
    assert all(buffer.is_meta for buffer in model.buffers())
    assert torch.equal(model(x), want)


def test_running_statistics_in_memory_are_kept(x):
    model = BufferedNet().train()
    twin = copy.deepcopy(model)
    cpu_offload(model, "cpu", offload_buffers=True)
    with torch.no_grad():
        model(x), twin(x)
    assert torch.equal(get_state_dict_offloaded_model(model)["batchnorm.running_mean"], twin.batchnorm.running_mean)


def test_a_class_can_have_all_its_weights_at_once(x):
    class Reader(BufferedNet):
        def forward(self, x):
            return nn.functional.linear(x, self.linear1.weight, self.linear1.bias)

    model = Reader().eval()
    want = model(x)
    cpu_offload(model, "cpu", preload_module_classes=["Reader"])
    assert torch.equal(model(x), want)
    assert not hasattr(model.linear1, "_hf_hook")


def test_weights_are_let_go_when_a_forward_fails():
    model = cpu_offload(BufferedNet().eval(), "cpu")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 7))
    assert model.linear1.weight.is_meta
    assert model(torch.ones(2, 3)).shape == (2, 5)


def test_a_forward_inside_a_forward_keeps_the_weights(x):
    class Twice(nn.Linear):
        def forward(self, x, again=True):
            return super().forward(self(x, again=False)) if again else super().forward(x)

    model = Twice(3, 3)
    want = model(x)
    cpu_offload(model, "cpu")
    assert torch.equal(model(x), want)
    assert model.weight.is_meta


def test_tied_weights_are_one_again_in_the_end(x):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    want = model(x)
    cpu_offload(model, "cpu")
    assert model[2].weight is model[0].weight
    assert torch.equal(model(x), want)
    remove_hook_from_submodules(model)
    assert model[2].weight is model[0].weight
    assert not model[0].weight.is_meta


def test_training_with_offloaded_weights_is_told_once(x, caplog):
    model = cpu_offload(BufferedNet().train(), "cpu")
    model(x)
    model(x)
    assert caplog.text.count("require gradients, which they do not get") == 1
    caplog.clear()
    with torch.no_grad():
        cpu_offload(BufferedNet().train(), "cpu")(x)
    assert not caplog.text


def test_gradients_pass_through_offloaded_layers_to_others():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).eval()
    twin = copy.deepcopy(model)
    cpu_offload(model[1], "cpu")
    x = torch.randn(2, 3)
    for net in (model, twin):
        net(x).pow(2).sum().backward()
    assert torch.equal(model[0].weight.grad, twin[0].weight.grad)


# ---- weights read outside of a forward


@pytest.fixture
def offloaded():
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    return cpu_offload(model, "cpu")


def test_what_needs_numbers_reads_them(offloaded, x):
    weight, ones = offloaded.weight, torch.ones(2, 2)
    assert torch.equal(nn.functional.linear(ones, weight), torch.full((2, 2), 2.0))
    assert torch.equal(weight + 1, ones + 1)
    assert torch.equal(torch.cat([weight, ones]), torch.ones(4, 2))
    assert torch.equal(ones @ weight.T, torch.full((2, 2), 2.0))
    assert weight[0].tolist() == [1.0, 1.0]
    assert weight.sum().item() == 4
    assert (weight.numpy() == 1).all()
    assert not weight.cpu().is_meta
    assert torch.equal(weight.data.clone(), ones)
    assert weight.is_meta


def test_what_needs_none_reads_nothing():
    class Unreadable(Mapping):
        def __getitem__(self, key):
            pytest.fail(f"{key} was read")

        def __iter__(self):
            return iter(("weight", "bias"))

        def __contains__(self, key):
            return key in ("weight", "bias")

        def __len__(self):
            return 2

    model = nn.Linear(2, 2)
    attach_align_device_hook(model, "cpu", offload=True, weights_map=Unreadable())
    weight = model.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type, weight.requires_grad) == (
        (2, 2),
        torch.float32,
        "meta",
        True,
    )
    assert (weight.numel(), weight.element_size(), len(weight), weight.ndim) == (4, 4, 2, 2)
    assert "weight" in repr(weight)
    assert list(model.state_dict()) == ["weight", "bias"]
    assert [name for name, _ in named_module_tensors(model)] == ["weight", "bias"]


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.add_(1),
        lambda w: w.data.zero_(),
        nn.init.zeros_,
        lambda w: w.__setitem__(0, 1),
        lambda w: setattr(w, "data", torch.ones(2, 2)),
        lambda w: torch.add(torch.ones(2, 2), 1, out=w),
    ],
)
def test_a_change_that_would_be_lost_is_refused(offloaded, change):
    with pytest.raises(OffloadError, match=r"Linear\.weight is offloaded, and .* would change a copy"), torch.no_grad():
        change(offloaded.weight)


def test_a_state_dict_is_saved_with_its_numbers(offloaded):
    file = io.BytesIO()
    torch.save(offloaded.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weight"], torch.ones(2, 2))


def test_a_module_can_be_aligned_for_a_block(offloaded):
    with align_module_device(offloaded):
        assert torch.equal(offloaded.weight, torch.ones(2, 2))
        assert not offloaded.weight.is_meta
    assert offloaded.weight.is_meta
    plain = nn.Linear(2, 2)
    before = plain.weight
    with align_module_device(plain, "meta"):
        assert plain.weight.is_meta
    assert plain.weight is before


# ---- the next layer is fetched while one computes


class Recorder(Mapping):
    """Weights that lie "on disk", and who has asked for them."""

    def __init__(self, weights):
        self.weights, self.calls = weights, []

    def __getitem__(self, key):
        self.calls.append((key, threading.current_thread() is threading.main_thread()))
        return self.weights[key]

    def is_on_disk(self, key):
        return True

    def __contains__(self, key):
        return key in self.weights

    def __iter__(self):
        return iter(self.weights)

    def __len__(self):
        return len(self.weights)


def test_the_next_layer_is_fetched_by_another_thread(x):
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    want = model(x)
    weights = Recorder({name: tensor.detach() for name, tensor in model.named_parameters()})
    attach_align_device_hook(model, "cpu", offload=True, weights_map=weights)
    assert torch.equal(model(x), want)
    assert sorted(weights.calls) == [("0.weight", True), ("1.weight", False), ("2.weight", False)]


def test_another_order_is_learned_and_a_wrong_guess_does_no_harm(x):
    class Backwards(nn.Sequential):
        def forward(self, x):
            for layer in reversed(self):
                x = layer(x)
            return x

    model = Backwards(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    want = model(x)
    weights = Recorder({name: tensor.detach() for name, tensor in model.named_parameters()})
    attach_align_device_hook_on_blocks(model, "cpu", offload=True, weights_map=weights)
    assert torch.equal(model(x), want)
    weights.calls.clear()
    assert torch.equal(model(x), want)
    assert sorted(weights.calls) == [("0.weight", False), ("1.weight", False), ("2.weight", True)]


def test_an_error_of_the_other_thread_comes_where_the_weights_are_needed(x):
    class Broken(Recorder):
        def __getitem__(self, key):
            if key == "1.weight":
                raise OSError("the disk is gone")
            return super().__getitem__(key)

    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    weights = Broken({name: tensor.detach() for name, tensor in model.named_parameters()})
    attach_align_device_hook(model, "cpu", offload=True, weights_map=weights)
    with pytest.raises(OSError, match="the disk is gone"):
        model(x)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_nothing_is_fetched_ahead_in_memory(x):
    before = set(threading.enumerate())
    cpu_offload(BufferedNet().eval(), "cpu")(x)
    assert set(threading.enumerate()) <= before


def test_a_prefetcher_lets_go_what_was_fetched_for_nothing():
    class Layer:
        def weights(self):
            return [torch.ones(2)]

        def device(self):
            return torch.device("cpu")

        def is_slow(self):
            return True

    prefetcher, first, second = Prefetcher(), Layer(), Layer()
    prefetcher.add(first)
    prefetcher.add(second)
    prefetcher.take(first)
    prefetcher.finish()
    assert torch.equal(prefetcher.take(second)[0], torch.ones(2))


# ---- whole models, and placing tensors


def test_models_take_turns(x):
    first, first_hook = cpu_offload_with_hook(nn.Linear(3, 3), "cpu")
    second, second_hook = cpu_offload_with_hook(nn.Linear(3, 3), "cpu", prev_module_hook=first_hook)
    assert isinstance(first._hf_hook, CpuOffload)
    assert second(first(x)).shape == (2, 3)
    second_hook.offload()
    second_hook.remove()
    assert not hasattr(second, "_hf_hook")


def test_a_tensor_is_put_elsewhere_with_or_without_another_value():
    model = nn.Linear(2, 2)
    weight = model.weight
    set_module_tensor_to_device(model, "weight", "cpu")
    assert model.weight is weight
    set_module_tensor_to_device(model, "weight", "meta")
    assert model.weight.is_meta
    set_module_tensor_to_device(model, "weight", "cpu", value=torch.ones(2, 2, dtype=torch.float16))
    assert model.weight.dtype is torch.float32
    assert isinstance(model.weight, nn.Parameter)
    set_module_tensor_to_device(model, "weight", "cpu", value=torch.ones(2, 2), dtype="float16")
    assert model.weight.dtype is torch.float16


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("weight", {"value": torch.ones(3, 3)}, r"shape torch.Size\(\[3, 3\]\) in \"weight\" \(which has shape"),
        ("nope", {}, "a parameter or a buffer named nope: it has weight, bias"),
        ("inner.weight", {}, "no submodule 'inner'"),
        ("weight", {}, "weight is on the meta device, we need a `value`"),
    ],
)
def test_what_cannot_be_put_says_why(name, options, message):
    with pytest.raises(DeviceMapError, match=message):
        set_module_tensor_to_device(nn.Linear(2, 2, device="meta"), name, "cpu", **options)


def test_tied_tensors_share_what_was_put():
    first, second, tied = nn.Linear(2, 2), nn.Linear(2, 2), {}
    second.weight = first.weight
    tied[first.weight.data_ptr()] = {}
    for module in (first, second):
        set_module_tensor_to_device(module, "weight", "cpu", dtype="float16", tied_params_map=tied)
    assert first.weight is second.weight
    assert first.weight.dtype is torch.float16


def test_a_hook_puts_weights_and_inputs_on_its_device(x):
    model, hook = nn.Linear(3, 3), AlignDevicesHook("meta", io_same_device=True)
    add_hook_to_module(model, hook)
    assert model.weight.is_meta
    assert "execution_device='meta'" in repr(hook)


# ---- empty weights


def test_weights_are_made_empty_and_ties_are_kept():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(3, 4)
            self.norm = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 3)
            self.head.weight = self.emb.weight

    with init_empty_weights():
        model = Tied()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model.head.weight is model.emb.weight
    with init_empty_weights(include_buffers=True):
        model = Tied()
    assert all(buffer.is_meta for buffer in model.buffers())
    with init_on_device("cpu"):
        assert not nn.Linear(1, 1).weight.is_meta
    assert not nn.Linear(1, 1).weight.is_meta


def test_other_threads_are_left_alone():
    found = []
    with init_empty_weights():
        thread = threading.Thread(target=lambda: found.append(nn.Linear(1, 1).weight.is_meta))
        thread.start()
        thread.join()
    assert found == [False]


# ---- layer-wise casting


def test_layers_are_stored_small_and_compute_large(x):
    model = BufferedNet().eval()
    want = model(x)
    attach_layerwise_casting_hooks(model, torch.float16, torch.float32, skip_modules_pattern="linear2")
    assert isinstance(model.linear1._hf_hook, LayerwiseCastingHook)
    dtypes = [model.linear1.weight.dtype, model.batchnorm.weight.dtype, model.linear2.weight.dtype]
    assert dtypes == [torch.float16, torch.float32, torch.float32]
    weight = model.linear1.weight
    assert torch.allclose(model(x), want, atol=1e-2)
    assert model.linear1.weight is weight
    assert weight.dtype is torch.float16


@pytest.mark.parametrize(
    "options",
    [
        {"skip_modules_pattern": ["linear"]},
        {"skip_modules_classes": (nn.Linear,)},
        {"skip_modules_classes": (BufferedNet,)},
    ],
)
def test_what_is_skipped_keeps_its_dtype(options):
    model = BufferedNet()
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, **options)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_gradients_reach_weights_that_are_stored_small(x):
    model = nn.Linear(3, 3)
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
    model(x).sum().backward()
    assert model.weight.grad.dtype is torch.bfloat16
    assert torch.allclose(model.weight.grad.float()[0], x.sum(0), rtol=1e-2)


def test_a_failed_forward_leaves_the_stored_weights():
    model = nn.Linear(3, 3)
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 7))
    assert model.weight.dtype is torch.bfloat16


def test_an_offloaded_model_is_let_go_with_its_weights():
    model = cpu_offload(BufferedNet().eval(), "cpu")
    model(torch.ones(1, 3))
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
