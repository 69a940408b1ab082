"""Rounding: bit for bit against other implementations, against fractions, on every kind of tensor."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hmpx import OptionError, formats
from hmpx.formats import Block, Custom, Fixed, Float, Posit, Table, quantize
from hmpx.number_formats import ROUNDING_MODES, rounder
from hmpx.number_formats import kernels as kernel_library
from hmpx.number_formats import rounding as rounding_routes

from .posit_reference import Reference

IMPLEMENTATIONS = ("kernels", "ops")

#: Bytes -> the integers of as many.
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Name -> the type that has the same values.
ORACLES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e3m4": ml_dtypes.float8_e3m4,
    "float6_e2m3fn": ml_dtypes.float6_e2m3fn,
    "float6_e3m2fn": ml_dtypes.float6_e3m2fn,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
}

NF4 = Table(
    "nf4",
    (
        *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.562617, 0.7229568, 1.0),
    ),
)
SQUARES = Table("squares", sorted({s * i * i / 4 for i in range(100) for s in (-1, 1)}))
FLUSHED = Float("flushed", 4, 3, subnormals=False)
WIDE_FLUSHED = Float("wide_flushed", 8, 7, subnormals=False)
Q4_4 = Fixed("q4_4", 4, 4)


def name_of(format: object) -> str:
    """Returns what a parametrized test is called by."""
    return str(getattr(format, "name", format))


find_library = kernel_library.library  # before a test replaces it


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the compiled kernels, and again with torch ops."""
    use(request.param, monkeypatch)
    return request.param


def forget_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has plans and kernels of all formats made anew: they are kept by the class that runs them."""
    monkeypatch.setattr(
        rounding_routes,
        "FormatRounding",
        type("Rounding", (rounding_routes.FormatRounding,), {"__slots__": ()}),
    )


def use(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has all rounding done by the kernels, or by torch ops."""
    forget_runs(monkeypatch)
    library = find_library() if implementation == "kernels" else None
    if implementation == "kernels" and library is None:
        pytest.skip("hmpx was installed without a C compiler")
    monkeypatch.setattr(kernel_library, "library", lambda **_: library)


def bits_of(x: Tensor) -> Tensor:
    """Returns the bits, those of all NaNs alike."""
    return x.contiguous().view(INTEGERS[x.element_size()]).masked_fill(x.isnan(), -1)


def assert_same(actual: Tensor, expected: Tensor, x: Tensor) -> None:
    """Fails on the first difference, -0 and 0 differing; NaNs are alike."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    integer = INTEGERS[actual.element_size()]
    if torch.equal(actual.contiguous().view(integer), expected.contiguous().view(integer)):
        return  # as fast as can be, for the exhaustive tests
    differing = (bits_of(actual) != bits_of(expected)).flatten().nonzero()
    if differing.numel():
        first = int(differing[0])
        a, e, given_ = (t.flatten()[first].item() for t in (actual, expected, x))
        pytest.fail(f"{len(differing)} differ; the first: {given_!r} -> {a!r}, expected {e!r}")


def random_floats(count: int, seed: int = 0) -> Tensor:
    """Returns float32 of any bits: infinities, NaNs of both signs, subnormals, and both zeros."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    bits[:10] = [0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 2**31 - 1, 2**23, 3]
    return torch.from_numpy(bits.view(np.float32))


def magnitudes(format: Float) -> list[Fraction]:
    """Returns the format's values from 0 up, and the one that would follow the largest."""
    found = []
    bias = format.bias if format.bias is not None else 2 ** (format.exponent_bits - 1) - 1
    if format.bias is None and format.kind in ("fnuz", "p3109"):
        bias += 1
    unit = 2**format.mantissa_bits
    for field in range(2**format.exponent_bits):
        for fraction in range(unit):
            if field:
                found.append(Fraction(unit + fraction, unit) * Fraction(2) ** (field - bias))
            elif format.subnormals or fraction == 0:
                found.append(Fraction(fraction, unit) * Fraction(2) ** (1 - bias))
    if format.kind == "ieee":
        return found[: -unit + 1]
    return (
        found
        if format.kind in ("fn", "p3109")
        else [*found, Fraction(2) ** (2**format.exponent_bits - bias)]
    )


