"""Options of the pp axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from accel_state.errors import SettingError

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 2, "zbv_zero_bubble": 2}
"""Schedules, and how many stages each rank has by default."""

_SINGLE = ("gpipe", "1f1b")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a model is cut into stages, and how micro-batches pass through them.

    Args:
        schedule: "gpipe" (Huang et al., 2019), "1f1b" (Narayanan et al., PipeDream, 2019), "interleaved_1f1b"
            (Narayanan et al., Megatron-LM, 2021), "interleaved_zero_bubble" or "zbv_zero_bubble" (Qi et al., 2024).
        num_microbatches: equal parts that a batch is cut into; one per stage by default.
        stages_per_rank: 1 for the first two schedules, exactly 2 for "zbv_zero_bubble", from 2 for the others, which
            is their default.
        layers: names of modules, with shell wildcards, through which the input passes one after the other:
            `["embedding", "blocks.*", "norm", "head"]`. Not needed for an `nn.Sequential`.
        example: positional arguments of one micro-batch, for a model that is no such chain: torch traces it and cuts
            the graph before the modules in `cuts`.
        cuts: names of the modules that begin the second and later stages of a traced model.
        make_stage: `make_stage(model, index, num_stages)` returns a stage of the model; what it keeps has to have the
            same names as in the model.

    Raises:
        SettingError: an unknown schedule, or a number that it cannot have.
    """

    schedule: str = "1f1b"
    num_microbatches: int | None = None
    stages_per_rank: int | None = None
    layers: Sequence[str] | None = None
    example: Sequence[Any] | None = None
    cuts: Sequence[str] | None = None
    make_stage: Callable[[nn.Module, int, int], nn.Module] | None = None

    def __post_init__(self) -> None:
        if self.schedule not in STAGES_PER_RANK:
            raise SettingError(f"schedule={self.schedule!r} does not exist: use one of {', '.join(STAGES_PER_RANK)}")
        if self.num_microbatches is not None and self.num_microbatches < 1:
            raise SettingError(f"num_microbatches={self.num_microbatches} has to be at least 1")
        if self.stages_per_rank is None:
            object.__setattr__(self, "stages_per_rank", STAGES_PER_RANK[self.schedule])
        assert self.stages_per_rank is not None
        if self.schedule in _SINGLE:
            is_allowed, wanted = self.stages_per_rank == 1, "1"
        elif self.schedule == "zbv_zero_bubble":
            is_allowed, wanted = self.stages_per_rank == 2, "2"
        else:
            is_allowed, wanted = self.stages_per_rank >= 2, "2 or more"
        if not is_allowed:
            raise SettingError(
                f"stages_per_rank={self.stages_per_rank} does not fit schedule={self.schedule!r}, which has {wanted}"
            )
        if (self.example is None) != (self.cuts is None):
            raise SettingError("a traced model needs both `example` and `cuts`: give the other one too")
        if sum(way is not None for way in (self.layers, self.example, self.make_stage)) > 1:
            raise SettingError("layers, example with cuts, and make_stage each say how to cut: give one of them")

    def num_stages(self, num_ranks: int) -> int:
        """Stages on all ranks of a pipeline."""
        assert self.stages_per_rank is not None
        return num_ranks * self.stages_per_rank

    def stages_of(self, rank: int, num_ranks: int) -> list[int]:
        """The stages that a rank has, in ascending order: in a V for "zbv_zero_bubble", else every `num_ranks`-th."""
        count = self.num_stages(num_ranks)
        return [rank, count - 1 - rank] if self.schedule == "zbv_zero_bubble" else list(range(rank, count, num_ranks))
