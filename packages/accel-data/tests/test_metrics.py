"""Results of evaluation on several ranks: every sample once, in order."""

import pickle
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import gather_for_metrics, prepare_data_loader, weighted_mean
from accel_state import GradientState, PartialState
from accel_state.errors import DataLoaderError


def rank_setup():
    """What each rank of a test begins with."""
    state = PartialState(cpu=True)
    return state, GradientState()


def all_structures(size, length):
    """Gather every kind of structure over an epoch; returns what came together, one list per kind."""
    _, mailbox = rank_setup()
    loader = prepare_data_loader(DataLoader(torch.arange(length), batch_size=size), gradient_state=mailbox)
    got = {"tensor": [], "nested": [], "twice": [], "texts": [], "objects": [], "tuple": []}
    for batch in loader:
        together = {
            "tensor": gather_for_metrics(batch, gradient_state=mailbox),
            "nested": gather_for_metrics({"a": [(batch, batch + 1)]}, gradient_state=mailbox)["a"][0][1] - 1,
            "twice": gather_for_metrics(batch.repeat_interleave(2), gradient_state=mailbox)[::2],
            "tuple": gather_for_metrics((batch, batch), gradient_state=mailbox)[1],
        }
        texts = gather_for_metrics([str(int(i)) for i in batch], gradient_state=mailbox)
        objects = gather_for_metrics(batch, gradient_state=mailbox, use_gather_object=True)
        for kind, tensor in together.items():
            got[kind] += tensor.tolist()
        got["texts"] += [int(text) for text in texts]
        got["objects"] += [int(item) for item in objects]
    return got


SIZES = [(1, 9), (2, 9), (4, 9), (5, 9), (4, 3), (3, 12)]


def all_sizes():
    return [all_structures(size, length) for size, length in SIZES]


@pytest.mark.parametrize("world", [2, 3])
def test_every_sample_once_in_any_structure(ranks, world):
    for of_rank in ranks(all_sizes, world):
        for (size, length), got in zip(SIZES, of_rank, strict=True):
            for kind, values in got.items():
                assert values == list(range(length)), (kind, size, length)


def test_one_process_needs_nothing():
    mailbox = GradientState()
    loader = prepare_data_loader(DataLoader(torch.arange(9), batch_size=4), gradient_state=mailbox)
    assert [gather_for_metrics(batch, gradient_state=mailbox).tolist() for batch in loader][-1] == [8]
    assert gather_for_metrics("text", gradient_state=mailbox) == ["text"]


def uneven_parts():
    _, mailbox = rank_setup()
    source = DataLoader(torch.arange(7), batch_size=2)
    loader = prepare_data_loader(source, gradient_state=mailbox, even_batches=False)
    return [i for batch in loader for i in gather_for_metrics(batch, gradient_state=mailbox).tolist()]


@pytest.mark.parametrize("length", [21, 20, 18])
def test_values_repeated_for_a_whole_batch_are_cut_to_a_shorter_last_one(length):
    """As transformers' Trainer repeats the loss, also where a whole batch is a multiple of the last one."""
    _, mailbox = rank_setup()
    loader = prepare_data_loader(DataLoader(torch.arange(length), batch_size=8), gradient_state=mailbox)
    counts = [len(gather_for_metrics(torch.zeros(8), gradient_state=mailbox)) for _ in loader]
    assert counts == [8, 8, length - 16]


def test_several_values_per_sample_are_all_kept_where_they_are_as_many_as_an_ordinary_batch():
    _, mailbox = rank_setup()
    loader = prepare_data_loader(DataLoader(torch.arange(12), batch_size=8), gradient_state=mailbox)
    counts = [len(gather_for_metrics(batch.repeat_interleave(2), gradient_state=mailbox)) for batch in loader]
    assert counts == [16, 8]


def test_uneven_batches_lose_nothing(ranks):
    assert ranks(uneven_parts, 2) == [list(range(7))] * 2


Pair = namedtuple("Pair", "a b")


def mixed_structures():
    _, mailbox = rank_setup()
    loader = prepare_data_loader(DataLoader(torch.arange(7), batch_size=2), gradient_state=mailbox)
    for batch in loader:
        texts = [f"s{int(i)}" for i in batch]
        got = {
            "tuple": gather_for_metrics((batch, texts), gradient_state=mailbox),
            "list": gather_for_metrics([batch, texts], gradient_state=mailbox),
            "dict": gather_for_metrics({"t": batch, "s": texts, "n": None}, gradient_state=mailbox),
            "named": gather_for_metrics(Pair(batch, batch * 2), gradient_state=mailbox, use_gather_object=True),
            "dicts": gather_for_metrics(tuple({"i": int(i)} for i in batch), gradient_state=mailbox),
            "objects": gather_for_metrics(
                [i.reshape(1) for i in batch], gradient_state=mailbox, use_gather_object=True
            ),
        }
    return {kind: plain(value) for kind, value in got.items()}


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def test_values_of_mixed_structures_are_cut_one_by_one(ranks):
    for got in ranks(mixed_structures, 2):
        assert got == {
            "tuple": [[4, 5], ["s4", "s5"], [6], ["s6"]],
            "list": [[4, 5], ["s4", "s5"], [6], ["s6"]],
            "dict": [{"t": [4, 5], "s": ["s4", "s5"], "n": None}, {"t": [6], "s": ["s6"], "n": None}],
            "named": [[4, 5], [8, 10], [6], [12]],
            "dicts": [{"i": 4}, {"i": 5}, {"i": 6}],
            "objects": [[4], [5], [6]],
        }


