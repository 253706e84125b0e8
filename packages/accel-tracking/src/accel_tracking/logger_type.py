"""The names of the trackers, as an enumeration."""

from __future__ import annotations

from enum import StrEnum


class LoggerType(StrEnum):
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
