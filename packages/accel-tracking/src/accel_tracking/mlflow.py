"""MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_state.errors import TrackerError

from .base import on_main_process
from .images import pictures, pillow
from .library import LibraryTracker
from .values import flat, mask_secrets, plain, rows_of, scalar

RUN_ID_VARIABLE = "MLFLOW_RUN_ID"
DATABASE_FILE = "mlflow.db"
_PARAMS_PER_CALL = 100  # what MLflow's servers take


class MLflowTracker(LibraryTracker):
    """Reports to a run of MLflow.

    MLflow's own functions (`mlflow.log_artifact`, …) join the same run: it is named by `MLFLOW_RUN_ID` in this process
    until it finishes. A thread that joined it that way leaves it by `mlflow.end_run()`.

    Args:
        experiment_name: the experiment, made when missing; the project's name.
        logging_dir: a folder for a database of its own, `mlflow.db`, and the artifacts; or an address, as of
            `mlflow.set_tracking_uri`. None leaves it to MLflow (`MLFLOW_TRACKING_URI`).
        run_id: a run to go on with, instead of a checkpoint's.
        tags: of the run.
        nested_run: begin the run within one that is active.
        run_name: what MLflow shows; made up when None.
        description: of the run.
    """

    name = "mlflow"
    requires_package = "mlflow"
    patience_s = 0.0  # MLflow takes steps in any order, and each call is a request
    timeout_s = 120.0  # what its client retries for

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name, tags=tags, nested=nested_run, description=description)
        self.experiment_name = experiment_name
        self.logging_dir = logging_dir
        self.run_id = run_id
        self._client: Any = None

    def open_run(self) -> tuple[Any, str]:
        """Start the `mlflow.ActiveRun`, in the experiment that it makes where it is missing."""
        import mlflow

        artifacts = None
        if self.logging_dir is not None:
            location = os.fspath(self.logging_dir)
            if ":" not in location:
                folder = Path(location).absolute()
                folder.mkdir(parents=True, exist_ok=True)
                location, artifacts = f"sqlite:///{folder / DATABASE_FILE}", (folder / "artifacts").as_uri()
            mlflow.set_tracking_uri(location)
        self._client = mlflow.MlflowClient()
        if self.experiment_name is not None:
            if artifacts is not None and self._client.get_experiment_by_name(self.experiment_name) is None:
                self._client.create_experiment(self.experiment_name, artifact_location=artifacts)
            mlflow.set_experiment(self.experiment_name)
        run = mlflow.start_run(run_id=self.run_id, run_name=self.run_name, **self._kwargs)
        os.environ[RUN_ID_VARIABLE] = run.info.run_id
        return run, run.info.run_id

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Logs the configuration as parameters, nested names joined by dots.

        Raises:
            TrackerError: the run has some of them already, with other values: MLflow never changes a parameter. The
                others are logged.
        """
        from mlflow.entities import Param

        texts = {name: str(value) for name, value in flat(mask_secrets(plain(values))).items()}
        there = self._client.get_run(self.tracker.info.run_id).data.params
        new = [Param(name, text) for name, text in texts.items() if name not in there]
        for begin in range(0, len(new), _PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, params=new[begin : begin + _PARAMS_PER_CALL])
        changed = {name: text for name, text in texts.items() if there.get(name, text) != text}
        if changed:
            raise TrackerError(
                f"MLflow never changes a parameter of a run: {changed} stay as they were, "
                f"{ {name: there[name] for name in changed} }"
            )

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs values by kind: numbers as metrics, anything else as tags with its text.

        Args:
            values: name to value, nested names joined by dots; MLflow takes letters, digits and `_-. :/` in names.
            step: the update that they belong to; None means 0.
            kwargs: passed on to `MlflowClient.log_batch`, for example `synchronous=False`.
        """
        from mlflow.entities import Metric, RunTag

        now_ms = int(time.time() * 1000)
        metrics, tags = [], []
        for name, raw in flat(values).items():
            value = scalar(raw)
            if isinstance(value, int | float):
                metrics.append(Metric(name, float(value), now_ms, step or 0))
            else:
                tags.append(RunTag(name, value if isinstance(value, str) else str(plain(value))))
        self._client.log_batch(self.tracker.info.run_id, metrics=metrics, tags=tags, **kwargs)

    @on_main_process
    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, dataformats: str = "NCHW", **kwargs: Any
    ) -> None:
        """Logs pictures; of several under one name, each gets its number: `name/0`, `name/1`.

        Args:
            values: name to a tensor or array of pictures, or to a list of what `log_image` takes.
            step: the update that they belong to; None means 0.
            dataformats: what the axes of a tensor or array mean.
            kwargs: passed on to `MlflowClient.log_image`.
        """
        for name, images in values.items():
            several = pictures(images, dataformats)
            for index, picture in enumerate(several):
                key = name if len(several) == 1 else f"{name}/{index}"
                self._client.log_image(
                    self.tracker.info.run_id, pillow(picture), key=key, step=step or 0, synchronous=True, **kwargs
                )

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Logs a table as the artifact `<table_name>.json`; a later one of the same name is appended to it.

        Args:
            table_name: what it is called.
            columns: names of the columns; None numbers them.
            data: rows.
            dataframe: a pandas data frame, instead of `columns` and `data`.
            step: the update that it belongs to; a column `step` tells it.
        """
        columns, data = rows_of(table_name, columns, data, dataframe)
        names = columns or [str(index) for index in range(len(data[0]) if data else 0)]
        table = {name: [plain(row[index]) for row in data] for index, name in enumerate(names)}
        if step is not None:
            table["step"] = [step] * len(data)
        self._client.log_table(self.tracker.info.run_id, table, f"{table_name}.json")

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Logs a figure of matplotlib or plotly as an artifact."""
        self._client.log_figure(self.tracker.info.run_id, figure, artifact_file, save_kwargs=save_kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Logs a file as an artifact."""
        self._client.log_artifact(self.tracker.info.run_id, local_path, artifact_path)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Logs the files of a folder as artifacts."""
        self._client.log_artifacts(self.tracker.info.run_id, local_dir, artifact_path)

    def close_run(self, _run: Any) -> None:
        """End it, in this process too."""
        import mlflow

        if os.environ.get(RUN_ID_VARIABLE) == self.run_id:
            del os.environ[RUN_ID_VARIABLE]
        mlflow.end_run()
