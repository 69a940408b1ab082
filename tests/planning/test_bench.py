"""`hmpx.bench`: what each variant runs under, how it is compared, and what is refused."""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx
from hmpx import Bench
from hmpx.planning import Measured, Quartiles

QUICK: dict[str, Any] = {"device": "cpu", "runs": 2, "warmup": 1, "run_s": 0.0, "threads": 1}


def training(width: int = 32) -> Callable[[], Tensor]:
    """Returns a step that trains a perceptron on random numbers drawn in each step."""
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        x = torch.randn(16, width)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        return loss

    return step


def alone(region: Callable[[], contextlib.AbstractContextManager[Any]], steps: int) -> float:
    """Returns the last loss of a variant that nothing takes turns with."""
    torch.manual_seed(0)
    step = training()
    for _ in range(steps):
        with region():
            loss = step()
    return loss.item()


def test_each_variant_trains_as_it_does_alone() -> None:
    """Weights, random numbers and casts are those of a program of its own: losses are equal bit for bit."""
    names = ["autocast", "always", "never"]
    found = hmpx.bench(training, variants=names, **QUICK)
    steps = found.variant("fp32").loss_step
    assert (
        steps == 1 + 1 + 2 * 2
    )  # the warm-up and its timed step; two runs of one step and one before
    expected = {
        "fp32": contextlib.nullcontext,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "always": lambda: hmpx.convert(device_types={"cpu"}, legalize="always"),
        "never": lambda: hmpx.convert(device_types={"cpu"}, legalize="never"),
    }
    for name, region in expected.items():
        assert found.variant(name).loss == alone(region, steps), name
    assert found.variant("fp32").loss_difference == 0
    assert found.variant("always").loss_difference == found.variant("always").loss - alone(
        contextlib.nullcontext, steps
    )


def test_what_variants_run_under() -> None:
    """Each in its turn, and the order of the turns is reversed every other time."""
    seen: list[tuple[bool, bool]] = []

    def make() -> Callable[[], None]:
        return lambda: seen.append((hmpx.is_converted(), torch.is_autocast_enabled("cpu")))

    hmpx.bench(make, variants=["autocast", "auto"], **{**QUICK, "warmup": 0})
    fp32, autocast, auto = (False, False), (False, True), (True, False)
    warming = [fp32, autocast, auto]
    turn = [fp32, fp32, autocast, autocast, auto, auto]
    memory = turn  # where the first step of each may compile anew
    assert seen == [*warming, *turn, *reversed(turn), *memory, fp32]  # the last looks for low ops


@pytest.mark.sampled(3)
def test_a_slow_variant_is_seen_to_be_slow() -> None:
    """By the ratio, by the verdict, and in all turns."""

    def make() -> Callable[[], None]:
        x = torch.randn(64, 64)

        def step() -> None:
            for _ in range(40 if hmpx.is_converted() else 1):
                torch.linalg.svdvals(x)

        return step

    found = hmpx.bench(make, variants=["never"], clock="cpu", **{**QUICK, "runs": 6})
    slow = found.variant("never")
    assert slow.ratio is not None
    assert slow.ratio.low > 5
    assert slow.is_other
    assert "None is faster than fp32. The nearest is hmpx never" in str(found)


def test_equal_variants_are_rarely_held_to_be_faster() -> None:
    """In less than one of fifteen benchmarks of four of them, with times that jump as those of busy machines."""
    draws = random.Random(0)
    wrong = 0
    for _ in range(500):
        turns = [[draws.lognormvariate(0, 0.2) for _ in range(5)] for _ in range(10)]
        rows = {f"v{i}": [turn[i] / turn[0] for turn in turns] for i in range(1, 5)}
        wrong += "Fastest" in str(bench_of(**rows))
    assert wrong < 500 / 15


def bench_of(**ratios: list[float]) -> Bench:
    """Returns a benchmark in which variants had these ratios."""
    (runs,) = {len(each) for each in ratios.values()}
    rows = [measured("fp32", [1.0] * runs), *(measured(*each) for each in ratios.items())]
    return Bench("cpu", 1, "wall", runs, 0, tuple(rows))


