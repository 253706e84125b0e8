"""A pytest plugin: where a run compared all rows of the parity table, it writes them to ``docs/parity.md``.

Tests hand their rows over as the property "parity", so that they arrive from other workers too. Loaded in every run of
the repository's tests, so it imports nothing heavy before there are rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_testkit.parity.compare import Comparison
    from accel_testkit.parity.table import Row

PROPERTY = "parity"
COMMAND = "tools/dev test integration-tests --parity -- -k a_loop_by_hand"
_HEAD = "| net | precision | accumulation | clip | optimizer | norm | bound | way | bound |\n" + "|---" * 9 + "|\n"

Line = Mapping[str, Any]
"""One row as plain values: "strategy", "cells" as the page has them, and whether it "holds"."""


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Write the page if all rows are there."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    lines = [line for report in reports for name, value in report.user_properties if name == PROPERTY for line in value]
    if not lines:
        return
    from accel_testkit.parity.table import ROWS

    if len(lines) == len(ROWS):
        path = Path(config.rootpath) / "docs" / "parity.md"
        path.write_text(page(lines))
        terminalreporter.write_line(f"parity: {len(lines)} rows written to {path.relative_to(config.rootpath)}")


def lines_of(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """Comparisons as plain values."""
    return [
        {
            "strategy": each.row.strategy,
            "cells": [
                *labels(each.row),
                "" if each.norm is None else number(each.norm),
                "" if each.norm is None else number(each.max_norm),
                number(each.way),
                number(each.max_way) + ("" if each.holds else " **missed**"),
            ],
            "holds": each.holds,
        }
        for each in comparisons
    ]


def labels(row: Row) -> list[str]:
    """The first cells of a row, which name it."""
    setting = row.setting
    return [
        row.net,
        setting.precision,
        str(setting.accumulation),
        "on" if setting.clips else "off",
        setting.optimizer,
    ]


def number(value: float) -> str:
    """ "1.3e-6"."""
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}" if value else "0"


def page(lines: Sequence[Line]) -> str:
    """The whole page, in the table's order."""
    import torch

    from accel_testkit.parity.compare import DERIVATION
    from accel_testkit.parity.table import NETS, ROWS, STRATEGIES

    by_key = {(line["strategy"], *line["cells"][:5]): line["cells"] for line in lines}
    missed = sum(not line["holds"] for line in lines)
    parts = [
        f"# Parity\n\nWritten by `{COMMAND}`; do not edit. {len(lines)} rows, {missed} missed, with torch "
        f"{torch.__version__} on CPUs and gloo.\n\nEvery strategy through `Accelerator` against a loop by hand in raw "
        "torch on one device, with the same global batch of 8: five updates, the same data, labels that end early here "
        "and there, so that ranks and micro-batches hold unequal numbers of them (`backward(loss_sum, "
        "num_items=...)`). With accumulation 3 the last window has one micro-batch.\n",
        "\n".join(f"- **{name}**: {net.text}." for name, net in NETS.items()),
        f"\n## Bounds\n\n{DERIVATION}\n",
        f"## Left out\n\n{_left_out()}\n",
    ]
    for strategy in STRATEGIES:
        keys = [(strategy, *labels(row)) for row in ROWS if row.strategy == strategy]
        rows = "\n".join(f"| {' | '.join(by_key[key])} |" for key in keys)
        parts.append(f"## {strategy}\n\n{STRATEGIES[strategy].ranks} rank(s).\n\n{_HEAD}{rows}\n")
    return "\n".join(parts)


def _left_out() -> str:
    from accel_testkit.parity.table import NETS, SETTINGS, STRATEGIES, why_no_setting, why_not

    reasons: dict[str, list[str]] = {}
    for name, strategy in STRATEGIES.items():
        for net_name, net in NETS.items():
            reason = why_not(strategy, net)
            if reason is not None and net_name != "chain":  # which stands in for the transformer, as its text says
                reasons.setdefault(f"the {net_name}: {reason}", []).append(name)
        for setting in SETTINGS:
            reason = why_no_setting(strategy, setting)
            if reason is not None:
                reasons.setdefault(reason, []).append(name)
    return "\n".join(f"- {', '.join(dict.fromkeys(names))}: {reason}." for reason, names in reasons.items())
