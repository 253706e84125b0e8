"""SwanLab."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import on_main_process
from .images import pictures, pillow
from .library import LibraryTracker
from .values import flat, mask_secrets, plain, scalar


class SwanLabTracker(LibraryTracker):
    """Reports to a run of `swanlab`; `mode="offline"` in `kwargs` or `SWANLAB_MODE` writes it for `swanlab sync`.

    A run goes on by its id: with one of a checkpoint it is initialised as `resume="allow"`.

    Args:
        run_name: the project.
        kwargs: what `swanlab.init` takes besides `project`.
    """

    name = "swanlab"
    requires_package = "swanlab"

    def open_run(self) -> tuple[Any, str]:
        """Initialise the `run of swanlab`."""
        import swanlab

        known = {} if self.run_id is None else {"id": self.run_id, "resume": "allow"}
        run = swanlab.init(**{"project": self.run_name, **known, **self._kwargs})
        return run, run.id

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Adds to the run's config."""
        self.tracker.config.update(mask_secrets(plain(values)))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs values.

        Args:
            values: name to number, text, or anything else that `swanlab` logs; a mapping's names are joined by dots.
            step: the update that they belong to.
            kwargs: passed on to the run's `log`.
        """
        import swanlab

        shown = {name: scalar(value) for name, value in flat(values).items()}
        self.tracker.log(
            {name: swanlab.Text(value) if isinstance(value, str) else value for name, value in shown.items()},
            step=step,
            **kwargs,
        )

    @on_main_process
    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, dataformats: str = "NCHW", **kwargs: Any
    ) -> None:
        """Logs pictures.

        Args:
            values: name to a tensor or array of pictures, or to a list of what `swanlab.Image` takes.
            step: the update that they belong to.
            dataformats: what the axes of a tensor or array mean.
            kwargs: passed on to `swanlab.Image`, for example `caption="..."`.
        """
        import swanlab

        self.tracker.log(
            {
                name: [swanlab.Image(pillow(picture), **kwargs) for picture in pictures(images, dataformats)]
                for name, images in values.items()
            },
            step=step,
        )
