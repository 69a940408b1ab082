"""The result of `plan`, and its views: text, JSON, a page, a part of a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from .. import arguments
from ..errors import OptionError, shown
from ..reports import (
    KINDS,
    Memory,
    Report,
    Table,
    Totals,
    Written,
    clean,
    count,
    page,
    page_file,
    paragraphs,
    section,
    share,
    short_dtype,
    size,
    wrapped,
)
from .sharding import PerRank, ShardGroup, ddp, fsdp2
from .steps import Run

#: The version of the JSON that `Plan.to_json` writes.
SCHEMA: Final = 1

#: How many groups of calls are printed.
_MOST_GROUPS: Final = 15


@dataclass(frozen=True)
class Plan(Written):
    """What a training step, or a forward, would take.

    Printing it prints how much runs in low precision, a table of memory with float32, torch.autocast
    and hmpx side by side, what to do about it, and the decisions by op.

    Attributes:
        model: Name of the model's class.
        device_type: The type of the device that was planned for.
        optimizer: Name of the optimizer.
        is_training: Whether it is a training step.
        parameters: How many parameters the model has.
        runs: What it costs in each precision: ``"float32"``, ``"autocast"``, ``"hmpx"`` as asked for,
            and ``"casts not kept"``, which is hmpx with ``keep_weight_casts=False``.
        frozen_bytes: Bytes of parameters and buffers as `hmpx.freeze` would store them, for inference; None
            where it can't freeze the model.
        notes: What else there is to know.
        groups: Parameters that FSDP2 gathers together.

    Example:
        >>> def inputs():
        ...     return torch.randn(32, 256)
        >>> p = hmpx.plan(lambda: torch.nn.Linear(256, 10), inputs, device="hpu")
        >>> p.parameter_bytes, p.saved_bytes, p.weight_cast_bytes, p.low_precision_flops_share
        (10280, 16384, 0, 1.0)
    """

    model: str
    device_type: str
    optimizer: str
    is_training: bool
    parameters: int
    runs: tuple[Run, ...]
    frozen_bytes: int | None = None
    notes: tuple[str, ...] = ()
    groups: tuple[ShardGroup, ...] = ()

    def run(self, name: str = "hmpx") -> Run:
        """Returns what the step costs in one precision.

        Raises:
            OptionError: It was not planned in that one.
        """
        for each in self.runs:
            if each.name == name:
                return each
        known = ", ".join(repr(each.name) for each in self.runs)
        raise OptionError(f"this plan has no {shown(name)} (there is: {known})")

    @property
    def memory(self) -> Memory:
        """The memory of a step under hmpx."""
        return self.run().memory

    @property
    def report(self) -> Report:
        """The calls of a step under hmpx, as `hmpx.record` reports them."""
        return self.run().report

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters."""
        return self.memory.parameter_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of their gradients."""
        return self.memory.gradient_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes that the optimizer keeps."""
        return self.memory.optimizer_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd keeps for the backward, without casts of weights."""
        return self.memory.saved_bytes

    @property
    def weight_cast_bytes(self) -> int:
        """Bytes of casts of weights that autograd keeps for the backward."""
        return self.memory.weight_cast_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes of all tensors at the moment of the step when they take most."""
        return self.memory.peak_bytes

    @property
    def low_precision_flops_share(self) -> float:
        """The share of floating-point operations in low precision, from 0 to 1."""
        totals = self.report.totals
        return totals.low_flops / totals.flops if totals.flops else 0.0

    @property
    def low_precision_bytes_share(self) -> float:
        """The share of bytes that are read and written by calls in low precision, from 0 to 1."""
        totals = self.report.totals
        return totals.low_bytes / totals.bytes if totals.bytes else 0.0

    def per_rank(self, world_size: int, strategy: str = "fsdp2", run: str = "hmpx") -> PerRank:
        """Returns what each of several processes holds; the inputs are those of one.

        Args:
            world_size: How many processes there are.
            strategy: ``"fsdp2"``, with a group for each item of a ``ModuleList``, or ``"ddp"``.
            run: Name of one of ``runs``.

        Raises:
            OptionError: An argument has a value that it can't have.

        Example:
            >>> p = hmpx.plan(lambda: torch.nn.Linear(256, 10), torch.ones(32, 256), device="hpu")
            >>> p.per_rank(2).parameter_bytes, p.per_rank(2, "ddp").parameter_bytes
            (5140, 10280)
        """
        if type(world_size) is not int or world_size < 1:
            raise OptionError(f"world_size must be an int of at least 1, not {shown(world_size)}")
        strategy = arguments.choice("strategy", strategy, ("fsdp2", "ddp"))
        memory = self.run(run).memory
        kept = memory.saved_bytes, memory.weight_cast_bytes
        if strategy == "ddp":
            return ddp(self.groups, *kept)
        return fsdp2(self.groups, world_size, *kept)

    def ranks(self, world_size: int) -> str:
        """Returns a table of what each of several processes holds, by FSDP2 and by DDP.

        Raises:
            OptionError: ``world_size`` is not a number of processes.

        Example:
            >>> p = hmpx.plan(lambda: torch.nn.Linear(256, 10), torch.ones(32, 256), device="hpu")
            >>> print(p.ranks(2).splitlines()[1])
            parameters          5.1 kB  10 kB
        """
        ranks = [self.per_rank(world_size, each) for each in ("fsdp2", "ddp")]
        lines = [
            (name, [getattr(each, field) for each in ranks]) for field, name in _OF_RANK.items()
        ]
        return str(_sizes(f"each of {world_size}", ("FSDP2", "DDP"), lines))

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        remedies = "".join(f"<li>{html.escape(each)}</li>" for each in _remedies(self))
        said = f"<p><strong>{html.escape(_headline(self))}</strong></p><p>{_verdict(self)}</p>"
        return f"<div>{said}{_memory_table(self).to_html()}<ul>{remedies}</ul></div>"

    def _data(self) -> Mapping[str, Any]:
        return {
            "hmpx_plan": SCHEMA,
            "model": self.model,
            "device_type": self.device_type,
            "optimizer": self.optimizer,
            "is_training": self.is_training,
            "parameters": self.parameters,
            "frozen_bytes": self.frozen_bytes,
            "notes": list(self.notes),
            "runs": {each.name: _of_run(each) for each in self.runs},
        }

    def _page(self) -> str:
        def scrolled(table: str) -> str:
            return f'<div class="scroll">{table}</div>'

        parts = [
            paragraphs((_headline(self), _verdict(self)), "verdict"),
            paragraphs(_remedies(self)),
            section("memory", "Memory of tensors", scrolled(_memory_table(self).to_html())),
            _peaks(self.runs),
            section("ops", "By op", scrolled(self.report.by_op().html_table())),
            section("modules", "By module", scrolled(self.report.by_module().html_table())),
        ]
        style = page_file(str(__package__), "plan.css")
        return page("hmpx plan", "Plan of a step", "\n".join(parts), style=style)


