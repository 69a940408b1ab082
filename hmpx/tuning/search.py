"""Searches for the smallest set to keep in fp32: ranks, grows to a passing set, proves each member necessary.

Every decision depends only on the errors received, so that a journal can replay a search.
"""

from __future__ import annotations

import json
import math
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import HmpxError, OptionError, raised_here, short, warn
from ..files import JOURNAL, append, damaged, parsed, read, shaped
from ..observers import LOGGER
from ..policy import CastPolicy, load_policy, set_names
from ..session import about_run
from .candidates import (
    COST_OF_A_LINE,
    Candidate,
    Evaluation,
    Kept,
    LowShares,
    Outcome,
    bare,
    following,
    low_parts,
    shares,
)
from .result import Tuned


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
        wanted = {"hmpx journal": 3, **json.loads(json.dumps(header))}
        content = read(path, JOURNAL) if os.path.exists(path) else b""  # noqa: PTH110  # any text
        if not content.startswith(b'{"hmpx journal"'[: len(content)]):
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
        begin = b"" if lines else json.dumps(wanted).encode() + b"\n"
        append(begin, path, len(content) - len(torn))

    def remembered(self, key: Any, compute: Callable[[], Any], kind: Any) -> Any:
        """Returns the value of a key, of a type that JSON has; computes and writes it if it is not known."""
        name = json.dumps(key)
        if name not in self._known:
            text = json.dumps({"key": key, "value": compute()})
            self._known[name] = self._path, json.loads(text)["value"]
            try:
                if self._path:
                    append(text.encode() + b"\n", self._path)
            except raised_here(OptionError) as error:
                self._path = ""  # a full disk ends the journal, not the search
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


#: Inputs of an evaluation: those of the search, or those that it has never seen.
TUNING: Final = "tuning"
FRESH: Final = "fresh"

#: The least tolerance, as a multiple of fp32's error against itself.
LEAST_OVER_NOISE: Final = 3

#: Candidates without a gradient, or whose values leave the range, are harmless if the error with only these in
#: low precision is below this share of the tolerance; else they are kept until they are pruned.
_UNFELT: Final = 0.3

#: A shipped set is skipped if a larger one fails by more than this factor: errors are not quite monotone.
_CLEARLY: Final = 1.05

#: Most failures of sets with one more member following its inputs, and the least share of the model's work
#: that each must bring into low precision.
_MOST_FAILURES: Final = 2
_LEAST: Final = 0.002

#: Factor for the tolerance after a set fails on fresh inputs, and the most retries.
_TIGHTER: Final = 0.7
_MOST_ROUNDS: Final = 8

_NOTHING: Final[Kept] = frozenset()


class BudgetError(HmpxError):
    """The budget of evaluations is spent."""


def shipped_sets(candidates: Iterable[Candidate], low_type: str) -> set[Kept]:
    """Returns the sets that shipped lists keep in fp32; ops in neither list follow their inputs."""
    found = set()
    for name in set_names():
        policy, kept = load_policy(lists=name, low_precision_type=low_type), set()
        for each in candidates:
            decided = policy[each.op].cast_policy
            if decided is not CastPolicy.LOW:
                follows = decided is not CastPolicy.FP32 and each.may_follow
                kept.add(following(each.name) if follows else each.name)
        found.add(frozenset(kept))
    return found


class Evaluator:
    """What a search asks for the errors of sets: a `Task` of `hmpx.tune`, or the `Check` of a command."""

    candidates: Sequence[Candidate]
    tolerance: float
    budget: int  # most evaluations
    shipped: Iterable[Kept] = ()  # sets that shipped lists keep
    has_fresh: bool = False  # fresh inputs check the set at the end
    is_noisy: bool = False  # errors depend on the tolerance, which determines the number of samples
    noise: float = 0.0  # the error of fp32 against itself
    batch_count: int = 0  # batches that errors are of
    metric_name: str
    low_type: str
    conversion: Mapping[str, Any] = {}  # arguments of `convert`

    def outcome(self, kept: Kept, inputs: str, tolerance: float) -> Outcome:
        """Returns the outcome of a set on `TUNING` or `FRESH` inputs; the tolerance matters if it is noisy."""
        raise NotImplementedError


