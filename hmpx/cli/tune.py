"""``hmpx tune``: finds the ops that a command needs in fp32, by its exit status."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any, Final

from ..errors import short
from . import output
from .options import Command

_TEXT: Final = """\
find the smallest set of ops that a command needs in fp32
---
hmpx tune --check "CMD" [--output DIR] [options]
---
Runs CMD repeatedly, each time with different ops in fp32. Writes the lists with the fewest
fp32 ops for which CMD exits with 0. Scripts under `hmpx run` in CMD need no change: the
environment variable HMPX_POLICY names the policy under test, which overrides the options of
`hmpx run`.
---
--check CMD  a shell command; passes if it exits with 0
--output DIR=hmpx_tune  where to write; default: hmpx_tune
--by op|module=op  decide for each op, the default, or for each op in each module
--low-precision-type TYPE  as for hmpx run; default: bfloat16
--runs N=1  how many runs must pass; default: 1
--timeout SECONDS  time limit of a run, which fails if it takes longer
--budget N=200  largest number of runs; default: 200
--no-progress  print only the result
---
exit status:
  0 if lists were found, after Ctrl-C the best so far; 130 if it was interrupted before any was tried;
  2 if CMD fails with everything in fp32, or the arguments are wrong

Each run's policy, output and exit status stay in DIR/NUMBER, and a restart continues the search.
Models that are Python functions are tuned in fewer runs by hmpx.tune(), which ranks ops by effect.

examples:
  hmpx tune --check "hmpx run train.py --steps 200 --fail-above 1.8"
  hmpx tune --check "hmpx run train.py && python compare.py" --by module --output lists
  hmpx run --lists hmpx_tune train.py"""


def _tune(options: argparse.Namespace) -> int:
    """Searches, writes the lists and prints the result."""
    from ..tuning import Check  # slow to import

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
        best = check.tune(not options.no_progress)
    except KeyboardInterrupt:
        what = "interrupted before any policy was tried; the same command continues the search"
        output.complain(what)
        return output.INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    paths = best.write(check.directory)
    return output.show(
        [*str(best).splitlines(), "", *(f"wrote {short(str(path))}" for path in paths)]
    )


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


_SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "check": {"required": True},
    "runs": {"type": _count},
    "budget": {"type": _count},
    "timeout": {"type": _seconds},
}
TUNE: Final = Command(_TEXT, _tune, _SETTINGS)
