"""Layers with fp32 parameters in inference: these are rounded on the way, in the same places as ever."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx.compute import layers
from tests.compute.keeping import Keeping
from tests.values import normal, same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("lacks_low_precision"),
]


@pytest.fixture(autouse=True)
def every_weight_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LEAST", 0)


#: Layer, and the shape of its input.
CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear, few rows": (nn.Linear(160, 128), (16, 160)),
    "linear, many rows": (nn.Linear(160, 128), (5, 128, 160)),
    "linear, no bias": (nn.Linear(160, 128, bias=False), (2, 3, 160)),
    "linear, a row": (nn.Linear(160, 128), (160,)),
    "linear, a long row": (nn.Linear(1_003, 1_301), (1_003,)),
    "linear, one row": (nn.Linear(163, 1_301), (1, 163)),
    "linear, two rows": (nn.Linear(163, 1_301, bias=False), (2, 1, 163)),
    "linear, two long rows": (nn.Linear(1_003, 1_301), (2, 1_003)),
    "linear, two short rows": (nn.Linear(2, 8_250), (2, 2)),
    "linear, no rows": (nn.Linear(160, 128), (0, 160)),
    "conv1d": (nn.Conv1d(64, 96, 3), (2, 64, 20)),
    "conv2d": (nn.Conv2d(48, 64, 3, padding=1), (2, 48, 7, 6)),
    "conv2d, no bias": (nn.Conv2d(48, 64, 3, stride=2, bias=False), (1, 48, 7, 6)),
    "conv2d, no batch": (nn.Conv2d(48, 64, 3), (48, 7, 6)),
    "conv2d, groups": (nn.Conv2d(96, 64, (3, 5), groups=2, padding="same"), (1, 96, 7, 6)),
    "conv3d": (nn.Conv3d(24, 32, 3), (1, 24, 4, 5, 6)),
    "transposed": (nn.ConvTranspose2d(48, 64, 3), (1, 48, 4, 5)),
}


#: Those whose fp32 weights are rounded while they are read.
READ_ONCE = {
    "linear, a row",
    "linear, a long row",
    "linear, one row",
    "linear, two rows",
    "linear, two long rows",
    "linear, two short rows",
}


def convert(dtype: torch.dtype = BF16, **options: Any) -> hmpx.Session:
    return hmpx.convert(
        device_types={"cpu"}, low_precision_type=dtype, legalize="always", **options
    )


def by_hand(layer: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the output of a copy with rounded parameters, rounded."""
    parameters = {name: reround(each, dtype) for name, each in layer.named_parameters()}
    return torch.func.functional_call(layer, parameters, (reround(x, dtype),)).to(dtype)


def reround(tensor: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    return tensor.to(dtype).float()


@pytest.fixture(params=["kernels", "torch"])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With compiled kernels, and without."""
    if request.param == "torch":
        monkeypatch.setattr(layers, "bfloat16_kernels", lambda: None)
        return "torch"
    return "kernels"


@pytest.mark.parametrize("x_dtype", [FP32, None])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_composition_of_casts(
    name: str, dtype: torch.dtype, x_dtype: torch.dtype | None, computed_by: str
) -> None:
    """But for the order of sums, in the product of few rows; that of one or two has a kernel for fp32 weights."""
    layer, shape = CASES[name]
    x = normal(*shape).to(x_dtype or dtype)
    with torch.no_grad():
        expected = by_hand(layer, x, dtype)
        with convert(dtype):
            actual = layer(x)
            with hmpx.freeze(layer.eval(), x, outputs="keep"):
                frozen = layer(x)
        layer.train()
    if computed_by == "torch" or dtype is FP16 or name not in READ_ONCE:
        same(actual, frozen, check_stride=True)
    for found in (actual, frozen):
        assert found.stride() == expected.stride()
        assert found.dtype is dtype
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
        assert (found != expected).float().mean().nan_to_num() < 0.01


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_results_may_be_written_to_by_what_learns(name: str, is_frozen: bool) -> None:
    """As torch's own, they are no views; autograd refuses to write to views that were made without it."""
    layer, shape = copy.deepcopy(CASES[name][0]).eval(), CASES[name][1]
    x = normal(*shape)
    with convert(), hmpx.freeze(layer, x, outputs="keep") if is_frozen else nullcontext():
        with torch.no_grad():
            y = layer(x)
        y += torch.ones_like(y).requires_grad_()
        assert y.requires_grad


def test_a_row_beside_weights_that_are_not_numbers(computed_by: str) -> None:
    """Whatever bits stand for NaN; numbers that round to infinity; and no trace of one in other outputs."""
    layer, x = nn.Linear(163, 131), normal(2, 163)
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7F7FFFFF, 0x7F800000]).int()
    with torch.no_grad():
        for column in (5, 160):  # among those that are computed side by side, and beside them
            layer.weight[3:8, column] = bits.view(FP32)
        expected = by_hand(layer, x, BF16)
        with convert():
            actual = layer(x)
    assert expected.isfinite().sum(1).tolist() == [126, 126]
    torch.testing.assert_close(actual, expected, rtol=0.01, atol=1e-3, equal_nan=True)


