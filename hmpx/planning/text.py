"""A plan as plain text of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..reports import Column, Totals, clean, column_rows, count, share, short_dtype, size, wrapped

if TYPE_CHECKING:
    from .result import Plan

#: How many groups of calls are shown.
_MOST_GROUPS = 15


def headline(plan: Plan) -> str:
    """Returns what was planned, in a clause."""
    what = f"a training step with {plan.optimizer}" if plan.is_training else "a forward"
    return f"{clean(plan.model)}, {count(plan.parameters)} parameters: {what} on {plan.device_type}"


def verdict(plan: Plan) -> str:
    """Returns how much would run in low precision."""
    totals = plan.report.totals
    flops = f"{share(totals.low_flops, totals.flops)} of FLOPs and " if totals.flops else ""
    return f"{flops}{share(totals.low_bytes, totals.bytes)} of bytes in low precision"


def remedies(plan: Plan) -> Iterator[str]:
    """Yields what to do about what autograd keeps, and what else there is to know."""
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


def memory_rows(plan: Plan) -> list[tuple[str, list[str]]]:
    """Returns the lines of the table of memory: a name, and a cell for each run."""
    memories = [run.memory for run in plan.runs]
    lines = [
        ("parameters", [each.parameter_bytes for each in memories]),
        ("buffers", [each.buffer_bytes for each in memories]),
        ("gradients", [each.gradient_bytes for each in memories]),
        ("optimizer state", [each.optimizer_bytes for each in memories]),
        ("saved for backward", [each.saved_bytes for each in memories]),
    ]
    totals: dict[str, int] = {}
    for memory in memories:
        for dtype, bytes_ in memory.saved.items():
            totals[dtype] = totals.get(dtype, 0) + bytes_
    for dtype in sorted(totals, key=lambda each: -totals[each]):
        name = f"  {clean(short_dtype(dtype))}"
        lines.append((name, [each.saved.get(dtype, 0) for each in memories]))
    lines.append(("weight casts kept", [each.weight_cast_bytes for each in memories]))
    lines.append(("peak of tensors", [each.peak_bytes for each in memories]))
    found = [
        (name, [size(each) if each else "-" for each in cells])
        for name, cells in lines
        if any(cells)
    ]
    found.append(("  in", [each.peak.phase or "-" for each in memories]))
    sums = [run.report.totals for run in plan.runs]
    found.append(("FLOPs in low", [_low(each, "flops") for each in sums]))
    found.append(("bytes in low", [_low(each, "bytes") for each in sums]))
    return found


def _low(totals: Totals, name: str) -> str:
    whole = getattr(totals, name)
    return share(getattr(totals, f"low_{name}"), whole) if whole else "-"


def text(plan: Plan) -> str:
    """Returns the plan as plain text."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    yield from wrapped(headline(plan))
    yield verdict(plan)
    yield ""
    rows = memory_rows(plan)
    columns = [Column("memory of tensors", tuple([name for name, _ in rows]), is_number=False)]
    columns += [
        Column(run.name, tuple([cells[index] for _, cells in rows]))
        for index, run in enumerate(plan.runs)
    ]
    yield from ("".join(cells).rstrip() for cells in column_rows(columns))
    said = list(remedies(plan))
    if said:
        yield ""
        for each in said:
            yield from wrapped(each)
    groups = plan.report.by_op()
    if groups:
        yield ""
        yield groups.table(_MOST_GROUPS)
        if len(groups) > _MOST_GROUPS:
            yield f"... and {count(len(groups) - _MOST_GROUPS)} more; .report.by_op() has all"


def rank_table(plan: Plan, world_size: int) -> str:
    """Returns what each of several processes holds, by FSDP2 and by DDP."""
    ranks = [plan.per_rank(world_size, each) for each in ("fsdp2", "ddp")]
    lines = [
        ("parameters", [each.parameter_bytes for each in ranks]),
        ("gathered parameters", [each.gathered_bytes for each in ranks]),
        ("gradients", [each.gradient_bytes for each in ranks]),
        ("buckets", [each.bucket_bytes for each in ranks]),
        ("optimizer state", [each.optimizer_bytes for each in ranks]),
        ("saved for backward", [each.saved_bytes for each in ranks]),
        ("weight casts kept", [each.weight_cast_bytes for each in ranks]),
        ("sum", [each.bytes for each in ranks]),
    ]
    rows = [line for line in lines if any(line[1])]
    columns = [Column(f"each of {world_size}", tuple([n for n, _ in rows]), is_number=False)]
    for index, title in enumerate(("FSDP2", "DDP")):
        cells = tuple([size(cells[index]) if cells[index] else "-" for _, cells in rows])
        columns.append(Column(title, cells))
    return "\n".join("".join(cells).rstrip() for cells in column_rows(columns))
