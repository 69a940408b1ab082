"""A result as text, as lists and policy files with reasons in comments, and as an HTML page."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import yaml

from ..errors import cut, lined
from ..policy import FILE_NAMES, of_libraries
from ..reports import Table, page, paragraphs, section
from ..tensors import long_name
from ..version import __version__
from .assignment import FP32, assigned, policy_source
from .candidates import FOLLOWS, Candidate, bare, is_following, low_parts, shares

if TYPE_CHECKING:
    from .result import Tuned

#: The metric of a command, which only passes or fails.
CHECK: Final = "check"

#: Text is not cut to the width of a terminal.
_WIDE: Final = 10_000


def text(tuned: Tuned) -> str:
    """Returns the verdict, the kept candidates with reasons, and the path of the search."""
    tables = [kept_table(tuned)] if tuned.kept else []
    parts = [lined(each.lines(_WIDE)) for each in (*tables, path_table(tuned))]
    return "\n\n".join([verdict(tuned), *parts])


def verdict(tuned: Tuned) -> str:
    """Returns the result in a few sentences."""
    count, low, is_check = len(tuned.kept), tuned.low_precision_type, tuned.metric == CHECK
    is_wider = any(bare(each) != each and not is_following(each) for each in tuned.kept)
    said = (
        f"{count} of {len(tuned.candidates)} candidates stay "
        f"{'in wider types' if is_wider else 'in fp32'} under {low}"
        if count
        else f"Nothing has to stay in fp32 under {low}"
    )
    if tuned.follows:
        said += f", {len(tuned.follows)} of them in calls that are given fp32"
    if is_check:
        of_all = error_text(tuned, tuned.all_low_error)
        lines = [f"{said}: the check passes; all in {low} it {of_all}."]
    else:
        lines = [
            f"{said}: {tuned.metric} error {shown(tuned.error)}, tolerance {shown(tuned.tolerance)}, "
            f"all in {low} {shown(tuned.all_low_error)}."
        ]
    lines.append(f"{_shares(tuned)}. {tuned.evaluations} evaluations.")
    if tuned.time_share is not None:
        lines.append(
            f"Ops take {tuned.time_share:.2f} of their time in fp32, as measured one by one."
        )
    if tuned.limit:
        lines.append(f"The choice with the least predicted error of those with {tuned.limit}.")
    if tuned.fresh_error is not None:
        lines.append(f"On inputs that the search has not seen: error {shown(tuned.fresh_error)}.")
    if tuned.is_complete:
        failing = "the check fails" if is_check else "the error is too large"
        if tuned.searched is not None:
            failing += (
                f" for {shown(tuned.searched)}, which was searched for since a set within the tolerance "
                "failed on fresh inputs"
            )
        free = {each.name for each in tuned.candidates if each.is_free} & tuned.kept
        if free:
            lines.append(f"No faster in {low}: {names(free, 10)}.")
        if count > len(free) and not tuned.limit:
            which = "the others" if free else "these"
            lines.append(f"None of {which} can be taken out: without it {failing}.")
    else:
        why = {
            "budget": "the budget was spent",
            "interrupt": "it was interrupted",
            "fresh inputs": "each smaller set that it found failed on fresh inputs",
        }[tuned.stopped_by]
        lines.append(f"The search did not end, since {why}: this is the best set so far.")
    return lined(lines)


def _shares(tuned: Tuned) -> str:
    """Returns the shares of FLOPs and bytes in each type below fp32."""
    types, found = tuned.types, []
    for name in dict.fromkeys([tuned.low_precision_type, *sorted(set(types.values()))]):
        if name in (FP32, FOLLOWS):
            continue
        others = {each.name for each in tuned.candidates if types[each.name] not in (name, FOLLOWS)}
        followed = {each for each in tuned.kept if is_following(each)}
        flops, count = shares(tuned.candidates, frozenset(others | followed), tuned.seen)
        found.append(f"In {name}: {flops:.1%} of FLOPs, {count:.1%} of bytes")
    return "; ".join(found)


def by_effect(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns candidates, those out of range first, then those with the largest effect."""
    return sorted(candidates, key=lambda each: (not each.is_hard, -(each.score or 0.0), each.name))