def neighbours(values: list[Fraction]) -> Tensor:
    """Returns float64: values, the points halfway between them, and what is just beside those."""
    exact = np.array([float(v) for v in values])
    between = (exact[1:] + exact[:-1]) / 2
    quarter = (exact[1:] + 3 * exact[:-1]) / 4
    points = np.concatenate([exact, between, quarter, exact[-1:] * 1.9, exact[-1:] * 100])
    points = np.concatenate([points, np.nextafter(points, -np.inf), np.nextafter(points, np.inf)])
    narrow = points.astype(np.float32)
    beside = [np.nextafter(narrow, np.float32(s), dtype=np.float32) for s in (-np.inf, np.inf)]
    points = np.concatenate([points, narrow, *beside])
    return torch.from_numpy(np.unique(np.concatenate([points, -points])))


def rounded_by_fractions(x: float, values: list[Fraction], format: Float, mode: str) -> float:
    """Returns ``x`` rounded by the definition; the last value is beyond the largest."""
    overflow = format.overflow or {"ieee": "inf", "p3109": "inf", "finite": "saturate"}.get(
        format.kind, "nan"
    )
    beyond = {"inf": math.inf, "nan": math.nan, "saturate": float(values[-2])}[overflow]
    sign = math.copysign(1.0, x)
    if math.isinf(x):
        return sign * beyond
    magnitude = abs(Fraction(x))
    at = bisect_right(values, magnitude) - 1
    grows = {"up": x > 0, "down": x < 0, "toward_zero": False}.get(mode)
    if at == len(values) - 1:
        rounded = sign * (float(values[-2]) if grows is False else beyond)
    else:
        low, high = values[at], values[at + 1]
        if magnitude == low:
            goes_up = False
        elif grows is not None:
            goes_up = grows
        else:
            middle = (low + high) / 2
            code = at if format.subnormals or at == 0 else at + 2**format.mantissa_bits - 1
            # In units of the lower of two powers of two, the upper is 2, which is even.
            is_odd = at > 0 if format.mantissa_bits == 0 else code % 2 == 1
            is_tie_up = mode == "nearest_away" or is_odd
            goes_up = magnitude > middle or (magnitude == middle and is_tie_up)
        is_beyond = at + goes_up == len(values) - 1
        rounded = sign * (beyond if is_beyond else float(values[at + goes_up]))
    return 0.0 if rounded == 0 and format.kind in ("fnuz", "p3109") else rounded


@pytest.mark.parametrize("name", ORACLES)
def test_floats_as_ml_dtypes(name: str, implementation: str) -> None:
    """A million random bit patterns, every value, every tie and its neighbours, overflow."""
    values = magnitudes(formats.get(name)) if name not in ("bfloat16", "float16") else []
    x = torch.cat([random_floats(2**20), neighbours(values).float() if values else torch.empty(0)])
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(x.numpy().astype(ORACLES[name]).astype(np.float32))
    if not formats.get(name).has_nan:  # ml_dtypes makes a zero of NaN
        expected = torch.where(x.isnan(), x, expected)
    assert_same(quantize(x, name), expected, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_every_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 2**32 of them, as ml_dtypes and numpy, by kernels and by torch ops."""
    rounders = []
    for implementation in IMPLEMENTATIONS:
        use(implementation, monkeypatch)
        rounders.append(rounder(name))
        rounders[-1](torch.ones(1))  # has its kernel, or none, from now on
    for start in range(0, 2**32, 2**24):
        bits = np.arange(start, start + 2**24, dtype=np.int64).astype(np.uint32)
        x = torch.from_numpy(bits.view(np.float32))
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(x.numpy().astype(ORACLES[name]).astype(np.float32))
        for round_ in rounders:
            assert_same(round_(x), expected, x)


@pytest.mark.parametrize("name", ORACLES)
def test_every_value_of_16_bit_inputs(name: str) -> None:
    """All bfloat16 and all float16, which are rounded by way of float32 and come back in their type."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype)
        assert_same(quantize(x, name), quantize(x.float(), name).to(dtype), x)


SMALL = [
    *(Float(f"{kind}_e3m2", 3, 2, kind=kind) for kind in ("ieee", "p3109", "fn", "fnuz", "finite")),
    formats.get("float4_e3m0"),
    Float("powers", 5, 0, kind="fnuz"),
    Float("low_powers", 4, 0, bias=127, kind="finite"),
    Float("flushed_powers", 4, 0, kind="finite", subnormals=False),
    Float("saturating", 3, 2, overflow="saturate"),
    Float("nan_beyond", 3, 2, overflow="nan"),
    Float("fn_saturating", 4, 3, kind="fn", overflow="saturate"),
    Float("low_bias", 2, 1, bias=-3, kind="finite"),
    Float("high_bias", 4, 1, bias=20, kind="fnuz"),
    Float("one_exponent_bit", 1, 3, kind="finite"),
    FLUSHED,
    Float("flushed_fnuz", 3, 2, kind="fnuz", subnormals=False),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", [mode for mode in ROUNDING_MODES if mode != "stochastic"])
@pytest.mark.parametrize("format", SMALL, ids=lambda format: format.name)
def test_floats_by_fractions(
    format: Float, mode: str, dtype: torch.dtype, implementation: str
) -> None:
    """Every kind, mode and overflow: values, ties, what is beside them, beyond the largest."""
    values = magnitudes(format)
    special = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 5e-324, -5e-324])
    x = torch.cat([neighbours(values), special.double()]).to(dtype)
    expected = [rounded_by_fractions(v, values, format, mode) for v in x.tolist()]
    assert_same(quantize(x, format, mode), torch.tensor(expected, dtype=dtype), x)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", [mode for mode in ROUNDING_MODES if mode != "stochastic"])
