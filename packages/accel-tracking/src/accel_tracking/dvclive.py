"""DVCLive, which writes files for DVC and Git."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import on_main_process
from .images import pictures, pillow
from .library import LibraryTracker
from .values import mask_secrets, plain, scalar


class DVCLiveTracker(LibraryTracker):
    """Writes by `dvclive.Live`: metrics as tables, parameters as YAML, pictures as files.

    A run is its folder: one that a checkpoint names goes on there (`resume=True`).

    Args:
        run_name: not used, DVC names experiments itself; here because every tracker is made with it.
        live: a `Live` of your own, instead of one that is made.
        kwargs: what `dvclive.Live` takes, for example `dir="results"`.
    """

    name = "dvclive"
    requires_package = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._run = live

    def open_run(self) -> tuple[Any, str]:
        """Make the `dvclive.Live`, unless one was given."""
        live = self._run
        if live is None:
            from dvclive import Live

            known = {} if self.run_id is None else {"dir": self.run_id, "resume": True}
            live = Live(**{**known, **self._kwargs})
        return live, live.dir

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Writes the configuration to `params.yaml`."""
        self.tracker.log_params(mask_secrets(plain(values)))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs values and ends the step, so that `metrics.json` has them.

        Args:
            values: name to number or text; what is neither is written as text. A mapping's names are joined by `/`.
            step: the update that they belong to; None counts on from the last.
            kwargs: passed on to `Live.log_metric`.
        """
        live = self.tracker
        if step is not None:
            live.step = step
        for name, raw in values.items():
            parts = (
                {name: raw} if not isinstance(raw, Mapping) else {f"{name}/{key}": item for key, item in raw.items()}
            )
            for full_name, item in parts.items():
                value = scalar(item)
                known = isinstance(value, int | float | str)
                live.log_metric(full_name, value if known else str(plain(value)), **kwargs)
        live.next_step()

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, dataformats: str = "NCHW") -> None:
        """Writes pictures to `plots/images/<step>`.

        Args:
            values: name to a tensor or array of pictures, or to a list of what `Live.log_image` takes.
            step: the update that they belong to; None means the current one.
            dataformats: what the axes of a tensor or array mean.
        """
        live = self.tracker
        folder = live.step if step is None else step
        for name, images in values.items():
            for index, picture in enumerate(pictures(images, dataformats)):
                live.log_image(f"{folder}/{name}-{index}.png", pillow(picture))

    def close_run(self, run: Any) -> None:
        """Write the summary and end the experiment."""
        run.end()
