"""Where `monitor` writes: functions, TensorBoard, W&B, MLflow, Lightning's loggers, files of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from .. import arguments
from ..errors import OptionError, raised_here, said_by, short, shown, warn
from ..files import MONITORED, append, opened

#: Takes the figures of a step by name, and the step's number.
Log = Callable[[Mapping[str, float], int], object]

_KINDS: Final = (
    "a function of figures and step, a path that ends in .jsonl, a SummaryWriter, a run of W&B, mlflow or its "
    "client, or a logger of Lightning"
)


def logging_to(target: Any, header: Callable[[], Mapping[str, Any]]) -> Log:
    """Returns the function that logs figures to a target.

    Raises:
        OptionError: It is none of those that are known, or a file can't be written.
    """
    if isinstance(target, (str, os.PathLike)):
        return _JsonLines(arguments.path("log", target), header)
    if hasattr(target, "add_scalar"):  # TensorBoard's SummaryWriter

        def add_scalars(figures: Mapping[str, float], step: int) -> None:
            for name, value in figures.items():
                target.add_scalar(name, value, step)

        return add_scalars
    if hasattr(target, "log_metrics"):  # mlflow, a logger of Lightning
        return lambda figures, step: target.log_metrics(dict(figures), step=step)
    if hasattr(target, "log_batch"):
        return _mlflow_client(target)
    named: Any = getattr(target, "log", None)
    if callable(named):  # a run of W&B, an Accelerator
        return lambda figures, step: named(dict(figures), step=step)
    if callable(target):
        return lambda figures, step: target(dict(figures), step)
    raise OptionError(f"log must be {_KINDS}, not {shown(target)}")


def _mlflow_client(client: Any) -> Log:
    import mlflow  # type: ignore[import-not-found, unused-ignore]  # its client is here
    from mlflow.entities import Metric  # type: ignore[import-not-found, unused-ignore]

    run = mlflow.active_run()
    if run is None:
        raise OptionError(
            "log is a client of MLflow, and no run is active; call mlflow.start_run() first"
        )
    run_id = run.info.run_id

    def log(figures: Mapping[str, float], step: int) -> None:
        now_ms = int(mlflow.utils.time.get_current_time_millis())
        metrics = [Metric(name, value, now_ms, step) for name, value in figures.items()]
        for start in range(0, len(metrics), 1000):  # MLflow's limit
            client.log_batch(run_id, metrics[start : start + 1000])

    return log


#: How files begin.
START: Final = b'{"hmpx_monitor"'


class _JsonLines:
    """Appends steps to a file; a run that goes on writes to the same one."""

    _is_torn = False  # a kill has cut its last line

    def __init__(self, path: str, header: Callable[[], Mapping[str, Any]]) -> None:
        if not path.endswith(".jsonl"):
            raise OptionError(f"log must be {_KINDS}, not {shown(path)}")
        self._path, self._header, self._is_begun = path, header, False
        if not Path(path).absolute().parent.is_dir():
            raise OptionError(f"log {short(path)}: its directory does not exist; make it first")
        if os.path.exists(path):  # noqa: PTH110  # any text
            with opened(path, MONITORED) as file:
                start = file.read(len(START))
                self._is_torn = (
                    bool(start) and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n"
                )
            if start and start != START:
                raise OptionError(f"{short(path)} is not a file of hmpx.monitor; give another path")

    def __call__(self, figures: Mapping[str, float], step: int) -> None:
        lines = [{"step": step, "figures": dict(figures)}]
        if not self._is_begun:
            lines.insert(0, {"hmpx_monitor": 1, "about": dict(self._header())})
            self._is_begun = True
        text = "\n" * self._is_torn + "".join([json.dumps(each) + "\n" for each in lines])
        append(text.encode(), self._path)
        self._is_torn = False


def safely(log: Log, figures: Mapping[str, float], step: int, *, warns: bool) -> bool:
    """Logs figures; returns whether that worked. A logger that fails gives a warning, and does not stop the training."""
    try:
        log(figures, step)
        return True
    except raised_here(Exception) as error:
        if warns:
            warn(f"hmpx.monitor: a log failed in step {step}: {said_by(error)}")
        return False
