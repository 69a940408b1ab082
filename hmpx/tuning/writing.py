"""Lists and policy files that say in comments why their lines are there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import yaml

from ..policy import FILE_NAMES
from ..version import __version__
from .assignment import assigned, policy_source
from .text import CHECK, effect, error_text, rank, shown

if TYPE_CHECKING:
    from .result import Tuned


def files(tuned: Tuned) -> dict[str, str]:
    """Returns the name of each file -> its content."""
    types = assigned(tuned.candidates, tuned.kept, tuned.low_precision_type)
    source = policy_source(types, tuned.low_precision_type)
    if "sections" in source:
        return {"policy.yaml": _policy_file(tuned, source)}
    written = yaml.safe_load(tuned.policy.to_yaml())
    called = {op for op, _ in types}
    load = "" if tuned.low_precision_type == "bfloat16" else _argument(tuned.low_precision_type)
    found = {}
    for kind, name in FILE_NAMES.items():
        lines = written.get(kind, [])
        ours = [line for line in lines if line.split()[0] in called]
        others = [line for line in lines if line not in ours]
        parts = [_head(tuned, f'hmpx.convert(lists="DIRECTORY"{load})')]
        if kind != "widest":
            parts.append(_section("What the model calls.", _explained(tuned, ours)))
        parts.append(_section("What it does not call: as by default.", others))
        found[name] = "\n".join(part for part in parts if part)
    return found


def _argument(low_type: str) -> str:
    return f', low_precision_type="{low_type}"'


def _policy_file(tuned: Tuned, source: dict[str, Any]) -> str:
    """Returns the policy file: its keys as YAML, with comments above the lines of what is kept."""
    parts = [_head(tuned, 'hmpx.convert(policy="policy.yaml")')]
    parts += [_comment(f"{name}: {why(tuned, name)}") for name in sorted(tuned.kept)]
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


def _explained(tuned: Tuned, lines: Iterable[str]) -> list[str]:
    found: list[str] = []
    known = {each.name: each for each in tuned.candidates}
    for line in lines:
        name = line.split()[0].removeprefix("-")
        member = next((each for each in (name, "=".join(line.split())) if each in tuned.kept), None)
        if member is not None:
            found.append(_comment(why(tuned, member)))
        elif name in known and known[name].score is not None:
            found.append(_comment(f"effect {effect(known[name])}"))
        found.append(line)
    return found


def why(tuned: Tuned, name: str) -> str:
    """Returns why a candidate is kept: its effect, and the error with and without it."""
    candidate = next(each for each in tuned.candidates if each.name == name.partition("=")[0])
    place = rank(candidate, tuned.candidates)
    ranked = f", rank {place} of {len(tuned.candidates)}" if place else ""
    measured = "the check" if tuned.metric == CHECK else "error"
    return (
        f"effect {effect(candidate)}{ranked}; {measured} {error_text(tuned, tuned.error)} with it, "
        f"{error_text(tuned, tuned.error_without(name))} without"
    )


def _comment(line: str) -> str:
    return f"# {' '.join(line.split())}"
