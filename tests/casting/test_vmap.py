"""torch.func.vmap: a product's bias is added in fp32, as under torch.autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap

import hmpx

BF16, FP32 = torch.bfloat16, torch.float32
LEGALIZED = pytest.mark.parametrize("legalize", ["auto", "always", "never", "fast"])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, WEIGHT, BIAS, TERM = drawn(3, 4, 8), drawn(5, 8), drawn(5, seed=1), drawn(4, 4)

#: Products with an added term; the last takes no tensor of the batch.
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, WEIGHT, BIAS),
    "linear by name": lambda x: F.linear(x, WEIGHT, bias=BIAS),
    "linear of a vector": lambda x: F.linear(x[0], WEIGHT, BIAS),
    "linear without a bias": lambda x: F.linear(x, WEIGHT),
    "bias of the batch": lambda x: F.linear(X[0], WEIGHT, x.sum() * BIAS),
    "addmm": lambda x: torch.addmm(TERM, x, x.t(), alpha=2),
    "addmm by name": lambda x: torch.addmm(input=TERM, mat1=x, mat2=x.t()),
    "baddbmm": lambda x: torch.baddbmm(TERM[None], x[None], x.t()[None]),
    "addbmm": lambda x: torch.addbmm(TERM, x[None], x.t()[None]),
    "vmap in vmap": lambda x: vmap(lambda row: F.linear(row, WEIGHT, BIAS))(x),
    "jvp": lambda x: jvp(lambda y: F.linear(y, WEIGHT, BIAS), (x,), (x,))[0],
    "unmapped": lambda x: F.linear(X[0], WEIGHT, BIAS) + 0 * x.sum(),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch.func.jvp
@LEGALIZED
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sampled(3)
def test_dtypes_and_values_are_those_of_autocast_or_better(name: str, legalize: str) -> None:
    run, exact = vmap(CALLS[name]), vmap(CALLS[name])(X)
    with torch.autocast("cpu", dtype=BF16):
        expected = run(X)
    with hmpx.convert(device_types={"cpu"}, legalize=legalize):
        actual = run(X)
    assert actual.dtype is expected.dtype
    error, allowed = (float((each - exact).norm()) for each in (actual, expected))
    assert error <= 1.3 * allowed  # with few elements, by chance
    assert error > 0


def test_a_gradient_in_a_batch_rounds_as_without_vmap() -> None:
    """For torch.autocast, too, only the innermost transform counts."""
    seen = []

    def loss(x: Tensor) -> Tensor:
        result = F.linear(x, WEIGHT, BIAS)
        seen.append(result.dtype)
        return result.float().sum()

    def each_in(region: Any) -> list[torch.dtype]:
        seen.clear()
        with region:
            vmap(grad(loss))(X)
            grad(lambda x: vmap(loss)(x).sum())(X)
            loss(X)
        return [*seen]

    expected = each_in(torch.autocast("cpu", dtype=BF16))
    assert each_in(hmpx.convert(device_types={"cpu"})) == expected == [BF16, FP32, BF16]


@pytest.mark.parametrize("seed", range(3))
def test_values_and_advantages_have_at_most_the_error_of_autocast(seed: int) -> None:
    first, second = (drawn(32, 4, seed=seed) / 2, drawn(32)), (drawn(1, 32) / 6, drawn(1))
    states, rewards = drawn(2, 80, 4, seed=seed + 9), drawn(80, 1)

    def run(region: Any) -> list[Tensor]:
        with region:
            now, then = vmap(lambda x: F.linear(torch.tanh(F.linear(x, *first)), *second))(states)
            return [now, rewards + 0.99 * then - now]

    exact = run(contextlib.nullcontext())
    allowed = run(torch.autocast("cpu", dtype=BF16))
    actual = run(hmpx.convert(device_types={"cpu"}))
    for one, other, right in zip(actual, allowed, exact, strict=True):
        assert (one - right).norm() <= 1.05 * (other - right).norm()
