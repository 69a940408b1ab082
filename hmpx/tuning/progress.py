"""What a search shows while it runs: a line in a notebook, on a terminal where `rich` is installed; else the log."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from ..observers import LOGGER
from .asking import Evaluation


class Progress(Protocol):
    """Takes each evaluation."""

    def __call__(self, number: int, evaluation: Evaluation, candidates: int, /) -> None:
        """Shows the state of the search."""


@contextlib.contextmanager
def progress(*, is_shown: bool) -> Iterator[Progress]:
    """Yields what shows evaluations, until the end of the block."""
    if is_shown and (display := _display_of_notebook()) is not None:
        yield _Line(display)
        return
    if not is_shown or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield _log
        return
    rich: Any = importlib.import_module("rich.console")
    with rich.Console(stderr=True).status("tune") as status:

        def show(number: int, evaluation: Evaluation, candidates: int) -> None:
            _log(number, evaluation, candidates)
            status.update(_line(number, evaluation, candidates))

        yield show


class _Line:
    """One line below a notebook's cell, which each evaluation replaces."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._shown: Any = None

    def __call__(self, number: int, evaluation: Evaluation, candidates: int) -> None:
        _log(number, evaluation, candidates)
        data = {"text/plain": _line(number, evaluation, candidates)}
        if self._shown is None:
            self._shown = self._display(data, raw=True, display_id=True)
        else:
            self._shown.update(data, raw=True)


def _display_of_notebook() -> Any:
    """Returns IPython's function that shows something, if this is a notebook; else None."""
    if "ipykernel" not in sys.modules:
        return None
    ipython = importlib.import_module("IPython")
    shell = ipython.get_ipython()
    return importlib.import_module("IPython.display").display if hasattr(shell, "kernel") else None


def _log(number: int, evaluation: Evaluation, candidates: int) -> None:
    LOGGER.info("%s", _line(number, evaluation, candidates))


def _line(number: int, evaluation: Evaluation, candidates: int) -> str:
    verdict = "passes" if evaluation.passed else "fails"
    return (
        f"tune: evaluation {number}, {evaluation.phase}: {len(evaluation.kept)} of {candidates} in fp32, "
        f"error {evaluation.error:.3g} {verdict}"
    )
