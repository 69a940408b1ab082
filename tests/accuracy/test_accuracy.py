"""What rounding costs: figures against definitions and known facts, the table, and the picture."""

from __future__ import annotations

import copy
import dataclasses
import html
import itertools
import json
import math
import pickle
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hmpx
from hmpx import formats
from hmpx.accuracy import measuring
from hmpx.accuracy.picture import exponent_shares, values_by_exponent
from hmpx.errors import OptionError
from hmpx.formats import (
    Block,
    Custom,
    ErrorStatistics,
    Fixed,
    Float,
    Posit,
    Table,
    error,
    plot,
    quantize,
    table,
)

# --- figures -----------------------------------------------------------------------------------


def by_definition(x: Tensor, rounded: Tensor) -> dict[str, float]:
    """Returns the figures from fractions of Python, one value after another."""
    pairs = list(zip(x.flatten().tolist(), rounded.flatten().tolist(), strict=True))
    finite = [pair for pair in pairs if math.isfinite(pair[0])]
    kept = [(Fraction(a), Fraction(b)) for a, b in finite if math.isfinite(b)]
    nonzero = [pair for pair in finite if pair[0]]
    relative = [abs(b - a) / abs(a) for a, b in kept if a]
    signal, noise = sum(a * a for a, _ in kept), sum((b - a) ** 2 for a, b in kept)
    return {
        "count": len(pairs),
        "nan": sum(math.isnan(a) for a, _ in pairs),
        "inf": sum(math.isinf(a) for a, _ in pairs),
        "overflow": 1 - len(kept) / len(finite),
        "underflow": sum(b == 0 for _, b in nonzero) / len(nonzero),
        "sqnr_db": 10 * (math.log10(signal) - math.log10(noise)),
        "max_abs": float(max(abs(b - a) for a, b in kept)),
        "max_rel": float(max(relative)),
        "mean_rel": float(sum(relative) / len(relative)),
    }


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[:, ::3],
    "needs gradients": lambda x: x.clone().requires_grad_(),
    "parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "posit8_2", "mxfp4_e2m1", "tf32"])
def test_figures_by_their_definition(name: str, dtype: torch.dtype) -> None:
    """Also of values that are infinite or NaN, or become so; in exact arithmetic."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 64, generator=generator) * torch.exp(
        3 * torch.randn(20, 1, generator=generator)
    )
    x[3, :4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    x = x.to(dtype)
    if dtype in (torch.bfloat16, torch.float16) and name == "tf32":
        assert error(x, name).sqnr_db == math.inf
        return
    for shape in SHAPES.values():
        given = shape(x)
        found = error(given, name)
        expected = by_definition(given.detach(), quantize(given, name).detach())
        for key, value in expected.items():
            assert getattr(found, key) == pytest.approx(value, rel=1e-9, abs=1e-12), key
        assert (found.format, found.bits, found.rounding) == (
            name,
            formats.get(name).bits,
            "nearest",
        )


def test_parts_of_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures do not depend on where parts end."""
    x = torch.randn(40, 77)
    whole = [error(x, name) for name in ("float8_e4m3fn", "mxfp4_e2m1", "posit8_0")]
    shares = exponent_shares(x)
    monkeypatch.setattr(measuring, "_PART", 100)
    monkeypatch.setattr("hmpx.accuracy.picture._PART", 100)
    for one in whole:
        again = error(x, one.format)
        for key, value in dataclasses.asdict(one).items():
            assert getattr(again, key) == (
                value if isinstance(value, str) else pytest.approx(value, rel=1e-12)
            )
    assert exponent_shares(x) == pytest.approx(shares)


