"""Small dataclasses that carry keyword arguments to where they are used."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from accel_state.errors import SettingError

NCCL_TIMEOUT = timedelta(minutes=10)  # torch's own default for nccl, and for everything else
OTHER_TIMEOUT = timedelta(minutes=30)


class KwargsHandler:
    """Base of the dataclasses whose fields become keyword arguments of something in torch."""

    def to_dict(self) -> dict[str, Any]:
        """All fields, as copies."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults: what torch has to be told."""
        default = type(self)().to_dict()
        return {key: value for key, value in self.to_dict().items() if default[key] != value}


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How to make the process group.

    Args:
        backend: of the accelerator; a CPU (gloo) half is always there beside it. On the CPU the default means gloo.
        init_method: a URL as of `torch.distributed.init_process_group`; the launcher's variables by default.
        timeout: of every collective, in torch's groups and in ours; by default 10 minutes on nccl and 30 elsewhere.

    Raises:
        SettingError: the time-out is not a timedelta.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = NCCL_TIMEOUT if self.backend == "nccl" else OTHER_TIMEOUT
        if not isinstance(self.timeout, timedelta):
            raise SettingError(
                f"timeout={self.timeout!r} is a {type(self.timeout).__name__}: give a datetime.timedelta, such as "
                "timedelta(minutes=30)"
            )