def _of_run(run: Run) -> Mapping[str, Any]:
    memory = asdict(run.memory)
    for name in ("peak", "phases"):
        del memory[name]
    peak = run.memory.peak
    return {
        **memory,
        "saved_bytes": run.memory.saved_bytes,
        "peak_bytes": run.memory.peak_bytes,
        "peak": {"phase": peak.phase, **peak.kinds},
        **run.report.totals._asdict(),
    }


# --- text ----------------------------------------------------------------------------------------


def _headline(plan: Plan) -> str:
    """Returns what was planned, in a clause."""
    what = f"a training step with {plan.optimizer}" if plan.is_training else "a forward"
    return f"{clean(plan.model)}, {count(plan.parameters)} parameters: {what} on {plan.device_type}"


def _verdict(plan: Plan) -> str:
    """Returns how much would run in low precision."""
    totals = plan.report.totals
    flops = f"{share(totals.low_flops, totals.flops)} of FLOPs and " if totals.flops else ""
    return f"{flops}{share(totals.low_bytes, totals.bytes)} of bytes in low precision"


def _remedies(plan: Plan) -> Iterator[str]:
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


def _lines(plan: Plan) -> Iterator[str]:
    yield from wrapped(_headline(plan))
    yield _verdict(plan)
    yield ""
    yield str(_memory_table(plan))
    remedies = list(_remedies(plan))
    if remedies:
        yield ""
    for each in remedies:
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


def _memory_table(plan: Plan) -> Table:
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
    """Returns a table with a line of bytes for each name of ``lines`` that has any, then the others."""
    shown = [(name, [size(n) if n else "-" for n in sizes]) for name, sizes in lines if any(sizes)]
    rows = [(name, *cells) for name, cells in [*shown, *others]]
    return Table.of([title, *names], rows, numbers=names)


# --- the picture ---------------------------------------------------------------------------------

_BAR_HEIGHT, _LABELS, _WIDTH = 30, 130, 900


def _peaks(runs: Sequence[Run]) -> str:
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
