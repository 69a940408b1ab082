"""Planted faults: each is named on the first bad step, by op, module and line.

The line of the fault ends in ``# here``.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import Offence

FP16 = torch.float16


class Fault:
    """A program that goes wrong, and what is to be said of it."""

    def __init__(  # noqa: PLR0917  # short rows
        self,
        op: str,
        phase: str = "forward",
        kind: str = "overflow",
        module: str = "",
        source: str = "op",
        remedy: str = "",
        **options: Any,
    ) -> None:
        self.expected = {"op": op, "phase": phase, "kind": kind, "module": module, "source": source}
        self.remedy = remedy
        low = {} if "policy" in options else {"low_precision_type": FP16}
        lists = {} if "policy" in options else {"lists": "lean"}
        self.options = {"device_types": {"cpu"}, **low, **lists, **options}
        self.key = repr(self.options)

    def __call__(self, program: Callable[[], Any]) -> Callable[[], Any]:
        self.program = program
        FAULTS[program.__name__] = self
        return program

    def line(self) -> str:
        """Returns where the fault is: ``path:line``."""
        lines, first = inspect.getsourcelines(self.program)
        (offset,) = [number for number, text in enumerate(lines) if "# here" in text]
        return f"{__file__}:{first + offset}"


FAULTS: dict[str, Fault] = {}


def x(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Lambda(nn.Module):
    """A module around a function."""

    def __init__(self, function: Callable[..., Any], *children: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(children)

    def forward(self, *args: Any) -> Any:
        return self.function(*self.inner, *args)


# --- forward -----------------------------------------------------------------------------------


@Fault("mul", remedy="fp32.txt: mul")
def squares_again_and_again() -> Tensor:
    y = torch.full((3, 3), 3.0, dtype=FP16)
    for _ in range(5):
        y = y * y  # here
    return y


@Fault("exp", kind="inf", remedy="none: exp is infinite in float32, too, where input 0 is 120")
def exponential_too_large_for_fp32() -> Tensor:
    return torch.exp(torch.tensor([1.0, 120.0]).half())  # here


@Fault("log", kind="underflow", remedy="none: softmax ran in float32 already; in float64")
def logarithm_of_zero() -> Tensor:
    p = torch.softmax(torch.tensor([0.0, 400.0]), -1)
    loss = p.log()  # here
    return -loss.sum()


@Fault(
    "div",
    kind="underflow",
    remedy="fp32.txt: div",
    policy=hmpx.Policy.from_ops(low=["div"], low_precision_type=FP16),
)
def tiny_weights_then_division() -> Tensor:
    weight = torch.full((4,), 1e-9) + 1e-10
    return torch.div(torch.ones(4), weight)  # here


@Fault("div", kind="underflow", remedy="fp32.txt: mul")
def division_by_an_underflowed_sum() -> Tensor:
    small = torch.full((4,), 1e-4, dtype=FP16)
    total = (small * small).sum()
    return torch.ones(4, dtype=FP16).div(total)  # here


@Fault("mul")
def cancellation_that_later_overflows() -> Tensor:
    h = (x(8) + 4096.0).half()
    difference = (h - 4096.0).abs().amax() + 1.0
    return difference * 60000.0  # here


@Fault("pow")
def squares_of_a_huge_row() -> Tensor:
    row = (x(1, 512, scale=0.0) + 300.0).half()
    return row.pow(2).sum(-1).sqrt()  # here


@Fault("var", kind="nan", remedy="none: var ran in float32")
def variance_of_one_element() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (x(1) + 0).var()  # here


@Fault("rsqrt", kind="underflow", remedy="fp32.txt: add")
def eps_that_half_has_not() -> Tensor:
    variance = torch.zeros(4).add(1e-8).half()
    return (variance + 1e-8).rsqrt()  # here


@Fault("matmul", module="inner.0")
def attention_logits() -> Tensor:
    q = x(1, 4, 64, scale=100.0).half()
    attend = Lambda(lambda a: a @ a.transpose(-1, -2))  # here
    return torch.softmax(Lambda(lambda inner, a: inner(a) * 0.125, attend)(q), -1)


@Fault("linear", kind="overflow", remedy="fp32.txt: linear", low_precision_type="float8_e4m3fn")
def fp8_has_no_infinity() -> Tensor:
    return F.linear(torch.full((2, 4), 300.0), torch.full((3, 4), 4.0))  # here


@Fault("linear", module="1")
def a_layer_of_a_model() -> Tensor:
    large = torch.full((4, 4), 6e4)
    second = Lambda(lambda a: F.linear(a, large))  # here
    return nn.Sequential(nn.Linear(4, 4), second)(torch.full((2, 4), 9.0))


@Fault("cumprod")
def running_product() -> Tensor:
    return torch.full((30,), 2.0, dtype=FP16).cumprod(0)  # here


@Fault("div", kind="inf")
def in_place_division() -> Tensor:
    h, zero = x(4).half() + 1, x(4).half() * 0
    h.div_(zero)  # here
    return h


@Fault("exp", remedy="none: exp writes to a tensor of float16")
def into_a_given_tensor() -> Tensor:
    out = torch.empty(2, dtype=FP16)
    torch.exp(torch.tensor([1.0, 12.0], dtype=FP16), out=out)  # here
    return out + 1


@Fault("mul", remedy="none: casts are switched off here")
def where_casts_are_off() -> Tensor:
    h = x(4).half()
    with hmpx.disable_casts():
        return (h + 1e3) * 1e3  # here


@Fault("exp", module="inner.0")
def inside_a_checkpoint() -> Tensor:
    block = Lambda(lambda a: torch.exp(a))  # here
    h = torch.full((2,), 12.0, requires_grad=True)
    return Lambda(lambda inner, a: checkpoint(inner, a, use_reentrant=False), block)(h.half()).sum()


@Fault("embedding", kind="nan", source="parameter", module="0")
def a_parameter_with_nan() -> Tensor:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[2] = float("nan")
    model[0].forward = lambda ids: F.embedding(ids, model[0].weight)  # here
    return model(torch.tensor([1, 2])).sum()


@Fault("einsum", policy=hmpx.Policy.from_ops(low=["einsum"], low_precision_type=FP16))
def contraction() -> Tensor:
    a = torch.full((2, 64), 100.0)
    return torch.einsum("ij,kj->ik", a, a)  # here


@Fault("cross_entropy", kind="inf")
def cross_entropy_at_a_masked_class() -> Tensor:
    logits = x(3, 4).masked_fill(torch.eye(3, 4, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(logits, torch.arange(3))  # here


@Fault("softmax", kind="nan")
def softmax_over_masks_only() -> Tensor:
    scores = x(3, 4).masked_fill(torch.ones(3, 4, dtype=torch.bool), float("-inf"))
    return torch.softmax(scores, -1).sum()  # here


@Fault("add", kind="overflow")
def masks_that_add_up_to_masked_rows() -> Tensor:
    least = torch.finfo(FP16).min
    mask = torch.full((3, 4), least, dtype=FP16)
    scores = mask + mask  # here
    return torch.softmax(scores, -1).sum()


@Fault("sub", kind="nan")
def infinity_less_infinity() -> Tensor:
    best = torch.full((3,), float("inf"))
    return (best - best).sum()  # here


@Fault("setitem", remedy="none: setitem writes to a tensor of float16")
def assigned_to_half() -> Tensor:
    h = torch.zeros(4, dtype=FP16)
    h[1] = torch.tensor(1e6)  # here
    return h + 1


@Fault("truediv", kind="nan")
def a_metric_that_is_kept_aside() -> Tensor:
    hits = x(3) * 0
    kept = [hits / hits]  # here
    return x(3).sum() + len(kept)


@Fault("add", kind="nan", source="input")
def data_with_nan() -> Tensor:
    data = torch.tensor([1.0, float("nan")])
    return (data + 1).sum()  # here


@Fault("half", remedy="none: half is the program's own conversion to float16")
def large_values_to_half() -> Tensor:
    return (x(4, scale=0.0) + 1e6).half() + 1  # here


@Fault("to", module="0", remedy="none: to is the program's own conversion to float16")
def conversion_in_a_module() -> Tensor:
    narrow = Lambda(lambda a: a.to("cpu", FP16))  # here
    return nn.Sequential(narrow, nn.Flatten())(torch.full((2, 2), 7e4)) * 0.5


@Fault("copy", kind="overflow", remedy="none: copy is the program's own conversion to float16")
def large_values_copied_to_half() -> Tensor:
    h = torch.zeros(4, dtype=FP16)
    h.copy_(torch.full((4,), 1e6))  # here
    return (h + 1).sum()


# --- recurrent ---------------------------------------------------------------------------------


IN_HALF = {
    "policy": hmpx.Policy.from_ops(
        low=["lstm", "gru", "rnn_relu", "lstm_cell", "gru_cell"], low_precision_type=FP16
    ),
    "legalize": "never",
}


def recurrent(cell: nn.Module, input_weight: float, hidden_weight: float) -> nn.Module:
    """Returns a model of a recurrent module with these weights, and biases of zero."""
    for name, parameter in cell.named_parameters():
        is_input, is_hidden = "weight_ih" in name, "weight_hh" in name
        nn.init.constant_(
            parameter, input_weight if is_input else hidden_weight if is_hidden else 0.0
        )
    return nn.Sequential(cell)


@Fault("lstm_cell", kind="nan", module="0", remedy="fp32.txt: lstm_cell", **IN_HALF)
def lstm_cell_whose_gates_overflow() -> Tensor:
    model = recurrent(nn.LSTMCell(4, 3), 1.0, -1.0)
    model[0].forward = functools.partial(model[0].forward, hx=large_states(2, 2, 3))
    return model(torch.full((2, 4), 3e4))[0].sum()  # here


@Fault("lstm", kind="nan", module="0", remedy="fp32.txt: lstm", **IN_HALF)
def lstm_whose_gates_overflow() -> Tensor:
    model = recurrent(nn.LSTM(4, 3), 1.0, -1.0)
    model[0].forward = functools.partial(model[0].forward, hx=large_states(2, 1, 2, 3))
    return model(torch.full((5, 2, 4), 3e4))[0].sum()  # here


@Fault("rnn_relu", module="0", remedy="fp32.txt: rnn_relu", **IN_HALF)
def rnn_that_grows() -> Tensor:
    model = recurrent(nn.RNN(4, 3, nonlinearity="relu"), 1.0, 1.0)
    return model(torch.full((5, 2, 4), 3e3))[0].sum()  # here


def large_states(count: int, *shape: int) -> tuple[Tensor, ...]:
    """Returns states, the first of which overflows in float16 once it is multiplied."""
    return tuple([torch.full(shape, 6e4 if number == 0 else 0.0) for number in range(count)])


# --- backward ----------------------------------------------------------------------------------


@Fault("sqrt", "backward", "inf", remedy="none: sqrt ran in float32 already")
def root_at_zero() -> None:
    h = torch.zeros(3, requires_grad=True)
    (h * 1).sqrt().sum().backward()  # here


@Fault("hypot", "backward", "nan")
def hypotenuse_of_nothing() -> None:
    a, b = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    torch.hypot(a * 1, b * 1).sum().backward()  # here


@Fault("linear", "backward", "overflow", module="0", remedy="fp32.txt: linear")
def gradient_in_half() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].forward = lambda a: F.linear(a, model[0].weight, model[0].bias)  # here
    nn.init.constant_(model[0].weight, 40.0)
    h = torch.full((2, 4), 1e-3, requires_grad=True)
    model(h).sum().mul(2000.0).backward()


@Fault("mul", "backward", "overflow")
def product_whose_gradient_overflows() -> None:
    h = torch.full((4,), 1e-4).half().requires_grad_()
    y = (h + 0) * 60000.0  # here
    (y.float().sum() * 100.0).backward()


@Fault("BadBackward", "backward", "nan", source="op")
def function_with_a_bad_backward() -> None:
    h = torch.ones(3, requires_grad=True)
    y = Bad.apply(h * 1)
    (y * 2).sum().backward()  # here


class Bad(torch.autograd.Function):
    """A function whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("nan"))


