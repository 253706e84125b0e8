"""The Accelerator on two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader


def _metrics(length: int, batch_size: int):
    from accel import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(length), batch_size=batch_size))
    seen = [accelerator.gather_for_metrics(batch) for batch in loader]
    return torch.cat(seen).tolist()


@pytest.mark.parametrize(("length", "batch_size"), [(9, 5), (9, 2), (16, 4), (1, 3), (7, 1)])
def test_metrics_are_gathered_over_each_sample_once(ranks, length, batch_size):
    for seen in ranks(_metrics, 2, length, batch_size):
        assert sorted(seen) == list(range(length))


def _triggers():
    from accel import Accelerator

    accelerator = Accelerator(cpu=True)
    answers = [accelerator.check_trigger()]
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    return [*answers, accelerator.check_trigger(), accelerator.check_trigger()]


def test_a_trigger_on_one_rank_is_seen_once_by_all(ranks):
    assert ranks(_triggers, 2) == [[False, True, False]] * 2


def _gradients():
    from accel import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model = accelerator.prepare(model)
    found = []
    for value in (1.0, 3.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), value * (1 + accelerator.process_index))).sum())
        found.append(model.module.weight.grad.item())
    return type(model).__name__, type(accelerator.unwrap_model(model)).__name__, found


def test_gradients_stay_local_inside_a_window_and_are_averaged_at_its_end(ranks):
    first, second = ranks(_gradients, 2)
    assert first[:2] == ("DistributedDataParallel", "Linear")
    assert (first[2], second[2]) == ([0.5, 3.0], [1.0, 3.0])


def _collectives():
    from accel import Accelerator

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    padded = accelerator.pad_across_processes(torch.ones(rank + 1))
    with accelerator.split_between_processes(["a", "b", "c"]) as part:
        mine = list(part)
    with accelerator.main_process_first():
        pass
    return {
        "gathered": accelerator.gather(torch.tensor([rank])).tolist(),
        "summed": accelerator.reduce(torch.tensor([rank + 1.0])).tolist(),
        "padded": padded.tolist(),
        "objects": accelerator.gather_object([{"rank": rank}]),
        "mine": mine,
    }


def test_collectives_of_the_facade(ranks):
    first, second = ranks(_collectives, 2)
    assert first["gathered"] == second["gathered"] == [0, 1]
    assert first["summed"] == second["summed"] == [3.0]
    assert (first["padded"], second["padded"]) == ([1.0, 0.0], [1.0, 1.0])
    assert first["objects"] == [{"rank": 0}, {"rank": 1}]
    assert (first["mine"], second["mine"]) == (["a", "b"], ["c"])


def _scheduler(per):
    from accel import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare_scheduler(scheduler, per=per)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    return optimizer.param_groups[0]["lr"]


def test_a_schedule_moves_in_the_unit_that_it_was_counted_in(ranks):
    assert ranks(_scheduler, 2, "update") == [0.5, 0.5]
    assert ranks(_scheduler, 2, "sample") == [0.25, 0.25]


def _fewer_samples_than_ranks(mode, dispatch):
    from accel import Accelerator
    from accel.utils import DataLoaderConfiguration
    from accel_state.errors import DataLoaderError

    config = DataLoaderConfiguration(even_batches=False, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(torch.ones(1, 1), batch_size=1))
    model.train(mode == "train")
    try:
        with torch.set_grad_enabled(mode != "no_grad"):
            for batch in loader:
                output = accelerator.unwrap_model(model)(batch)
                if mode == "train":
                    accelerator.backward(model(batch).sum())
                assert output.requires_grad == (mode != "no_grad")
    except DataLoaderError as error:
        return str(error)
    return "ended"


@pytest.mark.parametrize("dispatch", [False, True])
def test_ranks_without_any_data_end_training_as_the_others_do(ranks, dispatch):
    for mode in ("eval", "no_grad"):
        assert ranks(_fewer_samples_than_ranks, 2, mode, dispatch) == ["ended"] * 2
    errors = ranks(_fewer_samples_than_ranks, 2, "train", dispatch)
    assert errors == [errors[0]] * 2
    assert errors[0].startswith("After 0 batches the ranks from 1 on have none left")


def _metrics_after_the_loop(length: int, batch_size: int):
    from accel import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(length), batch_size=batch_size))
    for batch in loader:  # noqa: B007  it is used after the loop
        if accelerator.gradient_state.end_of_dataloader:
            break
    left = accelerator.gather_for_metrics(batch)
    is_last = accelerator.gradient_state.end_of_dataloader
    for _ in loader:
        pass
    return len(left), is_last, len(accelerator.gather_for_metrics(batch))


def test_the_last_batch_is_cut_after_its_loop_was_left_and_nothing_is_once_a_loop_is_over(ranks):
    assert ranks(_metrics_after_the_loop, 2, 13, 5) == [(3, False, 10)] * 2
