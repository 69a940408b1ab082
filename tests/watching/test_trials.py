"""What failed is run again in float32 before float32 is advised; the program does not notice."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from hmpx.watching import notes

pytestmark = pytest.mark.usefixtures("no_search_for_early_names")

FP16, BF16 = torch.float16, torch.bfloat16
INFINITY, NAN = float("inf"), float("nan")
LOW = ["sqrt", "mul", "pow", "sub", "log", "matmul"]


def given(value: float, *shape: int) -> Tensor:
    return torch.full(shape or (4,), value, requires_grad=True)


def first_found(program: Callable[[], Any], fp32: tuple[str, ...] = ()) -> hmpx.Offence:
    low = [op for op in LOW if op not in fp32]
    policy = hmpx.Policy.from_ops(low=low, fp32=fp32, low_precision_type=FP16)
    with hmpx.convert(policy=policy, device_types={"cpu"}), hmpx.watch("collect") as w:
        program()
    assert w.first is not None
    return w.first


FAIL_ALIKE = {
    "root at zero": (
        lambda: (given(2.0) * 0).sqrt().sum().backward(),
        ("sqrt", "inf", "backward"),
        "the gradient of sqrt is infinite in float32, too, where input 0 is 0 and the gradient is 1",
    ),
    "root of a negative": (
        lambda: ((-given(2.0)) ** 0.5).sum().backward(),
        ("pow", "nan", "forward"),
        "pow is NaN in float32, too, where input 0 is -2",
    ),
    "pole": (
        lambda: (given(2.0) * 0).pow(-1.0).sum().backward(),
        ("pow", "inf", "forward"),
        "pow is infinite in float32, too, where input 0 is 0",
    ),
    "difference of infinities": (
        lambda: (
            torch.sub(given(2.0) * INFINITY, given(2.0) * torch.full((4,), INFINITY))
            .sum()
            .backward()
        ),
        ("sub", "nan", "forward"),
        "sub is NaN in float32, too, where input 0 is inf and input 1 is inf",
    ),
    "product": (
        lambda: torch.matmul(given(1e30, 4, 4), given(1e30, 4, 4)).sum().backward(),
        ("matmul", "inf", "forward"),
        "matmul is infinite in float32, too, where input 0 is 1e+30 and input 1 is 1e+30",
    ),
}


@pytest.mark.parametrize("name", FAIL_ALIKE)
def test_float32_is_not_advised_where_it_fails_alike(name: str) -> None:
    """The values that make it fail are named."""
    program, expected, remedy = FAIL_ALIKE[name]
    found = first_found(program)
    assert (found.op, found.kind, found.phase) == expected
    assert found.remedy == f"none: {remedy}"


HELPED = {
    "overflow": lambda: (given(300.0) * 300.0).sum().backward(),
    "underflow": lambda: given(1e-9).log().sum().backward(),
    "gradient": lambda: (given(1e-3) * 3e4).backward(torch.full((4,), 1e3)),
    "gradient of matrices": lambda: torch.matmul(given(1e-3, 4, 4), given(3e4, 4, 4)).backward(
        torch.full((4, 4), 1e3)
    ),
}


@pytest.mark.parametrize("name", HELPED)
def test_float32_that_is_advised_helps(name: str) -> None:
    found = first_found(HELPED[name])
    assert found.remedy == f"fp32.txt: {found.op}"
    with pytest.raises(AssertionError):
        first_found(HELPED[name], (found.op,))


def test_what_can_not_be_tried_is_said() -> None:
    """Inputs that were written to before the backward."""

    def program() -> None:
        h = given(1e-3) * 1
        y = torch.mul(h, 6e4)
        h.detach().zero_()
        y.backward(torch.full((4,), 1e3))

    found = first_found(program)
    assert (found.op, found.phase, found.kind) == ("mul", "backward", "overflow")
    assert found.remedy.startswith("fp32.txt: mul (not tried: ")


@pytest.mark.parametrize(
    ("program", "expected", "remedy"),
    [
        (lambda h: torch.exp(h), "overflow", "fp32.txt: exp (tried on the extremes "),
        (lambda h: torch.log(h), "inf", "none: log may be infinite in float32, too, where input 0 is 0"),
        (lambda h: h.sqrt().sum().backward(), "inf", "none: the gradient of sqrt may be infinite"),
        (lambda h: (h * 6e4).float().sum().mul(9).backward(), "overflow", "fp32.txt: mul (tried on"),
    ],
)  # fmt: skip
def test_on_accelerators_extremes_are_tried(
    program: Any, expected: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing may be read before the end of the step."""
    looks_closer = notes.Notes._try

    def as_on_accelerators(
        self: Any, record: Any, arguments: Any, inputs: Any, results: Any
    ) -> Any:
        elsewhere = [type("Elsewhere", (), {"is_cpu": False})()]
        return looks_closer(self, record, arguments, inputs, elsewhere)

    monkeypatch.setattr(notes.Notes, "_try", as_on_accelerators)
    with hmpx.watch("collect") as w:
        h = torch.tensor([0.0, 12.0], dtype=FP16, requires_grad=True) * 1
        program(h if expected != "overflow" else h * 1)
    assert w.first is not None
    assert (w.first.kind, w.first.remedy[: len(remedy)]) == (expected, remedy)


