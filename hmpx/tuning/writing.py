"""Lists and policy files that say in comments why their lines are there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import yaml

from ..policy import FILE_NAMES, of_libraries
from ..version import __version__
from .assignment import assigned, policy_source
from .candidates import FOLLOWS, Candidate, bare, is_following
from .text import CHECK, effect, error_text, rank, shown

if TYPE_CHECKING:
    from .result import Tuned


def files(tuned: Tuned) -> dict[str, str]:
    """Returns the name of each file -> its content."""
    types = assigned(tuned.candidates, tuned.kept, tuned.low_precision_type)
    source = policy_source(types, tuned.low_precision_type)
    followed = {op for (op, _), each in types.items() if each == FOLLOWS}
    if "sections" in source:
        return {"policy.yaml": _policy_file(tuned, source)}
    written = yaml.safe_load(tuned.policy.to_yaml())
    called = {op for op, _ in types}
    load = "" if tuned.low_precision_type == "bfloat16" else _argument(tuned.low_precision_type)
    found = {}
    for kind, name in FILE_NAMES.items():
        lines = written.get(kind, [])
        ours = [line for line in lines if line.split()[0] in called]
        others = [line for line in lines if line not in ours and not _is_of_library(line)]
        parts = [_head(tuned, f'hmpx.convert(lists="DIRECTORY"{load})')]
        if kind == "widest":
            listed = [line for line in ours if line in followed]
            unlisted = sorted(followed - set(listed))
            parts.append(_section("What the model calls.", _explained(tuned, listed)))
            said = _explained(tuned, unlisted, is_listed=False)
            parts.append(_section("In no list, so that it follows its inputs.", said))
        else:
            parts.append(_section("What the model calls.", _explained(tuned, ours)))
        parts.append(_section("What it does not call: as by default.", others))
        found[name] = "\n".join(part for part in parts if part)
    return found


def _argument(low_type: str) -> str:
    return f', low_precision_type="{low_type}"'


def _policy_file(tuned: Tuned, source: dict[str, Any]) -> str:
    """Returns the policy file: its keys as YAML, with comments above the lines of what is kept."""
    parts = [_head(tuned, 'hmpx.convert(policy="policy.yaml")')]
    parts += [
        _comment(f"{bare(name)}{' follows' * is_following(name)}: {why(tuned, name)}")
        for name in sorted(tuned.kept)
    ]
    parts.append(yaml.safe_dump(source, sort_keys=False))
    return "\n".join(parts)


def _head(tuned: Tuned, use: str) -> str:
    kept = len(tuned.kept)
    tolerance = "" if tuned.metric == CHECK else f"tolerance {shown(tuned.tolerance)}, "
    lines = [
        f"Written by hmpx.tune {__version__}. Use: {use}",
        f"{tuned.metric}: {error_text(tuned, tuned.error)} with {kept} kept out of {tuned.low_precision_type}, "
        f"{error_text(tuned, tuned.all_low_error)} with none; "
        f"{tolerance}{tuned.evaluations} evaluations.",
    ]
    if not tuned.is_complete:
        lines.append("The search was ended early: some of these may not be needed.")
    return "\n".join(map(_comment, lines))


def _section(title: str, lines: Iterable[str]) -> str:
    lines = list(lines)
    return "\n".join(["", _comment(title), *lines, ""]) if lines else ""


def _is_of_library(line: str) -> bool:
    """Whether a line stands behind all lists anyway."""
    return line.split(maxsplit=1)[0] in of_libraries().ops


def _explained(tuned: Tuned, lines: Iterable[str], *, is_listed: bool = True) -> list[str]:
    found: list[str] = []
    by_op: dict[str, list[Candidate]] = {}
    for each in tuned.candidates:
        for op in sorted({op for op, _ in each.spots}):
            by_op.setdefault(op, []).append(each)
    kept = {bare(name): name for name in tuned.kept}
    for line in lines:
        members = by_op.get(line.split()[0].removeprefix("-"), [])
        for each in members:
            if each.name in kept:
                said = why(tuned, kept[each.name])
                named = _named(each, said, members) if is_listed else f"{each.name}: {said}"
                found.append(_comment(named))
            elif each.score is not None:
                found.append(_comment(_named(each, f"effect {effect(each)}", members)))
        if is_listed:
            found.append(line)
    return found


def _named(candidate: Candidate, said: str, members: list[Candidate]) -> str:
    """Returns what is said of a candidate, with its name where a line is about several, or a module."""
    is_op = len(members) == 1 and ":" not in candidate.name
    return said if is_op else f"{candidate.name}: {said}"


def why(tuned: Tuned, name: str) -> str:
    """Returns why a candidate is kept: its effect, and the error with and without it."""
    candidate = next(each for each in tuned.candidates if each.name == bare(name))
    place = rank(candidate, tuned.candidates)
    ranked = f", rank {place} of {len(tuned.candidates)}" if place else ""
    measured = "the check" if tuned.metric == CHECK else "error"
    return (
        f"effect {effect(candidate)}{ranked}; {measured} {error_text(tuned, tuned.error)} with it, "
        f"{error_text(tuned, tuned.error_without(name))} without"
    )


def _comment(line: str) -> str:
    return f"# {' '.join(line.split())}"