@Fault("exp", "backward", "nan", source="gradient")
def function_at_the_end() -> None:
    h = torch.ones(3, requires_grad=True)
    y = h.exp()  # here
    Bad.apply(y).backward(torch.ones(3))


@Fault("mul", "recompute", module="")
def only_when_recomputed() -> None:
    factors = [1.0, 6e4]
    block = Lambda(lambda a: torch.sigmoid((a + 1e3) * factors.pop(0)))  # here
    h = x(3).half().requires_grad_()
    checkpoint(block, h, use_reentrant=False).float().sum().backward()


@Fault("lstm_cell", "backward", module="0", remedy="fp32.txt: lstm_cell", **IN_HALF)
def gradient_of_an_lstm_cell() -> None:
    model = recurrent(nn.LSTMCell(4, 3), 40.0, 0.1)
    h = model(torch.zeros(2, 4, requires_grad=True))[0]  # here
    (h.float().sum() * 3e4).backward()


@Fault("lstm", "backward", module="0", remedy="fp32.txt: lstm", **IN_HALF)
def gradient_of_an_lstm() -> None:
    model = recurrent(nn.LSTM(4, 3), 40.0, 0.1)
    h = model(torch.zeros(5, 2, 4, requires_grad=True))[0]  # here
    (h.float().sum() * 3e4).backward()


