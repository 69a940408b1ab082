"""Formats that come with hmpx, against other implementations; the table of them in docs/evidence/number_formats.md."""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import get_args, get_type_hints

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from hmpx import formats
from hmpx.formats import Custom, Exponent, Float, Scaled, Table, decode, encode, get, quantize
from hmpx.number_formats import ROUNDING_MODES

from .bitsandbytes_golden import GOLDEN, digest, inputs, on_threshold
from .posit_reference import value
from .test_quantize import (
    assert_same,
    bits_of,
    implementation,
    magnitudes,
    neighbours,
    random_floats,
)

__all__ = ["implementation"]

E8M0 = ml_dtypes.float8_e8m0fnu

# --- powers of two -----------------------------------------------------------------------------


def scales() -> Tensor:
    """Returns float32: random bits, all powers of two, ties, what is beside them, and special values."""
    powers = np.ldexp(np.float64(1), np.arange(-150, 128)).astype(np.float32)
    points = np.concatenate([powers, powers * np.float32(1.5)])
    beside = [np.nextafter(points, np.float32(s), dtype=np.float32) for s in (0, np.inf)]
    with np.errstate(over="ignore"):
        return torch.cat(
            [random_floats(2**20), torch.from_numpy(np.concatenate([points, *beside]))]
        )


def test_e8m0_as_ml_dtypes(implementation: str) -> None:
    """Every code, and a million floats: zero and negative numbers are NaN.

    Between 2**-127 and 2**-126 ml_dtypes doesn't round to the nearest: 8e-39 is nearer to the former.
    """
    codes = torch.arange(256).to(torch.uint8)
    expected = torch.from_numpy(codes.numpy().view(E8M0).astype(np.float32))
    assert torch.equal(bits_of(decode(codes, "float8_e8m0fnu")), bits_of(expected))
    again = encode(expected, "float8_e8m0fnu")
    assert isinstance(again, Tensor)
    assert torch.equal(again, codes)
    x = scales()
    x = x[~((x > 2.0**-127) & (x < 2.0**-126))]
    with np.errstate(all="ignore"):
        oracle = x.numpy().astype(E8M0)
    expected = torch.from_numpy(oracle.astype(np.float32))
    assert_same(quantize(x, "float8_e8m0fnu"), expected, x)
    found = encode(x, "float8_e8m0fnu")
    assert torch.equal(found, torch.from_numpy(oracle.view(np.uint8)))  # type: ignore[arg-type]


def test_e8m0_as_torch(implementation: str) -> None:
    """Positive numbers that float32 holds whole; torch differs from ml_dtypes in all others."""
    x = scales()
    x = x[(x >= 2.0**-126) & (x < 2.0**127)]
    assert_same(quantize(x, torch.float8_e8m0fnu), x.to(torch.float8_e8m0fnu).float(), x)