def warned(make, size=5, length=9):
    import warnings

    _, mailbox = rank_setup()
    loader = prepare_data_loader(DataLoader(torch.arange(float(length)), batch_size=size), gradient_state=mailbox)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        values = [gather_for_metrics(make(batch), gradient_state=mailbox) for batch in loader]
    assert all(warning.filename == __file__ for warning in heard)
    return values, [str(warning.message) for warning in heard]


def test_a_mean_over_fill_up_samples_warns(ranks):
    for values, heard in ranks(warned, 2, lambda batch: batch.mean()):  # also where all of the rank's part is real
        assert [len(value) for value in values] == [2]
        assert len(heard) == 1
        assert "weighted_mean" in heard[0]


def test_a_mean_over_real_samples_is_let_through(ranks):
    for values, heard in ranks(warned, 2, lambda batch: batch.mean(), length=10):
        assert values[0].tolist() == [2.0, 7.0]
        assert not heard


def test_values_that_do_not_belong_to_samples_are_kept_with_a_warning(ranks):
    _, (values, heard) = ranks(warned, 2, lambda batch: batch[:3])
    assert len(values[0]) == 6
    assert "3 values for a last batch of 5 samples, 4 of them real" in heard[0]


def exact_mean():
    state, _ = rank_setup()
    values = torch.arange(5.0) if state.is_main_process else torch.arange(5.0, 9.0)
    mean = weighted_mean(values.mean(), len(values))
    empty_here = weighted_mean(float("nan") if state.is_main_process else 2.0, 0 if state.is_main_process else 3)
    return float(mean), float(empty_here)


def test_a_weighted_mean_is_exact(ranks):
    assert ranks(exact_mean, 2) == [(4.0, 2.0)] * 2


# ---- one shuffle on several ranks


def seeds_apart(seedable):
    state, _ = rank_setup()
    torch.manual_seed(100 + state.process_index)
    loader = prepare_data_loader(
        DataLoader(torch.arange(20), batch_size=3, shuffle=True), use_seedable_sampler=seedable, even_batches=False
    )
    before = torch.get_rng_state()
    epochs = [[i for batch in loader for i in batch.tolist()] for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    return epochs


@pytest.mark.parametrize("seedable", [False, True])
def test_ranks_with_different_seeds_share_one_shuffle(ranks, seedable):
    first, second = ranks(seeds_apart, 2, seedable)
    for mine, other in zip(first, second, strict=True):
        assert sorted(mine + other) == list(range(20))
    assert first[0] != first[1]


def resumed_by_all(state):
    process, _ = rank_setup()
    torch.manual_seed(500 + process.process_index)
    loader = prepare_data_loader(DataLoader(torch.arange(24), batch_size=2, shuffle=True))
    seen = []
    if state is None:
        for _, batch in zip(range(3), loader, strict=False):
            seen += batch.tolist()
    else:
        loader.load_state_dict(state)
        seen = [i for batch in loader for i in batch.tolist()]
    return seen, loader.state_dict()


def test_a_run_on_two_ranks_continues_on_three(ranks):
    before = ranks(resumed_by_all, 2, None)
    after = ranks(resumed_by_all, 3, before[0][1])
    assert sorted(i for seen, _ in [*before, *after] for i in seen) == list(range(24))


def synchronised_torch():
    state, _ = rank_setup()
    torch.manual_seed(state.process_index)
    loader = prepare_data_loader(DataLoader(torch.arange(4)), rng_types=["torch"])
    list(loader)
    return float(torch.rand(()))


def test_other_generators_are_synchronised_on_request(ranks):
    first, second = ranks(synchronised_torch, 2)
    assert first == second


def test_a_prepared_loader_pickles_with_its_mailbox():
    mailbox = GradientState()
    loader = prepare_data_loader(DataLoader(torch.arange(8), batch_size=2, shuffle=True), gradient_state=mailbox)
    twin = pickle.loads(pickle.dumps(loader))
    assert [b.tolist() for b in twin] == [b.tolist() for b in loader]
    assert isinstance(twin.gradient_state, GradientState)


@pytest.mark.parametrize("kinds", [["nonsense"], ["xla"], [None], "generator"])
def test_generators_that_are_not_here_are_refused(kinds):
    with pytest.raises(DataLoaderError, match="rng_types="):
        prepare_data_loader(DataLoader(torch.arange(4)), num_processes=1, process_index=0, rng_types=kinds)
