"""`hmpx.tune` as users call it: arguments, metrics, what it writes, and what it refuses."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import hmpx

from .planted import Block, Faulty, inputs


def cancel(h: Tensor) -> Tensor:
    return (h + 256) - 256


def harmless(h: Tensor) -> Tensor:
    return (h + 1) - 1


def faulty() -> nn.Module:
    torch.manual_seed(0)
    return Faulty(cancel)


def tune(model: Any, given: Any, **options: Any) -> hmpx.Tuned:
    options = {"tolerance": 0.02, "device_types": {"cpu"}, "progress": False, **options}
    return hmpx.tune(model, given, **options)


# --- what it finds -----------------------------------------------------------------------------------


def test_a_journal_and_what_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The lists load to the same policy and say why; nothing is evaluated again with the journal."""
    model, journal = faulty(), tmp_path / "journal.jsonl"
    caplog.set_level(logging.INFO, "hmpx")
    best = tune(model, inputs(), journal=journal)
    assert "tune: evaluation 1, all fp32: 7 of 7 in fp32, error 0 passes" in caplog.text
    written = journal.read_bytes()
    assert tune(model, inputs(), journal=journal) == best
    assert journal.read_bytes() == written

    paths = best.write(tmp_path / "lists")
    assert [each.name for each in paths] == [
        "bf16.txt", "fp32.txt", "widest.txt", "options.yaml", "report.txt", "report.html",
    ]  # fmt: skip
    loaded = hmpx.load_policy(lists=tmp_path / "lists", strict=True)
    assert loaded.fingerprint() == best.policy.fingerprint()
    fp32 = (tmp_path / "lists" / "fp32.txt").read_text()
    assert "# effect" in fp32
    assert "without\nadd\n" in fp32
    page = (tmp_path / "lists" / "report.html").read_text()
    assert "Candidates by effect" in page
    assert "tolerance" in page
    assert str(best).startswith("2 of 7 candidates stay in fp32 under bfloat16: relative_l2 error")
    assert "add" in best._repr_html_()
    with pytest.raises(hmpx.OptionError, match="can't write"):
        best.write(journal)
    with pytest.raises(hmpx.OptionError, match="belongs to another search: seed differs"):
        tune(model, inputs(), journal=journal, seed=1)


def test_an_interrupted_search_goes_on_with_its_journal(tmp_path: Path) -> None:
    """It returns the best set so far, and repeats no evaluation."""
    stop_at, calls = [6], [0]

    def metric(low: Tensor, fp32: Tensor) -> float:
        calls[0] += 1
        if calls[0] == stop_at[0]:
            raise KeyboardInterrupt
        return float((low - fp32).norm() / fp32.norm())

    options = {"metric": metric, "journal": tmp_path / "journal"}
    stopped = tune(faulty(), inputs(), **options)
    assert stopped.stopped_by == "interrupt"
    assert stopped.error <= 0.02
    stop_at[0] = 0
    whole = tune(faulty(), inputs(), **options)
    assert whole.keep_fp32 == {"add", "sub"}
    resumed = calls[0]
    assert tune(faulty(), inputs(), **options) == whole
    assert calls[0] == resumed + 1  # fp32 beside itself


def test_a_spent_budget_gives_the_best_set_so_far() -> None:
    spent = tune(faulty(), inputs(), budget=3)
    assert (spent.stopped_by, spent.evaluations) == ("budget", 3)
    assert spent.error <= 0.02


def test_lists_by_module(tmp_path: Path) -> None:
    """A policy file, whose sections name one layer of many."""
    torch.manual_seed(0)
    layers = [Block(cancel if i == 3 else harmless) for i in range(5)]
    best = tune(nn.Sequential(*layers), inputs(), by="module")
    assert best.keep_fp32 == {"3:add", "3:sub"}
    (policy, *_) = best.write(tmp_path)
    assert policy.name == "policy.yaml"
    text = policy.read_text()
    assert "# 3:add: effect" in text
    assert hmpx.load_policy(policy).fingerprint() == best.policy.fingerprint()
    with pytest.raises(hmpx.OptionError, match=r"; give policy='.*policy.yaml'$"):
        hmpx.load_policy(lists=tmp_path)

    # Beside a result of another kind `convert` would read a part of each: nothing is written or deleted.
    by_op = tune(faulty(), inputs(), budget=3)
    for first, second, name in ((by_op, best, "bf16.txt"), (best, by_op, "policy.yaml")):
        folder = tmp_path / f"with {name}"
        first.write(folder)
        before = {each.name: each.read_bytes() for each in folder.iterdir()}
        with pytest.raises(hmpx.OptionError, match=f"holds {name} of another result, which conv"):
            second.write(folder)
        assert {each.name: each.read_bytes() for each in folder.iterdir()} == before


# --- metrics -----------------------------------------------------------------------------------------


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def largest(output: Tensor, expected: Tensor) -> float:
    assert output.dtype is expected.dtype is torch.float32
    return float((output - expected).abs().max())


@pytest.mark.parametrize(("metric", "tolerance"), [("loss", 0.05), ("kl", 1e-4), (largest, 0.02)])
def test_metrics(metric: Any, tolerance: float) -> None:
    """All find the fault; its error with the set is below that without."""
    best = tune(faulty(), inputs(), metric=metric, loss_fn=loss, tolerance=tolerance)
    assert best.keep_fp32 <= {"add", "sub", "mul", "tanh"}
    assert best.error <= tolerance
    assert best.metric == (metric if isinstance(metric, str) else "largest")