@pytest.mark.parametrize(
    "format", [get("float8_e8m0fnu"), Exponent("e4m0", 4), Exponent("x", 3, -5)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", [mode for mode in ROUNDING_MODES if mode != "stochastic"])
def test_exponents_by_fractions(format: Exponent, dtype: torch.dtype, mode: str) -> None:
    """In each mode: below the smallest that, beyond the largest NaN unless it goes toward zero."""
    x = scales()[-1200:].to(dtype)
    expected = []
    least, most = Fraction(format.smallest_normal), Fraction(format.max)
    for v in x.tolist():
        if not v > 0 or math.isinf(v):
            expected.append(math.nan)
            continue
        low = Fraction(2) ** (math.frexp(v)[1] - 1)
        goes_up = {"up": Fraction(v) > low, "down": False, "toward_zero": False}.get(mode)
        if goes_up is None:
            goes_up = Fraction(v) >= low * 3 / 2
        rounded = max(low * 2 if goes_up else low, least)
        if rounded > most:
            rounded = most if mode in ("down", "toward_zero") else math.nan  # type: ignore[assignment]
        expected.append(float(rounded))
    assert_same(quantize(x, format, mode), torch.tensor(expected, dtype=dtype), x)
    saturated = quantize(
        torch.tensor([math.inf, 1e38, -1.0], dtype=torch.float64), format, mode, "saturate"
    )
    assert saturated[:2].tolist() == [format.max, min(2.0 ** (126 + (mode == "up")), format.max)]
    assert saturated[2].isnan()


def test_e3m0() -> None:
    """Powers of two with sign and zero: its sixteen codes."""
    values = [0.0, *(2.0**e for e in range(-2, 5))]
    assert decode(torch.arange(8), "float4_e3m0").tolist() == values
    assert torch.equal(decode(torch.arange(8, 16), "e3m0"), -torch.tensor(values))
    x = torch.tensor([0.124, 0.126, -0.374, 0.376, 3.0, 20.0, -math.inf])
    assert quantize(x, "float4_e3m0").tolist() == [0.0, 0.25, -0.25, 0.5, 4.0, 16.0, -16.0]
    again = encode(decode(torch.arange(16), "float4_e3m0"), "float4_e3m0")
    assert torch.equal(again.long(), torch.arange(16))  # type: ignore[union-attr]


# --- P3109 -------------------------------------------------------------------------------------

#: Formats of the draft, as gfloat describes them: bits and precision.
P3109 = [(8, 3), (8, 4), (8, 5), (8, 2), (6, 3), (4, 2)]

GFLOAT_MODES = {
    "nearest": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}


def p3109(bits: int, precision: int) -> tuple[Float, gfloat.FormatInfo]:
    """Returns a signed extended format, and gfloat's description of it."""
    info = gfloat.formats.format_info_p3109(bits, precision)
    if info.name in formats.names():
        found = get(info.name)
        assert isinstance(found, Float)
        return found, info
    return Float(info.name, bits - precision, precision - 1, kind="p3109"), info


def test_p3109_come_with_hmpx_by_gfloats_names() -> None:
    """And by those of the draft before; the finite ones have the values of fnuz."""
    for precision in (3, 4):
        name = gfloat.formats.format_info_p3109(8, precision).name
        assert get(name) is get(f"binary8p{precision}")
        info = gfloat.formats.format_info_p3109(8, precision, domain=gfloat.Domain.Finite)
        codes = torch.arange(256)
        expected = torch.tensor([gfloat.decode_float(info, code).fval for code in range(256)])
        assert torch.equal(bits_of(decode(codes, info.name)), bits_of(expected.float()))


@pytest.mark.parametrize(("bits", "precision"), P3109)
def test_p3109_codes_as_gfloat(bits: int, precision: int) -> None:
    """Every code, and its value's code again; the properties."""
    format, info = p3109(bits, precision)
    codes = torch.arange(2**bits)
    expected = torch.tensor([gfloat.decode_float(info, code).fval for code in codes.tolist()])
    assert torch.equal(bits_of(decode(codes, format)), bits_of(expected.float()))
    again = encode(expected, format)
    assert torch.equal(again.long(), codes)  # type: ignore[union-attr]
    assert (format.max, format.smallest_normal) == (info.max, info.smallest_normal)
    assert (format.smallest_subnormal, format.bits) == (info.smallest_subnormal, info.k)
    assert (format.epsilon, format.significand_bits) == (info.eps, info.precision)


@pytest.mark.parametrize("overflow", [None, "saturate"])
@pytest.mark.parametrize("mode", GFLOAT_MODES)
@pytest.mark.parametrize(("bits", "precision"), P3109)
def test_p3109_as_gfloat(
    bits: int, precision: int, mode: str, overflow: str | None, implementation: str
) -> None:
    """Values, ties, what is beside them, and random bits; zeros have no sign."""
    format, info = p3109(bits, precision)
    x = torch.cat([neighbours(magnitudes(format)), random_floats(5000).double()])
    x = torch.cat([x, torch.tensor([math.inf, -math.inf, -0.0, math.nan]).double()])
    expected = gfloat.round_ndarray(info, x.numpy(), GFLOAT_MODES[mode], sat=overflow == "saturate")
    assert_same(quantize(x, format, mode, overflow), torch.from_numpy(expected), x)
    narrow = x.float()
    expected = gfloat.round_ndarray(
        info, narrow.double().numpy(), GFLOAT_MODES[mode], sat=overflow == "saturate"
    )
    assert_same(
        quantize(narrow, format, mode, overflow), torch.from_numpy(expected).float(), narrow
    )


# --- wide posits -------------------------------------------------------------------------------


def test_posit32_by_its_definition(implementation: str) -> None:
    """Sampled codes have the value that the standard's formula gives, and these round to themselves."""
    codes = torch.randint(-(2**31), 2**31, (3000,), generator=torch.Generator().manual_seed(0))
    special = [0, 1, 2, 3, 2**31 - 1, 2**31 - 2, 2**30, -1, -2, -(2**31), 1 - 2**31]
    codes = torch.cat([codes, torch.tensor(special)])
    expected = [value(code % 2**32, 32, 2) for code in codes.tolist()]
    values = decode(codes.to(torch.int32), "posit32_2")
    exact = torch.tensor(
        [math.nan if v is None else float(v) for v in expected], dtype=torch.float64
    )
    assert torch.equal(bits_of(values), bits_of(exact))
    assert torch.equal(encode(exact, "posit32_2").long(), codes)  # type: ignore[union-attr]
    assert_same(quantize(exact, "posit32_2"), exact, exact)


def test_posit32_rounds_as_the_standard_says(implementation: str) -> None:
    """To the posit between whose bounds a number lies: those are the posits of 33 bits beside its own."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-130, 130, (3000,), generator=generator).double()
    x = torch.randn(3000, generator=generator, dtype=torch.float64) * torch.exp2(exponents)
    codes = encode(x, "posit32_2")
    assert isinstance(codes, Tensor)
    rounded = quantize(x, "posit32_2").tolist()
    for number, code, found in zip(x.tolist(), codes.tolist(), rounded, strict=True):
        magnitude = abs(code)
        assert found == (math.copysign(1, number)) * float(value(magnitude, 32, 2) or 0)
        low, high = value(2 * magnitude - 1, 33, 2), value(2 * magnitude + 1, 33, 2)
        exact = abs(Fraction(number))
        assert low is not None
        assert magnitude == 1 or low <= exact
        assert magnitude == 2**31 - 1 or (high is not None and exact <= high)
        assert magnitude % 2 == 0 or exact not in (low, high)


# --- bitsandbytes ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("name", inputs())
def test_four_bits_as_bitsandbytes(kind: str, name: str, implementation: str) -> None:
    """Every code, and millions of numbers, bit for bit; with its scales, and its codes where it sorts them."""
    golden = json.loads(GOLDEN.read_text("utf-8"))[kind]
    x, format = inputs()[name], get("nf4" if kind == "nf4" else "bnb_fp4")
    assert isinstance(format, Scaled)
    assert isinstance(format.element, Table)
    assert sorted({*golden["code"]} | {0.0}) == list(format.element.values)
    rounded = quantize(x, format)
    assert rounded[:8].tolist() == golden[name]["first"]
    left_out = on_threshold(x, golden["code"])
    assert left_out.sum() == golden[name]["left_out"] < 10
    assert digest(rounded.masked_fill(left_out, 0.0) + 0.0) == golden[name]["values"]
    codes, scales = encode(x, format)
    assert torch.equal(decode((codes, scales), format), rounded)
    assert codes.unique().numel() == (1 if name == "zeros" else len(format.element.values))
    if kind == "nf4":
        assert digest(codes.masked_fill(left_out, 0)) == golden[name]["codes"]
    if name != "zeros":  # where a scale is never 0 here
        assert digest(scales) == golden[name]["absmax"]


# --- documentation -----------------------------------------------------------------------------


DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = (DOCS / "formats.md").read_text("utf-8")
NAMES = (DOCS / "evidence" / "number_formats.md").read_text("utf-8")


def rows_after(text: str, document: str) -> list[list[str]]:
    """Returns the cells of the first table after a text of a document."""
    table = document.partition(text)[2].partition("\n\n|")[2].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("| ").split("|")] for row in table.split("\n")[2:]]


def test_modes_and_kinds_in_the_docs() -> None:
    """Are those that there are."""
    cells = " ".join([row[0] for row in rows_after("## Rounding", DOCUMENT)])
    assert sorted(re.findall(r'"(\w+)"', cells)) == sorted(ROUNDING_MODES)
    kinds = [row[0].strip('`"') for row in rows_after("## Kinds of floats", NAMES)]
    assert kinds == list(get_args(get_type_hints(Float)["kind"]))


def test_other_names_in_the_docs() -> None:
    """Each is taken for the format beside it, or one of those beside it."""
    faults = []
    for written, meant in rows_after("### Other names", NAMES):
        known = [get(name) for name in re.findall(r"`(\w+)`", meant) if name in formats.names()]
        for name in re.findall(r"`([^`]+)`", written):
            if name.startswith(("numpy.", "ml_dtypes.", "torch.")):
                found = get(eval(name, {"numpy": np, "ml_dtypes": ml_dtypes, "torch": torch}))
                is_meant = get(name.partition("(")[0]) is found if "(" not in name else True
            else:
                is_meant = not known or get(name) in known
            if not is_meant:
                faults.append(name)
    assert not faults


def test_the_table_in_the_docs_is_what_there_is() -> None:
    """A row for each format, in order, with its numbers and what becomes of larger ones."""
    rows = rows_after("## What comes with hmpx", NAMES)
    assert [row[0].strip("`") for row in rows] == list(formats.names())
    faults = []
    for name, *cells in rows:
        format = get(name.strip("`"))
        assert not isinstance(format, Custom)
        beyond = {"inf": "infinity", "nan": "NaN", "saturate": "the largest"}[
            format.default_overflow
        ]
        if name.startswith(("`posit", "`takum")):
            beyond = "the largest"  # only infinity is NaR
        numbers = [format.bits, format.max, format.smallest_normal]
        numbers += [format.smallest_subnormal, format.epsilon]
        expected = [
            f"{number:.6g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
            for number in numbers
        ]
        if cells != [*expected, beyond]:
            faults.append(" | ".join([name, *expected, beyond]))
    assert not faults, "\n".join(faults)
