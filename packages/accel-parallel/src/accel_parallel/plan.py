"""An ordered tuple of steps that turn a model into one that runs on many devices, checked as a whole beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn

from accel_state.errors import PlanError

SLOTS = (
    "pp",
    "placement",
    "fp8",
    "tp",
    "cp",
    "sp",
    "activation_checkpointing",
    "compile_blocks",
    "data_parallel",
    "compile",
    "autocast",
)
"""The places of a plan, in the order in which they have to come. At most one step takes each.

A pipeline is cut first, because the other steps work on what is left of the model. Layers are converted and sharded
before they are checkpointed, checkpointed before they are compiled, and compiled before FSDP or DDP hook into them. The
whole model is compiled after that, and autocast surrounds everything.
"""


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """Where a plan is applied.

    Args:
        device: of this rank.
        world_size: number of ranks.
        mesh: the named device mesh, for the steps that need one.
        process_group: of the data-parallel ranks; None means torch's default group.
    """

    device: torch.device
    world_size: int = 1
    mesh: Any = None
    process_group: Any = None


class Step(Protocol):
    """One change to a model. Satisfied by shape: nothing has to be inherited or registered.

    Attributes:
        name: what users read.
        slot: one of `SLOTS`, which decides the order.
        needs: facts that an earlier step must give, such as "placed".
        gives: facts that hold afterwards.
    """

    @property
    def name(self) -> str: ...
    @property
    def slot(self) -> str: ...
    @property
    def needs(self) -> frozenset[str]: ...
    @property
    def gives(self) -> frozenset[str]: ...

    def check(self, model: nn.Module, context: PlanContext, /) -> list[str]:
        """Reasons why it would not work on this model here; must not change anything."""
        ...

    def apply(self, model: nn.Module, context: PlanContext, /) -> nn.Module:
        """Change the model, or wrap it, and return it. Doing so twice is the same as once."""
        ...

    def describe(self, model: nn.Module | None, context: PlanContext, /) -> str:
        """One line: what it does here, and what it costs."""
        ...


class Plan:
    """Steps in order.

    Args:
        steps: any objects of the shape `Step`.

    Raises:
        PlanError: the steps do not fit together; all complaints at once.
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        self.steps: tuple[Step, ...] = tuple(steps)
        self.validate()

    def validate(self, model: nn.Module | None = None, context: PlanContext | None = None) -> None:
        """Check order, needs and duplicates, and with a model and a context also each step's own conditions.

        Raises:
            PlanError: lists everything that is wrong. The model was not touched.
        """
        complaints = _structural_complaints(self.steps)
        if not complaints and model is not None and context is not None:
            complaints = [
                f"{step.name}: {reason}"
                for step in self.steps
                for part in _parts_for(step, self.steps, model)
                for reason in step.check(part, context)
            ]
        if complaints:
            raise PlanError("this plan cannot work:\n" + "\n".join(f"- {complaint}" for complaint in complaints))

    def apply(self, model: nn.Module, context: PlanContext) -> nn.Module:
        """Validate for this model, then run the steps.

        Returns:
            The model to train with: the one passed, or a wrapper around it.

        Raises:
            PlanError: before anything was changed.

        Cost: what the steps do; see `explain`.
        """
        self.validate(model, context)
        for step in self.steps:
            if is_pipelined(model) and step.slot != "pp":  # each of this rank's stages is a model of its own
                stages = cast(nn.ModuleList, model.stages)
                for index, stage in enumerate(stages):
                    stages[index] = step.apply(stage, context)
            else:
                model = step.apply(model, context)
            if step.slot == "pp":
                self.validate(model, context)  # the other steps, on the stages; the model itself is as it was
        return model

    def explain(self, model: nn.Module | None = None, context: PlanContext | None = None) -> str:
        """What each step will do, one line each; with a model also sizes."""
        context = context or PlanContext(device=torch.device("cpu"))
        if not self.steps:
            return "no steps: the model stays as it is"
        rows = [
            (f"{index}.", step.name, step.slot, step.describe(model, context))
            for index, step in enumerate(self.steps, 1)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        head = f"on {context.device}, {context.world_size} rank{'s' if context.world_size > 1 else ''}:"
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
        ]
        return "\n".join([head, *lines])

    def __repr__(self) -> str:
        return f"Plan([{', '.join(step.name for step in self.steps)}])"


def is_pipelined(model: nn.Module) -> bool:
    """Whether a rank holds only stages of the model. Does not import pipelines."""
    return hasattr(model, "stage_indices")


def _parts_for(step: Step, steps: Sequence[Step], model: nn.Module) -> Sequence[nn.Module]:
    """What a step will work on: the model, or this rank's stages, of which nothing is known before they are cut."""
    if step.slot == "pp":
        return (model,)
    if is_pipelined(model):
        return tuple(cast(nn.ModuleList, model.stages))
    return () if any(other.slot == "pp" for other in steps) else (model,)


def _structural_complaints(steps: Sequence[Step]) -> list[str]:
    complaints = []
    taken: dict[str, str] = {}
    given: set[str] = set()
    last = -1
    for step in steps:
        if step.slot not in SLOTS:
            complaints.append(f"{step.name} wants the unknown slot {step.slot!r}: use one of {list(SLOTS)}.")
            continue
        place = SLOTS.index(step.slot)
        if step.slot in taken:
            complaints.append(f"{step.name} and {taken[step.slot]} both take the slot {step.slot!r}: leave one out.")
        elif place < last:
            complaints.append(
                f"{step.name} comes after {_latest(taken)}, but its slot {step.slot!r} is before {SLOTS[last]!r}: "
                "move it forward."
            )
        missing = sorted(step.needs - given)
        if missing:
            givers = [other.name for other in steps if set(missing) & other.gives]
            hint = f"move {' and '.join(givers)} before it." if givers else _suggestion(missing)
            complaints.append(f"{step.name} needs {', '.join(missing)}, which no earlier step gives: {hint}")
        taken.setdefault(step.slot, step.name)
        given |= step.gives
        last = max(last, place)
    return complaints


def _latest(taken: dict[str, str]) -> str:
    return taken[max(taken, key=SLOTS.index)]


def _suggestion(missing: list[str]) -> str:
    return "add single() at the start." if missing == ["placed"] else "add the step that does."
