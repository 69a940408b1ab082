"""The result of `plan`, as text, JSON, an HTML page and notebook output."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from .. import arguments, reports
from ..errors import OptionError, brief, fielded, shown
from ..reports import Memory, Report, ReportTable, Written, clean, size
from ..tensors import stored_parameters, tensors_of

STRATEGIES: Final = ("fsdp2", "ddp")


class _Size(NamedTuple):
    """Shape of a tensor, and bytes of an element."""

    sizes: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Size:
        return cls(tuple(tensor.shape), tensor.dtype.itemsize)

    def shard(self, world_size: int) -> int:
        """Returns the bytes of the largest of equal numbers of rows."""
        first, *others = self.sizes or (1,)
        return -(-first // world_size) * math.prod(others) * self.itemsize


class ParameterSize(NamedTuple):
    """The size of a parameter, whether it gets a gradient, and the sizes of its optimizer state."""

    size: _Size
    learns: bool
    states: tuple[_Size, ...] = ()


#: Parameters that FSDP2 gathers together: those of one block, or the rest.
ShardGroup = tuple[ParameterSize, ...]


def groups_of(modules: Iterable[nn.Module], optimizer: object) -> tuple[ShardGroup, ...]:
    """Groups the parameters: each item of a ``ModuleList`` is a group, and the rest is the last."""
    states: Mapping[nn.Parameter, Any] = getattr(optimizer, "state", {})
    outer = list(modules)
    inner = [each for module in outer for each in module.modules()]
    blocks = [block for each in inner if isinstance(each, nn.ModuleList) for block in each]
    seen: set[int] = set()
    groups = []
    for part in (*([block] for block in blocks), outer):
        group = []
        for parameter in (each for module in part for each in stored_parameters(module)):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                kept = tuple(map(_Size.of, tensors_of(dict(states.get(parameter, {})))))
                group.append(ParameterSize(_Size.of(parameter), parameter.grad is not None, kept))
        if group:
            groups.append(tuple(group))
    return tuple(groups)


@dataclass(frozen=True)
class PerRank:
    """The bytes of tensors in one of several processes.

    Attributes:
        parameter_bytes: Its parameters.
        gradient_bytes: Their gradients.
        optimizer_bytes: The optimizer state.
        gathered_bytes: FSDP2: the whole parameters of the two largest groups, since the next one is
            gathered while one is in use.
        bucket_bytes: DDP: buckets from which gradients are sent.
        saved_bytes: Tensors that autograd keeps for the backward, without casts of weights.
        weight_cast_bytes: Casts of weights, which are kept whole even if parameters are sharded.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    bucket_bytes: int
    saved_bytes: int
    weight_cast_bytes: int

    @property
    def bytes(self) -> int:
        """Their sum: a step's peak, apart from the temporary memory of single ops."""
        return sum(vars(self).values())


def per_rank(
    groups: Sequence[ShardGroup], memory: Memory, strategy: str, world_size: int
) -> PerRank:
    """Returns the bytes of the FSDP2 rank with the largest shards, or of each DDP rank."""
    is_sharded = strategy == "fsdp2"
    parts = world_size if is_sharded else 1
    every = [each for group in groups for each in group]
    whole = sorted(sum(each.size.shard(1) for each in group) for group in groups)
    gradients = sum(each.size.shard(parts) for each in every if each.learns)
    return PerRank(
        parameter_bytes=sum(each.size.shard(parts) for each in every),
        gradient_bytes=gradients,
        optimizer_bytes=sum(
            state.shard(parts if state.sizes == each.size.sizes else 1)
            for each in every
            for state in each.states
        ),
        gathered_bytes=sum(whole[-2:]) if is_sharded else 0,
        bucket_bytes=0 if is_sharded else gradients,
        saved_bytes=memory.saved_bytes,
        weight_cast_bytes=memory.weight_cast_bytes,
    )


# --- several processes ---------------------------------------------------------------------------

#: The version of the JSON that `Plan.to_json` writes.
SCHEMA: Final = 1


@dataclass(frozen=True)
class Run:
    """The costs of a step in one precision.

    Attributes:
        name: ``"float32"``, ``"autocast"``, ``"hmpx"``, ``"casts not kept"``.
        memory: The memory of its tensors.
        report: Its calls; no rows in float32.
    """

    name: str
    memory: Memory
    report: Report

    __repr__ = fielded


