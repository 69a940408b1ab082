"""`hmpx.tune` as users call it: arguments, metrics, what it writes, and what it refuses."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx
from hmpx.tuning import profiling
from hmpx.tuning.metrics import limit, sampled

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
        "bf16.txt", "fp32.txt", "widest.txt", "report.txt", "report.html",
    ]  # fmt: skip
    loaded = hmpx.load_policy(lists=tmp_path / "lists", strict=True)
    assert loaded.fingerprint() == best.policy.fingerprint()
    fp32 = (tmp_path / "lists" / "fp32.txt").read_text()
    assert "# effect" in fp32
    assert "without\nadd\n" in fp32
    page = (tmp_path / "lists" / "report.html").read_text()
    assert "Candidates by effect" in page
    assert "tolerance" in page
    assert str(best).startswith("2 of 7 candidates stay in fp32 beside bfloat16: relative_l2 error")
    assert "add" in best._repr_html_()
    with pytest.raises(hmpx.OptionError, match="can't write"):
        best.write(journal)
    with pytest.raises(hmpx.OptionError, match="belongs to another search: seed differs"):
        tune(model, inputs(), journal=journal, seed=1)


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


def test_the_conversion_in_force_stays(tmp_path: Path) -> None:
    """Its low type and devices are those of the search."""
    model, x = faulty(), inputs()
    with hmpx.convert(low_precision_type=torch.float16, device_types={"cpu"}) as session:
        best = tune(model, x, device_types=None, tolerance=0.05)
        assert hmpx.is_converted()
        assert session.policy.low_precision_type is torch.float16
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16
    assert best.low_precision_type == "float16"
    assert not hmpx.is_converted()


def test_an_executor_of_threads() -> None:
    """They take turns; the result is that of one."""
    model = faulty()
    with ThreadPoolExecutor(2) as executor:
        best = tune(model, inputs(), executor=executor)
    assert best.keep_fp32 == {"add", "sub"}
    assert best == tune(model, inputs())


@pytest.mark.slow
def test_two_processes_find_the_same(tmp_path: Path) -> None:
    """With the same path, errors and lists as this one."""
    model = nn.Sequential(*[Block(cancel if i == 1 else harmless) for i in range(3)])
    alone = tune(model, [inputs(), inputs() + 1], by="module")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        best = tune(model, [inputs(), inputs() + 1], by="module", executor=executor)
    assert best == alone
    assert best.keep_fp32 == {"1:add", "1:sub"}
    for each in (alone, best):
        each.write(tmp_path / str(each is best))
    texts = [(tmp_path / str(i) / "policy.yaml").read_text() for i in (False, True)]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_several_types() -> None:
    """The cheapest that pass; under a limit, the best of those that cost no more."""
    model = faulty()
    types = ["float8_e4m3fn", torch.bfloat16, "float32"]
    best = tune(model, inputs(), candidates=types)
    assert best.low_precision_type == "float8_e4m3fn"
    assert best.error <= 0.02
    assert {"add", "sub"} <= best.keep_fp32
    assert "bfloat16" in best.types.values()
    assert "In bfloat16" in str(best)
    limited = tune(model, inputs(), candidates=types, limit=("bits", 16))
    bits = {"float8_e4m3fn": 8, "bfloat16": 16, "float32": 32}
    total = sum(bits[limited.types[each.name]] * each.bytes for each in limited.candidates)
    assert total <= 16 * sum(each.bytes for each in limited.candidates)
    assert limited.evaluations == 3
    assert limited.error < limited.all_low_error
    assert "bits at most 16" in str(limited)


def test_measured_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no faster in low precision stays in fp32, and is said; times are measured once."""
    seconds = {"linear": (3.0, 1.0), "gelu": (0.5, 0.9), "tanh": (0.5, 0.5)}
    asked = []

    def forward(request: Any, policy: hmpx.Policy, recording: Any) -> list[Any]:
        low = policy["linear"].cast_policy is hmpx.CastPolicy.LOW
        asked.append(low)
        rows = real(request, policy, recording)
        return [replace(row, seconds=seconds.get(row.op, (1.0, 0.5))[low]) for row in rows]

    real = profiling._forward
    monkeypatch.setattr(profiling, "_forward", forward)
    journal = tmp_path / "journal"
    best = tune(faulty(), inputs(), objective="time", journal=journal)
    assert best.keep_fp32 == {"gelu", "tanh", "add", "sub"}
    assert best == tune(faulty(), inputs(), objective="time", journal=journal)
    assert len(asked) == 13  # the spots, then 6 rounds
    # In low precision: linear in three modules, sigmoid and relu. All: these, and gelu, tanh, add, sub.
    assert best.time_share == pytest.approx(1 - (3 * 2.0 + 2 * 0.5) / (3 * 3.0 + 2 * 0.5 + 4 * 1.0))
    assert "No faster in bfloat16: gelu, tanh." in str(best)
    assert "None of the others can be taken out" in str(best)
    assert tune(faulty(), inputs()).time_share is None
    with pytest.raises(hmpx.OptionError, match="belongs to another search: objective differs"):
        tune(faulty(), inputs(), journal=journal)


def test_times_are_measured_with_their_casts() -> None:
    """Of each op, in either type; what is no faster is kept."""
    model = nn.Sequential(nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 16))
    best = tune(model, torch.randn(64, 16), objective="time", by="module", tolerance=0.5)
    saved = {each.name: each.saved for each in best.candidates}
    assert saved.keys() == {"0:linear", "1:relu", "2:linear"}
    assert all(each is not None and each < 1 for each in saved.values())
    assert best.time_share <= 1
    assert best.keep_fp32 == {name for name, each in saved.items() if each <= 0}


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


