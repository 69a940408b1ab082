"""``hmpx diff-runs``: the first call of two traced runs whose difference nothing explains."""

from __future__ import annotations

import argparse
from typing import Any

from .. import tracing
from . import output
from .options import add_command, option


def add_parser(commands: Any) -> None:
    """Adds the parser of ``hmpx diff-runs``."""
    parser = add_command(
        commands,
        "diff-runs",
        run,
        help="compare two traced runs, call by call",
        usage="hmpx diff-runs [--html OUT] [--json OUT] A B",
        description="A and B are traces that hmpx run --trace or hmpx.trace() wrote: of two precisions, machines,\n"
        "versions of torch, or programs. Prints the first call whose difference is neither rounding of its\n"
        "types nor inherited from its inputs, and a table by module.",
        epilog="""\
exit status:
  0 everything is explained; 1 something is not; 2 a file is not a trace

examples:
  hmpx diff-runs fp32.hmpx bf16.hmpx
  hmpx diff-runs --html diff.html before.hmpx after.hmpx""",
    )
    parser.add_argument("a", metavar="A", help="the reference's trace")
    parser.add_argument("b", metavar="B", help="the other one")
    option(parser, "--html OUT", "write a page that needs no network")
    option(parser, "--json OUT", "write every call")


def run(options: argparse.Namespace) -> int:
    """Prints the difference; status 1 if something is unexplained."""
    output.check_writable("--html", options.html)
    output.check_writable("--json", options.json)
    found = tracing.diff_runs(options.a, options.b)
    written = [*output.written(options, html=found.to_html, json=found.to_json)]
    lines = [*str(found).splitlines(), *written]
    return output.show(lines, status=0 if found.first is None and found.rows else 1)
