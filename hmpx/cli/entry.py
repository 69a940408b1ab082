"""Entry of the command line: ``hmpx run``, ``report``, ``bench``, ``plan``, ...

A new command is an `options.Command`, with a row of `_COMMANDS`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NoReturn

from .. import __version__, renames
from ..errors import HmpxError, HmpxWarning, suggestion
from . import doctor, lint, lists, models, output, results, run, tune
from .options import PATHS, Command, add_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in ``argv``, by default ``sys.argv[1:]``, and returns its exit status.

    ``run`` takes over the process as ``python SCRIPT`` would: `sys.argv`, `sys.path` and ``__main__`` stay those of
    the script, which may raise `SystemExit` and `KeyboardInterrupt`.
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
    command: Command = options.command
    try:
        for name in command.writes:
            output.check_writable(f"--{name}", getattr(options, name))
        if given[0] not in _WITH_LINES:
            output.show_seconds(given[0])
        return command.run(options)
    except (HmpxError, HmpxWarning) as error:  # a warning is raised under `python -W error`
        output.complain(str(error))
        return 2
    finally:
        output.seconds.close()


#: Commands that run a script, whose lines these are, or print lines on what they do.
_WITH_LINES: Final = frozenset({"run", "lint", "diff", "bench", "tune"})

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
    for name, command in _COMMANDS.items():
        add_command(commands, name, command)
    return whole


# --- completion ----------------------------------------------------------------------------------

_COMPLETION: Final = """\
print a script for shell completion
---
hmpx completion SHELL
---
Prints a script for the shell that completes the commands and options of hmpx without
starting Python. Needs `pip install 'hmpx[completion]'`.
---
shell SHELL  bash, zsh, tcsh, fish
---
exit status:
  0; 1 if the extra is not installed; 2 wrong arguments

examples:
  hmpx completion bash >> ~/.bashrc
  hmpx completion zsh > ~/.zfunc/_hmpx
  hmpx completion fish > ~/.config/fish/completions/hmpx.fish"""


def _complete(options: argparse.Namespace) -> int:
    """Prints the script; status 1 if the package that writes it is missing."""
    try:
        import shtab
    except ImportError:
        output.complain("this needs the package shtab: pip install 'hmpx[completion]'")
        return 1
    whole = parser()
    for action in _actions(whole):
        if action.metavar in PATHS or action.nargs == argparse.REMAINDER:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    return output.show(shtab.complete(whole, options.shell).splitlines())


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)


#: In the order of ``hmpx --help``.
_COMMANDS: Final[Mapping[str, Command]] = {
    "run": run.RUN,
    "report": results.REPORT,
    "compare": models.COMPARE,
    "draw": models.DRAW,
    "bench": models.BENCH,
    "plan": models.PLAN,
    "tune": tune.TUNE,
    "export": models.EXPORT,
    "check": lists.CHECK,
    "lint": lint.LINT,
    "monitor": results.MONITOR,
    "diff": results.DIFF,
    "diff-runs": results.DIFF_RUNS,
    "lists": lists.LISTS,
    "schema": lists.SCHEMA,
    "ops": lists.OPS,
    "doctor": doctor.DOCTOR,
    "completion": Command(
        _COMPLETION, _complete, {"shell": {"choices": ("bash", "zsh", "tcsh", "fish")}}
    ),
}
