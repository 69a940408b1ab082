"""``hmpx completion``: shell completion of commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from . import output
from .options import PATHS

TEXT: Final = """\
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

SETTINGS: Final = {"shell": {"choices": ("bash", "zsh", "tcsh", "fish")}}


def run(options: argparse.Namespace) -> int:
    """Prints the script; status 1 if the package that writes it is missing."""
    try:
        import shtab
    except ImportError:
        output.complain("this needs the package shtab: pip install 'hmpx[completion]'")
        return 1
    from .entry import parser

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