@dataclass(frozen=True)
class Plan(Written):
    """The planned cost of a training step, or of a forward.

    Attributes:
        model: Name of the model's class.
        device_type: Type of the planned device.
        optimizer: Name of the optimizer.
        is_training: Whether it is a training step.
        parameters: Number of parameters.
        runs: Costs in each precision: ``"float32"``, ``"autocast"``, ``"hmpx"`` with the given options, and
            ``"casts not kept"``: hmpx with ``keep_weight_casts=False``.
        frozen_bytes: Bytes of parameters and buffers as `hmpx.freeze` would store them, for inference; None
            if it can't freeze the model.
        notes: Further remarks.
        groups: Parameters that FSDP2 gathers together.
        about: See [results](#results).

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
    about: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def run(self, name: str = "hmpx") -> Run:
        """Returns the cost of the step in one precision.

        Raises:
            OptionError: It was not planned in that precision.
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
        """Bytes of optimizer state."""
        return self.memory.optimizer_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for the backward, without casts of weights."""
        return self.memory.saved_bytes

    @property
    def weight_cast_bytes(self) -> int:
        """Bytes of casts of weights kept for the backward."""
        return self.memory.weight_cast_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes of all tensors at the peak of the step."""
        return self.memory.peak_bytes

    @property
    def low_precision_flops_share(self) -> float:
        """The share of floating-point operations in low precision, from 0 to 1."""
        totals = self.report.totals
        return totals.low_flops / totals.flops if totals.flops else 0.0

    @property
    def low_precision_bytes_share(self) -> float:
        """The share of bytes in low precision, from 0 to 1."""
        totals = self.report.totals
        return totals.low_bytes / totals.bytes if totals.bytes else 0.0

    def per_rank(self, world_size: int, strategy: str = "fsdp2", run: str = "hmpx") -> PerRank:
        """Returns the memory of each of several processes; the inputs are those of one.

        Args:
            world_size: Number of processes.
            strategy: ``"fsdp2"``, with a group for each item of a ``ModuleList``, or ``"ddp"``.
            run: Name of one of ``runs``.

        Raises:
            OptionError: An argument has an invalid value.

        Example:
            >>> p = hmpx.plan(lambda: torch.nn.Linear(256, 10), torch.ones(32, 256), device="hpu")
            >>> p.per_rank(2).parameter_bytes, p.per_rank(2, "ddp").parameter_bytes
            (5140, 10280)
        """
        world_size = arguments.whole("world_size", world_size, 1)
        strategy = arguments.choice("strategy", strategy, STRATEGIES)
        return per_rank(self.groups, self.run(run).memory, strategy, world_size)

    def ranks(self, world_size: int) -> str:
        """Returns a table of each process's memory, with FSDP2 and with DDP.

        Raises:
            OptionError: ``world_size`` is not a number of processes.

        Example:
            >>> p = hmpx.plan(lambda: torch.nn.Linear(256, 10), torch.ones(32, 256), device="hpu")
            >>> print(p.ranks(2).splitlines()[1])
            parameters          5.1 kB  10 kB
        """
        ranks = [self.per_rank(world_size, each) for each in STRATEGIES]
        return str(_table(f"each of {world_size}", ("FSDP2", "DDP"), _figures(ranks)))

    __repr__ = brief

    def __str__(self) -> str:
        lines = [
            *reports.wrapped(_headline(self)),
            _verdict(self),
            "",
            *_memory_table(self).lines(),
        ]
        said = [line for each in _remedies(self) for line in reports.wrapped(each)]
        groups = self.report.by_op()
        lines += ["", *_ranks_table(self).lines()] if _cards(self.runs) else []
        lines += ["", *said] if said else []
        lines += ["", *groups.lines(15, ".report.by_op()")] if groups else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        remedies = "".join(f"<li>{html.escape(each)}</li>" for each in _remedies(self))
        headline = f"<p><strong>{html.escape(_headline(self))}</strong></p>"
        said = headline + reports.paragraphs([_verdict(self)])
        ranks = _ranks_table(self).to_html() if _cards(self.runs) else ""
        return f"<div>{said}{_memory_table(self).to_html()}{ranks}<ul>{remedies}</ul></div>"

    def _data(self) -> Mapping[str, Any]:
        return {
            "hmpx_plan": SCHEMA,
            **{
                each.name: getattr(self, each.name)
                for each in fields(self)
                if each.name != "groups"
            },
            "runs": {each.name: _of_run(each) for each in self.runs},
        }

    def _table(self) -> ReportTable:
        return _memory_table(self)

    def _page(self) -> str:
        peaks = {run.name: run.memory.peak.kinds for run in self.runs}
        kinds = [(kind, [each.get(kind, 0) for each in peaks.values()]) for kind in reports.KINDS]
        keys = {f"kind{index}": kind for index, kind in enumerate(reports.KINDS)}
        marks = [card * 10**9 for card in _cards(self.runs)]
        picture = reports.bars(peaks, keys, marks, "memory at the peak, by kind")
        parts = [
            reports.paragraphs((_headline(self), _verdict(self)), "verdict"),
            reports.paragraphs(_remedies(self)),
            reports.section("memory", "Memory of tensors", _memory_table(self).to_html()),
            reports.chart_section("peak", "At the peak, by kind", keys, picture),
            _table("kind", peaks, kinds).to_html(),
            reports.section("ranks", "Each of several processes", _ranks_table(self).to_html()),
            reports.section("ops", "By op", self.report.by_op().html_table()),
            reports.section("modules", "By module", self.report.by_module().html_table()),
        ]
        return reports.page("hmpx plan", "Plan of a step", "\n".join(parts), self.about)


