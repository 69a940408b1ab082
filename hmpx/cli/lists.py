"""``hmpx lists``: shows where the shipped op lists are, and copies a set."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .. import policy
from ..errors import OptionError, short
from ..files import make_directory, write
from . import output

TEXT: Final = """\
show the shipped op lists and where they are, or copy a set
---
hmpx lists [NAME] [--copy DIR]
---
Prints the shipped sets of op lists with their files. --copy writes a set to a directory,
where you can edit it; then convert(lists=DIR) or hmpx run --lists DIR takes it.
---
name NAME?  a set; default: all
--copy DIR  write the files of the set, hmpx by default, to DIR
---
exit status:
  0; 2 if there is no such set, or the files can't be written

examples:
  hmpx lists
  hmpx lists hmpx --copy my_lists"""


def run(options: argparse.Namespace) -> int:
    """Prints the sets, or copies one."""
    if options.copy:
        return output.show(_copied(options.name or "hmpx", Path(options.copy)))
    return output.show(_lines(options.name))


def _files(name: str) -> list[Path]:
    if name not in policy.set_names():
        known = ", ".join(policy.set_names())
        raise OptionError(f"there is no set {short(name)!r}; the shipped ones are {known}")
    folder = policy.directory() / name
    return [folder / each for each in policy.FILE_NAMES.values() if (folder / each).is_file()]


def _lines(name: str | None) -> Iterator[str]:
    for each in policy.set_names() if name is None else [name]:
        for path in _files(each):
            yield str(path)


def _copied(name: str, folder: Path) -> Iterator[str]:
    files = _files(name)
    make_directory(folder)
    for path in files:
        if (folder / path.name).exists():
            raise OptionError(
                f"{short(str(folder / path.name))} is there already; name another directory"
            )
    for path in files:
        write(path.read_bytes(), folder / path.name)
        yield f"wrote {short(str(folder / path.name))}"
