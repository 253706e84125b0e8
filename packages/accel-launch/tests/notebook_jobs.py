"""What the ranks of `test_notebook.py` run; a module of its own, so that spawned ranks can import it."""

import os
from pathlib import Path


def note(folder: str) -> None:
    """Leave this rank's number and what it was told."""
    words = (os.environ["WORLD_SIZE"], os.environ["ACCEL_MIXED_PRECISION"], os.environ.get("ACCEL_USE_CPU", ""))
    Path(folder, os.environ["RANK"]).write_text(" ".join(words))


def fail(folder: str | None = None) -> None:
    """Fail; with a folder, leave a note, and fail at the first attempt only."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if folder is not None:
        Path(folder, f"{os.environ['RANK']}-{attempt}").touch()
    if attempt == "0":
        raise RuntimeError("the real cause")
