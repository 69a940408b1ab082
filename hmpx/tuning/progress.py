"""What a search shows while it runs: a line on a terminal where `rich` is installed, else the log."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from ..observers import LOGGER
from .evaluation import Evaluation


class Progress(Protocol):
    """Takes each evaluation."""

    def __call__(self, number: int, evaluation: Evaluation, candidates: int, /) -> None:
        """Shows the state of the search."""


@contextlib.contextmanager
def progress(*, is_shown: bool) -> Iterator[Progress]:
    """Yields what shows evaluations, until the end of the block."""
    if not is_shown or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield _log
        return
    rich: Any = importlib.import_module("rich.console")
    with rich.Console(stderr=True).status("tune") as status:

        def show(number: int, evaluation: Evaluation, candidates: int) -> None:
            _log(number, evaluation, candidates)
            status.update(_line(number, evaluation, candidates))

        yield show


def _log(number: int, evaluation: Evaluation, candidates: int) -> None:
    LOGGER.info("%s", _line(number, evaluation, candidates))


def _line(number: int, evaluation: Evaluation, candidates: int) -> str:
    verdict = "passes" if evaluation.passed else "fails"
    return (
        f"tune: evaluation {number}, {evaluation.phase}: {len(evaluation.kept)} of {candidates} in fp32, "
        f"error {evaluation.error:.3g} {verdict}"
    )
