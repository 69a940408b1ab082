"""Runs of searches without a model: journals, budgets, interruptions, executors."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from hmpx import OptionError
from hmpx.tuning import runner as running
from hmpx.tuning.candidates import Kept, Outcome, Seen
from hmpx.tuning.evaluating import Workers
from hmpx.tuning.journal import Journal
from hmpx.tuning.result import Tuned
from hmpx.tuning.runner import Runner, Searching, outcome_from_record

from .oracles import Oracle, oracle


@dataclass
class Simulated:
    """Evaluates by an oracle; counts, and may be killed."""

    model: Oracle
    kill_at: int = -1
    evaluated: list[Kept] = field(default_factory=list)

    def __call__(self, work: Any, ahead: object) -> dict[Any, Outcome]:
        return {work: self.outcome(*work)}

    def outcome(self, kept: Kept, inputs: str, tolerance: float) -> Outcome:
        """Evaluates as a task does in a worker."""
        if len(self.evaluated) == self.kill_at:
            raise KeyboardInterrupt
        self.evaluated.append(kept)
        found = self.model.error(kept)
        seen = {"op1": Seen(0.25, 1 / 3, 0.5)}
        return Outcome(found * 1.2 if inputs == "fresh" else found, seen)


def journal_at(path: Path | str, header: dict[str, Any] | None = None) -> Journal:
    return Journal(str(path), header or {}, {"kept": outcome_from_record})


def found_by(
    evaluator: Any, model: Oracle, journal: Journal, budget: int = 500, **options: Any
) -> tuple[Tuned, Runner]:
    runner = Runner(evaluator, journal, budget, str)
    return Searching(runner, model.candidates, 1.0, **options).run(), runner


MODEL = oracle(60, 3, seed=4, off=4, pair=True)


@pytest.mark.parametrize("kill_at", [1, 2, 5, 9, 14])
def test_a_killed_search_goes_on_without_a_repeated_evaluation(
    tmp_path: Path, kill_at: int
) -> None:
    """And finds what it would have found, by the same path."""
    path = str(tmp_path / "journal.jsonl")
    whole, expected = found_by(Simulated(MODEL), MODEL, journal_at(""))
    first = Simulated(MODEL, kill_at)
    stopped, _ = found_by(first, MODEL, journal_at(path, {"a": 1}))
    assert stopped.stopped_by == "interrupt"
    second = Simulated(MODEL)
    found, runner = found_by(second, MODEL, journal_at(path, {"a": 1}))
    assert found == whole
    assert runner.path == expected.path
    assert not set(first.evaluated) & set(second.evaluated)
    assert len(first.evaluated) + len(second.evaluated) == runner.evaluations
    third = Simulated(MODEL, 0)
    assert found_by(third, MODEL, journal_at(path, {"a": 1}))[0] == whole


def test_an_interrupted_search_returns_the_best_so_far() -> None:
    """A set that passes; before any has passed, all in fp32."""
    for kill_at in range(1, 12):
        found, runner = found_by(Simulated(MODEL, kill_at), MODEL, journal_at(""))
        assert found.stopped_by == "interrupt"
        assert MODEL.error(found.kept) <= 1
        assert found.kept in [each.kept for each in runner.path]
    with pytest.raises(KeyboardInterrupt):
        found_by(Simulated(MODEL, 0), MODEL, journal_at(""))


@pytest.mark.parametrize("budget", [2, 6, 10])
def test_a_spent_budget_returns_the_best_so_far(budget: int) -> None:
    """No more evaluations than that."""
    evaluator = Simulated(MODEL)
    found, runner = found_by(evaluator, MODEL, journal_at(""), budget)
    assert found.stopped_by == "budget"
    assert MODEL.error(found.kept) <= 1
    assert runner.evaluations == len(evaluator.evaluated) == budget


def test_fresh_inputs_tighten_the_tolerance() -> None:
    """Until the set passes on them too; nothing is evaluated twice."""
    model = oracle(40, 12, seed=3)
    errors = {
        name: (0.27 + 0.02 * i if value > 1 else 0)
        for i, (name, value) in enumerate(model.true.items())
    }
    model = Oracle(model.candidates, errors, model.culprits, frozenset())
    evaluator = Simulated(model)
    found, runner = found_by(evaluator, model, journal_at(""), has_fresh=True)
    fresh = [each for each in runner.path if each.phase == "fresh inputs"]
    assert [each.passed for each in fresh[-2:]] == [False, True] or fresh[0].passed
    assert 1.2 * model.error(found.kept) <= 1
    assert found.fresh_error == pytest.approx(1.2 * model.error(found.kept))
    # What is proven is said of the tolerance that was searched for.
    searched = found.searched or 1.0
    assert (found.searched is not None) is (not fresh[0].passed)
    assert all(model.error(found.kept - {each}) > searched for each in found.kept)


def test_nothing_is_proven_where_no_smaller_set_passes_on_fresh_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "_MOST_ROUNDS", 0)
    found, _ = found_by(Simulated(MODEL), MODEL, journal_at(""), has_fresh=True)
    assert found.kept == {each.name for each in MODEL.candidates}
    assert found.stopped_by == "fresh inputs"


def test_fp32_has_to_pass() -> None:
    """Else no list can."""
    model = Oracle(MODEL.candidates, MODEL.true, MODEL.culprits, frozenset({"nothing of these"}))
    with pytest.raises(OptionError, match="every op in fp32 the error is 3, above the tolerance 1"):
        found_by(Simulated(model), model, journal_at(""))


# --- journals ----------------------------------------------------------------------------------------


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    """What comes next begins on a line of its own; a header that is torn is written anew."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(str(path), {"a": 1})
    journal.write({"kept": ["b"], "error": 2.0})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kept": ["c"')
    journal = Journal(str(path), {"a": 1})
    assert journal.records == [{"kept": ["b"], "error": 2.0}]
    assert path.read_bytes() == whole
    path.write_bytes(whole[:20])
    assert Journal(str(path), {"a": 1}).records == []
    assert len(path.read_bytes().splitlines()) == 1


