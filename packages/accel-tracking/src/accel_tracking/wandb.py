"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .base import on_main_process
from .images import pictures
from .library import LibraryTracker
from .values import mask_secrets, plain, rows_of, scalar


class WandBTracker(LibraryTracker):
    """Reports to a run of `wandb`; `WANDB_MODE=offline` writes it to `wandb/` for `wandb sync`.

    A run goes on by its id: with one of a checkpoint it is initialised as `resume="allow"`.

    Args:
        run_name: the project.
        kwargs: what `wandb.init` takes besides `project`.
    """

    name = "wandb"
    requires_package = "wandb"
    timeout_s = 120.0  # `wandb.init` gives up after 90 s by itself

    def open_run(self) -> tuple[Any, str]:
        """Initialise the `wandb.Run`."""
        import wandb

        known = {} if self.run_id is None else {"id": self.run_id, "resume": "allow"}
        run = wandb.init(**{"project": self.run_name, **known, **self._kwargs})
        return run, run.id

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Sets the run's config; a run that goes on may change it."""
        self.tracker.config.update(mask_secrets(plain(values)), allow_val_change=True)

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs values.

        Args:
            values: name to anything that `wandb` logs; tensors and arrays of one element count as numbers.
            step: the update that they belong to; `wandb` drops steps below one that it has seen.
            kwargs: passed on to `Run.log`.
        """
        self.tracker.log({name: scalar(value) for name, value in values.items()}, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, dataformats: str = "NCHW", **kwargs: Any
    ) -> None:
        """Logs pictures.

        Args:
            values: name to a tensor or array of pictures, or to a list of what `wandb.Image` takes.
            step: the update that they belong to.
            dataformats: what the axes of a tensor or array mean.
            kwargs: passed on to `wandb.Image`, for example `caption="..."`.
        """
        import wandb

        self.tracker.log(
            {
                name: [wandb.Image(picture, **kwargs) for picture in pictures(images, dataformats)]
                for name, images in values.items()
            },
            step=step,
        )

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
            table_name: what it is called.
            columns: names of the columns.
            data: rows.
            dataframe: a pandas data frame, instead of `columns` and `data`.
            step: the update that it belongs to.
            kwargs: passed on to `Run.log`.
        """
        import wandb

        columns, data = rows_of(table_name, columns, data, dataframe)
        self.tracker.log({table_name: wandb.Table(columns=columns, data=data)}, step=step, **kwargs)
