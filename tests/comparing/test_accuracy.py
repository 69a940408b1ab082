"""What rounding costs: figures against definitions and known facts, the table, and the picture."""

from __future__ import annotations

import copy
import dataclasses
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
from hmpx import OptionError, formats
from hmpx.formats import (
    Block,
    Custom,
    ErrorStatistics,
    Fixed,
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
    cells = re.findall(r"<td.*?>(.*?)</td>", page)
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


# --- the picture -------------------------------------------------------------------------------


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
