import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch import nn

from accel_precision import AutocastKwargs, PrecisionPolicy, unwrap_forward
from accel_state.errors import PrecisionError

BF16 = PrecisionPolicy.from_name("bf16")
X = torch.ones(2, 4)


class Net(nn.Module):
    """Notes the type in which it computed; `forward` may call itself, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, depth: int = 0, fail: bool = False) -> torch.Tensor:
        """The inner layer."""
        if fail:
            raise RuntimeError("as told")
        if depth:
            self.forward(x, depth=depth - 1)
        out = self.inner(x)
        self.seen.append(out.dtype)
        return out

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_both_ways_to_call_compute_half_and_return_full_precision():
    net = Net()
    assert BF16.wrap(net, "cpu") is net
    assert type(net) is Net
    for call in (net, net.forward):
        assert call(X).dtype is torch.float32
    assert net.seen == [torch.bfloat16] * 2
    assert not torch.is_autocast_enabled("cpu")


def test_the_original_forward_stays_within_reach():
    net = Net()
    BF16.wrap(net, "cpu")
    assert net._original_forward(X).dtype is torch.float32
    assert net.seen == [torch.float32]
    assert list(inspect.signature(net.forward).parameters) == ["x", "depth", "fail"]
    assert net.forward.__name__ == "forward"
    assert net.forward.__self__ is net


def test_names_and_state_dict_do_not_change():
    net = Net()
    before = list(net.state_dict())
    BF16.wrap(net, "cpu")
    assert list(net.state_dict()) == before == [name for name, _ in net.named_parameters()]


def test_re_entrant_and_restores_what_was_set_outside():
    net = BF16.wrap(Net(), "cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        net(X, depth=2)
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_enabled("cpu")
    assert net.seen == [torch.bfloat16] * 3
    assert not torch.is_autocast_enabled("cpu")


def test_an_exception_leaves_nothing_behind():
    net = BF16.wrap(Net(), "cpu", handler=AutocastKwargs(cache_enabled=False))
    with pytest.raises(RuntimeError, match="as told"):
        net(X, fail=True)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def test_gradients_equal_torchs_own_autocast():
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    BF16.wrap(net, "cpu")(X).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = twin(X)
    out.float().sum().backward()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_works_without_gradients_and_in_inference_mode():
    net = BF16.wrap(Net(), "cpu")
    with torch.no_grad():
        assert not net(X).requires_grad
    with torch.inference_mode():
        assert net(X).dtype is torch.float32
    assert net.seen == [torch.bfloat16] * 2


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
def test_copies_compute_with_their_own_weights(duplicate):
    net = BF16.wrap(Net(), "cpu")
    other = duplicate(net)
    with torch.no_grad():
        other.inner.weight.zero_()
        other.inner.bias.fill_(3.0)
    assert torch.equal(other(X), torch.full((2, 4), 3.0))
    assert not torch.equal(net(X), other(X))
    assert other.seen == [torch.bfloat16] * 2
    assert other._original_forward.__self__ is other


def test_a_wrapped_part_of_a_model_is_copied_with_it():
    whole = nn.Sequential(BF16.wrap(Net(), "cpu"), nn.ReLU())
    other = copy.deepcopy(whole)
    assert other[0].forward.__self__ is other[0]
    assert whole[0].forward.__self__ is whole[0]


def test_dropping_the_model_frees_it_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        net = BF16.wrap(Net(), "cpu")
        net(X)
        view = unwrap_forward(net)
        alive = weakref.ref(net)
        forward = net.forward
        del net, view
        assert alive() is None
        with pytest.raises(ReferenceError, match="keep the model"):
            forward(X)
    finally:
        gc.enable()


def test_unwrapping_gives_a_live_view_and_leaves_the_model_alone():
    net = BF16.wrap(Net(), "cpu")
    view = unwrap_forward(net)
    assert type(view) is Net
    assert not hasattr(view, "_original_forward")
    view(X)
    net(X)
    assert net.seen == [torch.float32, torch.bfloat16]
    with torch.no_grad():
        net.inner.weight.zero_()
    assert view.inner.weight is net.inner.weight
    assert [id(p) for p in view.parameters()] == [id(p) for p in net.parameters()]
    plain = Net()
    assert unwrap_forward(plain) is plain


def test_a_forward_that_lay_on_the_instance_is_kept():
    net = Net()
    net.forward = lambda x: net.inner(x) * 0 + 7  # as hooks of other libraries do
    BF16.wrap(net, "cpu")
    assert torch.equal(net(X), torch.full((2, 4), 7.0))
    assert torch.equal(unwrap_forward(net)(X), torch.full((2, 4), 7.0))


def test_wrapping_again_takes_the_new_settings_in_one_layer():
    net = Net()
    PrecisionPolicy.from_name("fp16").wrap(net, "cpu")
    BF16.wrap(net, "cpu")
    net(X)
    assert net.seen == [torch.bfloat16]
    unwrap_forward(net)(X)
    assert net.seen[-1] is torch.float32


def test_the_policy_no_changes_nothing():
    net = Net()
    PrecisionPolicy.from_name("no").wrap(net, "cpu")
    assert "forward" not in vars(net)


def test_outputs_can_be_left_as_computed():
    net = PrecisionPolicy(compute=torch.bfloat16, output=None).wrap(Net(), "cpu")
    assert net(X).dtype is torch.bfloat16


def test_the_handler_says_so_too():
    net = BF16.wrap(Net(), "cpu", handler=AutocastKwargs(convert_outputs=False))
    assert net(X).dtype is torch.bfloat16


def test_a_disabled_handler_computes_fp32():
    net = BF16.wrap(Net(), "cpu", handler=AutocastKwargs(enabled=False))
    net(X)
    assert net.seen == [torch.float32]


def test_another_method_can_be_wrapped():
    net = BF16.wrap(BF16.wrap(Net(), "cpu"), "cpu", method="encode")
    assert net.encode(X).dtype is torch.float32
    assert not torch.equal(net.encode(X), net._original_encode(X))
    view = unwrap_forward(net)
    assert torch.equal(view.encode(X), net._original_encode(X))
    with pytest.raises(PrecisionError, match="Net has no method 'decode'"):
        BF16.wrap(net, "cpu", method="decode")


@pytest.mark.parametrize("compile_first", [True, False])
def test_works_inside_and_around_the_compiler(compile_first):
    net = Net()
    if compile_first:
        model = BF16.wrap(torch.compile(net, backend="eager", fullgraph=True), "cpu")
    else:
        model = torch.compile(BF16.wrap(net, "cpu"), backend="eager", fullgraph=True)
    eager = BF16.wrap(copy.deepcopy(net), "cpu")(X)
    out = model(X)
    assert out.dtype is torch.float32
    assert torch.equal(out, eager)