@functools.cache
def found(options: str) -> dict[str, list[Offence]]:
    """Returns name of a fault -> what is found, each fault being a step of one watched run."""
    alike = {name: fault for name, fault in FAULTS.items() if fault.key == options}
    steps: dict[str, list[Offence]] = {}
    with hmpx.convert(**next(iter(alike.values())).options), hmpx.watch("collect") as w:
        for step, (name, fault) in enumerate(alike.items()):
            before = len(w.offences)
            torch.manual_seed(0)
            fault.program()
            w.step()
            steps[name] = w.offences[before:]
            assert all(each.step == step for each in steps[name])
    return steps


@pytest.mark.usefixtures("no_search_for_early_names")
@pytest.mark.filterwarnings("ignore:linear. a result of 4608 is beyond float8_e4m3fn")
@pytest.mark.parametrize("name", FAULTS)
def test_the_producer_is_named(name: str) -> None:
    fault = FAULTS[name]
    offences = found(fault.key)[name]
    assert offences, "nothing was reported"
    first = offences[0]
    assert {key: getattr(first, key) for key in fault.expected} == fault.expected, str(first)
    assert first.location == fault.line(), str(first)
    assert first.remedy.startswith(fault.remedy), first.remedy
    calls = [(each.op, each.location, each.phase, each.context) for each in offences]
    assert len(set(calls)) == len(calls), "a call is reported more than once"
    lines = [line for line in str(first).splitlines() if first.location not in line]
    assert max(map(len, lines)) <= 80
