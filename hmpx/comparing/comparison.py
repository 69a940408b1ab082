"""The result of `compare`, as text, CSV, JSON, an HTML page and notebook output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

import torch

from .. import number_formats, reports
from ..errors import brief
from ..renames import renamed_fields
from ..reports import Column, ReportTable, Written, clean, count, exponential
from ..tensors import LOW_DTYPES
from .measures import EXPONENTS, Limits, limits
from .rows import ComparedGradient, ComparedSite

#: The version of the JSON that `Comparison.to_json` writes.
SCHEMA: Final = 2

#: Most rows, gradients and outputs printed, and most rows in a notebook.
_MOST_ROWS, _MOST_GRADIENTS, _MOST_NOTES, _MOST_IN_NOTEBOOK = 15, 3, 5, 30


@renamed_fields(output_rel="output_error")
@dataclass(frozen=True)
class Comparison(Written):
    """The effect of low precision on each call of a model.

    Attributes:
        rows: A row per op, module and line, largest effect first.
        gradients: A row per parameter, largest relative difference first.
        loss: The loss in float32; NaN without ``loss_fn``.
        low_loss: The loss in low precision; NaN without ``loss_fn``.
        output_error: Norm of the difference over the float32 norm, over all floating-point outputs.
        output_notes: Differences in other outputs, and outputs that can't be compared.
        unmatched: Number of calls that the model makes in float32 only.
        backward_error: The error of the backward, without ``loss_fn``; effects are unknown then.
        about: See [results](#results).

    Example:
        >>> comparison = hmpx.compare(torch.nn.Linear(8, 2), torch.ones(4, 8))
        >>> [(row.op, row.dtype, row.fits) for row in comparison.rows]
        [('linear', 'bfloat16', True)]
    """

    rows: tuple[ComparedSite, ...]
    gradients: tuple[ComparedGradient, ...] = ()
    loss: float = math.nan
    low_loss: float = math.nan
    output_error: float = math.nan
    output_notes: tuple[str, ...] = ()
    unmatched: int = 0
    backward_error: str | None = None
    about: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def worst(self, number: int = 10) -> tuple[ComparedSite, ...]:
        """Returns the rows of largest effect."""
        return self.rows[:number]

    __repr__ = brief

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        titles = ("op", "module", "in", "calls", "effect", "error", "passed on", "")
        rows = self.worst(_MOST_IN_NOTEBOOK)
        table = _table(rows, titles).to_html() if rows else ""
        return f"<div>{reports.paragraphs(_verdict(self))}{table}</div>"

    def _data(self) -> Mapping[str, Any]:
        return {"hmpx_comparison": SCHEMA, **asdict(self)}

    def _table(self) -> ReportTable:
        names = [each.name for each in fields(ComparedSite) if each.name != "exponents"]
        return ReportTable.of_fields(names, self.rows, " to ")

    def _page(self) -> str:
        target = "outputs, relative to their norm" if math.isnan(self.loss) else "loss"
        parts = [
            reports.paragraphs(_verdict(self), "verdict"),
            reports.table_section(
                "sites",
                "Calls, largest effect first",
                f'<p class="note">Effect: the change that the rounding of this op alone makes to the {target}, to '
                "first order. Error: of the op alone, relative to its results. Passed on: the same with "
                "the whole model in low precision.</p>",
            ),
        ]
        keys = {"own": "error of the op", "passed": "passed on"}
        picture = errors_by_depth(self.rows)
        parts.append(reports.chart_section("depth", "Errors along the model", keys, picture))
        keys = {"normal": "the type's numbers", "subnormal": "with fewer digits"}
        keys["values"] = "values in float32"
        parts.append(reports.chart_section("ranges", "Ranges of results", keys, ranges(self.rows)))
        tables = {"sites": _table(self.rows)}
        if self.gradients:
            parts.append(reports.table_section("gradients", "Gradients of parameters"))
            tables["gradients"] = ReportTable(
                [
                    Column("parameter", [each.name for each in self.gradients], clean, False),
                    Column("difference", [each.error for each in self.gradients], exponential),
                    Column("cosine", [each.cosine for each in self.gradients], "{:.6f}".format),
                ]
            )
        return reports.page(
            "hmpx comparison",
            "Low precision compared with float32",
            "\n".join(parts),
            self.about,
            tables=tables,
        )


def _table(rows: Sequence[ComparedSite], titles: Sequence[str] = ()) -> ReportTable:
    """Returns a table of rows, with the columns of these titles, or all columns."""

    def numbers(title: str, name: str, show: Any = exponential) -> Column:
        return Column(title, [getattr(row, name) for row in rows], show)

    names = [clean(row.module) or ("-" if titles else "") for row in rows]
    columns = [
        Column("op", [row.op for row in rows], clean, False, least=10),
        Column("module", names, str, False, reports.without_start, 12),
        Column("line", [row.location for row in rows], reports.located, False),
        Column(
            "in",
            [reports.short_dtype(row.dtype) or "fp32" for row in rows],
            str,
            False,
            is_dtype=True,
        ),
        Column("decided by", [row.reason for row in rows], clean, False),
        numbers("calls", "calls", count),
        numbers("effect", "effect"),
        numbers("error", "error"),
        numbers("passed on", "propagated_error"),
        numbers("SQNR, dB", "sqnr_db", "{:.0f}".format),
        numbers("ulp", "ulp", "{:.2f}".format),
        numbers("cosine", "cosine", "{:.6f}".format),
        numbers("largest error", "max_abs"),
        Column("smallest", [row.range.smallest for row in rows], exponential),
        Column("largest", [row.range.largest for row in rows], exponential),
        Column("" if titles else "remark", [*map(_remark, rows)], str, False),
    ]
    return ReportTable(column for column in columns if not titles or column.title in titles)


def _remark(row: ComparedSite) -> str:
    """Returns a row's faults: values lost, too large, rounded to zero; calls without an effect."""
    if row.lost:
        return f"{count(row.lost)} not finite"
    if not row.fits:
        return "beyond the range"
    if row.underflow >= 0.01:
        return f"{reports.share(row.underflow, 1)} became 0"
    if row.flips > 0:
        return f"{reports.share(row.flips, 1)} differ"
    if 0 < row.unseen < row.calls:
        return f"no gradient: {count(row.unseen)}"
    return ""


# --- text ----------------------------------------------------------------------------------------


def _verdict(comparison: Comparison) -> list[str]:
    """Returns how much low precision changes the result, and the op with the largest share."""
    if not comparison.rows:
        return ["No calls were compared."]
    parts = []
    if not math.isnan(comparison.loss):
        parts.append(
            f"loss {comparison.loss:.6g} in fp32, {comparison.low_loss:.6g} in low precision"
        )
    if not math.isnan(comparison.output_error):
        differ = exponential(comparison.output_error)
        parts.append(f"outputs differ by {differ}, relative to their norm")
    parts += map(clean, comparison.output_notes[:_MOST_NOTES])
    if len(comparison.output_notes) > _MOST_NOTES:
        parts.append(f"and {count(len(comparison.output_notes) - _MOST_NOTES)} outputs more")
    worst = next((row for row in comparison.rows if row.dtype), None)
    if worst is None:
        parts.append("no op runs in low precision")
    elif math.isnan(worst.effect):
        parts.append(
            "no gradient, or none that is finite, arrives at any op, so that effects are unknown"
        )
    elif worst.effect == 0:
        parts.append("no op has an effect")
    else:
        where = f" in {clean(worst.module)}" if worst.module else ""
        parts.append(
            f"largest effect: {clean(worst.op)}{where} at {reports.located(worst.location)}"
        )
    return parts


def _lines(comparison: Comparison) -> Iterator[str]:
    for sentence in _verdict(comparison):
        yield from reports.wrapped(sentence)
    if comparison.unmatched:
        yield from reports.wrapped(
            f"{count(comparison.unmatched)} calls were made in fp32 only: what the model calls "
            "depends on values"
        )
    if comparison.backward_error:
        yield from reports.wrapped(f"the backward failed: {clean(comparison.backward_error)}")
    low = [row for row in comparison.rows if row.dtype]
    if low:
        titles = ["op", "module", "in", "calls", "effect", "error", "passed on", "largest"]
        if any(map(_remark, low[:_MOST_ROWS])):
            titles.append("")
        yield ""
        yield str(_table(low[:_MOST_ROWS], titles))
        if len(low) > _MOST_ROWS:
            yield f"... and {count(len(low) - _MOST_ROWS)} more; .rows has all"
    if comparison.gradients:
        yield ""
        total = count(len(comparison.gradients))
        yield f"gradients of {total} parameters, those that differ most:"
    for each in comparison.gradients[:_MOST_GRADIENTS]:
        yield from reports.wrapped(f"{clean(each.name)} {_said(each)}", "  ")


def _said(gradient: ComparedGradient) -> str:
    if math.isnan(gradient.error):
        return "is not finite in float32"
    if not gradient.is_finite:
        return "is not finite in low precision"
    return f"differs by {exponential(gradient.error)}, cosine {gradient.cosine:.4f}"


# --- charts -----------------------------------------------------------------------------------------


def limits_of(dtype: str) -> Limits | None:
    """Returns the range of a type by its name; None if it is unknown or has none."""
    known = getattr(torch, dtype, None)
    if isinstance(known, torch.dtype) and known in LOW_DTYPES:
        return limits(known)
    return limits(number_formats.get(dtype)) if dtype in number_formats.names() else None


def errors_by_depth(rows: Sequence[ComparedSite]) -> str:
    """Returns a chart of errors in call order: propagated, and the op's own."""
    shown = sorted((row for row in rows if row.dtype), key=lambda row: row.order)
    points = [
        (kind, index, value, f"{clean(row.op)} {clean(row.module)}")
        for index, row in enumerate(shown)
        for kind, value in (("own", row.error), ("passed", row.propagated_error))
    ]
    types = {row.dtype: limits_of(row.dtype) for row in shown}
    roundoffs = {name: 2.0**-each.bits for name, each in types.items() if each}
    return reports.by_depth(points, len(shown), roundoffs, "errors in the order of calls")


def ranges(rows: Sequence[ComparedSite]) -> str:
    """Returns a strip for each of the first rows: how many values have each binary exponent.

    The range of the low-precision type is in the background: normal and subnormal numbers.
    """
    shown = [row for row in rows if row.dtype and any(row.exponents)][:40]
    if not shown:
        return ""
    used = [EXPONENTS[i] for row in shown for i, each in enumerate(row.exponents) if each]
    first, last = max(EXPONENTS.start, min(used) - 4), min(EXPONENTS.stop - 1, max(used) + 4)
    left, height = 280, 18
    step = (reports.CHART_WIDTH - left - 10) / (last - first + 1)

    def x(exponent: float) -> float:
        return left + (min(max(exponent, first), last + 1) - first) * step

    parts = []
    for place, row in enumerate(shown):
        top = place * height + 2
        within = limits_of(row.dtype)
        if within is not None:
            normal = math.log2(within.smallest_normal)
            most = math.floor(math.log2(within.max)) + 1
            for kind, start, end in (
                ("subnormal", normal - within.bits + 1, normal),
                ("normal", normal, most),
            ):
                parts.append(_rect(kind, x(start), x(end) - x(start), top, height - 2))
        for exponent, counted in zip(EXPONENTS, row.exponents, strict=False):
            if counted:
                shade = 0.25 + 0.75 * math.log1p(counted) / math.log1p(max(row.exponents))
                said = reports.svg_title(f"2^{exponent}: {counted}")
                parts.append(_rect("values", x(exponent), step, top + 4, height - 10, shade, said))
        name = reports.without_start(clean(f"{row.op} {row.module}"), 44)
        parts.append(reports.svg_text(left - 8, top + 11, name, "end"))
    bottom = len(shown) * height + 16
    for exponent in range(first - first % 8 + 8, last + 1, 8):
        parts.append(reports.svg_text(x(exponent), bottom, f"2^{exponent}", "middle"))
    return reports.svg_chart(bottom + 6, "ranges of results", parts)


def _rect(  # noqa: PLR0917
    kind: str, x: float, width: float, y: float, height: float, shade: float = 1.0, inside: str = ""
) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{max(0.0, width):.1f}" '
        f'height="{height}" opacity="{shade:.2f}">{inside}</rect>'
    )
