"""`hmpx.record`: what its rows say, whom it counts, and what it leaves alone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx.reports import Row

X, WEIGHT = torch.ones(4, 8), torch.ones(8, 8)


@pytest.fixture(autouse=True)
def _converted() -> Iterator[None]:
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        yield


def row_of(rec: hmpx.record, op: str, phase: str = "forward") -> Row:
    """Returns the one row of an op and phase."""
    (row,) = [row for row in rec.report().rows if (row.op, row.phase) == (op, phase)]
    return row


def test_a_row_says_what_was_called_where_and_why() -> None:
    """And what it cost."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    model = nn.Sequential(Block())
    with hmpx.record() as rec:
        for _ in range(3):
            model(X)
    row = row_of(rec, "linear")
    assert (row.site, row.module) == ("torch.nn.functional.linear", "0.inner")
    assert row.cast_policy == "LOW"
    assert (
        row.reason == hmpx.convert(device_types={"cpu"}, legalize="never").policy["linear"].reason
    )
    assert (row.dtype, row.device_type) == ("bfloat16", "cpu")
    assert row.input_dtypes == ("float32",) * 3
    assert row.cast_dtypes == ("bfloat16",) * 3
    assert row.output_dtypes == ("bfloat16",)
    assert (row.calls, row.casts) == (3, 9)
    assert row.cast_bytes == 3 * 2 * (4 * 8 + 8 * 2 + 2)
    assert row.flops == 3 * 2 * 4 * 8 * 2
    assert row.bytes == 3 * 2 * (4 * 8 + 8 * 2 + 2 + 4 * 2)
    assert row.seconds is None
    assert "test_record.py:" in row.location


def test_gradients_are_rows_of_their_own() -> None:
    """In the dtypes that autograd gives them; casts have gradients that are cast."""
    x = X.clone().requires_grad_()
    with hmpx.record() as rec:
        results = [torch.mm(x, WEIGHT) for _ in range(2)]
        results[0].sum().backward()
    row, backward = row_of(rec, "mm"), row_of(rec, "mm", "backward")
    assert (row.calls, backward.calls) == (2, 1)
    assert backward.input_dtypes == ("bfloat16",)
    assert backward.output_dtypes == ("float32",)
    assert (backward.casts, backward.cast_bytes) == (1, 4 * 4 * 8)
    assert backward.flops == 2 * 4 * 8 * 8


def test_ops_that_no_list_names_count() -> None:
    """As they ran: in the dtype of their input."""
    with hmpx.record() as rec:
        torch.erf(torch.mm(X, WEIGHT)).sqrt_()
    for op in ("erf", "sqrt"):
        row = row_of(rec, op)
        assert (row.dtype, row.casts, row.calls) == ("bfloat16", 0, 1)


def test_the_programs_own_casts_are_told_apart() -> None:
    """Those that change nothing are none."""
    with hmpx.record() as rec:
        X.bfloat16().float().to(torch.float32).to("cpu")
    assert [(row.op, row.reason, row.casts, row.cast_bytes) for row in rec.report().rows] == [
        ("bfloat16", "the program's own cast", 1, 2 * 32),
        ("float", "the program's own cast", 1, 4 * 32),
    ]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_told_apart(use_reentrant: bool) -> None:
    """Whatever kind of checkpoint."""
    x = X.clone().requires_grad_()
    with hmpx.record() as rec:
        y = checkpoint(
            lambda x: torch.relu(torch.mm(x, WEIGHT)) * 2, x, use_reentrant=use_reentrant
        )
        y.sum().backward()
    phases = {
        phase: row_of(rec, "mm", phase).calls for phase in ("forward", "recompute", "backward")
    }
    assert phases == {"forward": 1, "recompute": 1, "backward": 1}


def test_all_threads_are_recorded_and_no_call_is_lost() -> None:
    """Counting takes turns in no thread."""

    def work() -> None:
        for _ in range(200):
            torch.mm(X, WEIGHT)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with hmpx.record() as rec:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert row_of(rec, "mm").calls == 800


def test_records_nest() -> None:
    """Each counts what ran inside it."""
    with hmpx.record() as outer:
        torch.mm(X, WEIGHT)
        with hmpx.record() as inner:
            torch.mm(X, WEIGHT)
    assert sum(row.calls for row in outer.report().rows) == 2
    assert sum(row.calls for row in inner.report().rows) == 1


