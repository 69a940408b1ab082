"""``hmpx tune``: finds the ops that a command needs in fp32, by its exit status."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any, Final

from . import output
from .options import add_command, option

#: Exit status after Ctrl-C, as in shells.
_INTERRUPTED: Final = 130


def add_parser(commands: Any) -> None:
    """Adds the parser of ``hmpx tune``."""
    parser = add_command(
        commands,
        "tune",
        run,
        help="find the smallest set of ops that a command needs in fp32",
        usage='hmpx tune --check "CMD" [--output DIR] [options]',
        description="Runs CMD repeatedly, each time with different ops in fp32. Writes the lists with the fewest\n"
        "fp32 ops for which CMD exits with 0. Scripts under `hmpx run` in CMD need no change: the\n"
        "environment variable HMPX_POLICY names the policy under test, which overrides the options of\n"
        "`hmpx run`.",
        epilog="""\
exit status:
  0 if lists were found, after Ctrl-C the best so far; 130 if it was interrupted before any was tried;
  2 if CMD fails with everything in fp32, or the arguments are wrong

Each run's policy, output and exit status stay in DIR/NUMBER, and a restart continues the search.
Models that are Python functions are tuned in fewer runs by hmpx.tune(), which ranks ops by effect.

examples:
  hmpx tune --check "hmpx run train.py --steps 200 --fail-above 1.8"
  hmpx tune --check "hmpx run train.py && python compare.py" --by module --output lists
  hmpx run --lists hmpx_tune train.py""",
    )
    option(parser, "--check CMD", "a shell command; passes if it exits with 0", required=True)
    option(parser, "--output DIR", "where to write; default: hmpx_tune", default="hmpx_tune")
    option(
        parser,
        "--by",
        "decide for each op, the default, or for each op in each module",
        choices=("op", "module"),
        default="op",
    )
    option(parser, "--low-precision-type TYPE", "as for hmpx run; default: bfloat16")
    option(parser, "--runs N", "how many runs must pass; default: 1", type=_count, default=1)
    option(
        parser,
        "--timeout SECONDS",
        "time limit of a run, which fails if it takes longer",
        type=_seconds,
    )
    option(parser, "--budget N", "largest number of runs; default: 200", type=_count, default=200)


def run(options: argparse.Namespace) -> int:
    """Searches, writes the lists and prints the result."""
    from ..tuning import Check, tune_by_check  # slow to import

    check = Check(
        options.check,
        Path(options.output),
        options.low_precision_type,
        options.by,
        options.runs,
        options.timeout,
        options.budget,
    )
    # SIGTERM ends the search and its running command, like Ctrl-C.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        best = tune_by_check(check)
    except KeyboardInterrupt:
        output.complain(
            "interrupted before any policy was tried; the same command continues the search"
        )
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    paths = best.write(check.directory)
    return output.show([*str(best).splitlines(), "", *(f"wrote {path}" for path in paths)])


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value
