"""Formats as data, their names, and their codes: all encodings, against ml_dtypes and definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from hmpx import OptionError, formats
from hmpx.formats import (
    Block,
    Custom,
    Fixed,
    Float,
    Posit,
    Table,
    decode,
    encode,
    quantize,
)

from .posit_reference import Reference, value
from .test_quantize import NF4, ORACLES, POSITS, Q4_4, SQUARES, bits_of, name_of, random_floats

SHIPPED = (
    *("float32", "bfloat16", "float16", "tf32", "fp24", "float8_e4m3", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e3m4"),
    *("p3109_k8p3se", "p3109_k8p4se"),
    *("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "float4_e3m0", "float8_e8m0fnu"),
    *("posit8_0", "posit8_1", "posit8_2", "posit16_1", "posit16_2", "posit32_2"),
    "takum16",
    *("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1"),
    *("mxint8", "nvfp4", "float8_e4m3fn_tensor", "float8_e4m3fn_row", "float8_e4m3fn_block128"),
    *("float8_e4m3fn_block128x128", "float8_e5m2_tensor"),
    *("float8_e4m3fn_delayed", "float8_e5m2_delayed"),
    *("int8", "int8_row", "int4", "int4_row", "int4_block128", "nf4", "bnb_fp4"),
)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Forgets what a test registered."""
    before = set(formats.names())
    yield
    for name in set(formats.names()) - before:
        formats.unregister(name)


def test_menu() -> None:
    """The module holds what it says, and its names are those of the design."""
    assert set(formats.__all__) == {
        *("Float", "Exponent", "Posit", "Fixed", "Block", "Scaled", "Table", "Takum", "Custom"),
        *("register", "unregister", "error", "table", "plot", "ErrorStatistics", "ErrorTable"),
        *("get", "names", "quantize", "encode", "decode", "register_op", "create_lower_func"),
    }
    assert all(hasattr(formats, name) for name in formats.__all__)
    assert formats.names() == SHIPPED


@pytest.mark.parametrize("name", [name for name in ORACLES if name != "float16"])
def test_float_properties_as_ml_dtypes(name: str) -> None:
    """Range, epsilon and bits."""
    format, info = formats.get(name), ml_dtypes.finfo(ORACLES[name])
    assert isinstance(format, Float)
    assert format.max == float(info.max)
    assert format.smallest_normal == float(info.smallest_normal)
    assert format.smallest_subnormal == float(info.smallest_subnormal)
    assert format.epsilon == float(info.eps)
    assert (format.bits, format.significand_bits) == (info.bits, info.nmant + 1)


def test_properties() -> None:
    """Of float16 as numpy's, of the others by their definitions."""
    info, half = np.finfo(np.float16), formats.get("float16")
    assert isinstance(half, Float)
    assert (half.max, half.epsilon, half.bits) == (float(info.max), float(info.eps), 16)
    assert half.smallest_subnormal == float(info.smallest_subnormal)
    fp24 = formats.get("fp24")
    assert isinstance(fp24, Float)
    assert (fp24.bits, fp24.max) == (24, (2 - 2.0**-16) * 2.0**63)
    posit = Posit("p", 16, 1)
    assert (posit.max, posit.smallest_subnormal, posit.epsilon) == (2.0**28, 2.0**-28, 2.0**-12)
    assert Posit("p", 4, 2).epsilon == 3.0
    for bits, es in POSITS:
        found, reference = Posit("p", bits, es), Reference(bits, es)
        assert (found.smallest_normal, found.max) == (reference.values[0], reference.values[-1])
        assert 1 + found.epsilon == reference.values[reference.values.index(1.0) + 1]
    assert (Q4_4.bits, Q4_4.max, Q4_4.min, Q4_4.epsilon) == (8, 7.9375, -8.0, 0.0625)
    assert (NF4.bits, NF4.max, NF4.min, SQUARES.bits) == (4, 1.0, -1.0, 8)
    assert Table("t", (0.0, 1.0, 3.5)).significand_bits == 3
    assert math.isnan(Table("t", (-2.0, -1.0)).smallest_normal)
    block = formats.get("mxfp4_e2m1")
    assert isinstance(block, Block)
    assert (block.bits, block.max, block.epsilon) == (4.25, 1.5 * 2.0**127, 0.5)
    assert block.smallest_subnormal == 0.5 * 2.0**-127
    flushed = Float("f", 4, 3, subnormals=False)
    assert flushed.smallest_subnormal == flushed.smallest_normal == 2.0**-6


@pytest.mark.parametrize("name", ORACLES)
def test_every_code_as_ml_dtypes(name: str) -> None:
    """Decoded, and encoded again; NaNs of both signs where they have codes."""
    format, oracle = formats.get(name), ORACLES[name]
    assert isinstance(format, Float)
    unsigned = np.uint8 if format.bits <= 8 else np.uint16
    codes = np.arange(2**format.bits).astype(unsigned)
    expected = torch.from_numpy(codes.view(oracle).astype(np.float32))
    values = decode(torch.from_numpy(codes), name)
    assert values.dtype is torch.float32
    assert torch.equal(bits_of(values), bits_of(expected))
    again = encode(values, name)
    assert isinstance(again, Tensor)
    assert again.dtype is (torch.uint8 if format.bits <= 8 else torch.uint16)
    is_number = ~values.isnan()
    known = torch.from_numpy(codes.astype(np.int64))
    assert torch.equal(again.long()[is_number], known[is_number])


