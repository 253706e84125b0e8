"""A checkpoint of any strategy goes on on any other: equal bit for bit, and the run as if nothing had happened.

A sample in the core tier, all of `CROSSINGS` by --faults. docs/reliability.md shows them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from accel_ckpt import verify_checkpoint
from accel_state.testing import ranks  # noqa: F401  a fixture

sys.path.insert(0, str(Path(__file__).parent))
from reshard import WAYS, run

CROSSINGS = [
    ("fsdp2", "ddp"),
    ("pp", "single"),
    ("pp", "pp+fsdp2"),
    ("single", "pp interleaved"),
    ("fsdp1", "pp"),
    ("ddp", "fsdp2"),
    ("fsdp2", "fsdp2 on 4"),
    ("fsdp2 on 4", "single"),
    ("hsdp", "fsdp2"),
    ("fsdp2+tp", "single"),
    ("tp", "pp"),
    ("single", "pp"),
    ("pp", "pp on 4"),
    ("pp interleaved", "fsdp2"),
    ("pp in a V", "pp interleaved"),
    ("pp traced", "ddp"),
    ("fsdp2+tp", "pp traced"),
    ("pp+ddp", "pp in a V"),
    ("pp+fsdp2", "tp"),
    ("fsdp2+tp", "pp+ddp"),
    ("fsdp1 flat", "single"),
    ("fsdp2", "fsdp1 flat"),
    ("fsdp1 flat", "fsdp1"),
    ("pp", "fsdp1"),
]
FULL = "ACCEL_TEST_FAULTS" in os.environ
UPDATES = 3


def together(results: list) -> tuple[dict, list[float], list[float]]:
    """What all ranks have, each thing once and alike where several have it; losses as means over the ranks."""
    contents: dict = {}
    for found, _, rates in results:
        assert rates == results[0][2]
        for name, value in found.items():
            assert torch.equal(contents.setdefault(name, value), value), name
    per_update = zip(*(losses for _, losses, _ in results), strict=True)
    means = [sum(there) / len(there) for row in per_update if (there := [loss for loss in row if loss is not None])]
    return contents, means, results[0][2]


@pytest.mark.parametrize(("before", "after"), CROSSINGS if FULL else CROSSINGS[:5])
def test_any_strategy_goes_on_from_any_other(tmp_path, ranks, before, after):  # noqa: F811
    """Weights, buffers and AdamW's state bit for bit; losses within 1e-5, for sums are added in another order."""
    options = {"tied": "pp in a V" not in (before, after), "updates": UPDATES}
    saved = ranks(run, WAYS[before].ranks, WAYS[before], tmp_path / "c", save=True, **options)
    loaded = ranks(run, WAYS[after].ranks, WAYS[after], tmp_path / "c", save=False, **options)
    want, want_losses, want_rates = together(saved)
    contents, losses, rates = together(loaded)
    assert contents.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(contents[name], value), name
    assert len(losses) == UPDATES
    assert losses == pytest.approx(want_losses, rel=1e-5)
    assert rates == want_rates
    manifest = verify_checkpoint(tmp_path / "c")
    model = manifest.objects["Sequential-0"]
    assert model.aliases == ({"2.norm2.weight": "2.norm1.weight"} if options["tied"] else {})
    assert f"weight {next(reversed(model.tensors))}" in want
