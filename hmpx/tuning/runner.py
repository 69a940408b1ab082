"""Runs a whole search: evaluates each set once, journals results, shows progress, checks fresh inputs."""

from __future__ import annotations

import functools
import json
import math
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import HmpxError, OptionError, raised_here, short, warn
from ..files import JOURNAL, damaged, parsed, read, shaped, unwritable
from ..observers import LOGGER
from ..session import about_run
from .candidates import (
    COST_OF_A_LINE,
    Candidate,
    Evaluation,
    Kept,
    LowShares,
    Outcome,
    bare,
    low_parts,
)
from .evaluating import LEAST_OVER_NOISE
from .request import FRESH, TUNING
from .result import Tuned
from .search import Search

#: Factor for the tolerance after a set fails on fresh inputs, and the most retries.
_TIGHTER: Final = 0.7
_MOST_ROUNDS: Final = 8


class BudgetError(HmpxError):
    """The budget of evaluations is spent."""


@dataclass
class Searching:
    """One whole search."""

    evaluator: Callable[
        [Kept, str, float], Outcome
    ]  # on inputs, `TUNING` or `FRESH`, at a tolerance
    candidates: Sequence[Candidate]
    tolerance: float
    journal: Journal
    budget: int  # most evaluations
    show: Callable[[str], object] = LOGGER.debug  # takes a line on each evaluation
    shipped: Sequence[Kept] = ()  # sets that shipped lists keep
    has_fresh: bool = False  # fresh inputs check the set at the end
    is_noisy: bool = False  # errors depend on the tolerance, which determines the number of samples
    noise: float = 0.0  # the error of fp32 against itself
    about: Mapping[str, Any] = field(default_factory=dict)  # fields of the result
    path: list[Evaluation] = field(default_factory=list)  # each once
    _known: dict[tuple[Kept, str, float], Outcome] = field(default_factory=dict)

    def run(self) -> Tuned:
        """Runs the search. After Ctrl-C, or once the budget is spent, returns the best set so far."""
        everything = frozenset(each.name for each in self.candidates)
        error = self.outcome(everything, "all fp32").error
        if not error <= self.tolerance:
            raise OptionError(
                f"with every op in fp32 the error is {error:.3g}, above the tolerance {self.tolerance:g}: "
                "no list can pass; does the program convert to low precision itself, or draw random "
                "numbers that no seed sets?"
            )
        try:
            return self._checked(everything)
        except BudgetError:
            return self._tuned(self._best(everything), "budget")
        except KeyboardInterrupt:
            return self._tuned(self._best(everything), "interrupt")

    def outcome(
        self, kept: Kept, stage: str, tolerance: float | None = None, inputs: str = TUNING
    ) -> Outcome:
        """Returns the outcome of a set, unless the budget is spent."""
        tolerance = self.tolerance if tolerance is None else tolerance
        key = kept, inputs, tolerance if self.is_noisy else 0.0
        if key in self._known:
            return self._known[key]
        if len(self.path) >= self.budget:
            raise BudgetError(f"{self.budget} evaluations were not enough")

        def evaluated() -> tuple[float, Mapping[str, LowShares]]:
            found = self.evaluator(*key)
            return found.error, found.seen

        error, seen = self.journal.remembered(
            [sorted(kept), *key[1:]],
            evaluated,
            tuple[float, Mapping[str, tuple[float, float, float]]],
        )
        found = self._known[key] = Outcome(
            error, {name: LowShares(*each) for name, each in seen.items()}
        )
        passes = error <= tolerance
        self.path.append(Evaluation(kept, stage, error, passes))
        line = (
            f"tune: evaluation {len(self.path)}, {stage}: {len(kept)} of {len(self.candidates)} in "
            f"fp32, error {error:.3g} {'passes' if passes else 'fails'}"
        )
        LOGGER.info("%s", line)
        self.show(line)
        return found

    def _checked(self, everything: Kept) -> Tuned:
        """Returns a set that also passes on fresh inputs."""
        tolerance = self.tolerance
        for _ in range(_MOST_ROUNDS):
            evaluate = functools.partial(self.outcome, tolerance=tolerance)
            kept = Search(self.candidates, tolerance, evaluate, self.shipped).run()
            if not self.has_fresh:
                return self._tuned(kept)
            error = self.outcome(kept, "fresh inputs", inputs=FRESH).error
            if error <= self.tolerance:
                searched = tolerance if tolerance < self.tolerance else None
                return self._tuned(kept, fresh_error=error, searched=searched)
            tolerance *= _TIGHTER
            if tolerance <= LEAST_OVER_NOISE * self.noise:
                break
        error = self.outcome(everything, "fresh inputs", inputs=FRESH).error
        if not error <= self.tolerance:
            raise OptionError(
                f"on fresh inputs the error is {error:.3g} with every op in fp32, above the tolerance "
                f"{self.tolerance:g}"
            )
        return self._tuned(everything, "fresh inputs", fresh_error=error)

    def _known_outcome(self, kept: Kept) -> Outcome:
        known = self._known.get((kept, TUNING, self.tolerance if self.is_noisy else 0.0))
        return known or Outcome(math.nan)

    def _best(self, everything: Kept) -> Kept:
        """Returns the set with the lowest cost that has passed."""
        known = {each.name: each for each in self.candidates}

        def cost(kept: Kept) -> tuple[float, int, list[str]]:
            seen = self._known_outcome(kept).seen
            lost = COST_OF_A_LINE * len(kept)
            for each in (known[bare(member)] for member in kept):
                lost += each.benefit * (1 - low_parts(each, kept, seen)[1])
            return lost, len(kept), sorted(kept)

        passed = [
            each.kept
            for each in self.path
            if each.error <= self.tolerance and each.stage != "fresh inputs"
        ]
        return min(passed, key=cost, default=everything)

    def _tuned(
        self,
        kept: Kept,
        stopped_by: str = "",
        fresh_error: float | None = None,
        searched: float | None = None,
    ) -> Tuned:
        outcome = self._known_outcome(kept)
        return Tuned(
            kept=kept,
            error=outcome.error,
            all_low_error=next((each.error for each in self.path if not each.kept), math.nan),
            tolerance=self.tolerance,
            noise=self.noise,
            evaluations=len(self.path),
            is_complete=not stopped_by,
            stopped_by=stopped_by,
            path=tuple(self.path),
            candidates=tuple(self.candidates),
            seen=outcome.seen,
            fresh_error=fresh_error,
            searched=searched,
            about=about_run(),
            **self.about,
        )


