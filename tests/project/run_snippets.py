"""Runs the Python of a document as one program: python run_snippets.py DOCUMENT PRELUDE OUTCOMES.

Blocks share their names and follow PRELUDE, which makes what the document takes for granted. After
each block torch is reverted, unless the prelude has ``KEEPS = True``. Writes to OUTCOMES, as JSON,
what each block printed.

A prelude may set ``FILE``, the name of the program that the blocks are said to be in, ``RESTARTS = True``
where each block begins at the first line of it, and ``SMALLER``, a dict of what is replaced in the blocks,
where the document's own numbers take too long.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import hmpx
from tests.project import markdown


def main() -> None:
    """Runs all blocks; an exception of one ends the program with its traceback."""
    document, prelude, outcomes = map(Path, sys.argv[1:])
    names: dict[str, Any] = {"__name__": "__main__"}
    for each in (prelude.with_name("assumed.py"), prelude):
        if each.exists():
            exec(compile(each.read_text("utf-8"), str(each), "exec"), names)
    file = names.pop("FILE", f"{document.stem}.py")
    keeps, restarts = names.pop("KEEPS", False), names.pop("RESTARTS", False)
    smaller = names.pop("SMALLER", {})
    printed = []
    line = 0
    for block in markdown.blocks(document):
        if block.language != "python":
            continue
        source = block.text
        for old, new in smaller.items():
            source = source.replace(old, new)
        output = io.StringIO()
        place = f"{document.name}:{block.line}"
        try:
            with contextlib.redirect_stdout(output):
                exec(compile("\n" * line + source, file, "exec"), names)
        except BaseException:
            print(f"in the block at {place}", file=sys.stderr)
            raise
        line = 0 if restarts else line + source.count("\n")
        printed.append([block.line, output.getvalue()])
        if not keeps:
            hmpx.revert()
    outcomes.write_text(json.dumps(printed), encoding="utf-8")


main()
