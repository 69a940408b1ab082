"""Blocks with a shared power of two: its rules by exact arithmetic, MXINT8, and the ends of the range."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmpx import OptionError
from hmpx.formats import Block, Fixed, Float, Table, decode, encode, get, quantize

from .test_quantize import assert_same, find_library, implementation  # noqa: F401  # a fixture

RULES = ("floor", "rceil", "ceil", "even")
NAMES = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8")
MOST = torch.finfo(torch.float32).max


def block(name: str) -> Block:
    """Returns a registered format."""
    format = get(name)
    assert isinstance(format, Block)
    return format


def floor_log2(value: Fraction) -> int:
    """Returns the exponent of a positive number."""
    exponent = math.frexp(float(value))[1] - 1  # float32's numbers, and few times those
    assert Fraction(2) ** exponent <= value < Fraction(2) ** (exponent + 1)
    return exponent


def shared_exponent(amax: float, format: Block, rule: str) -> int:
    """Returns the shared exponent of a block, by the definitions of torchao's ScaleCalculationMode."""
    largest = Fraction(format.element.max)
    highest = floor_log2(largest)
    lowest = -126 if isinstance(format.element, Fixed) else -127
    if amax == 0:
        return lowest
    exact = Fraction(amax)
    if rule == "floor":
        found = floor_log2(exact) - highest
    elif rule == "rceil":  # ceil(log2(amax / largest))
        ratio = exact / largest
        found = floor_log2(ratio) + (ratio != Fraction(2) ** floor_log2(ratio))
    elif rule == "ceil":
        found = floor_log2(exact) + (exact != Fraction(2) ** floor_log2(exact)) - highest
    else:  # rounded to the element's mantissa bits, half away
        step = Fraction(2) ** (floor_log2(exact) - format.significand_bits + 1)
        found = floor_log2((exact / step + Fraction(1, 2)).__floor__() * step) - highest
    return max(lowest, min(found, 127 - highest))


@given(
    name=st.sampled_from(NAMES),
    rule=st.sampled_from(RULES),
    amax=st.one_of(
        st.floats(2.0**-126, MOST, width=32),
        st.builds(
            lambda exponent, steps: float(
                np.float32(2.0**exponent) * (1 + np.float32(steps) * np.float32(2.0**-23))
            ),
            st.integers(-125, 126),
            st.integers(0, 40)
            | st.integers(2**22 - 3, 2**22 + 3)
            | st.integers(2**23 - 40, 2**23 - 1),
        ),
    ),
)
@settings(deadline=None, max_examples=400)
def test_rules(name: str, rule: str, amax: float) -> None:
    """Exact, where torchao's logarithm is not; elements are the quotients', scales times them the values."""
    shipped = block(name)
    format = Block("rule", shipped.element, rule=rule)  # type: ignore[arg-type]
    x = torch.tensor([amax, -amax / 3, amax / 1000, 0.0])
    codes, scales = encode(x, format)
    exponent = shared_exponent(amax, format, rule)
    assert scales.item() == exponent + 127
    elements = quantize(x.double() * 2.0**-exponent, shipped.element, overflow="saturate")
    if isinstance(shipped.element, Fixed):
        elements = elements.clamp(min=-shipped.element.max)
    assert torch.equal(decode(codes, shipped.element).double(), elements)
    assert torch.equal(quantize(x, format), (elements * 2.0**exponent).float())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_ends(name: str, rule: str, implementation: str) -> None:  # noqa: F811
    """Nothing finite becomes infinite; zeros and the smallest stay finite; NaN and infinity make NaN."""
    format = Block("rule", block(name).element, size=4, rule=rule)  # type: ignore[arg-type]
    x = torch.tensor([MOST, 1.0, -MOST, 0.0, 1e-45, -1e-40, 0.0, -0.0, 0.0, 0.0, 0.0, -0.0])
    found = quantize(x, format)
    assert found[0] == -found[2] == format.max < math.inf
    assert (found[4:8].abs() <= 1e-38).all()
    assert (found[8:] == 0).all()
    assert_same(decode(encode(x, format), format), found, x)
    for value in (math.inf, math.nan):
        bad = torch.tensor([1.0, value, 0.0, 2.0, 1.0])
        rounded = quantize(bad, format)
        assert rounded.isnan().tolist() == [True] * 4 + [False]
        assert_same(decode(encode(bad, format), format), rounded, bad)
        assert encode(bad, format)[1].tolist()[0] == 255
    wide = torch.tensor([1e300, 1.0], dtype=torch.float64)
    assert quantize(wide, format).isfinite().all()


def test_mxint8(implementation: str) -> None:  # noqa: F811
    """As the specification has it: 64ths from -127 to 127, the exponent that of amax."""
    format = block("mxint8")
    x = torch.randn(8, 96) * torch.exp2(torch.randint(-90, 90, (8, 1)).float())
    blocks = x.view(8, 3, 32).double()
    scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))))
    expected = (blocks / scale * 64).round().clamp(-127, 127) / 64 * scale
    assert torch.equal(quantize(x, format), expected.view(8, 96).float())
    codes, scales = encode(x, format)
    assert torch.equal(codes.view(torch.int8).double().view_as(blocks) / 64 * scale, expected)
    assert torch.equal(scales.double() - 127, torch.log2(scale).squeeze(-1))
    assert (format.bits, format.max, format.epsilon) == (8.25, 127 / 64 * 2.0**127, 2.0**-6)


def test_mistakes() -> None:
    """Each message says what is wrong."""
    element = Float("e2m1", 2, 1, kind="finite")
    mistakes: list[tuple[dict[str, object], str]] = [
        (
            {"element": element, "rule": "round"},
            "format b: rule must be one of 'floor', 'rceil', 'ceil', 'even', not 'round'",
        ),
        (
            {"element": Table("t", (-1.0, 1.0))},
            "format b: element must be a Float or Fixed, not Table(name='t', values=(-1.0, 1.0)); "
            "get(name) returns a registered one",
        ),
        (
            {"element": Fixed("q", 20, 2)},
            "format b: element q must have a largest exponent from -1 to 16 and no numbers below 2**-22",
        ),
    ]
    for fields, message in mistakes:
        with pytest.raises(OptionError) as error:
            Block("b", **fields)  # type: ignore[arg-type]
        assert str(error.value) == message
