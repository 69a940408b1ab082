"""The kernels that make and read codes, and those for blocks along any axis, beside torch ops: bit for bit."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from hmpx import formats
from hmpx.formats import Fixed, Float, Posit, Scaled, Table, get, quantize
from hmpx.number_formats import ROUNDING_MODES, CodedFormat

from .test_quantize import NF4, SQUARES, assert_same, find_library, name_of, use

UNEVEN = Table("uneven", tuple(i * abs(i) / 2500 for i in range(-99, 100)))
CODED = [
    *(name for name in formats.names() if name != "float32"),
    *(NF4, SQUARES, UNEVEN, Fixed("q4_4", 4, 4), Fixed("q1_31", 1, 31)),
    *(Float("flushed", 4, 3, subnormals=False), Float("wide_flushed", 8, 7, subnormals=False)),
    *(Float("e5m20", 5, 20), Float("e11m30", 11, 30), Float("finite", 8, 3, kind="finite")),
    *(Float("biased", 4, 3, bias=-20), Posit("posit3_0", 3, 0), Posit("posit25_2", 25, 2)),
    *(Posit("posit32_2", 32, 2), Posit("posit6_4", 6, 4)),
]
EVERY_16_BITS = torch.arange(65536, dtype=torch.int32).to(torch.uint16)


@pytest.fixture(autouse=True)
def compiler() -> None:
    """There is nothing to compare without kernels."""
    if find_library() is None:
        pytest.skip("hmpx was installed without a C compiler")


def bit_patterns(count: int, seed: int) -> Tensor:
    """Returns float32 of random bits: NaN, infinities and subnormals among them, some of them often."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    found = bits.view(torch.float32)
    near = torch.randn(count, generator=generator) * 2.0 ** torch.randint(
        -30, 30, (count,), generator=generator
    )
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-40])
    return torch.cat((found, near, special))


def both(monkeypatch: pytest.MonkeyPatch, format: object, run: object) -> list[object]:
    """Returns what a function of a format gives with kernels, and with torch ops."""
    found = []
    for implementation in ("kernels", "ops"):
        use(implementation, monkeypatch)
        found.append(run(copy.copy(get(format))))  # type: ignore[operator,arg-type]  # without kernels of its own
    return found


def same_codes(actual: object, expected: object) -> bool:
    """Whether codes, or pairs of codes and scales, are equal."""
    if isinstance(actual, tuple) and isinstance(expected, tuple):
        return all(map(same_codes, actual, expected)) and len(actual) == len(expected)
    assert isinstance(actual, Tensor)
    assert isinstance(expected, Tensor)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    return torch.equal(actual.to(torch.int64), expected.to(torch.int64))