def kept_table(tuned: Tuned) -> Table:
    """Returns a row for each kept candidate, the one with the largest effect first."""
    members = {bare(name): name for name in tuned.kept}
    flops = max(1, sum(each.flops for each in tuned.candidates))
    count = max(1, sum(each.bytes for each in tuned.candidates))
    rows = []
    for each in by_effect(each for each in tuned.candidates if each.name in members):
        name = members[each.name]
        low = low_parts(each, tuned.kept, tuned.seen) if is_following(name) else (0.0, 0.0)
        rows.append(
            (
                f"{cut(each.name)} follows" if is_following(name) else cut(name),
                effect(each),
                rank(each, tuned.candidates),
                error_text(tuned, tuned.error_without(name)),
                f"{each.flops * (1 - low[0]) / flops:.1%}",
                f"{each.bytes * (1 - low[1]) / count:.1%}",
            )
        )
    titles = ("kept", "effect", "rank", "error without it", "FLOPs", "bytes")
    return Table.of(titles, rows, numbers=titles[1:])


def path_table(tuned: Tuned) -> Table:
    """Returns a row for each evaluation."""
    rows = [
        (
            str(number),
            each.phase,
            names(each.kept),
            error_text(tuned, each.error),
            "" if tuned.metric == CHECK else "passes" if each.passed else "fails",
        )
        for number, each in enumerate(tuned.path, 1)
    ]
    return Table.of(("", "phase", "kept", "error", ""), rows, numbers=["error"])


def candidate_table(tuned: Tuned) -> Table:
    """Returns a row for each candidate, the one with the largest effect first."""
    rows = [
        (each.name, effect(each), tuned.types[each.name], f"{each.flops:,}", f"{each.bytes:,}")
        for each in by_effect(tuned.candidates)
    ]
    titles = ("candidate", "effect", "type", "FLOPs", "bytes")
    return Table.of(titles, rows, numbers=("effect", "FLOPs", "bytes"))


def names(kept: Iterable[str], most: int = 4) -> str:
    """Returns the first names of a set, and the number of others."""
    found = sorted(kept)
    shown_names = ", ".join(map(cut, found[:most])) or "nothing"
    return f"{shown_names} and {len(found) - most} more" if len(found) > most else shown_names


def effect(candidate: Candidate) -> str:
    """Returns a candidate's effect, or words if it has none."""
    if candidate.is_hard:
        return "out of range"
    if candidate.is_unseen and not candidate.score:
        return "no gradient"
    return "not known" if candidate.score is None else shown(candidate.score)


def rank(candidate: Candidate, candidates: Sequence[Candidate]) -> str:
    """Returns the rank of a candidate by effect; ``""`` if that is not known."""
    if candidate.score is None:
        return ""
    better = sum(
        (each.is_hard, each.score or 0.0) > (candidate.is_hard, candidate.score)
        for each in candidates
    )
    return str(better + 1)


def error_text(tuned: Tuned, value: float | None) -> str:
    """Returns an error, or the verdict of a check."""
    if tuned.metric != CHECK or value is None:
        return shown(value)
    return "passes" if value == 0 else "fails"


def shown(value: float | None) -> str:
    """Returns an error with three digits."""
    if value is None:
        return "not tried"
    return "not finite" if math.isinf(value) else f"{value:.3g}"


# --- files -------------------------------------------------------------------------------------------


def html_page(tuned: Tuned) -> str:
    """Returns the page."""
    details = "".join(
        f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(content)}</pre></details>"
        for name, content in files(tuned).items()
        if name != "widest.txt"
    )
    body = [
        notebook_part(tuned),
        section("lists", "Lists", details),
        section("search", "The search", path_table(tuned).to_html()),
        section("candidates", "Candidates by effect", candidate_table(tuned).to_html()),
    ]
    return page("hmpx tune", "What to keep in fp32", "\n".join(body))


