"""The data of a report: rows of equal calls, unnecessary casts, sums, and the memory of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from ..errors import fielded
from .cells import clean, short_dtype, size, wrapped

#: Names of dtypes that are not low precision: the wide ones, and those that are not floating-point.
WIDE: Final = frozenset(
    {
        *("float32", "float64", "complex64", "complex128", ""),
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
    }
)


@dataclass(frozen=True, slots=True)
class Row:
    """Equal calls: of one op, from one line in one module, with the same dtypes.

    Attributes:
        op: Op name.
        site: The patched call site: ``"torch.nn.functional.linear"``.
        module: Qualified name of the innermost module; ``""`` for none.
        location: ``"train.py:12"``.
        phase: ``"forward"``, ``"recompute"`` or ``"backward"``.
        device_type: ``"cpu"``, ``"cuda"``, ...
        cast_policy: Name of the `CastPolicy` that decided, ``"TARGET"`` or ``"PASS"``.
        reason: The source of the decision: ``"lists/hmpx/bf16.txt:20"``.
        dtype: Name of the dtype or number format that the op computed in: ``"bfloat16"``.
        input_dtypes: Names of the floating inputs' dtypes before casting.
        cast_dtypes: Names of the floating inputs' dtypes after casting.
        output_dtypes: Names of the dtypes returned.
        calls: Number of calls.
        casts: Number of tensors cast for them.
        cast_bytes: Bytes that these casts wrote.
        flops: Floating-point operations, by the formulas of torch's FLOP counter.
        bytes: Bytes of the inputs, as cast, and of the results.
        seconds: Duration of the calls; None if not measured.
        legalized: Whether the op computed in fp32 and rounded.
    """

    op: str
    site: str
    module: str
    location: str
    phase: str
    device_type: str
    cast_policy: str
    reason: str
    dtype: str
    input_dtypes: tuple[str, ...]
    cast_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    calls: int
    casts: int
    cast_bytes: int
    flops: int
    bytes: int
    seconds: float | None = None
    legalized: bool = False

    __repr__ = fielded

    @property
    def is_low(self) -> bool:
        """Whether the op computed in low precision."""
        return self.dtype not in WIDE


@dataclass(frozen=True, slots=True)
class Waste:
    """Unnecessary casts that cost time or memory.

    Attributes:
        kind: ``"round trip"``, ``"parameter cast again"``, ``"tensor cast again"`` or
            ``"weight casts kept"``.
        what: The ops or the parameter concerned: ``"linear -> softmax -> matmul"``.
        module: Qualified name of the module.
        location: ``"train.py:12"``.
        times: Number of occurrences.
        bytes: Bytes written, or kept, needlessly.
        fix: The fix, as a line to copy: ``"bf16.txt: softmax"``, ``"hmpx.freeze(model)"``.
        note: The cost of the fix, or "".
    """

    kind: str
    what: str
    module: str
    location: str
    times: int
    bytes: int
    fix: str
    note: str = ""

    __repr__ = fielded


class Totals(NamedTuple):
    """Sums over rows.

    Attributes:
        calls: Number of calls.
        low_calls: Number of calls in low precision.
        flops: Floating-point operations.
        low_flops: Floating-point operations in low precision.
        bytes: Bytes read and written.
        low_bytes: Bytes of calls in low precision.
        casts: Number of tensors cast.
        cast_bytes: Bytes that casts wrote.
        seconds: Seconds, over the measured calls; None if none was measured.
    """

    calls: int
    low_calls: int
    flops: int
    low_flops: int
    bytes: int
    low_bytes: int
    casts: int
    cast_bytes: int
    seconds: float | None


def added(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Adds up rows that differ only in their sums; the most expensive first."""
    sums: dict[Row, Row] = {}
    add_up(sums, rows)
    return by_cost(sums.values())


