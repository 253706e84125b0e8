"""An overflow on one rank skips the update on all of them."""

import pytest


def run_updates(kind: str):
    """Three updates of SGD, the scaled gradient of the second infinite on rank 1 alone; of three, rank 2 has no rows.

    Returns what this rank saw after each: the scale, and its own part of the weights.
    """
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from accel_precision import GradScaler
    from accel_state import PartialState

    state = PartialState(cpu=True)
    rank, world = state.process_index, state.num_processes
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False), nn.Linear(3, 1, bias=False))
    if kind == "fully_shard":
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "two meshes":
        fully_shard(net[0], mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("a",)))
        fully_shard(net[1], mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("b", "c")))
    model = DistributedDataParallel(net) if kind == "ddp" else net
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1, sharded=kind == "plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for update in range(3):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if update == 1 and (rank == 1 or kind == "ddp"):  # DDP has averaged it over all ranks
            grad = net[0].weight.grad
            (grad.to_local() if hasattr(grad, "to_local") else grad)[-1, -1] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        parts = [p.to_local() if hasattr(p, "to_local") else p for p in net.parameters()]
        seen.append((scaler.get_scale(), [p.flatten().tolist() for p in parts]))
    return seen


@pytest.mark.parametrize("kind", ["fully_shard", "two meshes", "plain", "ddp"])
@pytest.mark.parametrize("world", [2, 3])
def test_an_overflow_on_one_rank_skips_the_update_on_all(ranks, kind, world):
    seen = ranks(run_updates, world, kind)
    for of_rank in seen:
        (first, before), (second, after), (third, last) = of_rank
        assert (first, second, third) == (16.0, 8.0, 16.0)
        assert before == after, "the update was left out"
        assert last != after, "the next one was made"


def test_sharded_updates_equal_those_of_one_process(ranks):
    def body(sharded: bool):
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from accel_precision import GradScaler
        from accel_state import PartialState

        state = PartialState(cpu=True)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        if sharded:
            fully_shard(net[0], mesh=init_device_mesh("cpu", (state.num_processes,)))  # the last layer stays plain
        scaler = GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(4):
            scaler.scale(net(torch.ones(2, 4)).pow(2).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
        return [value for p in whole for value in p.detach().flatten().tolist()]

    (ours, others), (alone, _) = ranks(body, 2, True), ranks(body, 2, False)
    assert ours == others
    assert ours == pytest.approx(alone, abs=1e-6)
