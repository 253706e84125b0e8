"""TensorBoard, by torch's own writer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.errors import TrackerError

from .base import GeneralTracker, is_main_process
from .images import write_atomically
from .values import flat, mask_secrets, plain, scalar

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

CONFIG_FILE = "hparams.yml"


class TensorBoardTracker(GeneralTracker):
    """Writes event files to `<logging_dir>/<run_name>`.

    A run is its folder: a run that starts again there is continued, in a further event file.

    Args:
        run_name: the project's name, a folder in `logging_dir`.
        logging_dir: where it lies.
        kwargs: what torch's `SummaryWriter` takes besides `log_dir`, for example `flush_secs=10` or `purge_step=120`.
    """

    name = "tensorboard"
    requires_logging_directory = True
    requires_package = "tensorboard"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.directory = Path(logging_dir) / run_name
        self._kwargs = kwargs
        self._writer: SummaryWriter | None = None

    @property
    def tracker(self) -> SummaryWriter:
        """torch's `SummaryWriter`."""
        if self._writer is None:
            raise TrackerError(f"TensorBoard's writer for {self.directory} is not open: call start() first")
        return self._writer

    def start(self) -> None:
        """Opens the event file."""
        if self.main_process_only and not is_main_process():
            return
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(self.directory), **self._kwargs)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Stores the configuration for the HPARAMS page, nested names joined by dots, and as a file.

        The page takes numbers, text and booleans; anything else is shown as text. `hparams.yml` beside the event file
        keeps the nesting; it is JSON, which is YAML too. Credentials are masked in both.
        """
        if self._is_absent():
            return
        from torch.utils.tensorboard.summary import hparams

        config = mask_secrets(plain(values))
        shown = {
            key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in flat(config).items()
        }
        # into the run's own event file: `add_hparams` would open a second run beside it
        event_file: Any = self.tracker.file_writer
        for summary in hparams(shown, {}):
            event_file.add_summary(summary)
        event_file.flush()
        write_atomically(self.directory / CONFIG_FILE, json.dumps(config, indent=2).encode())

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs values by kind: numbers as scalars, text as text, mappings of numbers as one chart of several lines.

        Args:
            values: name to value; tensors and arrays of one element count as numbers.
            step: the update that they belong to.
            kwargs: passed on to `SummaryWriter.add_scalar`, `add_text` or `add_scalars`.

        Raises:
            TrackerError: a value is of none of these kinds; the others are logged.
        """
        if self._is_absent():
            return
        writer = self.tracker
        unfit = {}
        for name, raw in values.items():
            value = scalar(raw)
            if isinstance(value, bool | int | float):
                writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                writer.add_scalars(name, {k: scalar(v) for k, v in value.items()}, global_step=step, **kwargs)
            else:
                unfit[name] = type(value).__name__
        if unfit:
            raise TrackerError(
                f"TensorBoard cannot show {unfit} (name: type): log numbers, text, mappings of numbers, tensors of one "
                "element; for the rest use the writer itself, `get_tracker('tensorboard', unwrap=True)`"
            )

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs images.

        Args:
            values: name to a tensor or array of images.
            step: the update that they belong to.
            kwargs: passed on to `SummaryWriter.add_images`, for example `dataformats="NHWC"` (`"NCHW"` by default).
        """
        if self._is_absent():
            return
        for name, images in values.items():
            self.tracker.add_images(name, images, global_step=step, **kwargs)

    def finish(self) -> None:
        """Writes what is queued and closes the event files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _is_absent(self) -> bool:
        return self._writer is None and self.main_process_only and not is_main_process()