def test_infinite_errors_are_kept(tmp_path: Path) -> None:
    """As JSON of Python's."""
    path = str(tmp_path / "journal.jsonl")
    Journal(path, {}).write({"error": float("inf")})
    assert Journal(path, {}).records == [{"error": float("inf")}]


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    """The message names what differs, and nothing is written."""
    path = tmp_path / "journal.jsonl"
    Journal(str(path), {"model": "a", "seed": 0})
    before = path.read_bytes()
    with pytest.raises(OptionError, match="belongs to another search: model differs"):
        Journal(str(path), {"model": "b", "seed": 0})
    with pytest.raises(OptionError, match="model, seed differ;"):
        Journal(str(path), {"model": "b", "seed": 1})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        b"hello\n",
        b"[1]\n",
        b'{"a": 1}\n',
        b"\xff\xfe\n",
        b"null\n",
        b"[" * 100_000 + b"\n",
    ],
    ids=["text", "line", "list", "object", "bytes", "null", "deep"],
)
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    """And kept."""
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(OptionError, match="is not a journal"):
        Journal(str(path), {})
    assert path.read_bytes() == content


def test_a_journal_that_cannot_be_written(tmp_path: Path) -> None:
    """In a directory that is not there, or is one."""
    with pytest.raises(OptionError, match="can't be written"):
        Journal(str(tmp_path / "nothing" / "journal"), {})
    with pytest.raises(OptionError, match="can't be read"):
        Journal(str(tmp_path), {})


# --- executors ---------------------------------------------------------------------------------------


def in_threads() -> Executor:
    return ThreadPoolExecutor(3)


def in_processes() -> Executor:
    return ProcessPoolExecutor(2, mp_context=get_context("fork"))


@pytest.mark.parametrize("make", [in_threads, in_processes])
def test_an_executor_finds_the_same(make: Callable[[], Executor], tmp_path: Path) -> None:
    """By the same path, however many sets it evaluates ahead; all of them are in the journal."""
    alone, expected = found_by(Simulated(MODEL), MODEL, journal_at(""))
    path = tmp_path / "journal.jsonl"
    with make() as executor:
        workers = Workers(executor, Simulated(MODEL))  # type: ignore[arg-type]
        found, runner = found_by(workers, MODEL, journal_at(path))
        workers.close()
    assert found == alone
    assert runner.path == expected.path
    lines = [json.loads(line) for line in path.read_text().splitlines()][1:]
    sets = [frozenset(each["kept"]) for each in lines]
    assert len(set(sets)) == len(sets) >= runner.evaluations


class Sent:
    """Counts how often it is unpickled."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def outcome(self, kept: Kept, inputs: str, tolerance: float) -> Outcome:
        return Outcome(float(self.count))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, ()


_TIMES = [0]


def _unpickled() -> Sent:
    _TIMES[0] += 1
    return Sent(_TIMES[0])


def test_the_model_is_sent_once_to_a_worker() -> None:
    """Of a pool of one, each evaluation is by the same copy."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as executor:
        workers = Workers(executor, Sent())  # type: ignore[arg-type]
        works = [(frozenset({str(i)}), "tuning", 0.0) for i in range(5)]
        assert [workers(work, ()) for work in works] == [{work: Outcome(1.0)} for work in works]


def test_what_cannot_be_pickled_is_refused() -> None:
    """Before anything is evaluated, with the remedy."""
    with pytest.raises(OptionError, match="define functions at the top of a module"):
        Workers(ThreadPoolExecutor(1), lambda: None)  # type: ignore[arg-type]


class Failing:
    def outcome(self, kept: Kept, inputs: str, tolerance: float) -> Outcome:
        raise OptionError("the worker's own error")


def test_an_error_in_a_worker_is_raised() -> None:
    """As it is."""
    pickle.dumps(Failing())
    with ThreadPoolExecutor(1) as executor:
        workers = Workers(executor, Failing())  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="the worker's own error"):
            workers((frozenset(), "tuning", 0.0), ())
