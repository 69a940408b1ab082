"""Where the harm shows later than the rounding that caused it: the calls before are tried in float32, too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hmpx

pytestmark = pytest.mark.usefixtures("no_search_for_early_names")

FP16 = torch.float16
LOW = ["linear", "mul", "add", "rsub", "truediv", "sum", "mean", "sigmoid", "exp", "sqrt"]


def first_found(program: Callable[[], Any], fp32: tuple[str, ...] = ()) -> hmpx.Offence | None:
    low = [op for op in LOW if op not in fp32]
    policy = hmpx.Policy.from_ops(low=low, fp32=fp32, low_precision_type=FP16)
    with hmpx.convert(policy=policy, device_types={"cpu"}), hmpx.watch("collect") as w:
        program()
    return w.first


def given(value: float, *shape: int) -> Tensor:
    return torch.full(shape or (4,), value, requires_grad=True)


def lost_eps() -> Tensor:
    h = given(0.0) * 2.0
    bottom = h.abs() + 1e-8  # cause
    return h / bottom


def lost_squares() -> Tensor:
    h = given(1e-5) * 1.0
    squares = h * h  # cause
    return h / squares.sum().view(1, 1)


def saturated() -> Tensor:
    p = torch.sigmoid(given(12.0))  # cause
    return torch.log((1.0 - p).double())


def variance() -> Tensor:
    h = given(3.0, 2, 4) + torch.tensor([0.0, 1e-3, 2e-3, 3e-3])
    spread = (h * h).mean(-1) - h.mean(-1) * h.mean(-1) - 1e-7  # cause
    return spread.float().sqrt()


def root_of_lost_squares() -> None:
    h = given(1e-5)
    y = h * h * 1.0  # cause
    y.sqrt().sum().backward()


def in_place() -> Tensor:
    h = given(0.0) * 2.0
    bottom = h.detach().abs().float().half()
    h = bottom * 1.0
    bottom = h + 1e-8  # cause
    bottom.sqrt_()
    return h.float() / bottom


CHAINS = {
    "eps": (lost_eps, ("truediv", "underflow", "forward"), ("add",)),
    "squares": (lost_squares, ("truediv", "underflow", "forward"), ("mul",)),
    "one minus": (saturated, ("log", "underflow", "forward"), ("sigmoid",)),
    "several": (variance, ("sqrt", "nan", "forward"), ("mul",)),
    "gradient": (root_of_lost_squares, ("sqrt", "underflow", "backward"), ("mul",)),
    "in place": (in_place, ("truediv", "underflow", "forward"), ("add",)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_call_that_lost_the_value_is_named(name: str) -> None:
    """Its line is, and the remedy that names it helps."""
    program, expected, ops = CHAINS[name]
    found = first_found(program)
    assert found is not None
    assert (found.op, found.kind, found.phase) == expected, str(found)
    lines, start = inspect.getsourcelines(program)
    [offset] = [number for number, line in enumerate(lines) if "# cause" in line]
    assert found.cause is not None
    assert (found.cause.op, found.cause.location) == (ops[0], f"{__file__}:{start + offset}")
    assert f"cause    {ops[0]}(" in str(found)
    names = found.remedy.removeprefix("fp32.txt: ").split(", ")
    assert names[0] == ops[0], found.remedy
    assert first_found(program, tuple(names)) is None


def test_no_claim_without_the_values() -> None:
    """A tensor that is gone, and was made by a function that is not observed."""

    def program() -> Tensor:
        h = torch.full((200, 200), 1e-9).half()
        bottom = h.clone()
        del h
        return torch.ones(200, 200, dtype=FP16) / bottom

    found = first_found(program)
    assert found is not None and (found.op, found.kind) == ("truediv", "inf")
    assert found.remedy.startswith(
        "unknown: truediv is infinite in float32, too, where input 0 is 1"
    )


def test_a_value_that_is_zero_in_float32_is_not_an_underflow() -> None:
    def program() -> Tensor:
        h = given(0.0) * 2.0
        return h / (h * h + 0.0)

    found = first_found(program)
    assert found is not None and (found.op, found.kind) == ("truediv", "nan")
    assert (
        found.remedy == "none: truediv is NaN in float32, too, where input 0 is 0 and input 1 is 0"
    )
    assert found.cause is None


def test_a_remedy_in_force_is_not_advised() -> None:
    """The gradient is finite in float32; it overflows where it is cast to the input's dtype."""

    def program() -> None:
        h = given(1e-5).half()
        (h * torch.rsqrt(h * h)).float().sum().backward()

    def run(fp32: tuple[str, ...]) -> hmpx.Offence:
        policy = {"fp32": list(fp32)}
        options: Any = {"device_types": {"cpu"}, "low_precision_type": "float16", "policy": policy}
        with hmpx.convert(**options), hmpx.watch("collect") as w:
            program()
        assert w.first is not None
        return w.first

    first = run(())
    assert first.remedy == "fp32.txt: mul"
    assert "mul" not in run(("mul",)).remedy

    def gradient() -> None:
        h = given(1e-3).detach().half().requires_grad_()
        (h * torch.full((4,), 1e5)).sum().backward()

    with hmpx.convert(policy={"fp32": ["mul"]}, device_types={"cpu"}), hmpx.watch("collect") as w:
        gradient()
    assert w.first is not None and (w.first.op, w.first.phase) == ("mul", "backward")
    assert w.first.remedy == "none: the gradient of mul is cast to low precision, as its input is"


def test_the_name_of_a_parameter_of_a_model_that_is_gone() -> None:
    def program() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        torch.nn.init.constant_(model[1].bias, float("nan"))
        model(torch.ones(1, 4))

    with hmpx.watch("collect") as w:
        program()
    assert w.first is not None and w.first.parameter == "1.bias"
