"""The names of the trackers, as an enumeration."""

from __future__ import annotations

from enum import EnumMeta, StrEnum


class _ContainsNames(EnumMeta):
    """Makes `"wandb" in LoggerType` work on every Python: before 3.12 a plain string raises TypeError there."""

    def __contains__(cls, member: object) -> bool:
        try:
            cls(member)
        except ValueError:
            return False
        return True


class LoggerType(StrEnum, metaclass=_ContainsNames):
    """A tracker's name. A member equals its string, so `"jsonl"` and `LoggerType.JSONL` are interchangeable."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    JSONL = "jsonl"

    @classmethod
    def list(cls) -> list[str]:
        """Every name, as plain strings."""
        return [member.value for member in cls]
