"""Entry of the command line: ``hmpx run``, ``report``, ``bench``, ``plan``, ...

A command is a module with ``run(options)``, which returns the exit status, and with its help as ``TEXT`` and
perhaps ``SETTINGS``: see `options.add_command`. A new command also needs its place in `_COMMANDS`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from .. import __version__, renames
from ..errors import HmpxError, HmpxWarning, suggestion
from . import output
from .options import add_command

#: Modules of this package, with ``_`` for ``-``, in the order of ``hmpx --help``.
_COMMANDS: Final = (
    "run", "report", "compare", "draw", "bench", "plan", "tune", "export", "check", "lint", "diff", "diff-runs",
    "lists", "ops", "doctor", "completion",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in ``argv``, by default ``sys.argv[1:]``, and returns its exit status.

    ``run`` takes over the process as ``python SCRIPT`` would: `sys.argv`, `sys.path` and
    ``__main__`` stay those of the script.

    Raises:
        SystemExit: The arguments are wrong, ``--help`` was given, or the script raised it.
        KeyboardInterrupt: The script was interrupted.
    """
    whole = parser()
    given = sys.argv[1:] if argv is None else list(argv)
    if not given:
        whole.print_help()
        return 0
    _check_command(whole, given[0])
    for old, new in renames.OPTIONS.get(given[0], {}).items():
        for at, word in enumerate(given):
            if word.partition("=")[0] == old:
                given[at] = new + word[len(old) :]
                output.complain(f"{old} is now {new}; the old name ends with the next version")
    options, unknown = whole.parse_known_args(given)
    if unknown:
        known = list(options.parser._option_string_actions)
        hint = suggestion(unknown[0].partition("=")[0], known, _OTHER_OPTIONS)
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (HmpxError, HmpxWarning) as error:  # a warning is raised under `python -W error`
        output.complain(str(error))
        return 2


#: Functions of hmpx -> the command that does the same; ``""`` for none.
_FUNCTIONS: Final = {
    "explain": "hmpx ops --why OP",
    "convert": "hmpx run SCRIPT",
    "record": "hmpx run --report FILE SCRIPT",
    "trace": "hmpx run --trace FILE SCRIPT",
    "watch": "hmpx run --watch raise SCRIPT",
    "freeze": "",
}

#: Options of other programs, with ``_`` for ``-`` -> options of ``hmpx run``.
_OTHER_OPTIONS: Final = {
    **dict.fromkeys(("__dtype", "__precision", "__type"), "--low-precision-type"),
    **dict.fromkeys(("__device", "__devices"), "--device-types"),
    **dict.fromkeys(("__skip", "__ignore"), "--exclude"),
}


def _check_command(whole: argparse.ArgumentParser, word: str) -> None:
    """Ends the program with a hint if ``word``, the first argument, is neither a command nor an option."""
    if word in _COMMANDS or word.startswith("-"):
        return
    hint = suggestion(word, _COMMANDS) or f"; commands are {', '.join(_COMMANDS)}"
    if word in _FUNCTIONS:
        hint = f"; in Python it is hmpx.{word}()"
        if _FUNCTIONS[word]:
            hint += f", on the command line {_FUNCTIONS[word]}"
    elif word.endswith(".py"):
        hint = f"; did you mean `hmpx run {word}`?"
    whole.error(f"there is no command {word!r}{hint}")


class _CommandParser(argparse.ArgumentParser):
    """A parser whose message about ``--flag=value`` says what is wrong."""

    def error(self, message: str) -> NoReturn:
        super().error(message.replace("ignored explicit argument", "it takes no value, not"))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    whole = _CommandParser(
        prog="hmpx",
        description="Mixed precision for PyTorch, op by op, from plain-text op lists.",
        epilog="hmpx COMMAND --help explains a command. To start: hmpx run --report report.html train.py",
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"hmpx {__version__}")
    commands = whole.add_subparsers(metavar="COMMAND", required=True)
    for name in _COMMANDS:
        add_command(
            commands, name, importlib.import_module(f".{name.replace('-', '_')}", __package__)
        )
    return whole
