"""Inference through a traced pipeline on two ranks against one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_parallel import find_pippy_batch_size, prepare_pippy
from accel_state.errors import SettingError


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 8)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
        self.head = nn.Linear(8, 3)

    def forward(self, x, scale=None):
        hidden = self.layers(self.emb(x))
        return {"out": self.head(hidden if scale is None else hidden * scale)}


def words():
    torch.manual_seed(0)
    return Words().eval(), torch.randint(0, 10, (4, 5))


def through_pipeline(batches, options):
    """On a rank: what comes out for batches of some sizes, and whether it is what one process gets."""
    from accel_state import PartialState

    PartialState(cpu=True)
    model, x = words()
    want = model(x)["out"]
    model = prepare_pippy(model, example_args=(x[:2],), **options)
    outputs = [model(x[:size]) for size in batches]
    same = [None if out is None else torch.allclose(out["out"], want[: out["out"].shape[0]]) for out in outputs]
    sizes = [None if out is None else out["out"].shape[0] for out in outputs]
    return model.hf_split_points, sizes, same


def with_arguments():
    from accel_state import PartialState

    PartialState(cpu=True)
    model, x = words()
    scale = torch.full((4, 1, 1), 2.0)
    want = model(x, scale=scale)["out"]
    prepare_pippy(model, example_args=(x[:2],), example_kwargs={"scale": scale[:2]}, gather_output=True)
    return torch.allclose(model(x, scale=scale)["out"], want)


def refused(options):
    from accel_state import PartialState

    PartialState(cpu=True)
    model, x = words()
    try:
        prepare_pippy(model, example_args=(x[:2],), **options)
    except ValueError as error:
        return type(error).__name__, str(error)
    return None


def test_the_last_rank_has_what_one_process_computes(ranks):
    first, last = ranks(through_pipeline, 2, [4, 2, 3], {})  # 2 and 3: other micro-batches, and one that is filled up
    assert first == (["layers.2.0"], [None] * 3, [None] * 3)
    assert last == (["layers.2.0"], [4, 2, 3], [True] * 3)


def test_all_ranks_have_what_was_gathered(ranks):
    options = {"gather_output": True, "num_chunks": 1, "split_points": ["layers.1"]}
    for found in ranks(through_pipeline, 2, [2], options):
        assert found == (["layers.1"], [2], [True])


def test_keyword_arguments_pass(ranks):
    assert ranks(with_arguments, 2) == [True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_points": ["nope"]}, "nope are no modules of the model"),
        ({"split_points": []}, "make 1 stages for 2 ranks"),
        ({"split_points": "layers"}, "give a list of names of modules, or 'auto'"),
        ({"num_chunks": 0}, "num_chunks=0 has to be at least 1"),
        ({"example_kwargs": {"nope": 1}}, "torch cannot trace Words"),
    ],
    ids=str,
)
def test_what_cannot_be_cut_is_refused_on_every_rank(ranks, options, message):
    found = ranks(refused, 2, options)
    assert found[0][0] == found[1][0]
    assert all(message in text for _, text in found)


def test_on_one_process_the_model_stays_as_it_is():
    model, x = words()
    want = model(x)["out"]
    assert prepare_pippy(model, example_args=(x,)) is model
    assert torch.equal(model(x)["out"], want)
    assert model.hf_split_points == []
    with pytest.raises(SettingError, match="num_chunks"):
        prepare_pippy(model, num_chunks=-1)


def test_the_batch_size_of_inputs():
    assert find_pippy_batch_size((torch.ones(3, 2),), {}) == 3
    assert find_pippy_batch_size((2,), {"a": torch.ones(4)}) == 4
    assert find_pippy_batch_size((), None) is None