# --- journals ----------------------------------------------------------------------------------------

_VERSION: Final = 3
_START: Final = b'{"hmpx journal"'


@dataclass(frozen=True)
class _JournalLine:
    """A result in a journal."""

    key: Any
    value: Any


class Journal:
    """A file of results by key, in JSON lines, from which a killed search continues."""

    def __init__(self, path: str, header: Mapping[str, Any]) -> None:
        """Opens the journal, or starts a new one; drops a last line that a kill has cut short.

        An empty path means no file. A file of another search, or a damaged one, is an error and stays unchanged.
        """
        self._path, self._known = path, dict[str, tuple[str, Any]]()
        if not path:
            return
        wanted = {"hmpx journal": _VERSION, **json.loads(json.dumps(header))}
        content = read(path, JOURNAL) if os.path.exists(path) else b""  # noqa: PTH110  # any text
        if not content.startswith(_START[: len(content)]):
            raise OptionError(f"{short(path)} is not a journal of hmpx.tune; give another path")
        *lines, torn = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            where, record = f"{short(path)}:{number}", parsed(line, short(path), JOURNAL, number)
            try:
                if number > 1:
                    written = shaped(record, _JournalLine)
                    self._known[json.dumps(written.key)] = where, written.value
                    continue
                record = shaped(record, Mapping[str, Any])
            except raised_here(ValueError) as error:
                raise damaged(where, JOURNAL, error) from None
            if differing := sorted(
                key for key in wanted | record if wanted.get(key) != record.get(key)
            ):
                raise OptionError(
                    f"the journal {short(path)} belongs to another search: {', '.join(differing)} "
                    f"differ{'s' if len(differing) == 1 else ''}; give another path, or delete the file"
                )
        self._write(b"" if lines else json.dumps(wanted).encode() + b"\n", len(content) - len(torn))

    def remembered(self, key: Any, compute: Callable[[], Any], kind: Any) -> Any:
        """Returns the value of a key, of a type that JSON has; computes and writes it if it is not known."""
        name = json.dumps(key)
        if name not in self._known:
            text = json.dumps({"key": key, "value": compute()})
            self._known[name] = self._path, json.loads(text)["value"]
            try:
                if self._path:
                    self._write(text.encode() + b"\n")
            except raised_here(
                OptionError
            ) as error:  # a full disk ends the journal, not the search
                self._path = ""
                warn(f"{error}; the search goes on without its journal")
        where, value = self._known[name]
        try:
            return shaped(value, kind)
        except raised_here(ValueError) as error:
            raise damaged(where, JOURNAL, error) from None

    def by_spot(self, key: Any, compute: Callable[[], Any], *kinds: type) -> Any:
        """Returns the value of a key that is a mapping of spots to tuples of these types, or None."""

        def rows() -> list[list[Any]] | None:
            found = compute()
            return None if found is None else [[*spot, *each] for spot, each in found.items()]

        row = types.GenericAlias(tuple, (str, str, *kinds))
        known = self.remembered(key, rows, tuple[row, ...] | None)  # type: ignore[valid-type]
        return None if known is None else {(op, module): tuple(each) for op, module, *each in known}

    def _write(self, data: bytes, size: int | None = None) -> None:
        """Appends to the file, cut to ``size`` before if given, and flushes it to disk."""
        try:
            with Path(self._path).open("ab") as file:
                if size is not None:
                    file.truncate(size)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except raised_here(OSError, ValueError) as error:
            raise unwritable(self._path, error) from error