def test_after_it_torch_is_as_before() -> None:
    """Wrappers are those without observers, and calls are not counted any more."""
    before = torch.nn.functional.linear.__code__, torch.erf
    with hmpx.record() as rec:
        y = torch.mm(X.clone().requires_grad_(), WEIGHT).sum()
    y.backward()
    torch.mm(X, WEIGHT)
    assert (torch.nn.functional.linear.__code__, torch.erf) == before
    assert {(row.op, row.phase) for row in rec.report().rows} == {
        ("mm", "forward"),
        ("sum", "forward"),
    }


def test_results_are_the_same_bit_by_bit() -> None:
    """Gradients, too, and random numbers."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.LayerNorm(8), nn.Softmax(-1))

    def step() -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        y = model(X)
        y.square().sum().backward()
        return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = step()
    with hmpx.record():
        actual = step()
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_no_tensor_is_kept_alive() -> None:
    """Neither inputs nor results, nor what the graph holds."""
    x = torch.ones(4, 8, requires_grad=True)
    with hmpx.record() as rec:
        y = torch.mm(x, WEIGHT)
        watched = weakref.ref(y), weakref.ref(x)
        del x, y
        gc.collect()
        assert [each() for each in watched] == [None, None]
    assert row_of(rec, "mm").calls == 1


def test_what_ran_before_an_error_is_reported() -> None:
    """With the error."""
    with pytest.raises(ZeroDivisionError), hmpx.record() as rec:
        torch.mm(X, WEIGHT)
        raise ZeroDivisionError("no data")
    assert rec.report().error == "ZeroDivisionError: no data"
    assert row_of(rec, "mm").calls == 1


def test_an_empty_report_says_that_torch_was_not_converted() -> None:
    """Which is the likeliest reason."""
    hmpx.revert()
    with hmpx.record() as rec:
        torch.mm(X, WEIGHT)
    assert rec.rows == ()
    assert "torch was not converted: hmpx.convert() comes first" in str(rec)


def test_times_are_measured_if_asked() -> None:
    """Sums over calls."""
    with hmpx.record(times=True) as rec:
        for _ in range(3):
            torch.mm(X, WEIGHT)
    row = row_of(rec, "mm")
    assert row.seconds is not None
    assert 0 < row.seconds < 10
    with pytest.raises(hmpx.OptionError, match="times"):
        hmpx.record(times="yes")  # type: ignore[arg-type]


def test_legalized_and_emulated_ops_count_as_low() -> None:
    """They compute in fp32, but what the program asked for is what is reported."""
    for options, dtype in (
        ({"legalize": "always"}, "bfloat16"),
        ({"low_precision_type": "float8_e4m3fn"}, "float8_e4m3fn"),
    ):
        with hmpx.convert(device_types={"cpu"}, **options), hmpx.record() as rec:  # type: ignore[arg-type]
            torch.mm(X, WEIGHT)
        row = row_of(rec, "mm")
        assert (row.dtype, row.flops, row.is_low) == (dtype, 2 * 4 * 8 * 8, True)
        assert rec.report().totals.low_flops == row.flops


def test_a_compiled_model_is_recorded() -> None:
    """It runs uncompiled for as long as the record."""
    model = torch.compile(nn.Linear(8, 2), backend="eager")
    model(X)
    with hmpx.record() as rec:
        model(X)
    assert row_of(rec, "linear").calls == 1


# --- waste ---------------------------------------------------------------------------------------


def wasted(rec: hmpx.record, kind: str) -> list[tuple[str, int, str]]:
    """Returns what, how often, and the fix, of one kind of waste."""
    return [(each.what, each.times, each.fix) for each in rec.waste() if each.kind == kind]


def test_a_weight_that_is_cast_at_each_call() -> None:
    """Could be stored as it is used."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    with torch.no_grad(), hmpx.record() as rec:
        for _ in range(5):
            model(X)
    assert wasted(rec, "parameter cast again") == [("0.weight", 4, "hmpx.freeze(model)")]
    (waste,) = [each for each in rec.waste() if each.kind == "parameter cast again"]
    assert waste.bytes == 4 * 2 * 64


def test_a_weight_that_learns_and_is_cast_for_each_of_its_uses() -> None:
    """As by a recurrent cell; freezing it is no remedy."""
    layer = nn.Linear(8, 8, bias=False)
    with hmpx.record() as rec:
        layer(layer(layer(X)))
    assert wasted(rec, "parameter cast again") == [("weight", 2, "weight = weight.bfloat16()")]


