"""The sentences, tables and the picture of a plan."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from ..reports import (
    KINDS,
    Table,
    Totals,
    clean,
    count,
    section,
    share,
    short_dtype,
    size,
    wrapped,
)
from .sharding import PerRank
from .steps import Run

if TYPE_CHECKING:
    from .result import Plan

#: Most groups of calls printed.
_MOST_GROUPS: Final = 15


def headline(plan: Plan) -> str:
    """Returns the planned model and step, in a clause."""
    what = f"a training step with {plan.optimizer}" if plan.is_training else "a forward"
    return f"{clean(plan.model)}, {count(plan.parameters)} parameters: {what} on {plan.device_type}"


def verdict(plan: Plan) -> str:
    """Returns the low-precision share."""
    totals = plan.report.totals
    flops = f"{share(totals.low_flops, totals.flops)} of FLOPs and " if totals.flops else ""
    return f"{flops}{share(totals.low_bytes, totals.bytes)} of bytes in low precision"


def remedies(plan: Plan) -> Iterator[str]:
    """Yields remedies for the memory that autograd keeps, and other remarks."""
    memory = plan.memory
    if memory.weight_cast_bytes:
        fix = "hmpx.convert(keep_weight_casts=False) casts weights again in the backward"
        yield (
            f"{size(memory.weight_cast_bytes)} are casts of weights, which autograd keeps for the "
            f"backward: {fix}; parameters in bf16 need none"
        )
    if plan.frozen_bytes is not None:
        whole = memory.parameter_bytes + memory.buffer_bytes
        yield (
            f"for inference, hmpx.freeze(model, x) would store {size(plan.frozen_bytes)} of weights "
            f"instead of {size(whole)}"
        )
    yield from plan.notes


def lines(plan: Plan) -> Iterator[str]:
    """Yields the lines of a plan as text."""
    yield from wrapped(headline(plan))
    yield verdict(plan)
    yield ""
    yield str(memory_table(plan))
    said = list(remedies(plan))
    if said:
        yield ""
    for each in said:
        yield from wrapped(each)
    groups = plan.report.by_op()
    if groups:
        yield ""
        yield str(groups.table(_MOST_GROUPS))
        if len(groups) > _MOST_GROUPS:
            yield f"... and {count(len(groups) - _MOST_GROUPS)} more; .report.by_op() has all"


# --- tables --------------------------------------------------------------------------------------

#: Attribute of `Memory`, and of `PerRank`, -> its name in tables.
_OF_RUN: Final = {
    "parameter_bytes": "parameters",
    "buffer_bytes": "buffers",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "saved_bytes": "saved for backward",
}
_OF_RANK: Final = {
    "parameter_bytes": "parameters",
    "gathered_bytes": "gathered parameters",
    "gradient_bytes": "gradients",
    "bucket_bytes": "buckets",
    "optimizer_bytes": "optimizer state",
    "saved_bytes": "saved for backward",
    "weight_cast_bytes": "weight casts kept",
    "bytes": "sum",
}


def rank_table(world_size: int, ranks: Sequence[PerRank]) -> Table:
    """Returns the bytes of each of several processes, by FSDP2 and by DDP."""
    lines = [(name, [getattr(each, field) for each in ranks]) for field, name in _OF_RANK.items()]
    return _sizes(f"each of {world_size}", ("FSDP2", "DDP"), lines)


def memory_table(plan: Plan) -> Table:
    """Returns the memory of all runs side by side, and how much of each is in low precision."""
    memories = [run.memory for run in plan.runs]
    lines = [(name, [getattr(each, field) for each in memories]) for field, name in _OF_RUN.items()]
    dtypes = dict.fromkeys(dtype for memory in memories for dtype in memory.saved)
    saved = {dtype: [each.saved.get(dtype, 0) for each in memories] for dtype in dtypes}
    for dtype, sizes in sorted(saved.items(), key=lambda each: -sum(each[1])):
        lines.append((f"  {clean(short_dtype(dtype))}", sizes))
    lines.append(("weight casts kept", [each.weight_cast_bytes for each in memories]))
    lines.append(("peak of tensors", [each.peak_bytes for each in memories]))
    totals = [run.report.totals for run in plan.runs]
    return _sizes(
        "memory of tensors",
        [run.name for run in plan.runs],
        lines,
        ("  in", [each.peak.phase or "-" for each in memories]),
        ("FLOPs in low", [_low_share(each, "flops") for each in totals]),
        ("bytes in low", [_low_share(each, "bytes") for each in totals]),
    )


def _low_share(totals: Totals, name: str) -> str:
    return share(getattr(totals, f"low_{name}"), getattr(totals, name))


def _sizes(
    title: str,
    names: Sequence[str],
    lines: Sequence[tuple[str, list[int]]],
    *others: tuple[str, list[str]],
) -> Table:
    """Returns a table with a row of bytes for each name in ``lines`` that has any, then the others."""
    shown = [(name, [size(n) if n else "-" for n in sizes]) for name, sizes in lines if any(sizes)]
    rows = [(name, *cells) for name, cells in [*shown, *others]]
    return Table.of([title, *names], rows, numbers=names)


# --- the picture ---------------------------------------------------------------------------------

_BAR_HEIGHT, _LABELS, _WIDTH = 30, 130, 900


def peaks(runs: Sequence[Run]) -> str:
    """Returns a section with a bar for each run: the tensors at its peak, by kind."""
    most = max(run.memory.peak_bytes for run in runs)
    if not most:
        return ""
    present = {kind for run in runs for kind in run.memory.peak.kinds}
    legend = [
        f'<span class="key kind-{place}">{kind}</span>'
        for place, kind in enumerate(KINDS)
        if kind in present
    ]
    parts = []
    for row, run in enumerate(runs):
        y, x = row * _BAR_HEIGHT + 4, float(_LABELS)
        parts.append(f'<text x="0" y="{y + 15}">{html.escape(run.name)}</text>')
        for place, kind in enumerate(KINDS):
            part = run.memory.peak.kinds.get(kind, 0)
            if part:
                width = (_WIDTH - _LABELS - 90) * part / most
                parts.append(
                    f'<rect class="kind-{place}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="20">'
                    f"<title>{run.name}: {kind} {size(part)}</title></rect>"
                )
                x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{size(run.memory.peak_bytes)}</text>')
    return section(
        "peak",
        "At the peak, by kind",
        f'<p class="legend">{" ".join(legend)}</p><div class="scroll chart">'
        f'<svg viewBox="0 0 {_WIDTH} {len(runs) * _BAR_HEIGHT}" role="img" '
        f'aria-label="Memory of tensors at the peak">{"".join(parts)}</svg></div>',
    )