@pytest.mark.parametrize("format", ["bfloat16", "tf32", "fp24", WIDE_FLUSHED], ids=name_of)
def test_wide_floats_by_fractions(format: str | Float, mode: str, implementation: str) -> None:
    """Random bits, by the spacing of the format's values at each of them."""
    known = formats.get(format)
    assert isinstance(known, Float)
    x = random_floats(3000)
    x = x[~x.isnan()]
    expected = []
    for v in x.tolist():
        if math.isinf(v) or v == 0:
            expected.append(v)
            continue
        exponent = max(math.frexp(v)[1] - 1, known.min_exponent)
        is_flushed = not known.subnormals and abs(v) < known.smallest_normal
        unit = Fraction(2) ** (exponent - (0 if is_flushed else known.mantissa_bits))
        steps = abs(Fraction(v)) / unit
        whole, rest = divmod(steps, 1)
        grows = {
            "toward_zero": False,
            "up": v > 0 and rest > 0,
            "down": v < 0 and rest > 0,
            "nearest_away": rest >= Fraction(1, 2),
            "nearest": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
        }[mode]
        magnitude = (whole + grows) * unit
        is_inward = mode == "toward_zero" or (mode in ("up", "down") and (mode == "up") != (v > 0))
        if magnitude > Fraction(known.max):
            magnitude = Fraction(known.max) if is_inward else math.inf
        expected.append(math.copysign(float(magnitude), v))
    assert_same(quantize(x, known, mode), torch.tensor(expected), x)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_float64_is_rounded_once(name: str, implementation: str) -> None:
    """What lies a little beside a tie, by less than float32 can tell, goes to its side."""
    generator = np.random.default_rng(1)
    wide = generator.standard_normal(4000) * np.exp2(generator.integers(-20, 20, 4000))
    known = formats.get(name)
    assert isinstance(known, Float)
    unit = np.exp2(np.floor(np.log2(np.abs(wide))) - known.mantissa_bits)
    ties = (np.floor(wide / unit) + 0.5) * unit
    x = torch.from_numpy(np.concatenate([wide, ties, ties * (1 + 2.0**-50), ties * (1 - 2.0**-50)]))
    grid = (
        [Fraction(float(v)) for v in np.arange(31744, dtype=np.uint16).view(np.float16)]
        if name == "float16"
        else None
    )
    if grid is not None:
        grid.append(Fraction(65536))
    elif name == "bfloat16":
        codes = np.arange(0x7F80, dtype=np.uint16)
        grid = [Fraction(float(v)) for v in codes.view(ml_dtypes.bfloat16).astype(np.float64)]
        grid.append(Fraction(2) ** 128)
    else:
        grid = magnitudes(known)
    expected = [rounded_by_fractions(v, grid, known, "nearest") for v in x.tolist()]
    assert_same(quantize(x, name), torch.tensor(expected, dtype=torch.float64), x)
    assert bool((quantize(x, name) != quantize(x.float(), name).double()).any())


