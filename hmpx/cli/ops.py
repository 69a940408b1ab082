"""``hmpx ops``: the ops that a list may name, and the policy's decisions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Final

from .. import formats, policy, session
from ..errors import OptionError
from ..reports import ReportTable
from . import output
from .options import list_options

TEXT: Final = """\
show ops, their policy, and the line that decides
---
hmpx ops [list options] [--why] [PATTERN...]
       hmpx ops --formats
---
Prints each op that a list may name, its policy, the line that decides, and its call sites in
torch.
---
patterns PATTERN*  part of a name, a glob such as 'conv*', or any spelling: truediv, F.gelu, Tensor.add
--formats  list the number formats that may be the low type, instead of ops
--why  explain ops: the line that decides, possible overrides, how it computes here
list options
---
policies:
  LOW bf16  inputs are cast to bf16        FIRST  ... to the type of the first one
  FP32      ... to fp32                    -      nothing
  WIDEST    ... to the widest type among them
  FOLLOW    ... to fp32, unless all have one low type already
  Rows without an op's name are decisions of sections of the policy file.

exit status:
  0; 1 if a pattern matches no op; 2 wrong arguments or op lists

examples:
  hmpx ops softmax
  hmpx ops matmul softmax 'conv*'
  hmpx ops --why torch.nn.functional.gelu
  hmpx ops --fp32 my_fp32.txt 'conv*'
  hmpx ops --formats"""


def run(options: argparse.Namespace) -> int:
    """Prints a row for each op, or for each number format; status 1 if no op matches."""
    if options.formats:
        return output.show(_format_lines())
    patterns: list[str] = options.patterns
    if options.why and not patterns:
        options.parser.error("--why explains an op: name one")
    loaded = output.with_warnings_shown(policy.load_policy, **list_options(options))
    if options.why:
        return _explain(patterns, loaded)
    names = session.listable(loaded)
    found = {pattern: session.matching(pattern, names) for pattern in patterns}
    for pattern in (each for each, matching in found.items() if not matching):
        without = "; hmpx ops without a pattern shows all"
        output.complain(session.why_no_match(pattern, names, without))
    status = 0 if all(found.values()) else 1
    if patterns:
        names = list(dict.fromkeys(name for matching in found.values() for name in matching))
    if not names:
        return status
    titles = ("op", "policy", "reason", "call sites")
    return output.show(ReportTable.of(titles, _rows(names, loaded)).lines(sys.maxsize), status)


def _rows(names: list[str], loaded: policy.Policy) -> Iterator[tuple[str, str, str, str]]:
    by_section = loaded.section_rules()
    for name in names:
        decision = loaded[name]
        sites = ", ".join(session.call_sites(name))
        yield name, session.outcome(decision), decision.reason, sites
        for each in by_section.get(name, ()):
            yield "", session.outcome(each.decision), str(each), ""


def _explain(patterns: list[str], loaded: policy.Policy) -> int:
    lines: list[str] = []
    status = 0
    for pattern in patterns:
        try:
            found = session.explain(pattern, policy=loaded)
        except OptionError as error:
            output.complain(str(error))
            status = 1
        else:
            lines += ["", *str(found).splitlines()] if lines else str(found).splitlines()
    return output.show(lines, status)


def _format_lines() -> list[str]:
    titles = ("format", "bits", "largest", "epsilon", "smallest normal", "smallest")
    rows: list[tuple[str, ...]] = []
    for name in formats.names():
        known = formats.get(name)
        if isinstance(known, formats.Custom):
            rows.append((name, *"-----"))
            continue
        values = (known.max, known.epsilon, known.smallest_normal, known.smallest_subnormal)
        rows.append((name, f"{known.bits:g}", *[f"{value:.6g}" for value in values]))
    return ReportTable.of(titles, rows, numbers=titles[1:]).lines(sys.maxsize)