@pytest.mark.parametrize("name", ORACLES)
def test_codes_of_a_million_floats_as_ml_dtypes(name: str) -> None:
    """Random bits, NaNs included: those that have a payload lose it."""
    x = random_floats(2**20)
    if name == "float16":
        x = torch.where(x.isnan(), torch.nan, x)
    with np.errstate(all="ignore"):
        expected = x.numpy().astype(ORACLES[name])
    unsigned = expected.view(np.uint8 if expected.itemsize == 1 else np.uint16)
    codes = encode(x, name)
    assert isinstance(codes, Tensor)
    assert torch.equal(codes.long(), torch.from_numpy(unsigned.astype(np.int64)))


@pytest.mark.parametrize(("bits", "es"), POSITS)
def test_every_code_of_posits(bits: int, es: int) -> None:
    """By the standard's formula; rounded values get the code that the standard rounds to."""
    format, reference = Posit("posit", bits, es), Reference(bits, es)
    codes = torch.arange(2**bits)
    values = decode(codes, format)
    exact = [value(code, bits, es) for code in codes.tolist()]
    expected = torch.tensor([math.nan if v is None else float(v) for v in exact])
    assert torch.equal(bits_of(values), bits_of(expected))
    again = encode(values, format)
    assert isinstance(again, Tensor)
    assert torch.equal(again.long(), codes)
    x = torch.cat([random_floats(500), torch.randn(500)])
    found = encode(x, format)
    assert isinstance(found, Tensor)
    assert found.tolist() == [reference.code(v) for v in x.tolist()]
    assert torch.equal(encode(x.double(), format).long(), found.long())  # type: ignore[union-attr]


WIDE = [
    *(formats.get(name) for name in ("tf32", "fp24", "float32")),
    formats.get("posit32_2"),
    Posit("posit20_1", 20, 1),
    Fixed("q16_16", 16, 16),
    Float("e10m20", 10, 20),
    Float("e11m52", 11, 52),
]


@pytest.mark.parametrize("format", WIDE, ids=name_of)
def test_wide_codes(format: Float | Posit | Fixed) -> None:
    """Values come back; codes are in order; int32 holds them, or int64, and float32 where it can."""
    x = torch.cat([random_floats(3000), torch.randn(3000)]).double()
    x = x[~x.isnan()]
    rounded = quantize(x, format)
    codes = encode(x, format)
    assert isinstance(codes, Tensor)
    assert codes.dtype is (torch.int32 if format.bits <= 32 else torch.int64)
    values = decode(codes, format)
    is_wide = format.name in ("posit32_2", "q16_16", "e10m20", "e11m52")
    assert values.dtype is (torch.float64 if is_wide else torch.float32)
    assert torch.equal(bits_of(values.double()), bits_of(rounded))
    positive = rounded[rounded > 0].sort().values
    ordered = encode(positive, format)
    assert isinstance(ordered, Tensor)
    assert (ordered.diff() >= 0).all()
    assert ordered.unique().numel() == positive.unique().numel()


