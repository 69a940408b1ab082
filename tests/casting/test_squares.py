"""Squares by ``pow``, which is in the fp32 list: errors over those of torch.autocast on the CPU.

docs/evidence/lists.md, section "Squares", says what these tests hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hmpx

Square = Callable[[Tensor], Tensor]

SEEDS = range(8)


def by_pow(x: Tensor) -> Tensor:
    return x.pow(2)


def by_product(x: Tensor) -> Tensor:
    return x * x


def by_power(x: Tensor) -> Tensor:
    return x**2


def variance(x: Tensor, square: Square) -> Tensor:
    return square(x - x.mean(-1, keepdim=True)).mean(-1)


def rms_norm(x: Tensor, square: Square) -> Tensor:
    return x * torch.rsqrt(square(x).mean(-1, keepdim=True) + 1e-6)


def correlation(x: Tensor, square: Square) -> Tensor:
    a, b = (each - each.mean(-1, keepdim=True) for each in x.chunk(2))
    return (a * b).sum(-1) / (square(a).sum(-1) * square(b).sum(-1)).sqrt()


def distance(x: Tensor, square: Square) -> Tensor:
    return square(x[:, None] - x).sum(-1)


def penalty(x: Tensor, square: Square) -> Tensor:
    return square(x).sum()


USES: dict[str, Callable[[Tensor, Square], Tensor]] = {
    "variance": variance,
    "rms_norm": rms_norm,
    "correlation": correlation,
    "distance": distance,
    "penalty": penalty,
}


def used(use: Callable[[Tensor, Square], Tensor], square: Square, seed: int) -> Tensor:
    """Returns the result of ``use`` on what a linear layer made."""
    torch.manual_seed(seed)
    x, weight = torch.randn(16, 64), torch.randn(256, 64) / 8
    return use(F.linear(x, weight), square).float()


def ssim(square: Square, seed: int) -> Tensor:
    """Returns the similarity of two smooth images: E[x^2] - E[x]^2 of a blur made by conv2d, as torchmetrics has it."""
    torch.manual_seed(seed)
    b = F.avg_pool2d(torch.rand(2, 3, 48, 48), 5, 1)
    a = (b + torch.randn_like(b) * 0.02).clamp(0, 1)
    weights = torch.exp(-((torch.arange(11.0) - 5) ** 2) / 4.5)
    kernel = (weights[:, None] * weights / weights.sum() ** 2).expand(3, 1, 11, 11)
    means = F.conv2d(torch.cat((a, b, a * a, b * b, a * b)), kernel, groups=3).split(2)
    of_a, of_b, of_both = square(means[0]), square(means[1]), means[0] * means[1]
    spread = (means[2] - of_a).clamp(min=0) + (means[3] - of_b).clamp(min=0)
    upper = (2 * of_both + 1e-4) * (2 * (means[4] - of_both).float() + 9e-4)
    return (upper / ((of_a + of_b + 1e-4) * (spread.float() + 9e-4))).mean()


def error(region: Callable[[], Any], compute: Callable[[int], Tensor]) -> float:
    """Returns the mean relative error over all seeds, against fp32."""
    total = 0.0
    for seed in SEEDS:
        exact = compute(seed)
        with region():
            found = compute(seed)
        total += float((found - exact).norm() / exact.norm())
    return total / len(SEEDS)


def ratio(compute: Callable[[int], Tensor], **options: Any) -> float:
    """Returns the error of hmpx over that of torch.autocast."""
    autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    converted = functools.partial(hmpx.convert, device_types={"cpu"}, **options)
    return error(converted, compute) / error(autocast, compute)


@pytest.fixture
def without_pow(tmp_path: Path) -> str:
    path = tmp_path / "my_fp32.txt"
    path.write_text("@hmpx\n-pow\n-square\n")
    return str(path)


@pytest.mark.parametrize("square", [by_pow, by_power])
@pytest.mark.parametrize("use", USES)
def test_squares_by_pow_have_less_error_than_under_autocast(use: str, square: Square) -> None:
    assert ratio(functools.partial(used, USES[use], square)) < 0.85


def test_a_variance_by_products_has_the_error_of_autocast(without_pow: str) -> None:
    """So ``pow`` in fp32 more than halves it."""
    assert 0.9 < ratio(functools.partial(used, variance, by_product)) < 1.1
    found = ratio(functools.partial(used, variance, by_pow), fp32_file_path=without_pow)
    assert 0.9 < found < 1.1
    assert ratio(functools.partial(used, variance, by_pow)) < 0.6


def test_differences_of_squares_and_products_need_one_way_to_square(without_pow: str) -> None:
    """A square in fp32 and a product in low precision are rounded differently, so they don't cancel."""
    compute = functools.partial(ssim, by_pow)
    assert 2 < ratio(compute) < 8
    assert 2 < ratio(compute, lists="autocast-cuda") < 8
    assert 0.9 < ratio(functools.partial(ssim, by_product)) < 1.1
    assert 0.9 < ratio(compute, fp32_file_path=without_pow) < 1.1