def test_known_facts() -> None:
    """A uniform quantizer's 6.02 dB a bit; MXFP4 with a floor of exponents; half a unit at most."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(2**20, generator=generator, dtype=torch.float64) * 2 - 1
    for bits in (8, 12, 16):
        found = error(uniform, Fixed("q", 1, bits - 1))
        assert found.sqnr_db == pytest.approx(20 * math.log10(2) * bits, abs=0.1)
    normal = torch.randn(2**20, generator=generator)
    assert error(normal, "mxfp4_e2m1").sqnr_db == pytest.approx(18.78, abs=0.03)
    even = Block("even", formats.get("float4_e2m1fn"), rule="even")  # type: ignore[arg-type]
    assert error(normal, even).sqnr_db == pytest.approx(19.01, abs=0.03)
    for name, mantissa in (("bfloat16", 7), ("float16", 10)):
        x = normal[normal.abs() > 1e-3]
        assert error(x, name).max_rel == pytest.approx(2.0 ** -(mantissa + 1), rel=0.05)
    cut = error(uniform, Fixed("q", 1, 9), "toward_zero").sqnr_db
    assert error(uniform, Fixed("q", 1, 9)).sqnr_db == pytest.approx(cut + 6.02, abs=0.1)


CLIPPED: list[tuple[Any, list[float], float]] = [
    ("float8_e4m3fn", [448.0, 448.5, -460.0, 1.0], 0.5),
    ("float8_e4m3fn", [465.0, 1e30, -1.0, 1.0], 0.0),  # become NaN
    ("float4_e2m1fn", [6.0, -6.01, 1e30, 0.1], 0.5),
    ("posit8_0", [64.0, 65.0, -1e30, 1e-30], 0.5),
    (Fixed("q4_0", 4, 0), [-8.0, 7.0, 7.5, -8.5], 0.5),
    (Table("t", (-1.0, 0.0, 3.0)), [-1.5, -1.0, 3.0, 2.9], 0.25),
    (Custom("c", torch.round), [1e30, 1.0, 2.5, 0.0], 0.0),
    ("float8_e8m0fnu", [1.0, 3.0, 1e-45, 2.0], 0.0),
]


@pytest.mark.parametrize("number", range(len(CLIPPED)))
def test_clipped_values(number: int) -> None:
    """Those beyond the largest value, or the least, that stay finite."""
    format, values, share = CLIPPED[number]
    assert error(torch.tensor(values), format).saturated == share


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("size", [1, 5, 32])
def test_clipped_in_blocks(axis: int, size: int) -> None:
    """By each block's own scale, whose exponent is that of its largest value."""
    format = Block("b", Float("e2m1", 2, 1, kind="finite"), size, axis)
    x = torch.randn(6, 70, 3) * torch.exp(torch.randn(6, 70, 1))
    rows = x.movedim(axis, -1).reshape(-1, x.shape[axis]).tolist()
    expected = 0
    for row in rows:
        for start in range(0, len(row), size):
            block = row[start : start + size]
            limit = 6.0 * 2.0 ** (math.frexp(max(map(abs, block)))[1] - 1 - 2)
            expected += sum(abs(value) > limit for value in block)
    assert error(x, format).saturated == pytest.approx(expected / x.numel())
    assert error(torch.tensor(7.0), "mxfp4_e2m1").saturated == 1.0


