"""`record`: what ran in which type, why, and at what cost."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

from .. import arguments
from ..errors import OptionError
from ..observers import Attached, attach_to_values
from ..policy import policy_line
from ..reports import Groups, Report, Row, Waste, added
from ..session import current
from ..torch_internals import is_dynamo_loaded
from ..version import __version__
from .recorder import Recorder
from .rows import rows
from .waste import waste


class record:  # noqa: N801  # a context manager, like torch.no_grad
    """Records each call of an op that computes: its dtypes, casts, costs, module and line.

    Holds for all threads, and nests. Ops inside compiled functions run uncompiled meanwhile. Nothing is
    kept of the program's tensors, and no device is waited for unless ``times`` is asked for. A call that
    raises is not recorded; so a checkpoint that stops computing early seems to have made one call less.

    Args:
        times: Whether calls are timed. Where tensors are on an accelerator each call then waits for it.

    Raises:
        OptionError: ``times`` is not a bool, or the record is entered twice.

    Example:
        >>> model, x = torch.nn.Linear(2, 3), torch.ones(4, 2)
        >>> with hmpx.convert(device_types={"cpu"}), hmpx.record() as rec:
        ...     model(x).sum().backward()
        >>> [(row.op, row.phase, row.dtype, row.flops) for row in rec.rows if row.op == "linear"]
        [('linear', 'backward', 'bfloat16', 48), ('linear', 'forward', 'bfloat16', 48)]
    """

    def __init__(self, *, times: bool = False) -> None:
        """Records nothing until it is entered."""
        self._is_timed = arguments.truth("times", times)
        self._recorder = Recorder()
        self._attached: Attached | None = None
        self._open = contextlib.ExitStack()
        self._about: dict[str, str] = {}
        self._error: str | None = None

    def __enter__(self) -> record:
        if self._attached is not None:
            raise OptionError("this record was entered before; make a new one with hmpx.record()")
        with contextlib.ExitStack() as stack:
            if is_dynamo_loaded():  # before that nothing can have been compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._attached = attach_to_values(self._recorder, times=self._is_timed)
            stack.callback(self._attached.detach)
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._about = _about()
        if error is not None:
            self._error = f"{type(error).__name__}: {error}"
        try:
            self._open.close()
        finally:
            self._recorder.is_on = False

    def report(self) -> Report:
        """Returns what was recorded so far, as data."""
        recorder = self._recorder
        entries = recorder.entries()
        found = rows(entries, is_timed=self._is_timed)
        wasted = waste(recorder.traces.found, entries)
        about = self._about or _about()
        return Report(
            added(found), tuple(sorted(wasted, key=lambda each: -each.bytes)), about, self._error
        )

    @property
    def rows(self) -> tuple[Row, ...]:
        """The calls that were recorded, those that cost most first."""
        return self.report().rows

    def by_op(self) -> Groups:
        """Returns the calls by op and dtypes; see `Report.by_op`."""
        return self.report().by_op()

    def by_module(self) -> Groups:
        """Returns the calls by module; see `Report.by_module`."""
        return self.report().by_module()

    def by_site(self) -> Groups:
        """Returns the calls by line of the program; see `Report.by_site`."""
        return self.report().by_site()

    def waste(self) -> tuple[Waste, ...]:
        """Returns casts that could be done without, each with what to do about it."""
        return self.report().waste

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the report as JSON, and writes it to ``path`` if that is given."""
        return self.report().to_json(path)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the rows as CSV, and writes them to ``path`` if that is given."""
        return self.report().to_csv(path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns a page that needs no network, and writes it to ``path`` if that is given."""
        return self.report().to_html(path)

    def to_dataframe(self) -> Any:
        """Returns the rows as a pandas data frame; see `Report.to_dataframe`."""
        return self.report().to_dataframe()

    def print(self) -> None:
        """Prints the report, with colours on a terminal; see `Report.print`."""
        self.report().print()

    def __str__(self) -> str:
        return str(self.report())

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


def _about() -> dict[str, str]:
    """Returns what identifies the run."""
    session = current()
    about = {"hmpx": __version__, "torch": torch.__version__}
    if session is not None:
        policy = session.policy
        about["policy"] = policy_line(policy.decisions, policy.low_precision_type, policy.sections)
        about["device types"] = ", ".join(sorted(session.device_types))
    if "RANK" in os.environ:
        about["rank"] = os.environ["RANK"]
    return about