def by_cost(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Returns rows in the order of reports."""
    return tuple(sorted(rows, key=lambda row: (-row.flops, -row.bytes)))


def add_up(sums: dict[Row, Row], rows: Iterable[Row]) -> None:
    """Adds rows to ``sums``, which maps a row without sums to their total."""
    for row in rows:
        key = replace(row, calls=0, casts=0, cast_bytes=0, flops=0, bytes=0, seconds=None)
        known = sums.get(key)
        sums[key] = row if known is None else _sum(known, row)


def _sum(a: Row, b: Row) -> Row:
    names = ("calls", "casts", "cast_bytes", "flops", "bytes")
    sums = {name: getattr(a, name) + getattr(b, name) for name in names}
    seconds = b.seconds if a.seconds is None else a.seconds + (b.seconds or 0.0)
    return replace(a, **sums, seconds=seconds)


def added_waste(waste: Iterable[Waste]) -> tuple[Waste, ...]:
    """Adds up waste that differs only in its sums; that with most bytes first."""
    sums: dict[Waste, Waste] = {}
    for each in waste:
        key = replace(each, times=0, bytes=0)
        known = sums.get(key, key)
        sums[key] = replace(key, times=known.times + each.times, bytes=known.bytes + each.bytes)
    return tuple(sorted(sums.values(), key=lambda each: -each.bytes))


def totals(rows: Iterable[Row]) -> Totals:
    """Returns the sums over ``rows``."""
    rows = list(rows)
    low = [row for row in rows if row.is_low]
    timed = [row.seconds for row in rows if row.seconds is not None]
    return Totals(
        sum(row.calls for row in rows),
        sum(row.calls for row in low),
        sum(row.flops for row in rows),
        sum(row.flops for row in low),
        sum(row.bytes for row in rows),
        sum(row.bytes for row in low),
        sum(row.casts for row in rows),
        sum(row.cast_bytes for row in rows),
        sum(timed) if timed else None,
    )


# --- memory --------------------------------------------------------------------------------------

#: Kinds of tensors, in display order.
KINDS: Final = (
    "parameters",
    "gradients",
    "optimizer state",
    "saved",
    "weight casts",
    "buffers",
    "other",
)


class Moment(NamedTuple):
    """The memory of tensors at one time.

    Attributes:
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        kinds: Bytes for each kind in `KINDS`.
    """

    phase: str = ""
    kinds: Mapping[str, int] = {}

    @property
    def bytes(self) -> int:
        """The sum of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Memory:
    """The memory of tensors, by storage: each counts once, however many views it has.

    An allocator's overhead is not included: rounding, fragments, workspaces of kernels, other libraries.

    Attributes:
        parameter_bytes: Bytes of the parameters of all called modules.
        buffer_bytes: Bytes of the buffers of all called modules.
        gradient_bytes: Bytes of the parameters' gradients.
        optimizer_bytes: Bytes of optimizer state.
        saved: Dtype -> bytes of the tensors that autograd kept for the backward, at their peak; without
            parameters, buffers and casts of parameters.
        weight_cast_bytes: Bytes of the casts of parameters that it kept then.
        peak: The moment at which all tensors took most.
        phases: The same moment in each phase.
    """

    parameter_bytes: int = 0
    buffer_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    saved: Mapping[str, int] = field(default_factory=dict)
    weight_cast_bytes: int = 0
    peak: Moment = field(default_factory=Moment)
    phases: tuple[Moment, ...] = ()

    __repr__ = fielded

    @property
    def saved_bytes(self) -> int:
        """Total bytes in ``saved``."""
        return sum(self.saved.values())

    @property
    def peak_bytes(self) -> int:
        """Bytes of all tensors at their peak."""
        return self.peak.bytes

    def __str__(self) -> str:
        saved = sorted(self.saved.items(), key=lambda each: -each[1])
        by_dtype = ", ".join(f"{clean(short_dtype(dtype))} {size(count)}" for dtype, count in saved)
        shown = (
            ("parameters", self.parameter_bytes, ""),
            ("buffers", self.buffer_bytes, ""),
            ("gradients", self.gradient_bytes, ""),
            ("optimizer state", self.optimizer_bytes, ""),
            ("saved for the backward", self.saved_bytes, by_dtype),
            ("weight casts kept for it", self.weight_cast_bytes, ""),
            ("peak of tensors", self.peak_bytes, f"in {self.peak.phase}"),
        )
        lines = [f"{n:25} {size(count):>8}  {note}".rstrip() for n, count, note in shown if count]
        return "\n".join(each for line in lines for each in wrapped(line))
