"""The rows of a report: calls that are alike, casts to do without, and sums. Data alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeGuard

#: Names of dtypes that are not low precision: the wide ones, and those that are not floating-point.
WIDE: Final = frozenset(
    {
        *("float32", "float64", "complex64", "complex128", ""),
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
    }
)


@dataclass(frozen=True, slots=True)
class Row:
    """Calls that are alike: of one op, made by one line in one module, with the same dtypes.

    Attributes:
        op: Op name.
        site: The call site patched: ``"torch.nn.functional.linear"``.
        module: Qualified name of the innermost module whose forward made the calls; ``""`` for none.
        location: ``"train.py:12"``.
        phase: ``"forward"``, ``"recompute"`` or ``"backward"``.
        device_type: ``"cpu"``, ``"cuda"``, ...
        cast_policy: Name of the `CastPolicy` that decided, ``"TARGET"`` or ``"PASS"``.
        reason: Where that comes from: ``"lists/hmpx/bf16.txt:20"``.
        dtype: Name of the dtype or number format that the op computed in: ``"bfloat16"``.
        input_dtypes: Names of the dtypes of the floating inputs, before and
        cast_dtypes: after casting.
        output_dtypes: Names of the dtypes returned.
        calls: How many.
        casts: How many tensors were cast for them, and
        cast_bytes: the bytes that these casts wrote.
        flops: Floating-point operations, by the formulas of torch's FLOP counter.
        bytes: Bytes of the inputs, as cast, and of the results.
        seconds: How long the calls took; None if that was not measured.
        legalized: Whether the op computed in fp32 and was rounded: legalized, in a number format, or for
            want of a kernel.
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

    @property
    def is_low(self) -> bool:
        """Whether the op computed in low precision."""
        return self.dtype not in WIDE


@dataclass(frozen=True, slots=True)
class Waste:
    """Casts that cost time or memory and could be done without.

    Attributes:
        kind: ``"round trip"``, ``"parameter cast again"``, ``"tensor cast again"``, ``"unused result"``
            or ``"weight casts kept"``.
        what: The ops or the parameter concerned: ``"linear -> softmax -> matmul"``.
        module: Qualified name of the module.
        location: ``"train.py:12"``.
        times: How often it happened.
        bytes: Bytes written, or kept, needlessly.
        fix: What to do about it, as a line to copy: ``"bf16.txt: softmax"``, ``"hmpx.freeze(model)"``.
        note: What the fix costs, or "".
    """

    kind: str
    what: str
    module: str
    location: str
    times: int
    bytes: int
    fix: str
    note: str = ""


class Totals(NamedTuple):
    """Sums over rows.

    Attributes:
        calls: Calls.
        low_calls: Those in low precision.
        flops: Floating-point operations.
        low_flops: Those in low precision.
        bytes: Bytes read and written.
        low_bytes: Those of calls in low precision.
        casts: Tensors cast.
        cast_bytes: Bytes that casts wrote.
        seconds: Seconds, as far as they were measured; None if they were not.
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
    """Returns rows in which those that differ in their sums only are added up; the costliest first."""
    sums: dict[Row, Row] = {}
    add_up(sums, rows)
    return tuple(sorted(sums.values(), key=lambda row: (-row.flops, -row.bytes)))


def add_up(sums: dict[Row, Row], rows: Iterable[Row]) -> None:
    """Adds rows to ``sums``: a row without its sums -> the sum of such rows."""
    for row in rows:
        key = replace(row, calls=0, casts=0, cast_bytes=0, flops=0, bytes=0, seconds=None)
        known = sums.get(key)
        sums[key] = row if known is None else _sum(known, row)


def _sum(a: Row, b: Row) -> Row:
    seconds = [each.seconds for each in (a, b) if is_measured(each.seconds)]
    return replace(
        a,
        calls=a.calls + b.calls,
        casts=a.casts + b.casts,
        cast_bytes=a.cast_bytes + b.cast_bytes,
        flops=a.flops + b.flops,
        bytes=a.bytes + b.bytes,
        seconds=sum(seconds) if seconds else None,
    )


def added_waste(waste: Iterable[Waste]) -> tuple[Waste, ...]:
    """Returns waste in which what differs in its sums only is added up; that of most bytes first."""
    sums: dict[Waste, tuple[int, int]] = {}
    for each in waste:
        key = replace(each, times=0, bytes=0)
        times, count = sums.get(key, (0, 0))
        sums[key] = times + each.times, count + each.bytes
    found = [replace(key, times=times, bytes=count) for key, (times, count) in sums.items()]
    return tuple(sorted(found, key=lambda each: -each.bytes))


def is_measured(seconds: float | None) -> TypeGuard[float]:
    """Whether ``seconds`` is a time, rather than None or what a broken clock gives."""
    return seconds is not None and math.isfinite(seconds)


def totals(rows: Iterable[Row]) -> Totals:
    """Returns the sums over ``rows``."""
    rows = list(rows)
    low = [row for row in rows if row.is_low]
    timed = [row.seconds for row in rows if is_measured(row.seconds)]
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