POSITS = [(8, 0), (8, 1), (8, 2), (16, 1), (16, 2), (7, 0), (9, 3), (3, 0), (4, 1), (6, 4)]


def posit_points(reference: Reference) -> Tensor:
    """Returns float64: values, what rounding turns at, beside both, and beyond the ends."""
    exact = np.array([*reference.values, *reference.between])
    exact = np.concatenate([exact, exact[:1] / 1e6, exact[-1:] * 1e6])
    narrow = exact.astype(np.float32)
    beside = [np.nextafter(narrow, np.float32(s), dtype=np.float32) for s in (0, np.inf)]
    points = np.concatenate([exact, *beside, np.nextafter(exact, 0), np.nextafter(exact, np.inf)])
    points = np.concatenate([points, -points, [0.0, -0.0, math.inf, -math.inf, math.nan]])
    return torch.from_numpy(points)


@pytest.mark.parametrize(("bits", "es"), POSITS)
def test_posits_by_their_definition(bits: int, es: int, implementation: str) -> None:
    """Every value, every point between neighbours, and beside both, in both types."""
    format = Posit(f"posit{bits}_{es}", bits, es)
    for x, expected in posit_cases(bits, es):
        assert_same(quantize(x, format), expected, x)


@functools.cache
def posit_cases(bits: int, es: int) -> list[tuple[Tensor, Tensor]]:
    """Returns inputs with what the reference makes of them."""
    reference = Reference(bits, es)
    points = posit_points(reference)
    return [
        (x, torch.tensor([reference.round(v) for v in x.tolist()], dtype=x.dtype))
        for x in (points.float(), points, random_floats(2000))
    ]


@pytest.mark.parametrize(("bits", "es"), [(8, 0), (8, 2), (6, 4)])
@pytest.mark.parametrize("mode", ["toward_zero", "up", "down", "nearest_away"])
def test_posits_in_other_modes(mode: str, bits: int, es: int, implementation: str) -> None:
    """Directed modes reach zero; ties away from zero do not."""
    format, reference = Posit(f"posit{bits}_{es}", bits, es), Reference(bits, es)
    values = [0.0, *reference.values]
    x = posit_points(reference)
    x = x[x.isfinite()]
    expected = []
    for v in x.tolist():
        magnitude = abs(v)
        at = bisect_right(values, magnitude) - 1
        is_inexact = magnitude != values[at] and at + 1 < len(values)
        if mode == "nearest_away":
            between = 0.0 if at == 0 else reference.between[at - 1]
            at += is_inexact and magnitude >= between
        else:
            at += is_inexact and mode == ("up" if v > 0 else "down")
        expected.append(values[at] * (1 if v > 0 else -1) + 0.0)
    assert_same(quantize(x, format, mode), torch.tensor(expected, dtype=x.dtype), x)
    assert quantize(torch.tensor([math.inf]), format, mode, "saturate").item() == format.max


@pytest.mark.parametrize(
    "format", [Q4_4, Fixed("q1_0", 2, 0), Fixed("q16_16", 16, 16)], ids=name_of
)
@pytest.mark.parametrize("mode", [mode for mode in ROUNDING_MODES if mode != "stochastic"])
def test_fixed_point_by_fractions(format: Fixed, mode: str, implementation: str) -> None:
    """Multiples of a step, saturated, without -0."""
    steps = torch.arange(-300, 300).double() / 4
    x = torch.cat([steps * format.epsilon, torch.tensor([1e9, -1e9, 1e-9, -1e-9, -0.0]).double()])
    expected = []
    for v in x.tolist():
        scaled = Fraction(v) / Fraction(format.epsilon)
        whole, rest = divmod(scaled, 1)
        goes_up = {
            "up": rest > 0,
            "down": False,
            "toward_zero": v < 0 and rest > 0,
            "nearest": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
            "nearest_away": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and v > 0),
        }[mode]
        rounded = float((whole + goes_up) * Fraction(format.epsilon))
        expected.append(min(max(rounded, format.min), format.max))
    for dtype in (torch.float64, torch.float32):
        y = x.to(dtype)
        known = torch.tensor(expected, dtype=torch.float64).to(dtype)
        assert_same(quantize(y, format, mode), known, x)
    special = torch.tensor([math.inf, -math.inf, math.nan])
    assert_same(
        quantize(special, format, mode),
        torch.tensor([format.max, format.min, math.nan]),
        special,
    )


