"""Codes, scales and values as torchao's, by digests that `torchao_digests` wrote; torch._scaled_mm's inputs."""

from __future__ import annotations

import json

import pytest
import torch

from hmpx.formats import Block, Scaled, encode, get, quantize

from . import torchao_digests
from .test_quantize import implementation  # noqa: F401  # a fixture
from .torchao_digests import digest

EXPECTED: dict[str, list[str]] = json.loads(torchao_digests.PATH.read_text())
MX = [key for key in EXPECTED if key.startswith("mx")]
NVFP4 = [key for key in EXPECTED if key.startswith("nvfp4")]


@pytest.mark.parametrize("key", MX)
def test_mx(key: str, implementation: str) -> None:  # noqa: F811
    """Each rule, on a million values and on all codes."""
    name, rule, kind = key.split(" ", 2)
    shipped = get(name)
    assert isinstance(shipped, Block)
    format = Block("rule", shipped.element, rule=rule)  # type: ignore[arg-type]  # one of them
    x = torchao_digests.mx_inputs(name)[kind]
    codes, scales = encode(x, format)
    assert [digest(scales), digest(codes), digest(quantize(x, format))] == EXPECTED[key]


@pytest.mark.parametrize("key", NVFP4)
def test_nvfp4(key: str, implementation: str) -> None:  # noqa: F811
    """With the tensor's scale and without."""
    x = torchao_digests.nvfp4_inputs()[
        key.removeprefix("nvfp4 ").removeprefix("without the tensor's scale ")
    ]
    format = get("nvfp4")
    assert isinstance(format, Scaled)
    if "without" in key:
        format = Scaled("single", format.element, 16, "e4m3")
    codes, scales, *_ = encode(x, format)
    assert [digest(scales), digest(codes), digest(quantize(x, format))] == EXPECTED[key]


@pytest.mark.parametrize("name", ["float8_e4m3fn_tensor", "float8_e4m3fn_row"])
def test_scaled_mm(name: str) -> None:
    """A product of rounded values is that of codes and scales by torch's own op, but for its order of sums."""
    x, weight = torch.randn(32, 64), torch.randn(48, 64) * 0.1
    codes, scale = encode(x, name)
    weight_codes, weight_scale = encode(weight, name)
    one = torch.ones(())  # before torch 2.12 its kernel for CPUs takes no scales by row
    products = torch._scaled_mm(
        codes.view(torch.float8_e4m3fn),
        weight_codes.view(torch.float8_e4m3fn).t(),
        scale_a=one,
        scale_b=one,
        out_dtype=torch.float32,
    )
    found = products * scale * (weight_scale.t() if weight_scale.dim() else weight_scale)
    expected = quantize(x, name).double() @ quantize(weight, name).double().t()
    bound = (x.double().abs() @ weight.double().abs().t()) * 64 * 2.0**-23
    assert ((found - expected).abs() <= bound).all()
    assert ((found - x @ weight.t()).abs() > bound).any()
