"""Where the harm shows later than the rounding that caused it: the calls before are tried in float32, too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hmpx
from hmpx.places import located

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
    text, _, made = found.remedy.partition("; ")
    assert text == "none: truediv is NaN in float32, too, where input 0 is 0 and input 1 is 0"
    assert made == f"input 1 was made by add in {located(found.location)}"
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
    assert w.first.remedy == (
        "none: the gradient of mul is cast to low precision, as its input is; make the loss, or its scale, "
        "smaller"
    )


def test_the_name_of_a_parameter_of_a_model_that_is_gone() -> None:
    def program() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        torch.nn.init.constant_(model[1].bias, float("nan"))
        model(torch.ones(1, 4))

    with hmpx.watch("collect") as w:
        program()
    assert w.first is not None and w.first.parameter == "1.bias"


def test_an_infinity_that_is_used_steps_later() -> None:
    """The call that wrote it is named, and its step."""
    memory, weight = torch.zeros(3), torch.ones(3, requires_grad=True)
    with hmpx.watch("collect") as w:
        for step in range(3):
            logarithm = torch.log(torch.tensor([float(step)]))
            memory[step : step + 1] = logarithm
            if step == 2:
                (weight * memory).sum().backward()
            w.step()
    assert w.first is not None
    assert (w.first.op, w.first.step, w.first.kind) == ("log", 0, "inf")


def test_values_that_a_call_in_place_has_overwritten() -> None:
    """A running mean of squares: what the call has left stands for what was there, and the remedy says so."""
    running = torch.zeros(4, dtype=FP16)
    h = torch.full((4,), 5e-5, dtype=FP16)
    with hmpx.watch("collect") as w:
        squares = h * h
        running.lerp_(squares, 0.5)
        h / running
    assert w.first is not None and (w.first.op, w.first.kind) == ("truediv", "underflow")
    assert w.first.cause is not None and w.first.cause.op == "mul"
    assert w.first.remedy.endswith(
        "which keeps its dtype; tried: that tensor in float32 (tried on values that a call in place "
        "has left)"
    )


def averages(state: Tensor, decay: float) -> Callable[[], Tensor]:
    """Returns a step that updates an average in place, and divides by it."""

    def step() -> Tensor:
        state.mul_(decay).add_(0.0)
        return torch.ones(4) / state.float()

    return step


@pytest.mark.parametrize("decay", [0.05, 0.5])
def test_a_value_lost_in_place_over_steps(decay: float) -> None:
    """It becomes zero steps later: 24 halvings make 1 zero in float16, not in float32."""
    step = averages(torch.ones(4, dtype=FP16), decay)
    with hmpx.watch("collect") as w:
        for _ in range(26):
            step()
            w.step()
    assert w.first is not None
    assert (w.first.op, w.first.kind) == ("truediv", "underflow")
    assert w.first.step == {0.05: 5, 0.5: 24}[decay]
    assert w.first.cause is not None and w.first.cause.op in ("mul", "add")
    assert "writes to a tensor of float16, which keeps its dtype; tried: that" in w.first.remedy
    wide = averages(torch.ones(4), decay)
    assert all(bool(wide().isfinite().all()) for _ in range(w.first.step + 1))


def test_a_value_that_a_program_keeps_as_a_new_tensor() -> None:
    """An average that is assigned, not written to: its op can be in float32."""

    def program() -> None:
        state = given(1.0).detach()
        for _ in range(8):
            state = state * 0.05  # cause
            (given(1.0).double() / state.double()).sum().backward()

    found = first_found(program)
    assert found is not None and found.kind == "underflow"
    assert found.cause is not None and found.cause.op == "mul"
    assert found.remedy == "fp32.txt: mul"
    assert first_found(program, ("mul",)) is None


def lost_in_backward(width: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Returns a step that divides by the norm of gradients that float16 makes zero."""

    def step() -> Tensor:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        net.to(dtype)
        loss = (net(torch.ones(16, width, dtype=dtype)).double() * 1e-9).mean()  # cause
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        norm = torch.stack([each.float().norm() for each in gradients]).norm()
        return gradients[0].float() / norm

    return step


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_value_lost_in_a_backward(is_converted: bool) -> None:
    """The call whose backward lost it is named; the op list that helps does, and the loss's scale."""
    step = lost_in_backward(4, torch.float32 if is_converted else FP16)
    if is_converted:
        found = first_found(step)
    else:
        with hmpx.watch("collect") as w:
            step()
        found = w.first
    assert found is not None and (found.op, found.kind) == ("truediv", "underflow")
    assert found.cause is not None and found.cause.op == "double"
    line, _, rest = found.remedy.removeprefix("fp32.txt: ").partition("; or ")
    text = "make the loss, or its scale, larger: the gradient of double becomes zero in float16"
    assert text in found.remedy, found.remedy
    if is_converted:
        assert rest and first_found(step, tuple(line.split(", "))) is None


def test_gradients_that_all_become_zero() -> None:
    """Learning stops without a NaN; gradients that float32 makes zero, too, are not reported."""

    def offences(scale: float, dtype: torch.dtype) -> list[hmpx.Offence]:
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()).to(dtype)
        torch.nn.init.constant_(net[0].bias, -9.0)  # zero gradients, for one sample alone
        with hmpx.watch("collect") as w:
            for value in (0.1, 9.0):
                h = net[0](torch.full((512, 4), value, dtype=dtype))
                (net[1](h).mean() * scale + (h * 0).sum()).backward()
                w.step()
        return w.offences

    assert not offences(1.0, FP16)
    assert not offences(1e-6, torch.float32)
    [found] = offences(1e-5, FP16)
    assert (found.op, found.kind, found.phase, found.source) == (
        "mean", "underflow", "backward", "op",
    )  # fmt: skip
    assert "make the loss, or its scale, larger: the gradient of mean becomes zero" in found.remedy


def test_no_op_in_float32_helps() -> None:
    """A setting was rounded before: the value, the op and the line that made it are named."""
    decay = torch.tensor(0.999, dtype=torch.bfloat16)
    with hmpx.watch("collect") as w:
        rest = 1 - decay.pow(2)
        torch.ones(1, dtype=torch.bfloat16) / rest
    assert w.first is not None and w.first.op == "truediv"
    assert w.first.remedy.startswith(
        "none found: truediv is infinite in float32, too, where input 0 is 1 and input 1 is 0; "
        "input 1 was made by rsub in tests/watching/test_chains.py:"
    )
