"""The tracker that needs nothing: one line of JSON per call, appended to a file.

The file is `<logging_dir>/<run_name>/metrics.jsonl`. Each line is an object with `time` (seconds since 1970) and one
of these keys, which says what the line is:

    {"time": …, "run": "4f0c…", "project": "digits"}           a process began to report to this run
    {"time": …, "config": {"lr": 0.1}}                         the configuration, credentials masked
    {"time": …, "step": 7, "values": {"loss": 0.5}}            one call of `log`
    {"time": …, "step": 7, "images": {"wrong": ["images/…"]}}  PNG files, relative to the file's folder
    {"time": …, "step": 7, "table": "errors", "columns": […], "rows": [[…], …]}
    {"time": …, "torn": "{\\"time\\": 17"}                       what a machine that lost power left of a line

Lines are only ever appended, so a run that starts again from a checkpoint repeats the steps after it: of two lines
with the same step the later one counts.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from accel_state.errors import TrackerError

from .base import GeneralTracker, is_main_process
from .images import encode_png, split_images, write_atomically
from .values import mask_secrets, plain, rows_of

FILE_NAME = "metrics.jsonl"

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

# floats outside JSON make it raise, and so take the slow path through `plain`
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=plain).encode


class JsonlTracker(GeneralTracker):
    """Appends everything that is logged to `metrics.jsonl`; the module's docstring lists the kinds of lines.

    A line is handed to the operating system before `log` returns, so a process that is killed loses nothing that it
    logged; `finish` also waits for the disk. While the disk is full or gone, lines wait in memory, `log` raises, and
    each later call tries again. `log` of 20 numbers costs under 30 µs.

    Args:
        run_name: the project's name, a folder in `logging_dir`.
        logging_dir: where it lies; made when missing.
    """

    name = "jsonl"
    requires_logging_directory = True
    in_background = False  # a line is in the system's hands when `log` returns, so that a kill loses none

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.run_name = run_name
        self.directory = Path(logging_dir) / run_name
        self._descriptor: int | None = None
        self._waiting = bytearray()  # lines, or the rest of one, that the operating system has not taken yet

    @property
    def path(self) -> Path:
        """The file."""
        return self.directory / FILE_NAME

    @property
    def tracker(self) -> Path:
        """The file: there is no library behind this tracker."""
        return self.path

    def start(self) -> None:
        """Opens the file for appending and writes the line that names the run."""
        if self.main_process_only and not is_main_process():
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        torn = _cut_torn_line(self.path)
        self._descriptor = os.open(self.path, _APPEND, 0o644)
        if torn:
            self._append({"torn": torn})
        self.run_id = self.run_id or uuid.uuid4().hex
        self._append({"run": self.run_id, "project": self.run_name})

    def resume(self, run_id: str) -> None:
        """Continue the run with this id: at once where the file is open already, since a line can say so."""
        started, self.run_id = self.run_id, run_id
        if self._descriptor is not None and started != run_id:
            self._append({"run": run_id, "project": self.run_name})

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Writes the configuration as one line, credentials masked."""
        self._append({"config": mask_secrets(plain(values))})

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Writes one line.

        Args:
            values: name to number, text, tensor, array, or nested mappings and lists of them.
            step: the update that they belong to; None writes `null`.
            kwargs: further keys of the line, for example `epoch=3`.
        """
        self._append({"step": step, "values": values, **kwargs})

    def log_images(self, values: Mapping[str, Any], step: int | None = None, dataformats: str = "NCHW") -> None:
        """Writes PNG files beside the file, and a line that names them.

        Args:
            values: name to images: a tensor or array of bytes, or of numbers from 0 to 1.
            step: the update that they belong to.
            dataformats: what the axes mean, as TensorBoard has it: `N` images, `C` channels (1, 3 or 4), `H` rows,
                `W` columns, in any order; `N` and `C` may be absent.
        """
        if self._descriptor is None:
            return
        written: dict[str, list[str]] = {}
        for name, images in values.items():
            written[name] = []
            for index, picture_hwc in enumerate(split_images(images, dataformats)):
                path = self._image_path(name, step, index)
                write_atomically(path, encode_png(picture_hwc))
                written[name].append(path.relative_to(self.directory).as_posix())
        self._append({"step": step, "images": written})

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Writes a table as one line.

        Args:
            table_name: what the line calls it.
            columns: names of the columns.
            data: rows, each as long as `columns`.
            dataframe: a pandas data frame, instead of `columns` and `data`.
            step: the update that it belongs to.
        """
        columns, data = rows_of(table_name, columns, data, dataframe)
        self._append({"step": step, "table": table_name, "columns": columns, "rows": data})

    def finish(self) -> None:
        """Waits until the disk has everything and closes the file.

        Raises:
            OSError: lines still wait in memory and the disk does not take them.
        """
        if self._descriptor is None:
            return
        self._flush()
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None

    def _append(self, entry: dict[str, Any]) -> None:
        if self._descriptor is None:
            if self.main_process_only and not is_main_process():
                return
            raise TrackerError(f"{self.path} is not open: call start() first, and log before finish()")
        entry = {"time": time.time(), **entry}
        try:
            line = _encode(entry)
        except (TypeError, ValueError):  # NaN, an infinity, or a key that is no string
            line = _encode(plain(entry))
        self._waiting += line.encode()
        self._waiting += b"\n"
        self._flush()

    def _flush(self) -> None:
        assert self._descriptor is not None
        while self._waiting:
            del self._waiting[: os.write(self._descriptor, self._waiting)]

    def _image_path(self, name: str, step: int | None, index: int) -> Path:
        moment = f"{step:08d}" if step is not None else f"t{time.time_ns()}"
        return self.directory / "images" / f"{quote(name, safe='')}-{moment}-{index}.png"


def _cut_torn_line(path: Path) -> str:
    """Cuts what follows the last end of line off the file, and returns it as text."""
    if not path.exists():
        return ""
    with path.open("r+b") as file:
        end = position = file.seek(0, os.SEEK_END)
        tail = b""
        while position and b"\n" not in tail:
            position = max(0, position - 65536)
            file.seek(position)
            tail = file.read(end - position)
        torn = tail.rpartition(b"\n")[2]
        if torn:
            file.truncate(end - len(torn))
    return torn.decode(errors="replace")
