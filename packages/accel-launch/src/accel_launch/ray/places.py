"""Where Ray put the ranks, and what each of them is told about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where an actor is: the node's name in Ray, its address, and the GPUs that Ray gave to this rank."""

    node: str
    address: str
    gpus: tuple[str, ...]


def by_machine(places: Sequence[Place]) -> list[int]:
    """The order in which places become ranks: machine after machine, as they first appear."""
    nodes = list(dict.fromkeys(place.node for place in places))
    return sorted(range(len(places)), key=lambda index: nodes.index(places[index].node))


def rank_variables(places: Sequence[Place], port: int) -> list[dict[str, str]]:
    """What tells each rank its place, as torchrun does; nothing where there is only one.

    All ranks of a machine see its GPUs, as they do under every other engine, and choose theirs by `LOCAL_RANK`.

    Args:
        places: by rank, machine after machine.
        port: where rank 0 will listen.
    """
    nodes = list(dict.fromkeys(place.node for place in places))
    found = []
    for rank, place in enumerate(places):
        here = [other for other in range(len(places)) if places[other].node == place.node]
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(here.index(rank)),
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "GROUP_RANK": str(nodes.index(place.node)),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(port),
        }
        gpus = [gpu for other in here for gpu in places[other].gpus]
        found.append(
            (variables if len(places) > 1 else {}) | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        )
    return found
