"""``hmpx ops``: what a list may name, and what a policy does with it."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Iterator
from typing import Any

from .. import formats, ops, policy
from ..errors import shown, suggestion
from ..policy import CastPolicy, Decision
from ..tensors import short_name
from ..torch_internals import VF_NAMESPACE
from . import output
from .options import add_command, add_list_options, list_options


def add_parser(commands: Any) -> None:
    """Adds the parser of ``hmpx ops``."""
    parser = add_command(
        commands,
        "ops",
        run,
        help="show what a list may name, and what is done with it",
        usage="hmpx ops [list options] [PATTERN]\n       hmpx ops --formats",
        description="Prints every op that a list may hold, what the policy does with it, the line\n"
        "that says so, and the places in torch where it is called.",
        epilog="""\
what is done:
  LOW bf16  inputs are cast to bf16        FIRST  ... to the type of the first one
  FP32      ... to fp32                    -      nothing
  WIDEST    ... to the widest type among them
  FOLLOW    ... to fp32, unless all have one low type already
  Lines without an op's name are what sections of the policy file do with it.

exit status:
  0; 1 if no op matches; 2 wrong arguments or op lists

examples:
  hmpx ops softmax
  hmpx ops torch.nn.functional.gelu
  hmpx ops --fp32 my_fp32.txt 'conv*'
  hmpx ops --formats""",
    )
    add_list_options(parser)
    parser.add_argument(
        "--formats",
        action="store_true",
        help="list the number formats that may be the low type, instead of ops",
    )
    parser.add_argument(
        "pattern",
        nargs="?",
        metavar="PATTERN",
        help="part of a name, a glob such as 'conv*', or any spelling: truediv, F.gelu, Tensor.add",
    )


def run(options: argparse.Namespace) -> int:
    """Prints a row for each op, or for each number format; status 1 if no op matches."""
    if options.formats:
        return output.show(_format_lines())
    loaded = output.with_warnings_shown(policy.load_policy, **list_options(options))
    names = [name for name in ops.table() if ops.is_castable(name)]
    by_section = loaded.section_rules()
    names += dict.fromkeys(filter(ops.is_foreign, (*loaded.decisions, *by_section)))
    names.sort(key=lambda name: (name.startswith("_"), name.lower()))
    if options.pattern is not None:
        matching = _matching(options.pattern, names)
        if not matching:
            output.complain(_why_no_match(options.pattern, names))
            return 1
        names = matching
    rows = [("op", "policy", "reason", "call sites")]
    for name in names:
        decision = loaded[name]
        rows.append((name, _what(decision), decision.reason, ", ".join(_call_sites(name))))
        rows += [("", _what(each.decision), str(each), "") for each in by_section.get(name, ())]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return output.show(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )


def _format_lines() -> Iterator[str]:
    rows: list[tuple[str, ...]] = [
        ("format", "bits", "largest", "epsilon", "smallest normal", "smallest")
    ]
    for name in formats.names():
        known = formats.get(name)
        if isinstance(known, formats.Custom):
            rows.append((name, "-", "-", "-", "-", "-"))
            continue
        values = (known.max, known.epsilon, known.smallest_normal, known.smallest_subnormal)
        rows.append((name, f"{known.bits:g}", *[f"{value:.6g}" for value in values]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for name, *cells in rows:
        shown = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        yield "  ".join([name.ljust(widths[0]), *shown])


def _matching(pattern: str, names: list[str]) -> list[str]:
    """Returns the ``names`` that ``pattern`` means: one by any spelling first, then the others."""
    if any(character in pattern for character in "*?["):
        return [
            name
            for name in names
            if fnmatch.fnmatchcase(name, pattern)
            or any(fnmatch.fnmatchcase(site, pattern) for site in _call_sites(name))
        ]
    resolved = ops.resolve(pattern)
    first = [resolved] if resolved in names else []
    return first + [name for name in names if pattern in name and name != resolved]


def _why_no_match(pattern: str, names: list[str]) -> str:
    resolved = ops.resolve(pattern)
    if resolved is not None and ops.is_foreign(resolved):
        return f"{shown(pattern)}, an op of another library, is in no list"
    if resolved is not None:
        return f"{shown(pattern)} computes nothing from tensors, so there is nothing to cast"
    spellings = [spelling for spelling, name in ops.names().items() if name in names]
    hint = suggestion(pattern, spellings) or "; hmpx ops without a pattern shows all"
    return f"no op matches {shown(pattern)}{hint}"


def _what(decision: Decision) -> str:
    if decision.cast_policy is CastPolicy.PASS:
        return "-"
    words = [decision.cast_policy.name]
    if decision.cast_policy is CastPolicy.LOW and decision.dtype is not None:
        words.append(short_name(decision.dtype))
    if decision.accumulate_dtype is not None:
        words.append(f"accumulate={short_name(decision.accumulate_dtype)}")
    if decision.output_dtype is not None:
        words.append(f"output={short_name(decision.output_dtype)}")
    return " ".join(words)


def _call_sites(name: str) -> list[str]:
    if ops.is_foreign(name):
        return [name]
    op = ops.table()[name]
    sites = [site.qualified for site in (*op.sites, *op.followers)]
    return [site for site in sites if not site.startswith(f"{VF_NAMESPACE}.")] or sites
