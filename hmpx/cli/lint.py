"""``hmpx lint``: runs a program, and shows where it loses precision or time."""

from __future__ import annotations

import argparse
import functools
import os
from typing import Final

from .. import checking, files, reports
from ..errors import short
from . import output, scripts
from .options import Command

_FORMATS: Final = {
    "text": lambda found: "\n".join(map(str, found)),
    "json": checking.as_json,
    "sarif": checking.as_sarif,
    "github": checking.as_github,
}


_CODES: Final = "\n".join(
    [f"  {code}  {name}: {text}" for code, (name, text) in checking.RULES.items()]
)

_TEXT: Final = f"""\
run a script as it is, and show where it loses precision or time
---
hmpx lint [options] SCRIPT [ARGS...]
       hmpx lint [options] -m MODULE [ARGS...]
---
Runs SCRIPT without converting torch, and measures each finding in float64.
---
--select CODES  check these codes only: HP101,HP103
--ignore CODES  leave these codes out
--every N=50  check the first two optimizer steps and every N-th; default: 50
--baseline FILE  known findings, which are not shown
--write-baseline  write the findings to --baseline instead of showing them
--output-format text|json|sarif|github=text  default: text
--html FILE  write a page that needs no network
-m  run a module, as python -m does
program ...
---
codes:
{_CODES}

`# hmpx: ignore[HP103]` on a line of the program leaves a finding out.

exit status:
  0 no finding; 1 findings, or the script failed; 2 wrong arguments

examples:
  hmpx lint train.py
  hmpx lint --output-format github --baseline lint.txt train.py"""


def _lint(options: argparse.Namespace) -> int:
    """Runs the program under `hmpx.lint`; status 1 if there are findings."""
    if options.write_baseline and not options.baseline:
        options.parser.error("--write-baseline needs --baseline FILE")
    known: set[str] = set()
    if options.baseline and not options.write_baseline:
        known.update(files.read_text(options.baseline, files.BASELINE).splitlines())
    codes = {
        name: [*filter(None, getattr(options, name).split(","))] for name in ("select", "ignore")
    }
    checked = checking.lint(every=options.every, **codes)
    name = scripts.prepare(options)
    failed, process = False, os.getpid()
    try:
        with checked:
            scripts.execute(name, options.is_module)
    except SystemExit as end:
        if os.getpid() != process:
            raise  # a child that the program has forked
        failed = bool(end.code)
    except Exception as error:
        failed = True
        scripts.show_uncaught(error)
    if os.getpid() != process:
        return int(failed)
    found = [each for each in checked if each.key not in known]
    if options.write_baseline:
        lines = sorted({each.key for each in checked})
        files.write("".join(f"{line}\n" for line in lines).encode(), options.baseline)
        return output.show(
            [f"wrote {output.counted(len(lines), 'finding')} to {short(options.baseline)}"]
        )
    page = checking.findings_page(found, checked.about)
    wrote = [*output.written(options, None, html=functools.partial(reports.written, page))]
    lines = [_FORMATS[options.output_format](found)]
    if options.output_format == "text":
        lines += [output.counted(len(found), "finding") if found else "no findings", *wrote]
    return output.show(filter(None, lines), status=1 if found or failed else 0)


_SETTINGS: Final = {
    "m": {"dest": "is_module"},
    "select": {"default": ""},
    "ignore": {"default": ""},
}
LINT: Final = Command(_TEXT, _lint, _SETTINGS, writes=("html",))
