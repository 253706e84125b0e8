"""Methods other than forward through the wrapper of a model."""

import copy
import inspect

import pytest
import torch
from torch import nn

from accel_parallel import route_method

USES = ("once", "twice", "window")


def gradients(kind: str, uses):
    """For each use of a method on this rank's half of a batch: the gradients, what was called, what is left behind."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from accel_parallel import Plan, PlanContext, ddp, no_sync, route_method, single
    from accel_state import PartialState

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 2)
            self.calls = []

        def forward(self, x):
            self.calls.append("forward")
            return self.inner(x)

        def encode(self, x, *, twice=False):
            self.calls.append("encode")
            return self(x) + self.forward(x) if twice else self.inner(x).sum(1)

    state = PartialState(cpu=True)
    torch.manual_seed(0)
    net, batch = Net(), torch.randn(4, 4)
    part = batch if kind == "one process" else batch[state.process_index :: 2]
    model, found = net, []
    if kind == "ddp":
        context = PlanContext(device=state.device, world_size=state.num_processes)
        model = Plan([single(), ddp()]).apply(net, context)
    elif kind == "fully_shard":
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    route_method(model, "encode")
    route_method(model, "encode")
    for use in uses:
        net.zero_grad()
        net.calls.clear()
        if use == "window":
            with no_sync(model):
                model.encode(part).pow(2).mean().backward()
        model.encode(part, twice=use == "twice").pow(2).mean().backward()
        grad = net.inner.weight.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found.append((grad.tolist(), list(net.calls), "forward" in vars(net)))
    return found


@pytest.mark.parametrize("kind", ["ddp", "fully_shard"])
def test_gradients_equal_those_of_one_process_with_the_whole_batch(ranks, kind):
    alone = ranks(gradients, 1, "one process", USES)[0]
    for of_rank in ranks(gradients, 2, kind, USES):
        for (got, called, forward_was_left), (wanted, calls, _) in zip(of_rank, alone, strict=True):
            assert torch.allclose(torch.tensor(got), torch.tensor(wanted), atol=1e-6)
            assert called == calls
            assert not forward_was_left


def hidden_names():
    from torch import nn

    from accel_parallel import Plan, PlanContext, ddp, route_method, single
    from accel_state import PartialState

    class Net(nn.Linear):
        def encode(self, x):
            raise RuntimeError("as told")

    state = PartialState(cpu=True)
    context = PlanContext(device=state.device, world_size=2)
    model = Plan([single(), ddp()]).apply(Net(2, 2), context)
    messages = []
    for name in ("encode", "weight", "decode"):
        try:
            getattr(model, name)
        except AttributeError as error:
            messages.append(str(error))
    route_method(model, "encode")
    for use in (lambda: model.encode(None), lambda: route_method(model, "decode")):
        try:
            use()
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    return type(model).__name__, messages, "forward" in vars(model.module)


def test_what_the_wrapper_hides_is_explained(ranks):
    for name, messages, forward_was_left in ranks(hidden_names, 2):
        assert name == "DistributedDataParallel"
        encode, weight, decode, failed, refused = messages
        assert encode.startswith("'DistributedDataParallel' object has no attribute 'encode', but the Net inside has")
        assert "accelerator.register_forward_method(model, 'encode') once" in encode
        assert "accelerator.unwrap_model(model).weight" in weight
        assert decode == "'DistributedDataParallel' object has no attribute 'decode'"
        assert failed == "as told"
        assert "Net has no method 'decode'" in refused
        assert not forward_was_left, "a failure leaves the model as it was"


class Encoder(nn.Linear):
    def encode(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.forward(x) * scale


def test_a_model_without_a_wrapper_is_left_alone():
    net = Encoder(2, 2)
    route_method(net, "encode")
    assert "encode" not in vars(net)


def test_copies_and_signatures():
    model = nn.DataParallel(Encoder(2, 2))  # a wrapper that needs no process group
    route_method(model, "encode")
    assert list(inspect.signature(model.encode).parameters) == ["x", "scale"]
    assert (model.encode.__name__, model.encode.__self__) == ("encode", model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.module.weight.zero_()
        other.module.bias.fill_(3.0)
    x = torch.ones(1, 2)
    assert other.encode(x, scale=2.0).tolist() == [[6.0, 6.0]]
    assert model.encode(x).tolist() == model(x).tolist()
    encode = model.encode
    del model
    with pytest.raises(ReferenceError, match="keep the model"):
        encode(x)
