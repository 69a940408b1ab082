"""``hmpx lint``: runs a program, and shows where it loses precision or time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from .. import linting
from ..errors import OptionError, short
from . import output, scripts
from .options import add_command, option

_FORMATS: Final = {
    "text": lambda found: "\n".join(map(str, found)),
    "json": linting.as_json,
    "sarif": linting.as_sarif,
    "github": linting.as_github,
}


def add_parser(commands: Any) -> None:
    """Adds the parser of ``hmpx lint``."""
    codes = "\n".join(f"  {code}  {name}: {text}" for code, (name, text) in linting.RULES.items())
    parser = add_command(
        commands,
        "lint",
        run,
        help="run a script as it is, and show where it loses precision or time",
        usage="hmpx lint [options] SCRIPT [ARGS...]\n       hmpx lint [options] -m MODULE [ARGS...]",
        description="Runs SCRIPT without converting torch, and measures each finding in float64.",
        epilog=f"""\
codes:
{codes}

`# hmpx: ignore[HP103]` on a line of the program leaves a finding out.

exit status:
  0 no finding; 1 findings, or the script failed; 2 wrong arguments

examples:
  hmpx lint train.py
  hmpx lint --output-format github --baseline lint.txt train.py""",
    )
    option(parser, "--select CODES", "check these codes only: HP101,HP103", default="")
    option(parser, "--ignore CODES", "leave these codes out", default="")
    option(
        parser, "--every N", "check every N-th optimizer step; default: 50", type=int, default=50
    )
    option(parser, "--baseline FILE", "known findings, which are not shown")
    option(parser, "--write-baseline", "write the findings to --baseline instead of showing them")
    option(parser, "--output-format", "default: text", choices=tuple(_FORMATS), default="text")
    option(parser, "-m", "run a module, as python -m does", dest="is_module")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Runs the program under `hmpx.lint`; status 1 if there are findings."""
    if options.write_baseline and not options.baseline:
        options.parser.error("--write-baseline needs --baseline FILE")
    known = _known(options)
    codes = {
        name: [*filter(None, getattr(options, name).split(","))] for name in ("select", "ignore")
    }
    checked = linting.lint(every=options.every, **codes)
    name = scripts.prepare(options)
    failed = False
    try:
        with checked:
            scripts.execute(name, options.is_module)
    except SystemExit as end:
        failed = bool(end.code)
    except Exception as error:
        failed = True
        scripts.show_uncaught(error)
    found = [each for each in checked if each.key not in known]
    if options.write_baseline:
        lines = sorted({each.key for each in checked})
        Path(options.baseline).write_text("".join(f"{line}\n" for line in lines), "utf-8")
        return output.show([f"wrote {output.counted(len(lines), 'finding')} to {options.baseline}"])
    lines = (
        [_FORMATS[options.output_format](found)] if found or options.output_format != "text" else []
    )
    if options.output_format == "text":
        lines.append(output.counted(len(found), "finding"))
    return output.show([line for line in lines if line], status=1 if found or failed else 0)


def _known(options: argparse.Namespace) -> frozenset[str]:
    """Returns the keys in the baseline."""
    if not options.baseline or options.write_baseline:
        return frozenset()
    try:
        return frozenset(Path(options.baseline).read_text("utf-8").splitlines())
    except OSError as error:
        raise OptionError(
            f"--baseline {short(options.baseline)}: {error.strerror}; make it with --write-baseline"
        ) from None