def notebook_part(tuned: Tuned) -> str:
    """Returns the verdict and the kept candidates as HTML without scripts or styles."""
    table = kept_table(tuned).to_html() if tuned.kept else ""
    return f"<div>{paragraphs(verdict(tuned).splitlines())}{table}</div>"


def files(tuned: Tuned) -> dict[str, str]:
    """Maps each file's name to its content."""
    low = tuned.low_precision_type
    types = assigned(tuned.candidates, tuned.kept, low)
    source = policy_source(types, low)
    if "sections" in source:
        reasons = [
            _comment(f"{bare(name)}{' follows' * is_following(name)}: {_why(tuned, name)}")
            for name in sorted(tuned.kept)
        ]
        head = _head(tuned, policy="policy.yaml")
        return {"policy.yaml": "\n".join([head, *reasons, yaml.safe_dump(source, sort_keys=False)])}
    called = {op for op, _ in types}
    followed = {op for (op, _), each in types.items() if each == FOLLOWS}
    load = {} if low == "bfloat16" else {"low_precision_type": low}
    decided = yaml.safe_load(tuned.policy.to_yaml())
    found = {}
    for kind, name in FILE_NAMES.items():
        lines = decided.get(kind, [])
        ours = [line for line in lines if line.split()[0] in called]
        # Functions of other libraries come after all lists anyway.
        others = [line for line in lines if line.split()[0] not in called.union(of_libraries().ops)]
        parts = [_head(tuned, lists="DIRECTORY", **load)]
        unlisted: set[str] = set()
        if kind == "widest":
            ours = [line for line in ours if line in followed]
            unlisted = followed - set(ours)
        parts.append(_section("What the model calls.", _explained(tuned, ours)))
        said = _explained(tuned, sorted(unlisted), is_listed=False)
        parts.append(_section("In no list, so that it follows its inputs.", said))
        parts.append(_section("What it does not call: as by default.", others))
        found[name] = "\n".join(filter(None, parts))
    return found


def _head(tuned: Tuned, **chosen: str) -> str:
    """Returns how to convert as measured, with these arguments that choose the lists; and the result."""
    given = [f"{name}={_literal(value)}" for name, value in {**chosen, **tuned.conversion}.items()]
    use = f"hmpx.convert({', '.join(given)})"
    tolerance = "" if tuned.metric == CHECK else f"tolerance {shown(tuned.tolerance)}, "
    lines = [
        f"Written by hmpx.tune {__version__}. Use: {use}",
        f"{tuned.metric}: {error_text(tuned, tuned.error)} with {len(tuned.kept)} kept out of "
        f"{tuned.low_precision_type}, {error_text(tuned, tuned.all_low_error)} with none; "
        f"{tolerance}{tuned.evaluations} evaluations.",
    ]
    if not tuned.is_complete:
        lines.append("The search was ended early: some of these may not be needed.")
    return "\n".join(map(_comment, lines))


def _literal(value: Any) -> str:
    """Returns an argument of `convert` as code: a plain value, a set of these, or a format's name."""
    if isinstance(value, set):
        return "{" + ", ".join(map(_literal, sorted(value))) + "}"
    return repr(value) if isinstance(value, bool) else json.dumps(long_name(value))


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join(["", _comment(title), *lines, ""]) if lines else ""


def _explained(tuned: Tuned, lines: Iterable[str], *, is_listed: bool = True) -> list[str]:
    """Returns the lines of a list with comments on their candidates."""
    kept = {bare(name): name for name in tuned.kept}
    found: list[str] = []
    for line in lines:
        op = line.split()[0].removeprefix("-")
        for each in tuned.candidates:
            if each.op == op and (each.name in kept or each.score is not None):
                said = f"effect {effect(each)}"
                if each.name in kept:
                    said = _why(tuned, kept[each.name])
                is_clear = is_listed and each.name == op
                found.append(_comment(said if is_clear else f"{each.name}: {said}"))
        if is_listed:
            found.append(line)
    return found


def _why(tuned: Tuned, name: str) -> str:
    """Returns the reason to keep a candidate: its effect, and the error with and without it."""
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
