"""Where a pass stands in each shard of a data set, and which rank reads which shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def place_code(num_read: int, *, is_finished: bool = False) -> int:
    """A place in a shard as one integer, which is how ranks and workers tell each other."""
    return 2 * num_read + is_finished


def num_read(code: int) -> int:
    """Samples received of the shard."""
    return code // 2


def is_finished(code: int) -> bool:
    """Whether the last one of them ended the shard."""
    return code % 2 == 1


@dataclass(frozen=True)
class ShardPlaces:
    """A place in every shard.

    Args:
        codes: by shard, see `place_code`.
        deal: the order in which shards are dealt to ranks: rank r of n reads `deal[r::n]`.
    """

    codes: tuple[int, ...]
    deal: tuple[int, ...]

    @classmethod
    def start(cls, num_shards: int) -> ShardPlaces:
        """The start of an epoch."""
        return cls((0,) * num_shards, tuple(range(num_shards)))

    def moved_to(self, codes: tuple[int, ...]) -> ShardPlaces:
        """Other places in the shards as they are dealt."""
        return ShardPlaces(codes, self.deal)

    def dealt_as(self, other: ShardPlaces) -> ShardPlaces:
        """The same places in shards that are dealt otherwise."""
        return ShardPlaces(self.codes, other.deal)

    def state(self) -> dict[str, list[int]]:
        """Plain data; what says nothing is left out."""
        finished = [shard for shard, code in enumerate(self.codes) if is_finished(code)]
        deal = list(self.deal)
        return {
            "shard_positions": [num_read(code) for code in self.codes],
            **({"finished_shards": finished} if finished else {}),
            **({"shard_deal": deal} if deal != sorted(deal) else {}),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], num_processes: int) -> ShardPlaces | None:
        """The places in a state; None if it is not of a data set in shards.

        As many ranks go on with the shards that they had. Another number is dealt those first that are not finished.
        """
        positions = state.get("shard_positions")
        if positions is None:
            return None
        finished = set(state.get("finished_shards", ()))
        codes = tuple(place_code(int(read), is_finished=shard in finished) for shard, read in enumerate(positions))
        everyone = range(len(codes))
        if state.get("num_processes") == num_processes:
            return cls(codes, tuple(state.get("shard_deal", everyone)))
        return cls(codes, tuple(sorted(everyone, key=lambda shard: is_finished(codes[shard]))))
