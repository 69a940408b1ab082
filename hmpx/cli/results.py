"""``hmpx report``, ``diff`` and ``diff-runs``: what runs have left, and how two of them differ."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from .. import reports, tracing
from ..checking import siblings
from ..errors import OptionError, short
from ..monitoring import page_of, read_run
from ..places import located
from ..policy import Decision, Policy, is_policy_file, load_policy
from ..reports import Report, ReportTable, Row, read_json, short_dtype, written
from ..tensors import default_device_types, short_name
from . import output
from .options import Command

_MONITOR: Final = """\
show figures of a training over time, which hmpx.monitor wrote
---
hmpx monitor [--html OUT] [--csv OUT] FILE...
---
Prints the figures that leave the limits of the default alarms, and the first step of each. The page
has lines and a map of modules and steps for each figure; two runs are above each other.
---
files FILE+  files that hmpx.monitor(log="run.jsonl") wrote
--html OUT  write a page that needs no network
--csv OUT  write the figures of the first run: step, name, value
---
exit status:
  0; 2 if a file can't be read or written, or is none of hmpx.monitor's

examples:
  hmpx monitor run.jsonl
  hmpx monitor run.jsonl --html run.html"""


def _monitor(options: argparse.Namespace) -> int:
    """Prints monitored runs, or writes them to the given paths."""
    runs = [read_run(path) for path in options.files]
    if options.html:
        written(page_of(runs), options.html)
    if options.csv:
        runs[0].to_csv(options.csv)
    paths = [each for each in (options.html, options.csv) if each]
    return output.show([f"wrote {short(each)}" for each in paths] or map(str, runs))


MONITOR: Final = Command(_MONITOR, _monitor, writes=("html", "csv"))

_REPORT: Final = """\
print reports of runs, or turn them into a page or a table
---
hmpx report [--html OUT] [--csv OUT] FILE...
       hmpx report merge FILE... -o OUT
---
Prints the share of work in low precision, avoidable casts, and a table by op.
Several files, such as those of ranks, are merged.
---
files FILE+  a report in JSON, from hmpx run --report x.json or Report.to_json
--html OUT  write a page that needs no network
--csv OUT  write a table
-o --output OUT  the file that merge writes, in JSON
---
exit status:
  0; 2 if a file can't be read or written, holds no report, or the arguments are wrong

examples:
  hmpx report report.json
  hmpx report report.json --html report.html
  hmpx report merge rank0.json rank1.json -o all.json"""


def _report(options: argparse.Namespace) -> int:
    """Prints the report, or writes it to the given path."""
    files: list[str] = options.files
    is_merge = files[0] == "merge"
    if is_merge and len(files) == 1:
        options.parser.error("name the reports to merge")
    if is_merge and options.output is None:
        options.parser.error("merge needs -o OUT, where it writes")
    if options.output is not None and not is_merge:
        options.parser.error("-o says where merge writes: hmpx report merge FILE... -o OUT")
    found = [reports.read_json(path) for path in files[is_merge:]]
    report = found[0] if len(found) == 1 else reports.merged(found)
    written = [*output.written(options, report, output=report.to_json)]
    return output.show(written or str(report).splitlines())


REPORT: Final = Command(_REPORT, _report, {"files": {"type": str}})  # one is a word

_DIFF_RUNS: Final = """\
compare two traced runs, call by call
---
hmpx diff-runs [--html OUT] [--json OUT] A B
---
A and B are traces that hmpx run --trace or hmpx.trace() wrote: of two precisions, machines,
versions of torch, or programs. Prints the first call whose difference is neither rounding of its
types nor inherited from its inputs, and a table by module.
---
a A  the reference's trace
b B  the other one
--html OUT  write a page that needs no network
--json OUT  write every call
---
exit status:
  0 everything is explained; 1 something is not; 2 a file is not a trace

examples:
  hmpx diff-runs fp32.hmpx bf16.hmpx
  hmpx diff-runs --html diff.html before.hmpx after.hmpx"""


def _diff_runs(options: argparse.Namespace) -> int:
    """Prints the difference; status 1 if something is unexplained."""
    found = tracing.diff_runs(options.a, options.b)
    lines = [*str(found).splitlines(), *output.written(options, found)]
    return output.show(lines, status=0 if found.first is None and found.rows else 1)


DIFF_RUNS: Final = Command(_DIFF_RUNS, _diff_runs, writes=("html", "json"))

_DIFF: Final = """\
show what two policies decide otherwise, for all ops or for a program, or how two reports differ
---
hmpx diff A B [-- SCRIPT [ARGS...]]
---
A and B are sets of lists, such as hmpx or autocast-cuda@2.11 (torch.autocast's lists in
that version of torch), torch.autocast for those of the installed one, directories of lists, or
policy files. With a SCRIPT, it runs once under each. Two .json files are reports of runs.
---
before A
after B
program ...
---
exit status:
  0 no difference; 1 differences; 2 wrong arguments, or the script failed