@pytest.mark.parametrize("format", [Q4_4, Fixed("q2_7", 2, 7), NF4, SQUARES], ids=name_of)
def test_fixed_point_and_tables(format: Fixed | Table) -> None:
    """Every code is another value, in order as two's complement or as indices."""
    count = 2**format.bits if isinstance(format, Fixed) else len(format.values)
    codes = torch.arange(count)
    values = decode(codes, format)
    order = codes if isinstance(format, Table) else (codes + count // 2) % count
    assert (values[order].diff() > 0).all()
    assert values.min() == torch.tensor(format.min)
    assert values.max() == torch.tensor(format.max)
    again = encode(values, format)
    assert isinstance(again, Tensor)
    assert torch.equal(again.long(), codes)
    nan = encode(torch.tensor([math.nan]), format)
    assert isinstance(nan, Tensor)
    assert decode(nan, format).abs().item() == decode(codes, format).abs().min()


BLOCKS = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1"]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("mode", ["nearest", "up", "stochastic"])
def test_blocks(name: str, mode: str) -> None:
    """Elements and scales give the rounded values back; scales are the specification's."""
    format = formats.get(name)
    assert isinstance(format, Block)
    x = torch.randn(6, 70) * torch.exp2(torch.randint(-100, 100, (6, 1)).float())
    x[1, 5], x[2, 40], x[3], x[4] = math.inf, math.nan, 0.0, 1e-44
    rounded = quantize(x, name, mode, generator=torch.Generator().manual_seed(0))
    codes, scales = encode(x, name, mode, generator=torch.Generator().manual_seed(0))
    assert (codes.shape, scales.shape) == (x.shape, (6, 3))
    assert codes.dtype is scales.dtype is torch.uint8
    assert torch.equal(bits_of(decode((codes, scales), name)), bits_of(rounded))
    assert codes.int().max() < 2**format.element.bits
    most = x[0, :32].abs().max().item()
    assert scales[0, 0] == math.frexp(most)[1] - 1 - format.element.max_exponent + 127
    assert (scales[1, 0], scales[2, 1], scales[3, 0]) == (255, 255, 0)


def test_registry() -> None:
    """A format is found by its name, also as TVM spells it, until it is unregistered."""
    mine = Float("float10_e5m4", exponent_bits=5, mantissa_bits=4)
    formats.register(mine, code=150)
    formats.register(mine, code=150)
    assert formats.get("float10_e5m4") is mine
    assert formats.get("custom[float10_e5m4]10") is mine
    assert formats.get("custom[posit16_1]16") is formats.get("posit16_1")
    assert formats.get(mine) is mine
    assert formats.names() == (*SHIPPED, "float10_e5m4")
    x = torch.randn(10)
    assert torch.equal(quantize(x, "float10_e5m4"), quantize(x, mine))
    formats.unregister("float10_e5m4")
    assert "float10_e5m4" not in formats.names()
    other = Float("float10_e5m4", 5, 3)
    formats.register(other, code=150)
    assert torch.equal(quantize(x, "float10_e5m4"), quantize(x, other))


E2M1 = Float("e2m1", 2, 1, kind="finite")

MISTAKES: list[tuple[Callable[[], object], str]] = [
    (
        lambda: Float("8bit", 4, 3),
        "a format's name must be an identifier such as float10_e5m4, not '8bit'",
    ),
    (
        lambda: Float("f", 12, 3),
        "format f: exponent_bits must be an integer from 2 to 11, not 12",
    ),
    (
        lambda: Float("f", 4, 3, kind="fnu"),  # type: ignore[arg-type]
        "format f: kind must be one of 'ieee', 'p3109', 'fn', 'fnuz', 'finite', not 'fnu'; did you mean "
        "'fnuz'?",
    ),
    (
        lambda: Float("f", 11, 3, bias=2000),
        "format f: exponents from -1999 to 46 with 3 mantissa bits are beyond float64, in which "
        "formats are computed; take fewer exponent bits or another bias",
    ),
    (lambda: Posit("p", 33, 2), "format p: bits must be an integer from 3 to 32, not 33"),
    (
        lambda: Posit("p", 32, 6),
        "format p: its largest value, 2**1920, is beyond float64, in which formats are computed; "
        "take fewer bits or a smaller es",
    ),
    (
        lambda: Fixed("q", 20, 20),
        "format q: integer_bits and fraction_bits must be 2 to 32 in all, not 40",
    ),
    (
        lambda: Block("b", "float8_e4m3fn"),  # type: ignore[arg-type]
        "format b: element must be a Float or Fixed, not 'float8_e4m3fn'; get(name) returns a "
        "registered one",
    ),
    (lambda: Block("b", E2M1, size=0), "format b: size must be an integer from 1 to 65536, not 0"),
    (
        lambda: Table("t", (1.0, 3.0, 2.0)),
        "format t: values must be ascending, but value 2, 2.0, comes after 3.0",
    ),
    (
        lambda: Custom("c", 3),  # type: ignore[arg-type]
        "format c: quantize must be a function of a tensor, not 3",
    ),
    (
        lambda: formats.register(Float("float16", 5, 9)),
        "format float16 comes with hmpx; choose another name",
    ),
    (
        lambda: (formats.register(E2M1), formats.register(Float("e2m1", 2, 2))),
        "format e2m1 is already registered, and differs: Float(name='e2m1', exponent_bits=2, "
        "mantissa_bits=1, bias=None, kind='finite', subnormals=True, overflow=None); choose another "
        "name or unregister it first",
    ),
    (
        lambda: (
            formats.register(E2M1, code=200),
            formats.register(Float("other", 2, 1), code=200),
        ),
        "format other: code 200 is that of format e2m1; choose another",
    ),
    (
        lambda: formats.unregister("float16"),
        "format float16 comes with hmpx and can't be unregistered",
    ),
    (
        lambda: formats.get("custom[posit16_1]8"),
        "format posit16_1 has 16 bits, not 8: 'custom[posit16_1]8'",
    ),
    (
        lambda: encode(torch.ones(1), Custom("c", torch.round)),
        "format c is given by a function and has no codes; quantize rounds to it",
    ),
    (
        lambda: decode(torch.ones(1, dtype=torch.uint8), "mxfp4_e2m1"),
        "format mxfp4_e2m1: decode takes (codes, scales)",
    ),
    (
        lambda: decode((torch.ones(3, 40).byte(), torch.ones(3).byte()), "mxfp4_e2m1"),
        "format mxfp4_e2m1: scales must be of shape (3, 2), not (3,)",
    ),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes(number: int) -> None:
    """Each message says what is wrong, and what would be right."""
    make, message = MISTAKES[number]
    with pytest.raises(OptionError) as error:
        make()
    assert str(error.value) == message
