"""Every strategy equals a loop by hand in raw torch on one device: the rows of docs/parity.md.

Each test starts ranks once and trains all its rows in them; the core tier every tenth row of the table.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_testkit.parity.compare import run
from accel_testkit.parity.page import PROPERTY, labels, lines_of
from accel_testkit.parity.table import ROWS, SAMPLE

CHOSEN = ROWS if "ACCEL_TEST_PARITY" in os.environ else SAMPLE
PAGE = Path(__file__).parents[2] / "docs" / "parity.md"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("strategy", "net"), dict.fromkeys((row.strategy, row.net) for row in CHOSEN))
def test_it_equals_a_loop_by_hand(strategy, net, record_property):
    comparisons = run(strategy, net, [row for row in CHOSEN if (row.strategy, row.net) == (strategy, net)])
    record_property(PROPERTY, lines_of(comparisons))
    missed = [each for each in comparisons if not each.holds]
    assert not missed, "\n".join(map(str, missed))


def test_the_page_has_the_rows_of_the_table():
    found, strategy = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            strategy = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| net "):
            found.append((strategy, *(cell.strip() for cell in line.strip("|").split("|")[:5])))
    assert found == [(row.strategy, *labels(row)) for row in ROWS]
