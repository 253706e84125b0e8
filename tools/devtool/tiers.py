"""The tiers of tests beyond the core one: each is a flag of ``tools/dev test`` and, but for one, a pytest marker."""

from __future__ import annotations

from typing import NamedTuple


class Tier(NamedTuple):
    """A group of tests that only runs when asked for, because it takes long or needs more installed."""

    name: str
    text: str
    is_marker: bool = True


TIERS = {
    tier.name: tier
    for tier in (
        Tier(name="parity", text="the same loops in raw torch, bit by bit"),
        Tier(name="faults", text="kill -9, full disks, hostile files, unequal ranks"),
        Tier(name="isolated", text="each wheel with only what it declares (tools/dev isolated)", is_marker=False),
        Tier(name="clients", text="the libraries that build on the peer, on top of this one"),
        Tier(name="engines", text="trackers and engines with their real libraries"),
        Tier(name="xla", text="torch_xla"),
        Tier(name="gpu", text="one NVIDIA GPU: copies, streams, precision, generators, saving from its memory"),
        Tier(name="cluster", text="several nodes: elastic agents, MPI, Slurm, Ray"),
    )
}
MARKERS = [tier.name for tier in TIERS.values() if tier.is_marker]


ELSEWHERE = ["engines"]
"""Tiers whose tests run in an environment of their own, apart from the others."""


def marker_expression(chosen: list[str]) -> str:
    """What to give to ``pytest -m``: the core tier and the chosen ones."""
    left_out = [name for name in MARKERS if name not in chosen or name in ELSEWHERE]
    return f"not ({' or '.join(left_out)})" if left_out else ""
