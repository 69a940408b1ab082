"""Entry of the command line: ``hmpx run``, ``report``, ``bench``, ``plan``, ``tune``, ``check``, ``ops``, ...

A command is a module with two functions: ``add_parser(commands)`` adds its parser, and ``run(options)``
runs it and returns the exit status. A new command also needs its place in `_COMMANDS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Final

from .. import __version__
from ..errors import HmpxError, HmpxWarning, suggestion
from . import bench, check, completion, doctor, ops, output, plan, report, run, tune

#: In the order of ``hmpx --help``.
_COMMANDS: Final = (
    run, report, bench, plan, tune, check, ops, doctor, completion,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in ``argv``, by default ``sys.argv[1:]``, and returns its exit status.

    ``run`` takes over the process as ``python SCRIPT`` would: `sys.argv`, `sys.path` and
    ``__main__`` stay those of the script.

    Raises:
        SystemExit: The arguments are wrong, ``--help`` was given, or the script raised it.
        KeyboardInterrupt: The script was interrupted.
    """
    options, unknown = parser().parse_known_args(argv)
    if unknown:
        known = list(options.parser._option_string_actions)
        hint = suggestion(unknown[0].partition("=")[0], known)
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (HmpxError, HmpxWarning) as error:  # a warning is raised under `python -W error`
        output.complain(str(error))
        return 2


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    whole = argparse.ArgumentParser(
        prog="hmpx",
        description="Mixed precision for PyTorch, op by op, from plain-text op lists.",
        epilog="Each command explains itself: hmpx run --help",
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"hmpx {__version__}")
    commands = whole.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return whole