@pytest.mark.parametrize("format", [NF4, SQUARES, Table("two", (-1.0, 0.1))], ids=name_of)
@pytest.mark.parametrize("mode", [mode for mode in ROUNDING_MODES if mode != "stochastic"])
def test_tables_by_fractions(format: Table, mode: str, implementation: str) -> None:
    """Values, the points between, and what is beside them; ties go to the even index."""
    values = [Fraction(v) for v in torch.tensor(format.values).tolist()]
    points = np.array([float(v) for v in values], dtype=np.float32)
    between = ((points[1:].astype(np.float64) + points[:-1]) / 2).astype(np.float32)
    x = np.concatenate([points, between, np.random.default_rng(0).uniform(-2000, 2000, 500)])
    x = x.astype(np.float32)
    x = np.concatenate(
        [x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, -np.float32(np.inf))]
    )
    expected = []
    for v in x.tolist():
        exact = Fraction(v)
        at = bisect_right(values, exact) - 1
        if at < 0 or at == len(values) - 1 or exact == values[at]:
            expected.append(float(values[max(at, 0)]))
            continue
        low, high = values[at], values[at + 1]
        middle = (low + high) / 2
        nearest = exact > middle or (exact == middle and at % 2 == 1)
        away = exact > middle or (exact == middle and middle > 0)
        goes_up = {
            "up": True,
            "down": False,
            "toward_zero": nearest if low < 0 < high else high <= 0,
            "nearest": nearest,
            "nearest_away": away,
        }[mode]
        expected.append(float(high if goes_up else low))
    tensor = torch.from_numpy(x)
    assert_same(quantize(tensor, format, mode), torch.tensor(expected), tensor)
    special = torch.tensor([math.inf, -math.inf, math.nan])
    ends = torch.tensor([format.max, format.min, math.nan])
    assert_same(quantize(special, format, mode), ends, special)


def rounded_blocks(row: list[float], format: Block, mode: str) -> list[float]:
    """Returns one row rounded as the specification says, in fractions."""
    values = magnitudes(format.element)
    saturating = Float("element", 1, 1, kind="finite")  # only its overflow counts
    found = []
    for start in range(0, len(row), format.size):
        block = row[start : start + format.size]
        if not all(map(math.isfinite, block)):
            found += [math.nan] * len(block)
            continue
        most = max(map(abs, block))
        exponent = math.frexp(most)[1] - 1 if most else -1000
        exponent = min(max(exponent - format.element.max_exponent, -127), 127)
        scale = Fraction(2) ** exponent
        for v in block:
            scaled = Fraction(v) / scale
            near = rounded_by_fractions_of(scaled, v, values, saturating, mode)
            found.append(math.copysign(float(abs(near) * scale), v))
    return found


def rounded_by_fractions_of(
    scaled: Fraction, x: float, values: list[Fraction], format: Float, mode: str
) -> Fraction:
    """Returns a fraction rounded, saturating."""
    magnitude = abs(scaled)
    at = min(bisect_right(values, magnitude) - 1, len(values) - 2)
    low, high = values[at], values[at + 1]
    middle = (low + high) / 2
    goes_up = {
        "nearest": magnitude > middle or (magnitude == middle and at % 2 == 1),
        "nearest_away": magnitude >= middle,
        "toward_zero": False,
        "up": x > 0 and magnitude > low,
        "down": x < 0 and magnitude > low,
    }[mode]
    return min(values[at + goes_up], values[-2])


BLOCKS = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("mode", ["nearest", "toward_zero", "up", "nearest_away"])
def test_blocks_by_fractions(name: str, mode: str, implementation: str) -> None:
    """Zeros, tiny and huge blocks, infinity and NaN, ties, and a shorter block at the end."""
    format = formats.get(name)
    assert isinstance(format, Block)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(14, 71, generator=generator)
    x[1] *= 2.0**100
    x[2] *= 2.0**-120
    x[3] *= torch.exp2(torch.arange(71) - 35.0)
    x[4] = random_floats(71).nan_to_num(0.0, 0.0, 0.0)
    x[5] = (x[5] * 16).round() / 16
    x[6, 3], x[6, 40], x[7, 70] = math.inf, math.nan, -math.inf
    x[8], x[9] = 0.0, -0.0
    x[10] = torch.finfo(torch.float32).max
    x[11] = 1e-45
    x[12, 1], x[12, 0] = 1e30, 1e-40
    expected = torch.tensor([rounded_blocks(row, format, mode) for row in x.tolist()])
    assert_same(quantize(x, format, mode), expected, x)
    assert_same(quantize(x.double(), format, mode), expected.double(), x)