class Search:
    """One whole search.

    If one of the sets that shipped lists keep passes, the result has at least as much in low precision, in the sum
    of the shares of FLOPs and of bytes.
    """

    def __init__(
        self, asked: Evaluator, journal: Journal, show: Callable[[str], object] = LOGGER.debug
    ) -> None:
        """Prepares a search; ``show`` takes a line on each evaluation."""
        self._asked, self._journal, self._show = asked, journal, show
        self._candidates = sorted(asked.candidates, key=lambda each: each.name)
        self._everything = frozenset(each.name for each in self._candidates)
        self._path: list[Evaluation] = []  # each once
        self._known: dict[tuple[Kept, str, float], Outcome] = {}

    def run(self) -> Tuned:
        """Runs the search. After Ctrl-C, or once the budget is spent, returns the best set so far."""
        error = self.evaluated(self._everything, "all fp32").error
        if not error <= self._asked.tolerance:
            raise OptionError(
                f"with every op in fp32 the error is {error:.3g}, above the tolerance {self._asked.tolerance:g}: "
                "no list can pass; does the program convert to low precision itself, or draw random "
                "numbers that no seed sets?"
            )
        try:
            return self._checked()
        except BudgetError:
            return self._tuned(self._best(), "budget")
        except KeyboardInterrupt:
            return self._tuned(self._best(), "interrupt")

    def _checked(self) -> Tuned:
        """Returns a set that also passes on fresh inputs."""
        tolerance = self._asked.tolerance
        for _ in range(_MOST_ROUNDS):
            kept = self.minimal(tolerance)
            if not self._asked.has_fresh:
                return self._tuned(kept)
            error = self.evaluated(kept, "fresh inputs", inputs=FRESH).error
            if error <= self._asked.tolerance:
                searched = tolerance if tolerance < self._asked.tolerance else None
                return self._tuned(kept, fresh_error=error, searched=searched)
            tolerance *= _TIGHTER
            if tolerance <= LEAST_OVER_NOISE * self._asked.noise:
                break
        error = self.evaluated(self._everything, "fresh inputs", inputs=FRESH).error
        if not error <= self._asked.tolerance:
            raise OptionError(
                f"on fresh inputs the error is {error:.3g} with every op in fp32, above the tolerance "
                f"{self._asked.tolerance:g}"
            )
        return self._tuned(self._everything, "fresh inputs", fresh_error=error)

    def _best(self) -> Kept:
        """Returns the set with the lowest cost that has passed."""

        def cost(kept: Kept) -> tuple[float, int, list[str]]:
            seen, lost = self._remembered(kept).seen, COST_OF_A_LINE * len(kept)
            for each in self._candidates:
                lost += each.benefit * (1 - low_parts(each, kept, seen)[1])
            return lost, len(kept), sorted(kept)

        passed = [
            each.kept
            for each in self._path
            if each.error <= self._asked.tolerance and each.stage != "fresh inputs"
        ]
        return min(passed, key=cost, default=self._everything)

    def _tuned(
        self,
        kept: Kept,
        stopped_by: str = "",
        fresh_error: float | None = None,
        searched: float | None = None,
    ) -> Tuned:
        outcome = self._remembered(kept)
        return Tuned(
            kept=kept,
            error=outcome.error,
            all_low_error=next((each.error for each in self._path if not each.kept), math.nan),
            tolerance=self._asked.tolerance,
            noise=self._asked.noise,
            evaluations=len(self._path),
            is_complete=not stopped_by,
            stopped_by=stopped_by,
            path=tuple(self._path),
            candidates=tuple(self._candidates),
            seen=outcome.seen,
            fresh_error=fresh_error,
            searched=searched,
            batches=self._asked.batch_count,
            metric=self._asked.metric_name,
            low_precision_type=self._asked.low_type,
            conversion=dict(self._asked.conversion),
            about=about_run(),
        )

    # --- evaluations ---------------------------------------------------------------------------------

    def evaluated(
        self, kept: Kept, stage: str, tolerance: float | None = None, inputs: str = TUNING
    ) -> Outcome:
        """Returns the outcome of a set, unless the budget is spent."""
        tolerance = self._asked.tolerance if tolerance is None else tolerance
        key = kept, inputs, tolerance if self._asked.is_noisy else 0.0
        if key in self._known:
            return self._known[key]
        if len(self._path) >= self._asked.budget:
            raise BudgetError(f"{self._asked.budget} evaluations were not enough")

        def compute() -> tuple[float, Mapping[str, LowShares]]:
            found = self._asked.outcome(*key)
            return found.error, found.seen

        kind = tuple[float, Mapping[str, tuple[float, float, float]]]
        error, seen = self._journal.remembered([sorted(kept), *key[1:]], compute, kind)
        found = Outcome(error, {name: LowShares(*each) for name, each in seen.items()})
        self._known[key] = found
        passes = error <= tolerance
        self._path.append(Evaluation(kept, stage, error, passes))
        line = (
            f"tune: evaluation {len(self._path)}, {stage}: {len(kept)} of {len(self._candidates)} in "
            f"fp32, error {error:.3g} {'passes' if passes else 'fails'}"
        )
        LOGGER.info("%s", line)
        self._show(line)
        return found

    def _remembered(self, kept: Kept) -> Outcome:
        """Returns the outcome of a set at the tolerance asked for; without an error if it is not known."""
        key = kept, TUNING, self._asked.tolerance if self._asked.is_noisy else 0.0
        return self._known.get(key, Outcome(math.nan))

    # --- at one tolerance ----------------------------------------------------------------------------

    def minimal(self, tolerance: float) -> Kept:
        """Returns a 1-minimal set within a tolerance: no single member can be removed.

        Keeping all candidates is known to pass.
        """
        self._within, self._outcomes = tolerance, {self._everything: Outcome(0.0)}
        if not self._candidates or self._error(_NOTHING, "all low") <= self._within:
            return _NOTHING
        return self._pruned(self._followed(self._best_shipped(self._passing())))

    def _error(self, kept: Kept, stage: str) -> float:
        if kept not in self._outcomes:
            self._outcomes[kept] = self.evaluated(kept, stage, self._within)
        return self._outcomes[kept].error

    def _failed(self, kept: Kept, factor: float = 1.0) -> bool:
        """Whether a larger set has failed: one with all members, following their inputs as here or in fp32."""
        return any(
            not outcome.error <= factor * self._within
            and all(each in other or bare(each) in other for each in kept)
            for other, outcome in self._outcomes.items()
        )

    def _passing(self) -> Kept:
        """Returns a passing set with few unnecessary members."""
        error = self._error(_NOTHING, "all low")
        suspects = frozenset(e.name for e in self._candidates if e.is_hard or e.is_unseen)
        if suspects and math.isfinite(error):
            others = self._everything - suspects
            if others and self._error(others, "unseen") <= _UNFELT * self._within:
                suspects = frozenset()
        if suspects:
            error = self._error(suspects, "range")
            if error <= self._within:
                return suspects
        rest = [each for each in self._candidates if each.name not in suspects]
        if all(each.score is None for each in rest):
            rest.sort(key=lambda each: (each.prior, each.benefit, each.name))
        else:
            rest.sort(key=lambda each: (-((each.score or 0.0) ** 2) / each.cost, each.name))
        return self._prefix(suspects, rest, error)

    def _prefix(self, base: Kept, ranking: Sequence[Candidate], error: float) -> Kept:
        """Returns the base with the shortest prefix of the ranking that passes.

        Gallops from none to the first that passes, guided by squared scores, then bisects.
        """
        squares = [(each.score or 0.0) ** 2 for each in ranking]

        def prefix(length: int) -> Kept:
            return base | {each.name for each in ranking[:length]}

        low, high, step = 0, len(ranking), 1
        while high - low > 1:
            if high == len(ranking):
                guess = max(self._predicted(squares, low, error), low + step)
                step *= 2
            else:
                guess = (low + high) // 2
            guess = min(max(guess, low + 1), high - 1)
            found = self._error(prefix(guess), "prefix")
            if found <= self._within:
                high = guess
            else:
                low, error = guess, found
        return prefix(high)

    def _predicted(self, squares: Sequence[float], low: int, error: float) -> int:
        """Returns the prefix length at which the rest is predicted to pass, by the error at ``low``."""
        rest = sum(squares[low:])
        if rest <= 0:
            return (low + len(squares)) // 2
        if not math.isfinite(error):
            return low + 1
        allowed = rest * (self._within / error) ** 2
        for length in range(low, len(squares)):
            if rest <= allowed:
                return length
            rest -= squares[length]
        return len(squares)

    def _best_shipped(self, kept: Kept) -> Kept:
        """Returns the best shipped set; ``kept`` if none is better.

        Tries those that keep most first: if they fail, so do the others. Skips those that can't have more in
        low precision than ``kept``, whatever follows its inputs.
        """

        def order(tried: Kept) -> tuple[float, list[str]]:
            weights = {each.name: each.cost for each in self._candidates}
            weights |= {following(name): cost / 2 for name, cost in weights.items()}
            return -sum(weights[each] for each in sorted(tried)), sorted(tried)

        best = kept
        for each in sorted({*self._asked.shipped} - {_NOTHING}, key=order):
            if self._failed(each, _CLEARLY) or self._kept_work(best) <= self._kept_work(each):
                continue
            if self._error(each, "shipped") <= self._within and self._kept_work(
                each
            ) < self._kept_work(best):
                best = each
        return kept if best is kept else self._settled(best)

    def _kept_work(self, kept: Kept) -> float:
        """Returns the shares of FLOPs and bytes that a set keeps in fp32; a lower bound if unknown."""
        seen = self._outcomes[kept].seen if kept in self._outcomes else {}
        return round(2 - sum(shares(self._candidates, kept, seen)), 9)

    def _settled(self, kept: Kept) -> Kept:
        """Returns an equivalent set, evaluated.

        A member that follows its inputs is removed if all of its calls are low, and put in fp32 if none are.
        """
        found = kept
        for name, part in self._outcomes[kept].seen.items():
            if following(name) in kept and min(part.flops, part.bytes) >= 1:
                found -= {following(name)}
            elif following(name) in kept and part.given <= 0:
                found = found - {following(name)} | {name}
        self._error(found, "shipped")
        return found

    def _followed(self, kept: Kept) -> Kept:
        """Lets members follow their inputs where the set still passes, those with most work first.

        Only tries members with calls of both kinds: with low-precision inputs alone, and with others. Otherwise
        it makes no difference, or the same as removing the member.
        """
        tried: set[str] = set()
        failures = 0
        while failures < _MOST_FAILURES:
            seen = self._outcomes[kept].seen if kept in self._outcomes else {}
            gains = [
                (each.benefit * seen[each.name].given, each.name)
                for each in self._candidates
                if each.name in (kept - tried) & seen.keys() and 0 < seen[each.name].given < 1
            ]
            gain, name = max(gains, default=(0.0, ""))
            if gain < _LEAST:
                break
            tried.add(name)
            trial = kept - {name} | {following(name)}
            if self._failed(trial):
                continue
            if self._error(trial, "follow") <= self._within:
                kept = trial
            else:
                failures += 1
        return kept

    def _pruned(self, kept: Kept) -> Kept:
        """Returns a subset of a passing set in which each member is necessary.

        First removes blocks, doubling while they are unnecessary: of out-of-range members and those with unknown
        effect, then the weakest. After each removal all necessary members are tried again.
        """
        member = {bare(each): each for each in kept}
        weakest = sorted(
            (each for each in self._candidates if each.name in member),
            key=lambda each: (
                not each.is_hard,
                not each.is_unseen,
                each.score or -each.prior,
                -each.benefit,
                each.name,
            ),
        )
        needed: list[str] = []
        waiting, block = [member[each.name] for each in weakest], 1
        while waiting:
            part = waiting[:block]
            if self._error(kept - {*part}, "prune") <= self._within:
                kept -= {*part}
                waiting, needed = waiting[len(part) :] + needed, []
                block *= 2
            elif len(part) > 1:
                block = len(part) // 2
            else:
                needed.append(waiting.pop(0))
                block = 1
        return kept