#: Up to two rows for a linear layer of 160 x 128, and its bias.
ROWS: dict[str, Callable[[], tuple[Tensor, Tensor | None]]] = {
    "one dimension": lambda: (normal(160), normal(128)),
    "four dimensions": lambda: (normal(1, 2, 1, 160), normal(128)),
    "the last of a sequence": lambda: (normal(2, 3, 160)[:, -1], normal(128)),
    "every other feature": lambda: (normal(2, 320)[:, ::2], normal(128)),
    "by column": lambda: (normal(160, 2).t(), normal(128)),
    "float16": lambda: (normal(1, 160).half(), normal(128).half()),
    "no bias": lambda: (normal(1, 160), None),
    "one bias for all": lambda: (normal(1, 160), normal(1).expand(128)),
}


@pytest.mark.parametrize("way", ROWS)
def test_a_row_is_computed_however_it_is_given(way: str, computed_by: str) -> None:
    """Where native kernels are fast for a row, too."""
    (x, bias), weight = ROWS[way](), nn.Parameter(normal(128, 160, seed=1))
    expected = F.linear(reround(x), reround(weight), None if bias is None else reround(bias))
    for legalize in ("auto", "always"):
        with torch.no_grad(), hmpx.convert(device_types={"cpu"}, legalize=legalize):
            actual = F.linear(x, weight, bias=bias)
        assert actual.is_contiguous() and actual.dtype is BF16
        torch.testing.assert_close(actual, expected.bfloat16(), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_modes_may_keep_what_they_see(is_frozen: bool) -> None:
    """Memory that is used again is not shown to them."""
    layer, weight, mode = nn.Linear(160, 128).eval(), normal(160, 128), Keeping()
    with convert(), hmpx.freeze(layer, normal(1, 160)) if is_frozen else nullcontext():
        with torch.no_grad(), mode:
            for rows in (1, 9):
                layer(normal(rows, 160))
                normal(rows, 160) @ weight
        with torch.no_grad():
            layer(normal(20, 160))
    assert len(mode.seen) > 8
    for kept, copied in mode.seen:
        assert torch.equal(kept, copied)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_parameters_and_inputs_stay_as_they_are(mode: str) -> None:
    layer, x = nn.Linear(160, 128), normal(600, 160)
    before = {name: each.clone() for name, each in layer.state_dict().items()}
    given = x.clone()
    with getattr(torch, mode)(), convert():
        first = layer(x)
        assert torch.equal(layer(x), first)
    assert torch.equal(x, given)
    same(dict(layer.state_dict()), before)
    layer(x).sum().backward()


def test_errors_are_torchs() -> None:
    """Of inputs that don't fit, as without hmpx."""
    linear, conv = nn.Linear(160, 128), nn.Conv2d(48, 64, 3)
    wrong: list[tuple[Any, tuple[Any, ...]]] = [
        (F.linear, (normal(4, 100), linear.weight)),
        (F.linear, (normal(4, 160), linear.weight, normal(7))),
        (F.linear, (normal(4, 160).long(), linear.weight)),
        (F.conv2d, (normal(1, 40, 5, 5), conv.weight)),
        (F.conv2d, (None, conv.weight)),
        (F.conv2d, (normal(1, 48, 5, 5), conv.weight, normal(3))),
        (F.conv2d, (normal(1, 48, 5, 5).double(), conv.weight)),
    ]
    for function, arguments in wrong:
        with torch.no_grad():
            with pytest.raises((RuntimeError, TypeError)) as expected:
                function(*arguments)
            with convert(), pytest.raises(expected.type):
                function(*arguments)


@pytest.mark.parametrize("rows", [1, 2, 3, 40])
@pytest.mark.parametrize("k", [1_003, 6_000])
def test_weights_of_matmul_and_their_transposes(rows: int, k: int) -> None:
    """Whole blocks of the outputs, and one less long; all are computed in one way, whatever is transposed."""
    x, weight, bias = normal(rows, k), normal(k, 301), normal(301)
    expected = (reround(x) @ reround(weight) + reround(bias)).bfloat16()
    with torch.no_grad(), convert():
        found = [
            torch.addmm(bias, x, weight),
            F.linear(x, weight.t(), bias),
            F.linear(x, nn.Parameter(weight.t()), bias),
            torch.addmm(bias, x, weight.t().contiguous().t()),
        ]
        without_bias = x @ weight, torch.mm(x, weight), F.linear(x, weight.t())
    for actual in found:
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, expected, rtol=0.01, atol=0.01)
    expected = (reround(x) @ reround(weight)).bfloat16()
    for actual in without_bias:
        torch.testing.assert_close(actual, expected, rtol=0.01, atol=0.01)
