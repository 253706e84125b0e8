"""ClearML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .base import on_main_process
from .images import pictures
from .library import LibraryTracker
from .values import flat, mask_secrets, plain, rows_of, scalar


class ClearMLTracker(LibraryTracker):
    """Reports to a task of ClearML: the one that the script made itself, or a new one.

    Args:
        run_name: the project.
        kwargs: what `clearml.Task.init` takes besides `project_name`, for example `task_name`.
    """

    name = "clearml"
    requires_package = "clearml"
    patience_s = 0.0  # ClearML takes steps in any order
    timeout_s = 180.0  # closing a task analyses the installed packages

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._made_here = False

    def open_run(self) -> tuple[Any, str]:
        """Take the script's `clearml.Task`, or make one."""
        from clearml import Task

        task = Task.current_task()
        if task is None:
            # 0: its steps are ours, not counted on from the last one
            known = {} if self.run_id is None else {"reuse_last_task_id": self.run_id, "continue_last_task": 0}
            task = Task.init(**{"project_name": self.run_name, **known, **self._kwargs})
            self._made_here = True
        return task, task.id

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Stores the configuration with the task."""
        self.tracker.connect_configuration(mask_secrets(plain(values)))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs values by kind: numbers as scalars, or as single values without a step; anything else as a line of text.

        `train/loss` is the series `loss` of the chart `train`; a name without a slash is both. ClearML has no NaN and
        no infinity, and shows 0 for them, so they become lines of text too.

        Args:
            values: name to value, nested names joined by dots.
            step: the update that they belong to.
            kwargs: passed on to `report_scalar`, `report_single_value` or `report_text`.
        """
        logger = self.tracker.get_logger()
        for name, raw in flat(values).items():
            value = scalar(raw)
            if not isinstance(value, int | float) or not math.isfinite(value):
                moment = "" if step is None else f" at step {step}"
                text = value if isinstance(value, str) else plain(value)
                logger.report_text(f"{name}{moment}: {text}", **{"print_console": False, **kwargs})
            elif step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _chart(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, dataformats: str = "NCHW", **kwargs: Any
    ) -> None:
        """Logs pictures; ClearML keeps them as JPEG.

        Args:
            values: name to a tensor or array of pictures, or to a list of arrays or Pillow's images.
            step: the update that they belong to.
            dataformats: what the axes of a tensor or array mean.
            kwargs: passed on to `report_image`.
        """
        logger = self.tracker.get_logger()
        for name, images in values.items():
            title, series = _chart(name)
            several = pictures(images, dataformats)
            for index, picture in enumerate(several):
                numbered = series if len(several) == 1 else f"{series} {index}"
                logger.report_image(title=title, series=numbered, iteration=step, image=picture, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Logs a table.

        Args:
            table_name: `train/errors` is the series `errors` of the page `train`; a name without a slash is both.
            columns: names of the columns.
            data: rows.
            dataframe: a pandas data frame, instead of `columns` and `data`.
            step: the update that it belongs to.
            kwargs: passed on to `report_table`.
        """
        columns, data = rows_of(table_name, columns, data, dataframe)
        rows = [*([columns] if columns else []), *data]
        title, series = _chart(table_name)
        self.tracker.get_logger().report_table(title=title, series=series, iteration=step, table_plot=rows, **kwargs)

    def close_run(self, run: Any) -> None:
        """Close the task, unless the script made it itself."""
        if self._made_here:
            run.close()


def _chart(name: str) -> tuple[str, str]:
    title, slash, series = name.partition("/")
    return (title, series) if slash else (name, name)
