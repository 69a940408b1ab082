"""What was seen of a run: rows of calls, what was wasted, and shares in low precision. Data alone."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import OptionError

#: The version of the JSON that `Report.to_json` writes.
SCHEMA: Final = 1

#: Names of dtypes that are not low precision.
WIDE: Final = frozenset({"float32", "float64", "complex64", "complex128"})


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
        reason: Where that comes from: ``"lists/hmp/bf16.txt:12"``.
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


class Group(NamedTuple):
    """Rows that have something in common, with their sums.

    Attributes:
        key: What they have in common: ``("linear", "bfloat16")``.
        totals: Their sums.
        rows: The rows.
    """

    key: tuple[str, ...]
    totals: Totals
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Report:
    """What was seen of a run.

    Attributes:
        rows: The calls, those that cost most first.
        waste: Casts to do without, those of most bytes first.
        about: Names and values that identify the run: versions, policy, device, rank.
        error: The exception that ended the run, if one did.
    """

    rows: tuple[Row, ...]
    waste: tuple[Waste, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None

    @functools.cached_property
    def totals(self) -> Totals:
        """Sums over all rows."""
        return totals(self.rows)

    def by_op(self) -> list[Group]:
        """Returns groups of one op, phase and dtypes each; key ``(op, phase, from, dtype, to)``."""
        return grouped(
            self.rows,
            lambda row: (
                row.op,
                row.phase,
                ", ".join(row.input_dtypes),
                row.dtype,
                ", ".join(row.output_dtypes),
            ),
        )

    def by_module(self) -> list[Group]:
        """Returns groups of one module each, without the modules inside it."""
        return grouped(self.rows, lambda row: (row.module,))

    def by_site(self) -> list[Group]:
        """Returns groups of one line of the program and one op each; key ``(location, op)``."""
        return grouped(self.rows, lambda row: (row.location, row.op))

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the report as JSON, and writes it to ``path`` if that is given."""
        text = json.dumps(
            {
                "hmpx_report": SCHEMA,
                "about": dict(self.about),
                "error": self.error,
                "rows": [asdict(row) for row in self.rows],
                "waste": [asdict(each) for each in self.waste],
            },
            indent=1,
        )
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text


def read_json(path: str | os.PathLike[str]) -> Report:
    """Returns the report that `Report.to_json` wrote to ``path``.

    Raises:
        OptionError: The file can't be read, or holds no report.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{os.fspath(path)}: {error}") from error
    if not isinstance(found, dict) or found.get("hmpx_report") != SCHEMA:
        raise OptionError(
            f"{os.fspath(path)} is not a report of this version of hmpx; write one with "
            "`hmpx run --report report.json script.py`"
        )
    rows = tuple([_row(each) for each in found["rows"]])
    waste = tuple([Waste(**each) for each in found["waste"]])
    return Report(rows, waste, found["about"], found["error"])


def _row(found: Mapping[str, Any]) -> Row:
    dtypes = {name: tuple(found[name]) for name in ("input_dtypes", "cast_dtypes", "output_dtypes")}
    return Row(**{**found, **dtypes})


def merged(reports: Iterable[Report]) -> Report:
    """Returns one report of what several processes did: their rows are added up."""
    reports = list(reports)
    about: dict[str, str] = {}
    for report in reports:
        for name, value in report.about.items():
            known = about.get(name, "").split(", ") if name in about else []
            about[name] = ", ".join(dict.fromkeys([*known, value]))
    errors = [report.error for report in reports if report.error]
    return Report(
        added(row for report in reports for row in report.rows),
        _added_waste(each for report in reports for each in report.waste),
        about,
        "; ".join(dict.fromkeys(errors)) or None,
    )


def added(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Returns rows in which those that differ in their sums only are added up; the costliest first."""
    sums: dict[Row, Row] = {}
    for row in rows:
        key = replace(row, calls=0, casts=0, cast_bytes=0, flops=0, bytes=0, seconds=None)
        known = sums.get(key)
        sums[key] = row if known is None else _sum(known, row)
    return tuple(sorted(sums.values(), key=lambda row: (-row.flops, -row.bytes)))


def _sum(a: Row, b: Row) -> Row:
    seconds = [each.seconds for each in (a, b) if each.seconds is not None]
    return replace(
        a,
        calls=a.calls + b.calls,
        casts=a.casts + b.casts,
        cast_bytes=a.cast_bytes + b.cast_bytes,
        flops=a.flops + b.flops,
        bytes=a.bytes + b.bytes,
        seconds=sum(seconds) if seconds else None,
    )


def _added_waste(waste: Iterable[Waste]) -> tuple[Waste, ...]:
    sums: dict[Waste, tuple[int, int]] = {}
    for each in waste:
        key = replace(each, times=0, bytes=0)
        times, count = sums.get(key, (0, 0))
        sums[key] = times + each.times, count + each.bytes
    found = [replace(key, times=times, bytes=count) for key, (times, count) in sums.items()]
    return tuple(sorted(found, key=lambda each: -each.bytes))


def grouped(rows: Iterable[Row], key: Callable[[Row], tuple[str, ...]]) -> list[Group]:
    """Returns groups of the rows that have the same ``key``; those of most FLOPs, then bytes, first."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    groups = [Group(name, totals(several), tuple(several)) for name, several in found.items()]
    return sorted(groups, key=lambda group: (-group.totals.flops, -group.totals.bytes))


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