def test_overflow_and_rounding_are_those_of_quantize() -> None:
    """Saturated values are clipped instead of lost; a generator gives the same figures."""
    x = torch.tensor([1e6, 1.0, 1.1])
    assert error(x, "float8_e4m3fn").overflow == pytest.approx(1 / 3)
    found = error(x, "float8_e4m3fn", overflow="saturate")
    assert (found.overflow, found.saturated) == (0.0, pytest.approx(1 / 3))
    assert error(x, "float8_e5m2", rounding="up").overflow == pytest.approx(1 / 3)
    x = torch.randn(1000)
    drawn = [
        error(x, "e4m3", "stochastic", generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_tensors_without_errors_or_values() -> None:
    """Nothing to compare is NaN, nothing lost infinity; numbers near the ends of float64 keep their ratio."""
    exact = error(torch.ones(3), "float8_e4m3fn")
    assert (exact.sqnr_db, exact.max_abs, exact.max_rel, exact.mean_rel) == (
        math.inf,
        0.0,
        0.0,
        0.0,
    )
    for x in (torch.empty(0, 3), torch.full((2,), math.nan)):
        empty = error(x, "float8_e4m3fn")
        assert math.isnan(empty.sqnr_db)
        assert math.isnan(empty.max_abs)
        assert (empty.count, empty.overflow, empty.underflow) == (x.numel(), 0.0, 0.0)
        assert "-" in str(empty)
    zeros = error(torch.zeros(4), "float8_e4m3fn")
    assert (zeros.max_abs, zeros.underflow) == (0.0, 0.0)
    assert math.isnan(zeros.max_rel)
    assert math.isnan(zeros.sqnr_db)
    wide = Float("wide", 11, 4)
    x = torch.rand(1000, dtype=torch.float64) + 0.5
    for scale in (2.0**1000, 2.0**-1000):
        assert error(x * scale, wide).sqnr_db == pytest.approx(error(x, wide).sqnr_db)


def test_a_conversion_changes_no_figure_and_sees_no_call(tmp_path: Path) -> None:
    """Whatever its lists say: nothing is cast, logged or recorded."""
    x = torch.randn(500)
    expected = table(x, ["e4m3", "mxfp4", "bf16"])
    policy = {"lists": "none", "low": ["*"], "low_precision_type": "float8_e5m2"}
    with hmpx.convert(policy=policy, device_types={"cpu"}), hmpx.record() as report:
        assert table(x, ["e4m3", "mxfp4", "bf16"]) == expected
        exponent_shares(x)
    assert not report.rows


def test_layer_by_layer() -> None:
    """It is compare that says what a format costs in each op: by any name of the format."""
    linear = torch.nn.Linear(64, 64)
    x = torch.randn(32, 64)
    found = hmpx.compare(linear, x, low_precision_type="e4m3", device_types={"cpu"})
    (row,) = [row for row in found.rows if row.op == "linear"]
    assert row.dtype == "float8_e4m3fn"
    with hmpx.convert(low_precision_type="e4m3", device_types={"cpu"}):
        rounded = linear(x).detach()
    expected = by_definition(linear(x).detach(), rounded)
    assert row.sqnr_db == pytest.approx(expected["sqnr_db"], abs=0.01)
    assert row.max_abs == pytest.approx(expected["max_abs"], rel=1e-3)


# --- the table ---------------------------------------------------------------------------------


def test_a_table_in_the_order_asked_for() -> None:
    """As text of 80 columns, as HTML, and as data."""
    x = torch.cat([torch.randn(1000), torch.tensor([math.nan, math.inf, 1e30])])
    names = ["mxfp4", "e5m2", Posit("mine", 8, 1), torch.float8_e4m3fn]
    found = table(x, names)
    assert [row.format for row in found.rows] == [
        "mxfp4_e2m1",
        "float8_e5m2",
        "mine",
        "float8_e4m3fn",
    ]
    assert found.rows == tuple(error(x, name) for name in names)
    lines = str(found).split("\n")
    assert len(lines) == 1 + 4 + 1
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("of 1,003 values 1 were NaN and 1 infinite")
    for line, row in zip(lines[1:], found.rows, strict=False):
        assert line.startswith(row.format)
        assert f" {row.sqnr_db:.2f} " in line
    page = found._repr_html_()
    assert page.count("<tr>") == 5
    cells = re.findall(r"<td>(.*?)</td>", page)
    assert [cells[9 * i] for i in range(4)] == [row.format for row in found.rows]
    assert repr(found) == "<hmpx.formats.ErrorTable of 4 formats; print it>"
    data = [dataclasses.asdict(row) for row in found.rows]  # as pandas.DataFrame takes rows
    assert [row["format"] for row in json.loads(json.dumps(data))] == [r.format for r in found.rows]
    for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert again == found
    assert (
        str(found.rows[0]).split("\n")[0]
        == "format     bits SQNR dB mean rel max rel max abs not finite clipped to zero"
    )


def test_the_table_in_the_docs() -> None:
    """Of a million normal numbers."""
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text("utf-8")
    shown = (
        text.partition("## What rounding costs")[2].partition("```text\n")[2].partition("\n```")[0]
    )
    x = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    assert str(table(x, ["e4m3", "e5m2", "mxfp4", "posit8_2"])) == shown


def test_one_format_is_a_row() -> None:
    """A name, a dtype or a format is not taken for a list of letters."""
    x = torch.randn(10)
    for name in ("e4m3", torch.float8_e4m3fn, formats.get("e4m3")):
        assert table(x, name).rows == (error(x, "e4m3"),)  # type: ignore[arg-type]


def test_long_names_are_cut_and_never_markup() -> None:
    """Of formats of one's own, whose names may have any letters."""
    name = "\u00e4" * 100
    found = table(torch.randn(10), [Custom(name, torch.round)])
    assert max(map(len, str(found).split("\n"))) <= 80
    assert html.escape(name) in found._repr_html_()
    assert math.isnan(found.rows[0].bits)


# --- the picture -------------------------------------------------------------------------------


def test_the_picture() -> None:
    """Bars hold all values that have an exponent; the line counts the format's."""
    x = torch.tensor([0.0, math.nan, math.inf, 1.0, 1.5, -1.9, 2.0, 2.0**-149, 0.75])
    assert exponent_shares(x) == pytest.approx({0: 3 / 6, 1: 1 / 6, -149: 1 / 6, -1: 1 / 6})
    ends = torch.tensor([5e-324, sys.float_info.max], dtype=torch.float64)
    assert exponent_shares(ends) == {-1074: 0.5, 1023: 0.5}
    assert values_by_exponent(formats.get("float4_e2m1fn")) == {-1: 1, 0: 2, 1: 2, 2: 2}
    assert sum(values_by_exponent(formats.get("float8_e4m3fn")).values()) == 126
    assert values_by_exponent(formats.get("mxfp4_e2m1")) == {}
    figure = plot(x, "e4m3")
    bars, line = figure.axes
    assert bars.get_title() == "float8_e4m3fn"
    assert sum(bar.get_height() for bar in bars.patches) == pytest.approx(1.0)
    assert max(line.patches[0].get_data().values) == 8


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [*formats.names(), Custom("c", torch.round), Fixed("q", 3, 3)],
    ids=lambda each: getattr(each, "name", each),
)
def test_every_format_can_be_drawn(name: Any, tmp_path: Path) -> None:
    """And written."""
    figure = plot(torch.randn(100), name)
    figure.savefig(tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text("utf-8").count("<path") > 5
    found = table(torch.rand(100), name)
    assert len(found.rows) == 1


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install; figures need nothing."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match=r"pip install 'hmpx\[plot\]'"):
        plot(torch.ones(3), "e4m3")
    assert isinstance(error(torch.ones(3), "e4m3"), ErrorStatistics)


# --- mistakes ----------------------------------------------------------------------------------

ONES = torch.ones(2)
DTYPES = "torch.float32, torch.bfloat16, torch.float16, torch.float64"

MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: error([1.0], "e4m3"), "error takes a tensor, not list"),  # type: ignore[arg-type]
    (lambda: plot(np.ones(2), "e4m3"), "plot takes a tensor, not ndarray"),
    (
        lambda: error(ONES, "fp8"),
        "no format 'fp8' is known; did you mean 'float8_e4m3fn' or 'float8_e5m2'?",
    ),
    (lambda: plot(ONES, 3), "a format must be a name or a format, not 3"),  # type: ignore[arg-type]
    (lambda: table(ONES, []), "formats is empty; name at least one, such as 'float8_e4m3fn'"),
    (lambda: table(ONES, 3), "formats must be a list of formats or their names, not 3"),  # type: ignore[arg-type]
    (
        lambda: table(ONES, itertools.repeat("e4m3")),
        "formats holds more than 100,000 items; give a list of formats or their names",
    ),
    (
        lambda: table(ONES, ["e4m3", "float4_e2m1fn"], overflow="nan"),
        "format float4_e2m1fn: overflow must be 'saturate' or None, not 'nan'",
    ),
    (lambda: error(ONES, "e4m3", generator=3), "generator must be a torch.Generator, not 3"),  # type: ignore[arg-type]
    (
        lambda: error(ONES.int(), "e4m3"),
        f"quantize takes tensors of {DTYPES}, not torch.int32; cast it first",
    ),
    (
        lambda: plot(ONES.to(torch.complex64), "e4m3"),
        f"plot takes tensors of {DTYPES}, not torch.complex64; cast it first",
    ),
    (
        lambda: error(ONES.to_sparse(), "e4m3"),
        "number formats take dense tensors, not one of torch.sparse_coo; its values() are dense",
    ),
    (
        lambda: plot(torch.zeros(3), "e4m3"),
        "plot: no value is finite and other than zero: there is nothing to draw",
    ),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes(number: int) -> None:
    """Each message says what is wrong."""
    make, message = MISTAKES[number]
    with pytest.raises(OptionError) as caught:
        make()
    assert str(caught.value) == message
