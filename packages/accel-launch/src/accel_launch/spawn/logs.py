"""A file of its own for what each rank prints."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from accel_state.errors import LaunchError

STREAMS = ("stdout", "stderr")


class Log:
    """One stream of one rank in a file; a full disk ends the file, not the run.

    Args:
        path: appended to, so that a restarted rank goes on in it.

    Raises:
        LaunchError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LaunchError(f"--log-dir: {str(path)!r} cannot be written: {error.strerror}") from None

    def write(self, data: bytes) -> None:
        """Append."""
        try:
            while data and self._fd >= 0:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            print(f"accel launch: {self._path} ends here: {error.strerror}", file=sys.stderr)
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def read_tee(text: str, local_world_size: int) -> list[tuple[bool, bool]]:
    """For each local rank, whether its stdout and its stderr get a file.

    Args:
        text: `1` stdout, `2` stderr, `0` or `3` both, for all ranks or, `0:1,1:3`, for some.
        local_world_size: how many ranks there are.

    Raises:
        LaunchError: not of this form, or a rank that does not exist.
    """
    kinds = {"0": (True, True), "1": (True, False), "2": (False, True), "3": (True, True)}
    if text in kinds:
        return [kinds[text]] * local_world_size
    found = [(False, False)] * local_world_size
    for part in text.split(","):
        rank, _, kind = part.strip().partition(":")
        if not rank.isdecimal() or int(rank) >= local_world_size or kind not in kinds:
            raise LaunchError(
                f"--tee {text}: {part!r} is not allowed; give 1 (stdout), 2 (stderr) or 3 (both), or RANK:KIND with "
                f"local ranks 0 to {local_world_size - 1}"
            )
        found[int(rank)] = kinds[kind]
    return found


def open_logs(folder: str | None, tee: str, first_rank: int, local_world_size: int) -> list[list[Log | None]]:
    """The files of each rank's stdout and stderr, `FOLDER/RANK/stdout.log`; None where there is none.

    Raises:
        LaunchError: a file cannot be made, or `tee` cannot be read.
    """
    if folder is None:
        return [[None, None]] * local_world_size
    wanted = read_tee(tee, local_world_size)
    return [
        [
            Log(Path(folder) / str(first_rank + index) / f"{name}.log") if is_wanted else None
            for name, is_wanted in zip(STREAMS, kinds, strict=True)
        ]
        for index, kinds in enumerate(wanted)
    ]