def test_a_weight_that_is_written_in_between_is_not_cast_in_vain() -> None:
    """As by an optimizer."""
    model = nn.Linear(8, 8, bias=False)
    with torch.no_grad(), hmpx.record() as rec:
        for _ in range(5):
            model(X)
            model.weight.mul_(0.5)
    assert wasted(rec, "parameter cast again") == []


def test_a_tensor_that_several_ops_cast() -> None:
    """As the input of three projections."""
    q, k, v = (torch.ones(8, 8) for _ in range(3))
    with hmpx.record() as rec:
        x = X + 1
        for weight in (q, k, v):
            torch.mm(x, weight)
    assert wasted(rec, "tensor cast again") == [("mm", 2, "low = x.bfloat16()")]


def test_an_fp32_op_between_low_ones() -> None:
    """Through views, too."""
    with hmpx.record() as rec:
        y = torch.softmax(torch.mm(X, WEIGHT), -1)
        torch.mm(y.t(), X)
    assert wasted(rec, "round trip") == [("mm -> softmax -> mm", 1, "bf16.txt: softmax")]


def test_a_low_op_between_fp32_ones() -> None:
    """Where it computes little."""
    with hmpx.convert(lists="lean", device_types={"cpu"}), hmpx.record() as rec:
        torch.softmax(F.leaky_relu(X), -1)
    assert wasted(rec, "round trip") == [("leaky_relu -> softmax", 1, "bf16.txt: -leaky_relu")]


def test_weights_that_autograd_keeps_as_cast() -> None:
    """Not where it keeps the parameter itself, as for legalized ops."""
    model, x = nn.Sequential(nn.Linear(8, 8)), X.clone().requires_grad_()
    with hmpx.record() as rec:
        model(x)
    (waste,) = [each for each in rec.waste() if each.kind == "weight casts kept"]
    assert (waste.what, waste.times, waste.bytes) == ("0.weight", 1, 2 * 64)
    with hmpx.convert(device_types={"cpu"}, legalize="always"), hmpx.record() as rec:
        model(x)
    assert wasted(rec, "weight casts kept") == []


def test_a_record_shows_how_much_it_has() -> None:
    with hmpx.convert(device_types={"cpu"}), hmpx.record() as rec:
        assert repr(rec) == "<hmpx.record: 0 calls in 0 rows>"
        for _ in range(3):
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert repr(rec) == "<hmpx.record: 3 calls in 1 rows>"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_dtypes_of_optimizers(make: Any, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(WEIGHT.to(dtype))
    optimizer = make([parameter], lr=0.1)
    with hmpx.record() as rec:
        for _ in range(2):
            (X.to(dtype) @ parameter).sum().backward()
            optimizer.step()
    states = {name for name, value in optimizer.state[parameter].items() if value.dim()}
    assert rec.report().optimizers == {
        f"{make.__name__}.{name}": str(dtype).removeprefix("torch.")
        for name in ("parameters", *states)
    }
    assert rec.report().about["loss scaler"] == "none"


def test_a_loss_scaler_is_seen() -> None:
    """Also if it is gone at the end."""

    def train() -> None:
        parameter, scaler = nn.Parameter(WEIGHT.clone()), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        scaler.scale((X @ parameter).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    with hmpx.record() as rec:
        train()
        gc.collect()
    assert rec.report().about["loss scaler"] == "yes"


def test_equal_calls_with_a_parameter_and_with_a_tensor_are_told_apart() -> None:
    x, weight = torch.ones(2, 8, requires_grad=True), nn.Parameter(torch.ones(8, 8))
    with hmpx.convert(device_types={"cpu"}, legalize="never"), hmpx.record() as rec:
        for each in (weight, weight.detach().clone().requires_grad_(), weight):
            F.linear(x, each)
    kept = [each for each in rec.waste() if each.kind == "weight casts kept"]
    assert [(each.times, each.what) for each in kept] == [(2, "a parameter of shape (8, 8)")]


def test_shapes_of_results_and_arguments_keep_calls_apart() -> None:
    """Of calls on one line, in one record."""
    x = torch.arange(12.0).view(3, 4)
    calls = [lambda n=n: torch.masked_select(x, x < n).sum() for n in (2, 5)]
    calls += [lambda dim=dim: x.sum(dim) for dim in (0, 1, 0)]
    with hmpx.convert(device_types={"cpu"}), hmpx.record() as rec:
        for call in calls:
            call()
    found = {(row.calls, row.bytes) for row in rec.rows if row.op == "sum"}
    assert found == {(2, 4 * (2 + 5 + 2)), (3, 4 * (3 * 12 + 4 + 3 + 4))}