STOCHASTIC = ["float8_e4m3fn", "bfloat16", "float4_e2m1fn", "posit8_1", "mxfp8_e4m3", FLUSHED]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("format", [*STOCHASTIC, Q4_4, SQUARES], ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stochastic_rounding_is_unbiased(
    format: str | Float, dtype: torch.dtype, implementation: str
) -> None:
    """The mean is what was rounded, within five standard deviations; only neighbours come out."""
    count = 2**15
    generator = torch.Generator().manual_seed(0)
    for value in (1.0 + 1 / 300, 1.7, -2.9, 0.013, 3e-4):
        x = torch.full((count,), value, dtype=dtype)
        rounded = quantize(x, format, "stochastic", generator=generator)
        low, high = quantize(x[:32], format, "down")[0], quantize(x[:32], format, "up")[0]
        assert set(rounded.tolist()) <= {low.item(), high.item()}
        share = (x[0] - low) / (high - low) if high > low else torch.zeros(())
        deviation = (high - low) * (share * (1 - share) / count) ** 0.5
        assert (rounded.double().mean() - x[0]).abs() <= 5 * deviation + 1e-9


def test_noise(implementation: str) -> None:
    """By the generator alone: one draw a call, one place one noise; values of the format stay."""
    x = torch.rand(70, 1000)

    def rounded(y: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return quantize(y, "float8_e4m3fn", "stochastic", generator=generator)

    first = rounded(x, 1)
    assert torch.equal(rounded(x, 1), first)
    strided = rounded(x.t().contiguous().t(), 1)
    assert torch.equal(strided, first)
    assert strided.stride() == (1, 70)
    assert not torch.equal(rounded(x, 2), first)
    assert torch.equal(rounded(first, 3), first)
    same = torch.full((70, 1000), 1.04)
    ups, others = (rounded(same, 1) > 1).double(), (rounded(same, 2) > 1).double()
    for one, other in ((ups[:, :-1], ups[:, 1:]), (ups[:-1], ups[1:]), (ups, others)):
        pair = torch.stack([one.flatten(), other.flatten()])
        assert abs(torch.corrcoef(pair)[0, 1]) < 0.02  # five standard deviations
    torch.manual_seed(5)
    global_ = quantize(x, "posit16_1", "stochastic")
    torch.manual_seed(5)
    assert torch.equal(quantize(x, "posit16_1", "stochastic"), global_)
    assert not torch.equal(quantize(x, "posit16_1", "stochastic"), global_)


ALL = [*formats.names(), NF4, SQUARES, Q4_4, FLUSHED, WIDE_FLUSHED, Posit("posit32_2", 32, 2)]


@pytest.mark.parametrize("format", ALL, ids=name_of)
def test_kernels_do_as_ops(format: str | Float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, in each mode, overflow and dtype, with the same noise."""
    x = torch.cat([random_floats(1000), torch.randn(1000), torch.randn(48) * 1e-3]).view(2, -1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for mode in ROUNDING_MODES:
            for overflow in (None, "saturate"):
                found = []
                for implementation in IMPLEMENTATIONS:
                    use(implementation, monkeypatch)
                    generator = torch.Generator().manual_seed(7)
                    found.append(quantize(x.to(dtype), format, mode, overflow, generator))
                assert_same(found[0], found[1], x)


@settings(deadline=None, max_examples=200)
@given(
    x=st.floats(width=32),
    exponent_bits=st.integers(2, 7),
    mantissa_bits=st.integers(0, 10),
    kind=st.sampled_from(["ieee", "p3109", "fn", "fnuz", "finite"]),
    mode=st.sampled_from(ROUNDING_MODES),
)
def test_properties(x: float, exponent_bits: int, mantissa_bits: int, kind: str, mode: str) -> None:
    """Rounding twice is rounding once; order is kept; directions hold; the sign does, too."""
    mantissa_bits += mantissa_bits == 0 and kind not in ("fnuz", "finite")
    format = Float("any", exponent_bits, mantissa_bits, kind=kind, overflow="saturate")  # type: ignore[arg-type]
    tensor = torch.tensor([x, x * 1.0625])
    once = quantize(tensor, format, mode)
    assert_same(quantize(once, format, mode), once, tensor)
    assert_same(quantize(once, format, "nearest"), once, tensor)
    assert (once.abs() <= format.max).logical_or(once.isnan()).all()
    if math.isnan(x):
        return
    first, second = once.tolist()
    if mode != "stochastic":
        assert first == second or (first < second) == (x < tensor[1].item())
    if abs(x) <= format.max:
        assert mode != "up" or first >= tensor[0].item()
        assert mode != "down" or first <= tensor[0].item()
        assert mode != "toward_zero" or abs(first) <= abs(x)
    assert first == 0 or math.copysign(1, first) == math.copysign(1, x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 3),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "sliced": lambda x: x[:, ::2, 1:],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "flipped": lambda x: x.flip(2),
    "0-dim": lambda x: x[0, 0, 0, 0],
    "empty": lambda x: x[:0],
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "large": lambda x: x.repeat(9, 3, 3, 3).transpose(0, 2),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["float8_e4m3fn", "posit16_1", "mxfp8_e4m3"])
def test_layouts(name: str, layout: str, dtype: torch.dtype, implementation: str) -> None:
    """The strides are those of a clone, values those of a contiguous tensor; nothing is shared."""
    x = LAYOUTS[layout](torch.randn(4, 6, 5, 8).to(dtype))
    before = x.clone()
    rounded = quantize(x, name)
    assert rounded.stride() == x.clone().stride() or x.numel() == 0
    assert (rounded.dtype, rounded.shape, rounded.requires_grad) == (dtype, x.shape, False)
    assert_same(rounded, quantize(x.contiguous(), name), x)
    assert torch.equal(x, before)
    assert x.numel() == 0 or rounded.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_to_round(dtype: torch.dtype) -> None:
    """A format that has all values of the dtype gives the tensor itself, NaNs' payloads included."""
    x = random_floats(100).to(dtype)
    assert quantize(x, "float32") is x
    assert (quantize(x, "bfloat16") is x) == (dtype is torch.bfloat16)
    assert (quantize(x, "float16") is x) == (dtype is torch.float16)
    saturated = quantize(torch.tensor(math.inf), "float32", overflow="saturate")
    assert saturated == torch.finfo(torch.float32).max
    assert_same(quantize(x.double(), "float32").to(dtype), x, x)


def test_overflow(implementation: str) -> None:
    """As the standard says, or as asked for."""
    x = torch.tensor([1e6, -1e6, math.inf, -math.inf])
    inf, nan = math.inf, math.nan
    for name, overflow, expected in (
        ("float8_e5m2", None, [inf, -inf, inf, -inf]),
        ("float8_e5m2", "saturate", [57344, -57344, 57344, -57344]),
        ("float8_e5m2", "nan", [nan] * 4),
        ("float8_e4m3fn", None, [nan] * 4),
        ("float8_e4m3fn", "saturate", [448, -448, 448, -448]),
        ("float8_e5m2fnuz", None, [nan] * 4),
        ("float4_e2m1fn", None, [6, -6, 6, -6]),
        ("posit8_0", None, [64, -64, nan, nan]),
        ("posit8_0", "saturate", [64, -64, 64, -64]),
        (Float("own", 4, 3, kind="fn", overflow="saturate"), None, [448, -448, 448, -448]),
    ):
        expected_ = torch.tensor(expected, dtype=torch.float32)
        assert_same(quantize(x, name, overflow=overflow), expected_, x)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "bfloat16", "posit16_1", "float32"])
def test_gradients_pass(name: str) -> None:
    """Backward, forward mode, twice, under vmap; `rounder` has none."""
    x = torch.randn(3, 4, requires_grad=True)
    (quantize(x, name) * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))  # type: ignore[arg-type]
    assert name == "float32" or not rounder(name)(x).requires_grad
    with torch.no_grad():
        assert not quantize(x * 1, name).requires_grad
    detached = x.detach()
    gradient = torch.func.grad(lambda y: (quantize(y, name) ** 2).sum())(detached)
    assert torch.equal(gradient, 2 * quantize(detached, name))
    many = torch.func.vmap(torch.func.grad(lambda y: (quantize(y, name) ** 2).sum()))(detached)
    assert torch.equal(many, gradient)
    assert torch.equal(
        torch.func.vmap(lambda y: quantize(y, name))(detached), quantize(detached, name)
    )


