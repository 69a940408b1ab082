"""Tunes by a command whose exit status says whether a policy passes."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from .. import arguments
from ..arguments import POLICY_VARIABLE, REPORT_VARIABLE
from ..errors import OptionError, raised_here
from ..files import make_directory, unwritable
from ..reports import merged, read_json, written
from ..version import __version__
from .candidates import (
    Costs,
    Kept,
    Outcome,
    assigned,
    called_spots,
    candidates_of,
    observing_policy,
    policy_source,
)
from .result import CHECK, Tuned
from .search import Evaluator, Journal, Search
from .task import low_type_name

#: The file of a run with the command's output.
OUTPUT: Final = "output.txt"

#: Takes the place of an exit status.
_TIMEOUT: Final = "timeout"

#: A check passes or fails; as errors:
_PASSES, _TOLERANCE, _FAILS = 0.0, 0.5, math.inf


@dataclass
class Check(Evaluator):
    """A command that tests whether a policy passes."""

    command: str  # of a shell; `hmpx run` in it obeys the environment variables
    directory: Path  # of a folder for each run, the journal, the result
    low_precision_type: str | None = None  # None for bfloat16
    by: str = "op"  # or "module"
    runs: int = 1  # how often the command must pass
    timeout_s: float | None = None  # after which a run counts as failed
    budget: int = 200  # most evaluations

    def __post_init__(self) -> None:
        self.tolerance, self.metric_name = _TOLERANCE, CHECK
        self.low_type = low_type_name(self.low_precision_type)
        self._last = self.directory  # of the last run

    def tune(self, progress: bool = True) -> Tuned:
        """Returns the smallest set of ops to keep in fp32 with which the command succeeds.

        Raises:
            OptionError: The command fails with every op in fp32, calls nothing that may run in low precision,
                or does not run under hmpx; the directory can't be written, or belongs to another search.
        """
        try:
            make_directory(self.directory)
            return self._tuned(arguments.progress(progress))
        except raised_here(OSError) as error:
            raise unwritable(self.directory, error) from error

    def _tuned(self, show: Callable[[str], object]) -> Tuned:
        header = {"hmpx": __version__, "command": self.command, "low_precision_type": self.low_type}
        header |= {"by": self.by, "runs": str(self.runs)}
        journal = Journal(os.fspath(self.directory / "journal.jsonl"), header)
        self.candidates = candidates_of(journal.by_spot("spots", self._spots, int, int), by=self.by)
        search = Search(self, journal, show)
        everything = frozenset(each.name for each in self.candidates)
        if search.evaluated(everything, "all fp32").error != _PASSES:
            raise OptionError(
                f"the command has passed once with every op in fp32, and then failed: see "
                f"{self._last / OUTPUT}; its outcome varies, and tells nothing of types. Have it set "
                f"its seeds, or allow more, then delete {self.directory} and start again"
            )
        return search.run()

    def outcome(self, kept: Kept, inputs: str, tolerance: float) -> Outcome:
        """Returns an error of 0 if the command passes, else infinity."""
        names = [each.name for each in self.directory.iterdir()]
        taken = [int(name) for name in names if name.isascii() and name.isdigit()]
        self._last = make_directory(self.directory / f"{max(taken, default=0) + 1:04d}")
        source = policy_source(assigned(self.candidates, kept, self.low_type), self.low_type)
        passes = all(self._run(self._last, source) == 0 for _ in range(self.runs))
        return Outcome(_PASSES if passes else _FAILS)

    def _spots(self) -> Costs:
        """Returns the command's ops that may run in low precision, with their costs."""
        folder = make_directory(self.directory / "called")
        for old in folder.glob("report*.json"):
            old.unlink()
        listed = sorted(observing_policy().decisions)
        report = {REPORT_VARIABLE: os.fspath((folder / "report.json").absolute())}
        status = self._run(folder, {"lists": "none", "fp32": listed}, report)
        reports = sorted(folder.glob("report*.json"))
        if status == _TIMEOUT:
            raise OptionError(
                f"the command takes longer than {self.timeout_s:g} s in fp32 already: give a larger "
                f"--timeout, or have it do less; exit status timeout, see {folder / OUTPUT}"
            )
        if status != 0:
            raise OptionError(
                f"the command fails in fp32 already, with exit status {status}: see {folder / OUTPUT}"
            )
        if not reports:
            raise OptionError(
                "the command has not run under `hmpx run`, which obeys HMPX_POLICY and HMPX_REPORT; "
                "write `hmpx run SCRIPT` in it in place of `python SCRIPT`"
            )
        found = called_spots(merged(map(read_json, reports)).rows)
        if not found:
            raise OptionError(
                "the command calls no op on fp32 tensors that may run in low precision; on an accelerator "
                "its tensors are cast there only"
            )
        return found

    def _run(
        self, folder: Path, source: Mapping[str, Any], report: Mapping[str, str] | None = None
    ) -> int | str:
        """Returns the exit status, or ``"timeout"``; keeps the command's output."""
        policy = (folder / "policy.yaml").absolute()
        written(yaml.safe_dump(dict(source), sort_keys=False), policy)
        inherited = {name: value for name, value in os.environ.items() if name != REPORT_VARIABLE}
        with (folder / OUTPUT).open("ab") as output:
            process = subprocess.Popen(
                self.command,
                shell=True,
                env={**inherited, POLICY_VARIABLE: os.fspath(policy), **(report or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                return _TIMEOUT
            finally:
                end(process)


#: Grace period between terminating and killing processes, and how often they are looked at.
_PATIENCE_S: Final = 5.0
_PAUSE_S: Final = 0.02


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and all that it started: every process of its session's group.

    Terminates them, and kills those that don't end in time; another Ctrl-C kills at once.
    """
    try:
        _signal(process, signal.SIGTERM)
    finally:
        _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal, and waits until no process of the group is left, or the grace period is over."""
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s:
        process.poll()  # reaps finished processes
        try:
            os.killpg(process.pid, number)
        except raised_here(ProcessLookupError, PermissionError):
            return
        number = 0
        time.sleep(_PAUSE_S)