examples:
  hmpx diff autocast-cuda@2.11 autocast-cuda@2.12
  hmpx diff torch.autocast policy.yaml -- train.py --steps 10
  hmpx diff before.json after.json"""


def _diff(options: argparse.Namespace) -> int:
    """Prints the differences; status 1 if there are any."""
    names = options.before, options.after
    program = [each for each in options.program if each != "--"] if options.program else []
    if program:
        lines = [*_of_calls(*[_recorded(name, program) for name in names])]
    elif all(name.endswith(".json") for name in names):
        lines = [*_of_calls(*map(read_json, names))]
    else:
        before, after = [load_policy(**_arguments(name)) for name in names]
        lines = [*_of_ops(before, after, names)]
    return output.show(lines or ["no difference"], status=1 if lines else 0)


DIFF: Final = Command(_DIFF, _diff)


def _arguments(name: str) -> dict[str, Any]:
    """Returns the arguments of `load_policy` for a name on the command line."""
    if name == "torch.autocast":
        device = next(iter(default_device_types()), "cpu")
        return {"lists": f"autocast-{device}"}
    return {"policy": name} if is_policy_file(name) else {"lists": name}


# --- ops -----------------------------------------------------------------------------------------


def _of_ops(before: Policy, after: Policy, names: tuple[str, str]) -> Iterator[str]:
    ops = sorted({*before.decisions, *after.decisions})
    rows = [
        (op, one, two)
        for op in ops
        if (one := _said(before.decisions.get(op))) != (two := _said(after.decisions.get(op)))
    ]
    if rows:
        yield from ReportTable.of(["op", *names], rows).lines(sys.maxsize)
    for name, policy in zip(names, (before, after), strict=True):
        if policy.sections:
            yield f"{name} has {output.counted(len(policy.sections), 'section')}; compare them with a program"


def _said(decision: Decision | None) -> str:
    """Returns a decision's policy, dtype and options, without its reason."""
    if decision is None:
        return "PASS"
    words = [decision.cast_policy.name]
    words += [] if decision.dtype is None else [short_name(decision.dtype)]
    words += [f"{word}={short_name(value)}" for word, value in decision.options()]
    return " ".join(words)


# --- a program -------------------------------------------------------------------------------------


def _recorded(name: str, program: list[str]) -> Report:
    """Runs the program under a policy, in a process of its own, and returns its report."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.fspath(Path(folder) / "report.json")
        (key, value), *_ = _arguments(name).items()
        hmpx = [sys.executable, "-m", "hmpx", "run", f"--{key}", value, "--report", path]
        done = subprocess.run(
            [*hmpx, *program], capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode or not Path(path).is_file():
            last = (done.stderr.strip().splitlines() or ["it wrote no report"])[-1]
            raise OptionError(f"{short(program[0])} failed under {name}: {last}")
        return read_json(path)


class _DiffedCall(NamedTuple):
    op: str
    module: str
    location: str
    phase: str


def _by_place(report: Report) -> dict[_DiffedCall, Row]:
    return {
        _DiffedCall(row.op, row.module, located(row.location), row.phase): row
        for row in report.rows
    }


def _of_calls(before: Report, after: Report) -> Iterator[str]:
    one, two = _by_place(before), _by_place(after)
    places = [place for place in one if place in two]
    changed = [place for place in places if _outcome(one[place]) != _outcome(two[place])]
    rows = [
        (place.op, place.module, place.location, _outcome(one[place]), _outcome(two[place]))
        for place in changed
    ]
    if rows:
        titles = ["op", "module", "line", "before", "after"]
        yield from ReportTable.of(titles, rows).lines(sys.maxsize)
        calls = sum(two[place].calls for place in changed)
        yield f"{output.counted(calls, 'call')} at {output.counted(len(rows), 'place')} compute otherwise"
    yield from _consequences(one, two)
    for only, these, others in (("A", one, two), ("B", two, one)):
        for place in these:
            if place not in others:
                module = place.module or "no module"
                yield f"only under {only}: {place.op} in {module} at {place.location}"


def _outcome(row: Row) -> str:
    return f"{short_dtype(row.dtype)} -> {', '.join(map(short_dtype, row.output_dtypes))}"


def _consequences(one: Mapping[_DiffedCall, Row], two: Mapping[_DiffedCall, Row]) -> Iterator[str]:
    for place, row in two.items():
        which = siblings(place.op)
        dtypes = {*row.input_dtypes[which]}
        was = {*one[place].input_dtypes[which]} if place in one else set()
        if len(dtypes) > 1 and len(was) == 1:
            module = f" in {place.module}" if place.module else ""
            listed = " and ".join(sorted(map(short_dtype, dtypes)))
            yield f"mixed siblings: {place.op}{module} at {place.location} gets {listed}"
    sizes = [sum(row.bytes for row in rows.values()) for rows in (one, two)]
    if sizes[0] != sizes[1]:
        yield f"bytes read and written by ops: {sizes[0]:,} before, {sizes[1]:,} after"