def test_modes_of_dispatch(implementation: str) -> None:
    """Fake tensors, and traced graphs, which hold the rounding itself."""
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(3, 64))
        for format in (*formats.names(), NF4, Q4_4):
            for rounding in ("nearest", "stochastic"):
                rounded = quantize(fake, format, rounding)
                assert (rounded.shape, rounded.dtype) == (fake.shape, fake.dtype)
    x = torch.randn(3, 64)
    for format in ("float8_e4m3fn", "bfloat16", "posit8_1", "mxfp4_e2m1", NF4, Q4_4):
        graph = make_fx(functools.partial(quantize, format=format))(x)
        y = torch.randn(3, 64)
        assert_same(graph(y), quantize(y, format), y)


#: Of torch, in its own code.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@quiet
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's code, in one graph, rounds bit for bit as the kernels; also what was not called yet."""
    forget_runs(monkeypatch)
    names = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2fnuz", "posit16_1", "mxfp4_e2m1")
    known = (*names, NF4, Q4_4, WIDE_FLUSHED)
    x = torch.cat([random_floats(2000), torch.randn(2048)])[:4000]

    def round_all(y: Tensor) -> list[Tensor]:
        found = [quantize(y, format) for format in known]
        return [*found, quantize(quantize(y, "float8_e5m2", "up"), "float4_e2m1fn", "toward_zero")]

    actual = torch.compile(round_all, fullgraph=True)(x)
    for found, expected in zip(actual, round_all(x), strict=True):
        assert_same(found, expected, x)