def measured(name: str, ratios: list[float], **found: Any) -> Measured:
    times = Quartiles(1.0, 1.0, 1.0)
    return Measured(
        name, name, ratio=Quartiles.of(ratios), ratios=tuple(ratios), step_s=times, **found
    )


NOISE = [0.8, 1.1, 0.9, 1.2, 0.7, 1.0, 0.6, 1.3, 0.8, 0.9]


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ({"a": [0.5] * 5}, "5 runs are too few to tell whether any differs from fp32: 6 are the least."),
        ({"a": [0.5]}, "1 run is too few"),
        ({"a": [0.9] * 10, "b": NOISE}, "Fastest is a: 0.90 of fp32's time. Equal to it within what runs vary: b."),
        ({"a": [0.6] * 10, "b": [0.9] * 10}, "Fastest is a: 0.60 of fp32's time.\n"),
        ({"a": NOISE}, "None is shown to be faster than fp32. The nearest, a: 0.90 of fp32's time, was faster in 6 of 10 runs"),
        ({"a": [1.5] * 10}, "None is faster than fp32. The nearest is a: 1.50 of fp32's time."),
    ],
    ids=["few", "one", "noisy", "clear", "equal", "slower"],
)  # fmt: skip
def test_verdict(ratios: dict[str, list[float]], message: str) -> None:
    """It claims what most turns show: a noisy variant does not hide one that is faster in each of them."""
    verdict = " ".join(str(bench_of(**ratios)).split("\n\n")[2].split())
    assert verdict.startswith(message.rstrip())
    assert ("Equal to it" in verdict) == ("Equal to it" in message)


def test_a_variant_without_a_number_is_not_the_fastest(tmp_path: Any) -> None:
    """However fast: its loss is named, and JSON has no NaN."""
    fp32 = measured("fp32", [1.0] * 10, loss=1.0, loss_step=9)
    nan = float("nan")
    fast = measured("a", [0.1] * 10, loss=nan, loss_step=9, loss_difference=nan, not_finite_at=3)
    found = Bench("cpu", 1, "wall", 10, 0, (fp32, fast, measured("b", [0.5] * 10)))
    assert "Fastest is b" in str(found)
    assert "The loss of a is NaN or infinite at step 3." in str(found)

    def refuse(constant: str) -> None:
        pytest.fail(constant)

    read = json.loads(found.to_json(), parse_constant=refuse)
    assert read["variants"]["a"]["loss"] == "nan"
    assert read["variants"]["a"]["ratios"] == [0.1] * 10


@pytest.mark.sampled(3)
def test_losses_that_are_no_numbers_are_found() -> None:
    """Where fp32 diverges, too, none is worse than it."""

    def make(is_fp32_finite: bool) -> Callable[[], Tensor]:
        count = [0]

        def step() -> Tensor:
            count[0] += 1
            is_nan = count[0] > 2 and (hmpx.is_converted() or not is_fp32_finite)
            return torch.tensor(float("nan") if is_nan else 1.0)

        return step

    found = hmpx.bench(lambda: make(True), variants=["never"], **QUICK)
    assert [each.not_finite_at for each in found.variants] == [None, 3]
    assert "Nothing to compare fp32 with." in str(found)
    assert "Nothing to compare" not in str(
        hmpx.bench(lambda: make(False), variants=["never"], **QUICK)
    )