@pytest.mark.parametrize("format", CODED, ids=name_of)
def test_codes_in_each_mode(format: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each mode, overflow and dtype, with the same noise."""
    x = bit_patterns(2000, 3)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        given = x.to(dtype)
        for mode in ROUNDING_MODES:
            for overflow in (None, "saturate"):
                actual, expected = both(
                    monkeypatch,
                    format,
                    lambda own, given=given, mode=mode, overflow=overflow: formats.encode(
                        given, own, mode, overflow, torch.Generator().manual_seed(5)
                    ),
                )
                assert same_codes(actual, expected), (dtype, mode, overflow)


@pytest.mark.parametrize("format", CODED, ids=name_of)
def test_codes_of_every_value_of_16_bits(format: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of a million patterns of float32."""
    halves = [EVERY_16_BITS.view(dtype).float() for dtype in (torch.bfloat16, torch.float16)]
    x = torch.cat((*halves, bit_patterns(500_000, 4)))
    actual, expected = both(monkeypatch, format, lambda own: formats.encode(x, own))
    assert same_codes(actual, expected)


@pytest.mark.parametrize(
    "format",
    [f for f in CODED if isinstance(get(f), CodedFormat)],  # type: ignore[arg-type]
    ids=name_of,
)
def test_values_of_every_code(format: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of up to 16 bits; of random ones beyond. Bits above those of the format are ignored alike."""
    known = get(format)  # type: ignore[arg-type]
    codes = formats.encode(bit_patterns(100_000, 6), known)
    assert isinstance(codes, Tensor)
    if known.bits <= 16:
        every = EVERY_16_BITS.to(torch.int32).to(codes.dtype)
    else:
        every = torch.randint(-(2**31), 2**31, (100_000,)).to(codes.dtype)
        if known.bits < 31:
            every = every & ((1 << int(known.bits)) - 1)
    for given in (codes, every):
        actual, expected = both(
            monkeypatch, format, lambda own, given=given: formats.decode(given, own)
        )
        assert_same(actual, expected, given)  # type: ignore[arg-type]


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(2, 0, 1),
    "strided": lambda x: x[:, ::2],
    "last strided": lambda x: x[..., 1::3],
    "offset": lambda x: x[1:, 3:],
    "expanded": lambda x: x[:, :1].expand(-1, 70, -1),
    "ones": lambda x: x[:, :1],
    "empty": lambda x: x[:, :0],
    "empty rows": lambda x: x[:0],
    "negative": lambda x: torch.complex(x.float(), x.float()).conj().imag.to(x.dtype),
    "0-dim": lambda x: x[0, 0, 0],
    "1-dim": lambda x: x.flatten()[:1001],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layouts_of_codes(layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are those of the element at each place; values of strided codes, too."""
    x = LAYOUTS[layout](torch.randn(9, 70, 33).to(dtype))
    for format in ("float8_e4m3fn", "bfloat16", "posit16_1", NF4, "mxfp4_e2m1"):
        for mode in ("nearest", "stochastic"):
            actual, expected = both(
                monkeypatch,
                format,
                lambda own, mode=mode: formats.encode(
                    x, own, mode, generator=torch.Generator().manual_seed(1)
                ),
            )
            assert same_codes(actual, expected)
        values, expected = both(
            monkeypatch, format, lambda own, actual=actual: formats.decode(actual, own)
        )
        assert_same(values, expected, x)  # type: ignore[arg-type]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["nearest", "up", "stochastic"])
def test_blocks_along_any_axis(layout: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded and encoded, whatever the strides; the last block of a row may be shorter."""
    x = torch.cat((bit_patterns(2_000, 8), torch.randn(3 * 70 * 33)))[: 3 * 70 * 33]
    x = LAYOUTS[layout](x[torch.randperm(len(x))].view(3, 70, 33))
    generator = torch.Generator()
    for size in (1, 7, 32, 2000):
        for axis in range(-1, max(x.dim() - 1, 0)):
            format = dataclasses.replace(get("mxfp8_e4m3"), axis=axis, size=size)
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                given = x.to(dtype)
                actual, expected = both(
                    monkeypatch,
                    format,
                    lambda own, given=given: quantize(
                        given, own, mode, generator=generator.manual_seed(2)
                    ),
                )
                assert_same(actual, expected, given)  # type: ignore[arg-type]
                assert actual.stride() == given.clone().stride() or x.numel() == 0  # type: ignore[attr-defined]
            actual, expected = both(
                monkeypatch,
                format,
                lambda own: formats.encode(x, own, mode, generator=generator.manual_seed(2)),
            )
            assert same_codes(actual, expected)


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each does its share, whatever the number; results are those of one thread."""
    x = torch.randn(70, 1003)
    known = ["float8_e4m3fn", "bfloat16", "posit16_1", NF4, SQUARES, "mxfp8_e4m3", Fixed("q", 4, 4)]
    known.append(dataclasses.replace(get("mxfp4_e2m1"), axis=0))

    def results() -> list[Tensor]:
        found: list[Tensor] = []
        for format in known:
            for mode in ("nearest", "stochastic"):
                generator = torch.Generator().manual_seed(3)
                found.append(quantize(x, format, mode, generator=generator))
                codes = formats.encode(x, format, mode, generator=generator)
                found.extend(codes if isinstance(codes, tuple) else (codes,))
                found.append(formats.decode(codes, format))
        return found

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = results()
        for threads in (2, 5):
            torch.set_num_threads(threads)
            for actual, wanted in zip(results(), expected, strict=True):
                assert torch.equal(actual, wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("format", ["float8_e4m3fn_row", "nvfp4", "nf4", "mxint8", "column"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaled_codes_of_any_layout(
    format: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes, scales and their values are those of torch ops, along each axis; what is not finite, too."""
    x = torch.randn(9, 70, 33)
    x[5, 3, 7], x[8, 60, 20], x[2, :9] = torch.nan, -torch.inf, 1e-41
    x = LAYOUTS[layout](x)
    named = Scaled("column", get("float8_e4m3fn"), "column") if format == "column" else get(format)
    for axis in range(-1, max(x.dim() - 1, 0)):
        own = dataclasses.replace(named, axis=axis)
        actual, expected = both(monkeypatch, own, lambda own: formats.encode(x, own))
        assert same_codes(actual[:1], expected[:1])  # type: ignore[index]
        for scales, wanted in zip(actual[1:], expected[1:], strict=True):  # type: ignore[index]
            assert scales.dtype is wanted.dtype
            assert torch.equal(scales.nan_to_num(-1), wanted.nan_to_num(-1))
        values, wanted = both(
            monkeypatch, own, lambda own, actual=actual: formats.decode(actual, own)
        )
        assert_same(values, wanted, x)
