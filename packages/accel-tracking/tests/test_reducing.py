from __future__ import annotations

import math

import pytest

from accel_state.errors import TrackerError
from accel_tracking import TrackerSet
from accel_tracking.reducing import RULES, reduce_over_ranks


@pytest.mark.parametrize(("rule", "expected"), [("mean", 2.0), ("sum", 6.0), ("min", 1.0), ("max", 3.0)])
def test_rules(rule: str, expected: float) -> None:
    assert RULES[rule]([1.0, 2.0, 3.0]) == expected
    assert math.isnan(RULES[rule]([1.0, math.nan, 3.0]))


def test_infinities_stay_infinities() -> None:
    assert RULES["mean"]([1.0, math.inf]) == math.inf
    assert math.isnan(RULES["sum"]([math.inf, -math.inf]))


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(TrackerError, match=r"reduce='median'.*'mean', 'sum'"):
        TrackerSet("jsonl").log({"loss": 1}, reduce="median")


def _log_on_ranks(folder: str) -> list[dict[str, object]]:
    import json
    from pathlib import Path

    import torch

    from accel_state import PartialState

    rank = PartialState(cpu=True).process_index
    trackers = TrackerSet("jsonl", folder)
    trackers.init("p")
    trackers.log({"loss": torch.tensor(1.0 + rank), "text": f"rank {rank}"}, step=1, reduce="mean")
    trackers.log({"loss": 1.0 + rank}, step=2, reduce="max")
    trackers.log({"loss": 1.0 + rank}, step=3)
    trackers.finish()
    PartialState().wait_for_everyone()
    lines = [json.loads(line) for line in (Path(folder) / "p" / "metrics.jsonl").read_text().splitlines()]
    return [line["values"] for line in lines if "values" in line]


def test_the_mean_over_ranks_is_logged_once(ranks, tmp_path) -> None:
    expected = [{"loss": 1.5, "text": "rank 0"}, {"loss": 2.0}, {"loss": 1.0}]
    assert ranks(_log_on_ranks, 2, str(tmp_path)) == [expected, expected]


def _log_other_names() -> str:
    from accel_state import PartialState

    rank = PartialState(cpu=True).process_index
    try:
        reduce_over_ranks({"loss": 1.0} if rank == 0 else {"lost": 1.0}, "mean")
    except TrackerError as error:
        return str(error)
    return ""


def test_other_names_on_other_ranks_are_an_error_on_all(ranks) -> None:
    first, second = ranks(_log_other_names, 2)
    assert first == second
    assert "rank 0 has ['loss'], rank 1 has ['lost']" in first