def test_a_model_is_run_without_gradients_and_frozen() -> None:
    """In evaluation mode; its error is that of its outputs, and afterwards it is as it was."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 8)).eval()
    weight = model[0].weight.detach().clone()
    x = torch.randn(4, 64)
    model.train()[1].eval()
    found = hmpx.bench(lambda: model, x, variants=["always", "frozen"], **QUICK)
    assert [each.training for each in model.modules()] == [True, True, False, True]
    model.eval()
    with torch.no_grad():
        exact = model(x)
        with hmpx.convert(device_types={"cpu"}, legalize="always"):
            low = model(x)
    expected = ((low.double() - exact.double()).norm() / exact.double().norm()).item()
    assert found.variant("always").output_error == pytest.approx(expected, rel=1e-12)
    frozen = found.variant("frozen")
    assert frozen.error is None
    assert frozen.output_error is not None
    assert 0 < frozen.output_error < 0.02
    assert model[0].weight.dtype is torch.float32
    assert torch.equal(model[0].weight, weight)


def test_fixes_of_a_record_are_timed() -> None:
    """The lines that a record proposes are in force; the remark names them, and what they save over hmpx auto."""
    seen: dict[str, set[torch.dtype]] = {}
    for name in ("auto", "fixes"):
        model = nn.Sequential(nn.Linear(32, 32), nn.Softmax(-1), nn.Linear(32, 32))
        dtypes: list[torch.dtype] = []
        model[1].register_forward_hook(lambda *given, dtypes=dtypes: dtypes.append(given[2].dtype))
        variants = ["auto", "fixes"] if name == "fixes" else [name]
        found = hmpx.bench(lambda model=model: model, torch.ones(8, 32), variants=variants, **QUICK)
        seen[name] = set(dtypes)
    assert seen == {"auto": {torch.float32}, "fixes": {torch.float32, torch.bfloat16}}
    (said,) = [each for each in found.notes if "hmpx fixes" in each]
    assert re.fullmatch(
        r"hmpx fixes has bf16\.txt: softmax: \d+ % (less|more) time than hmpx auto"
        r"(, within what runs vary)?\.",
        said,
    )


def test_a_record_without_fixes_is_named() -> None:
    """The variant then is `auto`; with lists of the user's own, too."""
    lists = {"policy": {"lists": "none", "low": ["linear"]}}
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    found = hmpx.bench(lambda: model, torch.ones(2, 8), variants=["fixes"], **QUICK, **lists)
    assert any("hmpx fixes is hmpx auto here" in each for each in found.notes)


def test_a_variant_that_fails_is_reported() -> None:
    """The others go on."""

    def make() -> Callable[[], Tensor]:
        def step() -> Tensor:
            if torch.is_autocast_enabled("cpu"):
                raise ValueError("not in here")
            return torch.ones(2, 2).sum()

        return step

    found = hmpx.bench(make, variants=["autocast", "never"], **QUICK)
    assert found.variant("autocast").error == "ValueError: not in here"
    where = found.variant("autocast").error_location
    assert re.fullmatch(r".*test_bench\.py:\d+", where)
    assert found.variant("autocast").ratio is None
    assert found.variant("never").ratio is not None
    assert f"torch.autocast failed: ValueError: not in here, at {where}" in " ".join(
        str(found).split()
    )


def test_random_numbers_and_threads_of_the_user_stay() -> None:
    """Those of torch and of Python, and the number of threads."""
    torch.manual_seed(7)
    random.seed(7)
    expected = torch.rand(3), random.random()
    torch.manual_seed(7)
    random.seed(7)
    hmpx.bench(training, variants=["never"], **QUICK)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert torch.get_num_threads() == 1