def _of_run(run: Run) -> Mapping[str, Any]:
    memory = run.memory
    figures = asdict(memory)
    del figures["peak"], figures["phases"]
    return {
        **figures,
        "saved_bytes": memory.saved_bytes,
        "peak_bytes": memory.peak_bytes,
        "peak": {"phase": memory.peak.phase, **memory.peak.kinds},
        **run.report.totals._asdict(),
    }


# --- text ----------------------------------------------------------------------------------------


def _headline(plan: Plan) -> str:
    what = f"a training step with {plan.optimizer}" if plan.is_training else "a forward"
    return f"{clean(plan.model)}, {reports.count(plan.parameters)} parameters: {what} on {plan.device_type}"


def _verdict(plan: Plan) -> str:
    totals = plan.report.totals
    flops = f"{reports.share(totals.low_flops, totals.flops)} of FLOPs and " if totals.flops else ""
    return f"{flops}{reports.share(totals.low_bytes, totals.bytes)} of bytes in low precision"


def _remedies(plan: Plan) -> Iterator[str]:
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


# --- tables --------------------------------------------------------------------------------------

#: Attribute of `Memory`, `PerRank` or both -> its name in tables.
_FIGURES: Final = {
    "parameter_bytes": "parameters",
    "gathered_bytes": "gathered parameters",
    "buffer_bytes": "buffers",
    "gradient_bytes": "gradients",
    "bucket_bytes": "buckets",
    "optimizer_bytes": "optimizer state",
    "saved_bytes": "saved for backward",
    "weight_cast_bytes": "weight casts kept",
    "peak_bytes": "peak of tensors",
    "bytes": "sum",
}

#: A row of a table: its name, and bytes for each column.
_Sizes = tuple[str, list[int]]


def _figures(found: Sequence[Any]) -> Iterator[_Sizes]:
    """Yields the figures of memories or ranks; what autograd saves also by dtype, the largest first."""
    for attribute, name in _FIGURES.items():
        yield name, [getattr(each, attribute, 0) for each in found]
        if attribute == "saved_bytes":
            saved = [getattr(each, "saved", {}) for each in found]
            dtypes = dict.fromkeys(dtype for each in saved for dtype in each)
            rows = [(dtype, [each.get(dtype, 0) for each in saved]) for dtype in dtypes]
            for dtype, sizes in sorted(rows, key=lambda row: -sum(row[1])):
                yield f"  {clean(reports.short_dtype(dtype))}", sizes


def _table(
    title: str, names: Iterable[str], sizes: Iterable[_Sizes], *others: tuple[str, list[str]]
) -> ReportTable:
    """Returns a table of sizes without rows of zeros, and then of other rows."""
    shown = [(name, [size(n) if n else "-" for n in row]) for name, row in sizes if any(row)]
    titles = [title, *names]
    rows = [(name, *cells) for name, cells in [*shown, *others]]
    return ReportTable.of(titles, rows, numbers=titles[1:])


def _memory_table(plan: Plan) -> ReportTable:
    memories = [run.memory for run in plan.runs]
    totals = [run.report.totals for run in plan.runs]
    peaks = [each.peak_bytes for each in memories]
    return _table(
        "memory of tensors",
        [run.name for run in plan.runs],
        _figures(memories),
        ("  in", [each.peak.phase or "-" for each in memories]),
        *[
            (
                f"fits on {card} GB",  # an allocator needs some memory more than the tensors
                [
                    f"yes, {reports.share(e, card * 10**9)}" if e <= card * 10**9 else "no"
                    for e in peaks
                ],
            )
            for card in _cards(plan.runs)
        ],
        ("FLOPs in low", [reports.share(each.low_flops, each.flops) for each in totals]),
        ("bytes in low", [reports.share(each.low_bytes, each.bytes) for each in totals]),
    )


#: Memory of common cards, in GB.
_CARDS: Final = (24, 40, 80)


def _cards(runs: Iterable[Run]) -> tuple[int, ...]:
    """Returns the cards of interest: none for a small model."""
    most = max((run.memory.peak_bytes for run in runs), default=0)
    return _CARDS if most > _CARDS[0] * 1e8 else ()


def _ranks_table(plan: Plan) -> ReportTable:
    """Returns the memory of each of several processes, and the smallest card that holds it; inputs are those of one."""
    rows = []
    for world_size in (2, 4, 8, 16, 32, 64):
        sums = [plan.per_rank(world_size, each).bytes for each in STRATEGIES]
        fits = [
            next((f"{card} GB" for card in _CARDS if each <= card * 10**9), "no") for each in sums
        ]
        rows.append((str(world_size), *map(size, sums), *fits))
    titles = ("processes", "FSDP2, each", "DDP, each", "FSDP2 fits on", "DDP fits on")
    return ReportTable.of(titles, rows, numbers=titles)