def test_custom_formats() -> None:
    """The user's function rounds; what it returns is checked."""
    custom = Custom("thirds", lambda x: (x * 3).round() / 3)
    x = torch.randn(5, requires_grad=True)
    rounded = quantize(x, custom)
    assert torch.equal(rounded, (x * 3).round() / 3)
    rounded.sum().backward()
    assert torch.equal(x.grad, torch.ones(5))  # type: ignore[arg-type]
    wrong = Custom("wrong", lambda x: x.double())
    message = (
        "format wrong: its quantize must return torch.float32 of shape (5,), as it was given, not "
        "torch.float64 of shape (5,)"
    )
    with pytest.raises(OptionError) as error:
        quantize(x.detach(), wrong)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (torch.ones(2, dtype=torch.int32), "float16"),
            "quantize takes tensors of torch.float32, torch.bfloat16, torch.float16, torch.float64, "
            "not torch.int32; cast it first",
        ),
        (([1.0], "float16"), "quantize takes a tensor, not list"),
        ((torch.ones(2), "flaot16"), "no format 'flaot16' is known; did you mean 'float16'?"),
        ((torch.ones(2), 3), "a format must be a name or a format, not 3"),
        (
            (torch.ones(2), "float16", "even"),
            "rounding must be one of 'nearest', 'toward_zero', 'up', 'down', 'nearest_away', "
            "'stochastic', not 'even'; did you mean 'nearest'?",
        ),
        (
            (torch.ones(2), "float8_e4m3fn", "nearest", "inf"),
            "format float8_e4m3fn: overflow must be 'nan', 'saturate' or None, not 'inf'",
        ),
        (
            (torch.ones(2), "posit8_0", "nearest", "saturated"),
            "format posit8_0: overflow must be 'saturate' or None, not 'saturated'; did you mean "
            "'saturate'?",
        ),
        (
            (torch.ones(2), Custom("own", torch.round), "up"),
            "format own: rounding can't be chosen, its own function rounds to it",
        ),
        (
            (torch.ones(2), Custom("own", torch.round), "nearest", "saturate"),
            "format own: overflow can't be chosen, its own function rounds to it",
        ),
        (
            (torch.ones(2), Block("deep", Float("e2m1", 2, 1, kind="finite"), axis=3)),
            "blocks lie along axis 3, which a tensor of shape (2,) lacks",
        ),
    ],
)
def test_errors(arguments: tuple[object, ...], message: str) -> None:
    """Each names what is wrong, and what would be right."""
    with pytest.raises(OptionError) as error:
        quantize(*arguments)  # type: ignore[arg-type]
    assert str(error.value) == message
