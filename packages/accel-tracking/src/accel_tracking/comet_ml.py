"""Comet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .base import on_main_process
from .images import pictures, pillow
from .library import LibraryTracker
from .values import mask_secrets, plain, rows_of, scalar


class CometMLTracker(LibraryTracker):
    """Reports to an experiment of Comet; `online=False` in `kwargs` writes an archive for `comet upload`.

    Args:
        run_name: the project.
        kwargs: what `comet_ml.start` takes besides `project_name`.
    """

    name = "comet_ml"
    requires_package = "comet_ml"
    patience_s = 0.0  # comet takes steps in any order
    timeout_s = 120.0  # what its end takes at most, by its own word

    def open_run(self) -> tuple[Any, str]:
        """Initialise the `experiment`."""
        import comet_ml

        known = {} if self.run_id is None else {"experiment_key": self.run_id, "mode": "get_or_create"}
        experiment = comet_ml.start(**{"project_name": self.run_name, **known, **self._kwargs})
        return experiment, experiment.get_key()

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Logs the configuration as parameters."""
        self.tracker.log_parameters(mask_secrets(plain(values)))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs values by kind: numbers and mappings of numbers as metrics, anything else as text under "Other".

        Args:
            values: name to value.
            step: the update that they belong to.
            kwargs: passed on to `log_metric`, `log_metrics` or `log_other`.
        """
        experiment = self.tracker
        if step is not None:
            experiment.set_step(step)
        for name, raw in values.items():
            value = scalar(raw)
            if isinstance(value, int | float):
                experiment.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, Mapping):
                numbers = {key: scalar(item) for key, item in value.items()}
                experiment.log_metrics(numbers, prefix=name, step=step, **kwargs)
            else:
                experiment.log_other(name, value if isinstance(value, str) else plain(value), **kwargs)

    @on_main_process
    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, dataformats: str = "NCHW", **kwargs: Any
    ) -> None:
        """Logs pictures.

        Args:
            values: name to a tensor or array of pictures, or to a list of what `log_image` takes.
            step: the update that they belong to.
            dataformats: what the axes of a tensor or array mean.
            kwargs: passed on to `log_image`.
        """
        for name, images in values.items():
            for picture in pictures(images, dataformats):
                self.tracker.log_image(pillow(picture), name=name, step=step, **kwargs)

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
        """Logs a table as a file `<table_name>.csv`.

        Args:
            table_name: what it is called.
            columns: names of the columns.
            data: rows.
            dataframe: a pandas data frame, instead of `columns` and `data`.
            step: the update that it belongs to.
            kwargs: passed on to `log_table`.
        """
        if step is not None:
            self.tracker.set_step(step)
        columns, data = rows_of(table_name, columns, data, dataframe)
        self.tracker.log_table(f"{table_name}.csv", data, headers=columns or False, **kwargs)

    def close_run(self, run: Any) -> None:
        """End the experiment."""
        run.end()
