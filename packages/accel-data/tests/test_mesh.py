"""Ranks that share a model's work share its data."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import prepare_data_loader
from accel_data.mesh import data_place
from accel_state import PartialState
from accel_state.errors import DataLoaderError


def mesh_of(**axes):
    count = torch.Size(axes.values()).numel()
    return SimpleNamespace(mesh=torch.arange(count).view(*axes.values()), mesh_dim_names=tuple(axes))


@pytest.mark.parametrize(
    ("axes", "parts"),
    [
        ({"tp": 4}, [0, 0, 0, 0]),
        ({"dp_shard": 4}, [0, 1, 2, 3]),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, [0, 0, 1, 1, 2, 2, 3, 3]),
        ({"pp": 2, "dp_shard": 2, "cp": 2}, [0, 0, 1, 1, 0, 0, 1, 1]),
        ({"dp": 2, "sp": 1}, [0, 1]),
    ],
)
def test_the_part_is_the_place_along_the_data_axes(axes, parts):
    mesh = mesh_of(**axes)
    places = [data_place(mesh, rank) for rank in range(len(parts))]
    assert [place.index for place in places] == parts
    assert {place.part_of_rank for place in places} == {tuple(parts)}
    assert {place.count for place in places} == {max(parts) + 1}
    for rank, part in enumerate(parts):
        loader = prepare_data_loader(
            DataLoader(torch.arange(16), batch_size=2),
            num_processes=len(parts),
            process_index=rank,
            torch_device_mesh=mesh,
        )
        assert next(iter(loader)).tolist() == [2 * part, 2 * part + 1]
        assert loader.total_batch_size == 2 * (max(parts) + 1)


@pytest.mark.parametrize(
    ("mesh", "rank", "message"),
    [
        (mesh_of(data=2), 0, r"axes \['data'\] .* one of dp, dp_replicate, dp_shard"),
        (SimpleNamespace(mesh=torch.arange(2), mesh_dim_names=None), 0, r"axes \[\] for 1 dimensions"),
        (mesh_of(tp=2), 2, r"holds the ranks \[0, 1\]; it has to hold all, this is 2"),
    ],
)
def test_a_mesh_that_says_too_little_is_refused(mesh, rank, message):
    with pytest.raises(DataLoaderError, match=message):
        data_place(mesh, rank)


def of_tensor_parallel_ranks(dispatch):
    from torch.distributed.device_mesh import init_device_mesh

    state = PartialState(cpu=True)
    torch.manual_seed(state.process_index)  # ranks of one group share the shuffle, whatever their seeds
    loader = prepare_data_loader(
        DataLoader(torch.arange(12), batch_size=2, shuffle=True),
        torch_device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp")),
        dispatch_batches=dispatch,
    )
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("dispatch", [False, True])
def test_ranks_of_one_group_get_the_same_batches(ranks, dispatch):
    first, second, third, fourth = ranks(of_tensor_parallel_ranks, 4, dispatch)
    assert first == second
    assert third == fourth
    assert sorted(item for batch in first + third for item in batch) == list(range(12))