# --- what it refuses ---------------------------------------------------------------------------------


def failing(*_: Any) -> float:
    raise TypeError("mine")


@pytest.mark.parametrize(
    ("options", "name"), [({"metric": failing}, "metric"), ({"measure": failing}, "measure")]
)
def test_what_functions_of_users_raise_passes(options: dict[str, Any], name: str) -> None:
    """The same error, with a note that says which function it is."""
    with pytest.raises(TypeError, match="mine") as caught:
        hmpx.tune(nn.Linear(4, 4), torch.ones(2, 4), progress=False, **options)
    assert str(caught.value) == "mine"
    assert caught.value.__cause__ is None
    assert caught.value.__notes__ == [f"hmpx.tune: {name} raised it"]


def test_what_the_model_raises_passes() -> None:
    """In its first forward."""

    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hmpx.tune(Failing(4, 4), torch.ones(2, 4), progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0}, "tolerance must be above 0"),
        ({"tolerance": -1}, "tolerance must be above 0"),
        ({"tolerance": math.nan}, "tolerance must be above 0"),
        ({"tolerance": "1"}, "tolerance must be a number"),
        ({"tolerance": True}, "tolerance must be a number"),
        ({"metric": "l2"}, "metric must be one of 'relative_l2', 'loss', 'kl'"),
        ({"metric": "loss"}, "needs a loss_fn"),
        ({"metric": lambda a, b: "x"}, "metric must return a number"),
        ({"by": "layer"}, "by must be 'op' or 'module'"),
        ({"seed": -1}, "seed must be an int of at least 0"),
        ({"budget": 1}, "budget must be an int of at least 2"),
        ({"samples": 0}, "samples must be an int of at least 1"),
        ({"loss_fn": 3}, "loss_fn must be a function"),
        ({"measure": 3}, "measure must be a function"),
        ({"progress": "yes"}, "progress must be True or False"),
        ({"low_precision_type": "float33"}, "low_precision_type must be"),
        ({"device_types": {"gpu"}}, "gpu"),
        ({"legalize": "sometimes"}, "legalize must be one of 'auto'"),
    ],
)  # fmt: skip
def test_invalid_arguments(options: dict[str, Any], message: str) -> None:
    """Each is named, with what is expected."""
    with pytest.raises(hmpx.OptionError, match=message):
        tune(nn.Linear(16, 16), inputs(), **options)
    assert not hmpx.is_converted()


class Fixed(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.clone(), "calls no op on fp32 tensors that may run in low precision"),
        (lambda x: None, "returns None, in which tune sees no numbers"),
        (lambda x: x * math.nan, "returns NaN in fp32"),
    ],
)
def test_models_that_cannot_be_tuned(function: Callable[[Tensor], Any], message: str) -> None:
    """With the reason."""
    with pytest.raises(hmpx.OptionError, match=message):
        tune(Fixed(function), inputs())


def test_fp32_must_pass_and_not_be_noise() -> None:
    """A program whose results no seed sets: each call has another."""
    numbers = itertools.count()

    def noisy(x: Tensor) -> Tensor:
        return torch.tanh(x) + next(numbers)

    with pytest.raises(hmpx.OptionError, match="is within the noise of fp32"):
        tune(Fixed(noisy), inputs())


def test_integer_outputs_without_gradients() -> None:
    """Their error is the share that differs; ops are ranked as the default lists have them."""
    torch.manual_seed(0)
    linear = nn.Linear(16, 16)
    best = tune(Fixed(lambda x: ((linear(x) + 256) - 256).argmax(-1)), inputs(), tolerance=0.1)
    assert best.keep_fp32 == {"add", "sub"}
    assert all(each.score is None for each in best.candidates)
    assert "not known" in str(best)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 6, 20])
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_a_limit_for_further_batches(count: int, spread: float) -> None:
    """By published factors of one-sided tolerance limits for 0.95 with confidence 0.95; fewer than five batches have none."""
    published = {5: 4.203, 6: 3.708, 20: 2.396}
    logs = numpy.random.default_rng(count).normal(math.log(0.01), spread, count)
    errors = dict(enumerate(numpy.exp(logs).tolist(), 1))

    def metric(low: Tensor, fp32: Tensor) -> float:
        return 0.0 if torch.equal(low, fp32) else errors[round(float(fp32.max().sinh()))]

    batches = [torch.full((4, 4), float(each)) for each in errors]
    model = Fixed(lambda x: torch.asinh(x))
    best = tune(model, batches, fresh_batches=batches, metric=metric, tolerance=100.0)
    found = numpy.array([*errors.values()])
    assert best.fresh_error == found.max()
    assert best.batches == count
    if count < 5:
        assert best.error == found.max()
        assert "a limit for others needs 5, besides those that only check" in str(best)
        return
    normal, lognormal = (
        each.mean() + published[count] * each.std(ddof=1) for each in (found, logs)
    )
    expected = max(found.max(), normal, math.exp(lognormal))
    assert math.log(best.error) == pytest.approx(
        math.log(expected), abs=0.02 * published[count] * logs.std(ddof=1)
    )
    assert f"a limit for 95 % of further batches, from {count} of them" in str(best)
    kept = tune(
        model, batches, fresh_batches=batches, metric=metric, tolerance=0.99 * best.error
    ).kept
    assert kept == {"asinh"}
