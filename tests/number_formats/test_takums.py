"""Takums, by the definition of the paper and by values of libtakum's codec."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from hmpx import OptionError
from hmpx.formats import Takum, decode, encode, get, quantize

from .test_quantize import assert_same, bits_of

NAR = 0x8000

#: float64 -> the code of a linear takum of 16 bits, and of 32, that libtakum's codec gives.
LIBTAKUM = {
    0.0: (0x0000, 0x00000000),
    1.0: (0x4000, 0x40000000),
    -1.0: (0xC000, 0xC0000000),
    3.14159265358979: (0x4A48, 0x4A487ED5),
    -2.718281828459045: (0xB690, 0xB6903D5D),
    1e-10: (0x176E, 0x176DF37F),
    0.1: (0x2F33, 0x2F333333),
    65504.0: (0x6080, 0x607FE000),
    -1e38: (0x881A, 0x881A625A),
    5e-324: (0x0001, 0x00000001),
    -1.7e308: (0x8001, 0x80000001),
    1 + 2.0**-12: (0x4000, 0x40008000),  # a tie, to the even code
    1 + 3 * 2.0**-12: (0x4002, 0x40018000),
    math.inf: (0x8000, 0x80000000),
}


def value(code: int, bits: int) -> Fraction | None:
    """Returns what a code stands for, by the paper's definition 3; None for NaR."""
    if code in (0, 1 << (bits - 1)):
        return Fraction(0) if code == 0 else None
    s, d = code >> (bits - 1), code >> (bits - 2) & 1
    header = code >> (bits - 5) & 7
    r = header if d else 7 - header
    p = bits - 5 - r
    c = (code >> p & ((1 << r) - 1)) + ((1 << r) - 1 if d else 1 - (2 << r))
    f = Fraction(code & ((1 << p) - 1), 1 << p)
    return ((1 - 3 * s) + f) * Fraction(2) ** ((1 - 2 * s) * (c + s))


def test_every_code_of_takum16() -> None:
    """Its value; values get the code back; codes are in order as two's complement."""
    codes = torch.arange(2**16)
    exact = [value(code, 16) for code in codes.tolist()]
    expected = torch.tensor(
        [math.nan if v is None else float(v) for v in exact], dtype=torch.float64
    )
    values = decode(codes, "takum16")
    assert torch.equal(bits_of(values), bits_of(expected))
    again = encode(values, "takum16")
    assert isinstance(again, Tensor)
    assert torch.equal(again.long(), codes)
    order = (codes + NAR) % 2**16
    assert (values[order][1:].diff() > 0).all()
    assert_same(quantize(values, "takum16"), values, values)


@pytest.mark.parametrize(("index", "bits"), [(0, 16), (1, 32)])
def test_codes_of_libtakum(index: int, bits: int) -> None:
    """Ties, both ends and what is not finite, too."""
    x = torch.tensor(list(LIBTAKUM), dtype=torch.float64)
    codes = encode(x, Takum("takum", bits))
    assert isinstance(codes, Tensor)
    expected = [pair[index] for pair in LIBTAKUM.values()]
    assert [code % 2**bits for code in codes.tolist()] == expected


@pytest.mark.parametrize("bits", [12, 13, 16])
def test_rounds_to_the_nearest(bits: int) -> None:
    """Of two equally near ones the even code; never to 0 or NaR, at any distance."""
    format = Takum("takum", bits)
    positive = [value(code, bits) for code in range(1, 1 << (bits - 1))]
    known = [each for each in positive if each is not None]
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-280, 280, (2000,), generator=generator).double()
    x = torch.randn(2000, generator=generator, dtype=torch.float64) * torch.exp2(exponents)
    places = torch.randint(0, len(known) - 1, (500,), generator=generator).tolist()
    middles = [float((known[i] + known[i + 1]) / 2) for i in places]
    x = torch.cat([x, torch.tensor(middles, dtype=torch.float64), -x])
    for number, found in zip(x.tolist(), quantize(x, format).tolist(), strict=True):
        exact = abs(Fraction(number))
        above = min(bisect_left(known, exact), len(known) - 1)
        below = max(above - 1, 0)
        if exact - known[below] == known[above] - exact:
            nearest = below if (below + 1) % 2 == 0 else above  # a place's code is one more
        else:
            nearest = min(below, above, key=lambda place: abs(known[place] - exact))
        assert found == math.copysign(1, number) * float(known[nearest])


SMALLEST = float(Fraction(17, 16) * Fraction(2) ** -255)

#: A number, and its neighbours below and above.
NEIGHBOURS = [
    (1.0 + 2.0**-13, 1.0, 1.0 + 2.0**-11),
    (-3.3, -3.30078125, -3.298828125),
    (1e-90, 0.0, SMALLEST),
    (-1e-90, -SMALLEST, 0.0),
]


@pytest.mark.parametrize(("number", "below", "above"), NEIGHBOURS)
def test_other_modes(number: float, below: float, above: float) -> None:
    """The neighbour in the mode's direction, of which 0 is one; by chance either, right on average."""
    x = torch.tensor([number], dtype=torch.float64)
    found = {mode: quantize(x, "takum16", mode).item() for mode in ("down", "up", "toward_zero")}
    expected = {"down": below, "up": above, "toward_zero": below if number > 0 else above}
    assert found == expected
    drawn = quantize(
        x.expand(40000), "takum16", "stochastic", generator=torch.Generator().manual_seed(0)
    )
    is_above = drawn == above
    assert ((drawn == below) | is_above).all()
    share = (number - below) / (above - below)
    assert abs(is_above.double().mean().item() - share) < 0.01


def test_in_float32_values_are_those_of_float64() -> None:
    """As far as float32 reaches; infinity and NaN are NaR, or the largest."""
    x = torch.cat([torch.randn(1000) * torch.exp2(torch.randint(-126, 126, (1000,)).float())])
    assert torch.equal(quantize(x, "takum16"), quantize(x.double(), "takum16").float())
    special = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 2.0**-149])
    found = quantize(special, "takum16")
    assert found[:3].isnan().all()
    assert found[3:].tolist() == [0.0, 2.0**-149]
    wide = torch.tensor([math.inf, -math.inf], dtype=torch.float64)
    format = get("takum16")
    assert isinstance(format, Takum)
    assert quantize(wide, format, overflow="saturate").tolist() == [format.max, -format.max]


def test_properties() -> None:
    """Those of the definition; and what no takum is."""
    format = Takum("takum", 16)
    largest, smallest = value(0x7FFF, 16), value(1, 16)
    assert largest is not None
    assert smallest is not None
    assert (format.max, format.smallest_normal) == (float(largest), float(smallest))
    assert format.epsilon == float((value(0x4001, 16) or 0) - 1)
    assert format.significand_bits == 12
    with pytest.raises(OptionError, match="format t: bits must be an integer from 12 to 32, not 8"):
        Takum("t", 8)