def test_json_holds_what_the_object_holds(tmp_path: Any) -> None:
    """And the table shows the ratio."""
    found = hmpx.bench(training, variants=["never"], **QUICK)
    found.to_json(tmp_path / "bench.json")
    read = json.loads((tmp_path / "bench.json").read_text("utf-8"))
    never = found.variant("never")
    assert never.ratio is not None
    assert read["hmpx_bench"] == 1
    assert read["variants"]["never"]["ratio"]["median"] == never.ratio.median
    assert read["variants"]["never"]["loss"] == never.loss
    (row,) = [line for line in str(found).splitlines() if line.startswith("hmpx never")]
    assert row.split()[2] == f"{never.ratio.median:.2f}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variants": ["fats"]}, "did you mean 'fast'"),
        ({"variants": 3}, "variants"),
        ({"runs": 0}, "runs must be an int of at least 1"),
        ({"warmup": -1}, "warmup must be an int of at least 0"),
        ({"run_s": float("nan")}, "run_s must be seconds"),
        ({"threads": 0}, "threads must be an int of at least 1"),
        ({"clock": "sun"}, "clock"),
        ({"device": "cup"}, "cup"),
        ({"device": "meta"}, "one that steps can run on here, .*cpu, not 'meta'"),
        ({"legalize": "fast"}, "it takes variants instead"),
        ({"verbose": True}, "verbose slows down"),
        ({"lists": "hmpp"}, "hmpp"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    """Before anything is made."""
    with pytest.raises(hmpx.HmpxError, match=message):
        hmpx.bench(lambda: pytest.fail("made"), **{**QUICK, **arguments})


SHARED = training(4)


def converting() -> Callable[[], None]:
    return lambda: hmpx.convert(device_types={"cpu"}) and None


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: 3, {}, "must return the step"),
        (lambda: nn.Linear(2, 2), {}, "inputs must be what its forward is called with"),
        (lambda: lambda: 1 / 0, {}, r"fails in fp32: ZeroDivisionError: .*, at .*test_bench\.py:\d+"),
        (lambda: lambda: sys.exit(0), {}, "fails in fp32: SystemExit: 0"),
        (lambda: sys.exit(0), {}, "can't be made: SystemExit: 0"),
        (lambda: lambda: (yield), {}, "returns a generator, which has run nothing yet"),
        (lambda: SHARED, {}, "fp32 and hmpx never train the same model"),
        (lambda: 1 / 0, {}, "can't be made: ZeroDivisionError: .*, at"),
        (lambda: hmpx.convert(device_types={"cpu"}).revert, {}, r"leave out hmpx\.convert\(\)"),
        (converting, {}, r"leave out hmpx\.convert\(\)"),
        (training, {"variants": ["frozen"]}, "make.. must return the model"),
    ],
    ids=[
        "number", "no inputs", "step fails", "step exits", "make exits", "generator", "shared",
        "make fails", "make converts", "converts", "frozen",
    ],
)  # fmt: skip
def test_what_can_not_be_measured(make: Any, arguments: dict[str, Any], message: str) -> None:
    """Is an error that says what to do, and leaves torch unconverted."""
    with pytest.raises(hmpx.BenchError, match=message):
        hmpx.bench(make, **{**QUICK, "variants": ["never"], **arguments})
    assert not hmpx.is_converted()


def test_it_needs_torch_as_it_is() -> None:
    """A conversion in force is refused, and stays."""
    with hmpx.convert(device_types={"cpu"}):
        with pytest.raises(hmpx.BenchError, match="converted already"):
            hmpx.bench(training, **QUICK)
        assert hmpx.is_converted()


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (hmpx.disable_casts, "inside of hmpx.disable_casts"),
        (lambda: torch.autocast("cpu"), "or a region of torch.autocast"),
        (hmpx.record, r"an observer such as hmpx\.record\(\) or hmpx\.watch\(\) is attached"),
    ],
    ids=["off", "autocast", "observed"],
)
def test_regions_that_would_hold_in_all_variants(region: Any, message: str) -> None:
    """Are refused: fp32 would not be fp32, or hmpx's variants would be slowed."""
    with region(), pytest.raises(hmpx.BenchError, match=message):
        hmpx.bench(training, **QUICK)


def in_autocast() -> Callable[[], Tensor]:
    step = training()

    def low() -> Tensor:
        with torch.autocast("cpu"):
            return step()

    return low


def in_conversion() -> Callable[[], Tensor]:
    step = training()

    def low() -> Tensor:
        with hmpx.convert(device_types={"cpu"}):
            return step()

    return low


def compiled() -> Callable[[], Tensor]:
    weight = torch.ones(2, 2)
    return torch.compile(lambda: (weight @ weight.bfloat16().float()).sum(), backend="eager")


@pytest.mark.parametrize(
    ("make", "does"),
    [
        (in_autocast, r"linear gives bfloat16, at .*test_bench.py:\d+"),
        (in_conversion, r"runs under hmpx.convert\(\)"),
        (compiled, r"bfloat16 gives bfloat16, at .*test_bench.py:\d+"),
    ],
    ids=["autocast", "conversion", "compiled"],
)
def test_a_step_that_casts_by_itself_is_no_baseline(make: Any, does: str) -> None:
    """The row fp32 would not be fp32: there is no verdict, and the op is named."""
    found = hmpx.bench(make, variants=[], **{**QUICK, "runs": 1})
    assert re.search(does, found.low_op)
    assert f"for in the step itself {found.low_op}." in " ".join(str(found).split())
