"""Trackio, which writes to a database on this machine, or to a Space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import on_main_process
from .images import pictures
from .library import LibraryTracker
from .values import mask_secrets, plain, scalar


class TrackioTracker(LibraryTracker):
    """Reports to a run of `trackio`; the folder is `TRACKIO_DIR`'s.

    A run goes on by its name, which is what a checkpoint keeps.

    Args:
        run_name: the project.
        kwargs: what `trackio.init` takes besides `project`.
    """

    name = "trackio"
    requires_package = "trackio"

    def open_run(self) -> tuple[Any, str]:
        """Initialise the `trackio.Run`."""
        import trackio

        known = {} if self.run_id is None else {"name": self.run_id, "resume": "allow"}
        run = trackio.init(**{"project": self.run_name, **known, **self._kwargs})
        return run, run.name

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Adds to the run's config, which trackio writes with the first values."""
        self.tracker.config.update(mask_secrets(plain(values)))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs values.

        Args:
            values: name to number, text, or anything else that `trackio` logs.
            step: the update that they belong to.
            kwargs: passed on to `Run.log`.
        """
        self.tracker.log({name: scalar(value) for name, value in values.items()}, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, dataformats: str = "NCHW", **kwargs: Any
    ) -> None:
        """Logs pictures; of several under one name, each gets its number: `name/0`, `name/1`.

        Args:
            values: name to a tensor or array of pictures, or to a list of what `trackio.Image` takes.
            step: the update that they belong to.
            dataformats: what the axes of a tensor or array mean.
            kwargs: passed on to `trackio.Image`, for example `caption="..."`.
        """
        import trackio

        shown = {}
        for name, images in values.items():
            several = pictures(images, dataformats)
            for index, picture in enumerate(several):
                shown[name if len(several) == 1 else f"{name}/{index}"] = trackio.Image(picture, **kwargs)
        self.tracker.log(shown, step=step)
