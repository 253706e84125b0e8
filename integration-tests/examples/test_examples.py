"""Every example runs through the launcher, small, and holds what it claims."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from safetensors import safe_open

from accel import STOPPED_EXIT_CODE

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
TESTED_ELSEWHERE = {"digits", "big_model_inference"}  # integration-tests/digits and big_models

pytestmark = pytest.mark.timeout(300)


def command(name: str, processes: int, *arguments: str) -> list[str]:
    launch = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num-processes", str(processes)]
    return [*launch, str(EXAMPLES / f"{name}.py"), *arguments]


def run(folder: Path, name: str, *arguments: str, processes: int = 2) -> str:
    """What an example printed; fails with its errors if it fails."""
    done = subprocess.run(
        command(name, processes, *arguments),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Warning" not in done.stderr
    return done.stdout


def numbers(pattern: str, printed: str) -> list[float]:
    """The number in each place where a pattern with one group is found; there is at least one."""
    found = [float(text) for text in re.findall(pattern, printed)]
    assert found, printed
    return found


def test_every_example_has_a_test_and_a_line_in_the_index() -> None:
    tests, index = Path(__file__).read_text(), (EXAMPLES / "README.md").read_text()
    for name in set(SCRIPTS) - TESTED_ELSEWHERE:
        assert f'"{name}"' in tests, name
    assert sorted(set(re.findall(r"\]\((\w+)\.py\)", index))) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_opens_with_the_commands_that_run_it(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert re.search(rf"^    (python|accel launch .*) docs/examples/{name}\.py", text, re.MULTILINE)
    assert "parse_args" in text
    assert "description=__doc__" in text  # so that --help shows them too


def test_help_shows_what_an_example_shows(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "gan.py", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "Several models: a generator and a discriminator" in done.stdout


@pytest.mark.parametrize("processes", [1, 2])
def test_images_are_classified(tmp_path: Path, processes: int) -> None:
    printed = run(tmp_path, "image_classification", "--epochs", "6", processes=processes)
    assert numbers(r"accuracy ([\d.]+)% of 359", printed)[-1] > 90


def test_text_is_classified(tmp_path: Path) -> None:
    accuracies = numbers(r"accuracy ([\d.]+)%", run(tmp_path, "text_classification", "--epochs", "6"))
    assert accuracies[-1] > 60  # 8 topics


def test_micro_batches_train_as_the_large_batch_does(tmp_path: Path) -> None:
    cut = run(tmp_path, "gradient_accumulation", "--epochs", "3")
    whole = run(tmp_path, "gradient_accumulation", "--epochs", "3", "--batch-size", "64", "--steps", "1")
    assert numbers(r"(\d+) updates", cut) == numbers(r"(\d+) updates", whole) == [11, 22, 33]
    losses = numbers(r"loss ([\d.]+)", cut)
    assert losses == pytest.approx(numbers(r"loss ([\d.]+)", whole), abs=1e-4)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("processes", [1, 2])
def test_weights_by_tokens_give_the_gradients_of_one_big_batch(tmp_path: Path, processes: int) -> None:
    printed = run(tmp_path, "exact_accumulation", processes=processes)
    (of_means,) = numbers(r"mean of means: .* by (\S+)", printed)
    (exact,) = numbers(r"num_items: .* by (\S+)", printed)
    assert exact < 1e-5 < 1e-2 < of_means
    first, last = numbers(r"loss per token ([\d.]+)", printed)
    assert last < first - 1


def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_cut(tmp_path: Path) -> None:
    disturbed, calm = (["--epochs", "3", "--project-dir", str(tmp_path / name)] for name in ("disturbed", "calm"))
    assert "left at update 40" in run(tmp_path, "checkpointing", *disturbed, "--stop-after", "40")
    resumed = run(tmp_path, "checkpointing", *disturbed, "--resume")
    assert "resumed at epoch 1, update 25" in resumed
    weights = resumed.splitlines()[-1]
    assert re.fullmatch(r"weights \w{12} after 87 updates", weights)
    assert weights in run(tmp_path, "checkpointing", *calm)


def test_trackers_have_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, "tracking", "--epochs", "2", "--project-dir", str(tmp_path))
    (file,) = tmp_path.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    losses = {row["step"]: row["values"]["loss"] for row in rows if "loss" in row.get("values", {})}
    assert list(losses) == [10, 20, 30, 40]
    assert losses[40] < losses[10]
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    board = EventAccumulator(str(events.parent))
    board.Reload()
    assert {event.step: event.value for event in board.Scalars("loss")} == pytest.approx(losses, rel=1e-5)
    assert board.Tags()["images"]


def test_the_rate_that_was_found_beats_others(tmp_path: Path) -> None:
    printed = run(tmp_path, "lr_finder")
    (rate,) = numbers(r"suggested rate (\S+)", printed)
    assert 1e-3 < rate < 3
    found, smaller, larger = numbers(r"rate \S+: loss ([\d.]+)", printed)
    assert found < min(smaller, larger) / 2


def test_folds_are_held_out_and_vote(tmp_path: Path) -> None:
    printed = run(tmp_path, "cross_validation", "--folds", "3", "--epochs", "6")
    assert sum(numbers(r"of (\d+) held out", printed)) == 1437
    assert min(numbers(r"fold \d: ([\d.]+)%", printed)) > 90
    (alone,), (together,) = numbers(r"test: ([\d.]+)%", printed), numbers(r"([\d.]+)% by all", printed)
    assert together > alone - 1 > 80


def test_all_ranks_stop_when_one_has_seen_enough(tmp_path: Path) -> None:
    printed = run(tmp_path, "early_stopping", "--epochs", "60", "--patience", "2")
    stopped = numbers(r"stopped in epoch (\d+)", printed)
    assert len(stopped) == 2
    assert stopped[0] == stopped[1] == min(numbers(r"seen enough in epoch (\d+)", printed)) < 60


def test_local_sgd_trains_apart_and_ends_together(tmp_path: Path) -> None:
    printed = run(tmp_path, "local_sgd", "--epochs", "6")
    ((apart, end),) = re.findall(r"lay (\S+) apart between the means, (\S+) at the end", printed)
    assert float(apart) > 1e-3
    assert float(end) == 0
    assert numbers(r"accuracy ([\d.]+)%", printed)[0] > 85


def test_a_batch_size_is_found_and_the_update_keeps_its_size(tmp_path: Path) -> None:
    printed = run(tmp_path, "batch_size_finder", "--pretend-limit", "100", "--epochs", "3")
    assert numbers(r"micro-batches of (\d+)", printed) == [256, 128, 64]
    assert "4 micro-batches per update" in printed


def test_two_models_with_two_optimizers_learn_to_draw(tmp_path: Path) -> None:
    before, after = numbers(r"energy distance ([\d.]+)", run(tmp_path, "gan", "--epochs", "12"))
    assert after < before / 4


def test_two_accelerators_keep_their_own_windows(tmp_path: Path) -> None:
    printed = run(tmp_path, "actor_critic", "--epochs", "5")
    rewards = numbers(r"reward ([\d.]+)", printed)
    assert rewards[-1] > rewards[0] + 0.3
    assert "140 updates of the actor, 35 of the critic" in printed


def test_gradients_travel_with_the_last_backward_pass(tmp_path: Path) -> None:
    printed = run(tmp_path, "delayed_sync")
    assert numbers(r"ranks differ by (\S+)", printed)[0] > 1e-3
    assert numbers(r"they differ by (\S+)", printed) == [0]
    assert numbers(r"of the sum by (\S+)", printed)[0] < 1e-5


def test_prompts_are_dealt_and_answered_in_order(tmp_path: Path) -> None:
    cut, whole = (run(tmp_path, "distributed_inference", processes=processes) for processes in (2, 1))
    assert sorted(numbers(r"answered (\d+)", cut)) == [5, 6]
    answers = re.findall(r"(\S+): ([\d.]+) bits", cut)
    assert [name for name, _ in answers] == sorted(topics)[:11]
    assert answers == re.findall(r"(\S+): ([\d.]+) bits", whole)


def test_fsdp2_cuts_the_model_in_two_and_writes_it_whole(tmp_path: Path) -> None:
    printed = run(tmp_path, "fsdp2", "--updates", "41", "--output-dir", str(tmp_path))
    whole = numbers(r"of (\d+) parameters", printed)[0]
    assert sum(numbers(r"holds (\d+) of", printed)) == whole
    losses = numbers(r"loss ([\d.]+)", printed)
    assert losses[-1] < losses[0] - 1
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert sum(file.get_tensor(name).numel() for name in file.keys()) == whole  # noqa: SIM118


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline_parallel"])
def test_a_cut_model_trains_as_the_whole_one(tmp_path: Path, name: str) -> None:
    cut = run(tmp_path, name, "--updates", "41")
    losses = numbers(r"loss ([\d.]+)", cut)
    assert losses == pytest.approx(numbers(r"loss ([\d.]+)", run(tmp_path, name, "--updates", "41", processes=1)), 1e-3)
    assert losses[-1] < losses[0] - 1
    if name == "tensor_parallel":
        assert all(held < 0.7 * numbers(r"of (\d+) parameters", cut)[0] for held in numbers(r"holds (\d+)", cut))
    else:
        first, second = sorted(re.findall(r"has layers (.*)", cut))
        assert not set(first.split(", ")) & set(second.split(", "))


def test_every_rank_leaves_a_trace_of_the_steps_that_were_watched(tmp_path: Path) -> None:
    printed = run(tmp_path, "profiling", "--trace-dir", str(tmp_path))
    assert re.search(r"aten::addmm|aten::mm", printed)
    for rank in range(2):
        events = json.loads((tmp_path / f"profile_{rank}.json").read_text())["traceEvents"]
        assert len({event["name"] for event in events if str(event["name"]).startswith("ProfilerStep#")}) == 3


def test_a_run_that_is_told_to_stop_goes_on_later(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command("preemption", 2, "--epochs", "2000"),
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        )
    until_s = time.monotonic() + 120
    while "epoch 1:" not in (tmp_path / "log").read_text():
        assert process.poll() is None and time.monotonic() < until_s, (tmp_path / "log").read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == STOPPED_EXIT_CODE, (tmp_path / "log").read_text()
    (stopped,) = numbers(r"stopped after update (\d+)", (tmp_path / "log").read_text())
    printed = run(tmp_path, "preemption", "--epochs", str(int(stopped) // 29 + 2))  # 29 updates are an epoch
    assert numbers(r"goes on after update (\d+)", printed) == [stopped]
    assert numbers(r"finished after update (\d+)", printed) == [29 * (stopped // 29 + 2)]