# --- where values come from ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "between",
    [
        lambda h: h.clone(),
        lambda h: h.t().contiguous().t(),
        lambda h: h[[0, 1, 2, 3]],
        lambda h: torch.cat([each.clone() for each in h.chunk(2)]),
        F.gelu,
        lambda h: _Doubled.apply(h),
    ],
    ids=["clone", "contiguous", "index", "chunks", "kept function", "autograd function"],
)
def test_a_parameter_is_named_behind_functions_that_are_not_observed(between: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), _Called(between), nn.Linear(4, 4))
    nn.init.constant_(model[0].weight, NAN)
    with pytest.raises(hmpx.NonFiniteError) as raised, hmpx.watch():
        model(torch.randn(4, 4)).sum().backward()
    found = raised.value.offence
    assert (found.op, found.source, found.parameter) == ("linear", "parameter", "0.weight")


def test_a_parameter_that_changes_before_the_end_of_the_step_is_named() -> None:
    layer = nn.Linear(4, 1)
    nn.init.constant_(layer.bias, NAN)
    with hmpx.watch("collect") as w:
        layer(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            layer.bias.zero_()
    assert w.first is not None and (w.first.source, w.first.parameter) == ("parameter", "bias")


class _Called(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)  # type: ignore[no-any-return]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def written_at(y: Tensor) -> Tensor:
    y[0, 0, 0, 0] = NAN
    return y


@pytest.mark.parametrize(
    "written",
    [written_at, lambda y: y.masked_fill(y > 0, NAN), lambda y: y * NAN, lambda y: y.fill_(NAN)],
    ids=["assigned", "masked", "factor", "filled"],
)
def test_nan_that_a_program_writes_is_its_own(written: Any) -> None:
    """Also if it reads only a part of what it makes of it; without a loss it is meant."""
    convolution = nn.Conv2d(4, 12, 1)
    with hmpx.watch("collect") as w:
        z = convolution(written(torch.randn(2, 4, 4, 4)))
        product = z[:, :4] * z[:, 4:8]
        w.step()
        assert w.first is None
        z = convolution(written(torch.randn(2, 4, 4, 4)))
        product = z[:, :4] * z[:, 4:8]
        product.sum().backward()
    assert w.first is not None
    assert (w.first.source, w.first.kind) == ("input", "nan")
    assert w.first.remedy == "none: the program wrote NaN here itself"


# --- the program does not notice ---------------------------------------------------------------


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called[str(func)] += 1
        return func(*args, **(kwargs or {}))


def outcome(*, anomalies: bool) -> list[Any]:
    """Returns all that a program with overflows in forward and backward can see of a step."""
    torch.manual_seed(0)
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor

    norm, layer = nn.BatchNorm1d(8), nn.Linear(8, 8)
    h = torch.randn(6, 8).requires_grad_()
    with (
        warnings.catch_warnings(record=True) as caught,
        torch.autograd.set_detect_anomaly(anomalies),
        saved_tensors_hooks(pack, lambda each: packed.append(-1) or each),
        _Counting() as counting,
    ):
        warnings.simplefilter("always")
        a = norm(layer(h)) * 100
        b = F.dropout((a.half() @ (a * 3).half().mT).nan_to_num(posinf=1.0, neginf=1.0), 0.5)
        c, _ = nn.LSTM(6, 3, dropout=0.5, num_layers=2)(b.float())
        d = a.half() * 100.0
        loss = (d.float() * 1e3).sum() + c.sum()
        try:
            loss.backward()
        except RuntimeError as error:  # torch's own, where it looks for NaN
            packed.append(len(str(error)))
    parameters = [*norm.parameters(), *layer.parameters()]
    grads = [torch.zeros(1) if each.grad is None else each.grad for each in (h, *parameters)]
    seen = [a, b, c, d, loss, *grads, *norm.buffers()]
    versions = [each._version for each in (a, b, c, d, h, *parameters)]
    graph = [loss.grad_fn]
    for node in graph:
        graph += [each for each, _ in node.next_functions if each not in (None, *graph)]
    names = [node.name() for node in graph]
    texts = [str(each.message).partition(". ")[0] for each in caught]
    return [*seen, torch.rand(3), versions, packed, counting.called, names, texts]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("legalize", ["never", "always"])
@pytest.mark.parametrize("anomalies", [False, True])
def test_trials_change_nothing(
    legalize: str, anomalies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Any] = []

    def counted(*args: Any) -> Any:
        tries.append(tried(*args))
        return tries[-1]

    tried = notes.tried
    with hmpx.convert(low_precision_type=FP16, device_types={"cpu"}, legalize=legalize):
        expected = outcome(anomalies=anomalies)
        monkeypatch.setattr(notes, "tried", counted)
        monkeypatch.setattr("hmpx.watching.trials.tried", counted)
        with hmpx.watch("collect") as w:
            actual = outcome(anomalies=anomalies)
    assert w.first is not None
    assert sum(each is not None for each in tries) >= 2
    for a, b in zip(actual, expected, strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b
