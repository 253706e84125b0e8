"""Aim, which writes to a repository on this machine or a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .base import on_main_process
from .images import pictures, pillow
from .library import LibraryTracker
from .values import mask_secrets, plain, scalar


class AimTracker(LibraryTracker):
    """Reports to an `aim.Run` in the repository at `logging_dir`.

    Args:
        run_name: the run's name, as shown.
        logging_dir: where the repository lies; `.` by default.
        kwargs: what `aim.Run` takes besides `repo`.
    """

    name = "aim"
    requires_logging_directory = True
    requires_package = "aim"
    patience_s = 0.0  # aim takes steps in any order
    timeout_s = 180.0  # the first run of a repository makes its databases

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = logging_dir

    def open_run(self) -> tuple[Any, str]:
        """Make the `aim.Run`, and the repository's folder."""
        from aim import Run

        repo = None if self.logging_dir is None else os.fspath(self.logging_dir)
        if repo is not None and "://" not in repo:
            os.makedirs(repo, exist_ok=True)  # noqa: PTH103  may be a server's address
        run = Run(**{"repo": repo, "run_hash": self.run_id, **self._kwargs})
        run.name = self.run_name
        return run, run.hash

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Sets the run's `hparams`."""
        self.tracker["hparams"] = mask_secrets(plain(values))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Tracks values.

        Args:
            values: name to number, text, or anything else that `aim` tracks.
            step: the update that they belong to.
            kwargs: passed on to `Run.track`, for example `context={"subset": "val"}`.
        """
        import aim

        for name, raw in values.items():
            value = scalar(raw)
            self.tracker.track(aim.Text(value) if isinstance(value, str) else value, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        kwargs: dict[str, dict[str, Any]] | None = None,
        dataformats: str = "NCHW",
    ) -> None:
        """Tracks pictures.

        Args:
            values: name to a tensor or array of pictures, or to a list of what `aim.Image` takes; a pair `(picture,
                caption)` has a caption.
            step: the update that they belong to.
            kwargs: `{"aim_image": {...}, "track": {...}}`, passed on to `aim.Image` and `Run.track`.
            dataformats: what the axes of a tensor or array mean.
        """
        import aim

        options = kwargs or {}
        for name, images in values.items():
            captioned = isinstance(images, tuple) and len(images) == 2 and isinstance(images[1], str)
            of_image = {**options.get("aim_image", {}), **({"caption": images[1]} if captioned else {})}
            shown = [
                aim.Image(pillow(picture), **of_image)
                for picture in ([images[0]] if captioned else pictures(images, dataformats))
            ]
            value = shown[0] if len(shown) == 1 else shown
            self.tracker.track(value, name=name, step=step, **options.get("track", {}))

    def close_run(self, run: Any) -> None:
        """Close it."""
        run.close()