def test_a_measure_gets_a_copy() -> None:
    """It may train; pairs of the same seed are compared, and the model stays as it is."""
    model = faulty()
    before = [each.clone() for each in model.parameters()]
    seeds = []

    def trained(copy: nn.Module, seed: int) -> float:
        seeds.append(seed)
        assert copy is not model
        with torch.no_grad():
            for each in copy.parameters():
                each.mul_(1.01)
            return float((copy(inputs()) - expected).square().mean()) + seed

    with torch.no_grad():
        expected = model(inputs())
    best = tune(model, inputs(), measure=trained, samples=2, tolerance=1e-4)
    assert set(seeds) == {0, 1}
    assert best.keep_fp32 <= {"add", "sub"}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_samples_are_taken_until_it_is_clear() -> None:
    """1, 2, 4, ...; what stays undecided is above the tolerance."""
    taken: list[int] = []

    def differences(*values: float) -> Callable[[int], float]:
        def difference(index: int) -> float:
            taken.append(index)
            return values[index % len(values)]

        return difference

    assert sampled(differences(0.2), 0.1, 1) == 0.2
    assert sampled(differences(0.05, 0.05), 0.1, 8) == pytest.approx(0.05)
    assert len(taken) == 3
    taken.clear()
    assert sampled(differences(0.0, 0.19), 0.1, 8) > 0.1
    assert len(taken) == 8
    taken.clear()
    assert sampled(differences(0.5, 0.51), 0.1, 8) > 0.1
    assert len(taken) == 2
    assert sampled(differences(math.nan), 0.1, 8) == math.inf


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
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"budget": 1}, "budget must be an integer of at least 2"),
        ({"samples": 0}, "samples must be an integer of at least 1"),
        ({"loss_fn": 3}, "loss_fn must be a function"),
        ({"measure": 3}, "measure must be a function"),
        ({"progress": "yes"}, "progress must be True or False"),
        ({"executor": 3}, "executor must have submit"),
        ({"low_precision_type": "float33"}, "low_precision_type must be"),
        ({"device_types": {"gpu"}}, "gpu"),
        ({"candidates": ["bfloat16"]}, "candidates must hold float32 and at least one other type"),
        ({"objective": "memory"}, "objective must be 'work' or 'time'"),
        (
            {"objective": "time", "candidates": ["float8_e4m3fn", "float32"]},
            "objective='time' weighs one low_precision_type",
        ),
        ({"limit": ("bits", 8)}, "limit chooses among several types"),
        ({"candidates": ["bfloat16", "float32"], "limit": 8}, "limit must be a pair"),
        ({"candidates": ["bfloat16", "float32"], "limit": ("mb", 8)}, "limit must be one of"),
        ({"candidates": ["bfloat16", "float32"], "limit": ("bits", 0)}, "above 0"),
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


def test_other_arguments_that_are_none() -> None:
    """A model that can't be called; no batches; a mapping whose keys are no names."""
    with pytest.raises(hmpx.OptionError, match="model must be a module or a function"):
        tune(3, inputs())
    with pytest.raises(hmpx.OptionError, match="inputs is an empty list"):
        tune(nn.Linear(16, 16), [])
    with pytest.raises(hmpx.OptionError, match="put a mapping that is the only argument"):
        tune(nn.Linear(16, 16), {1: inputs()})


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


def test_a_model_that_cannot_be_pickled() -> None:
    """With an executor only."""
    model = Fixed(lambda x: torch.tanh(x))
    with ThreadPoolExecutor(1) as executor, pytest.raises(hmpx.OptionError, match="can't be sent"):
        tune(model, inputs(), executor=executor)


def test_inputs_may_hold_flags() -> None:
    """Bool tensors, which go to the model as they are."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Tensor, kept: Tensor) -> Tensor:
            return self.linear(x) * kept

    batches = [{"x": torch.randn(6, 8), "kept": torch.rand(6, 4) > 0.5} for _ in range(2)]
    assert tune(Masked(), batches, tolerance=0.1).error <= 0.1


def test_a_limit_for_further_batches() -> None:
    """Of several batches; those that the search has not seen count by themselves."""
    assert limit([0.01]) == 0.01
    assert limit([0.01, 0.01, 0.01]) == pytest.approx(0.01)
    assert limit([0.0, math.inf]) == math.inf
    assert limit([0.0] * 30 + [1.0]) == 1.0
    draw = random.Random(0)
    for count in (2, 3, 6, 12, 30):
        held = sum(
            draw.gauss(3, 1) <= limit([draw.gauss(3, 1) for _ in range(count)]) for _ in range(4000)
        )
        assert held / 4000 >= 0.94

    errors = {1.0: 0.001, 2.0: 0.002}

    def metric(low: Tensor, fp32: Tensor) -> float:
        return 0.0 if torch.equal(low, fp32) else errors[round(float(fp32.max().atanh()), 1)]

    model, batches = (
        Fixed(lambda x: torch.tanh(x)),
        [torch.full((4, 4), each) for each in (1.0, 2.0)],
    )
    best = tune(model, batches, fresh_inputs=batches, metric=metric, tolerance=0.01)
    assert best.error == limit([0.001, 0.002])
    assert best.fresh_error == 0.002
    assert tune(model, batches, fresh_inputs=batches, metric=metric, tolerance=0.003).kept == {
        "tanh"
    }
