"""What failed is run again in float32 before float32 is advised; the program does not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx.places import located

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
    text, _, made = found.remedy.partition("; ")
    assert text == f"none: {remedy}"
    is_zero = "input 0 is 0" in remedy
    place = located(found.location)
    assert made == (f"input 0 was made by mul in {place}" if is_zero else "")


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
