"""Convolutions whose low-precision kernels leave memory unwritten compute in fp32, in every mode."""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))

import wrong_kernels

BF16 = torch.bfloat16
MODES = ("auto", "always", "never", "fast")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.mark.parametrize("mode", MODES)
def test_convolutions_and_their_gradients_are_right(mode: str) -> None:
    """300 seeded shapes, a quarter in each mode, in memory that held large numbers before."""
    draw = random.Random(f"{mode}")
    cases = [wrong_kernels.convolutions(draw) for _ in range(75)]
    assert any(case.flags for case in cases)
    with hmpx.convert(legalize=mode, device_types={"cpu"}):
        for seed, case in enumerate(cases):
            try:
                wrong = wrong_kernels.wrong_parts("convolutions", case, BF16, "cpu", seed)
            except RuntimeError as error:
                assert "too small" in str(error)  # a transposed convolution without an output
                continue
            assert wrong == [], case.about


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("depth", "kernel"), [(2, 3), (2, 5), (3, 5), (4, 5)])
def test_a_kernel_deeper_than_its_input(mode: str, depth: int, kernel: int) -> None:
    convolution = nn.Conv3d(16, 16, kernel, padding=kernel // 2)
    x = torch.randn(1, 16, depth, 6, 6)
    expected = torch.autograd.grad(convolution(x).square().sum(), [*convolution.parameters()])
    with hmpx.convert(legalize=mode, device_types={"cpu"}):
        result = convolution(x)
        assert result.dtype is BF16
        wrong_kernels.poison("cpu")
        found = torch.autograd.grad(result.float().square().sum(), [*convolution.parameters()])
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


def test_it_is_logged_once_and_other_convolutions_stay_native(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hmpx.compute.missing_kernels._noted", set())
    weight = torch.randn(4, 4, 3, dtype=BF16)
    with (
        caplog.at_level(logging.INFO, "hmpx"),
        hmpx.convert(legalize="never", device_types={"cpu"}),
    ):
        F.conv1d(torch.randn(1, 4, 9), weight)
        assert caplog.messages == []
        for _ in range(2):
            F.conv1d(torch.randn(1, 4, 2), weight, padding=1)
    assert caplog.messages == ["conv1d computes in fp32: cpu has no bf16 kernel for it"]
