"""The result of a search: the set, the policy and the evidence; as text, as lists with reasons, as a page."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from ..errors import OptionError, brief, cut, lined, short
from ..files import make_directory
from ..policy import FILE_NAMES, OPTIONS_NAME, POLICY_NAME, Policy, of_libraries
from ..reports import ReportTable, page, paragraphs, section, written
from ..tensors import long_name
from ..version import __version__
from .candidates import (
    FOLLOWS,
    FP32,
    Candidate,
    Evaluation,
    Kept,
    LowShares,
    assigned,
    bare,
    is_following,
    low_parts,
    policy_of,
    policy_source,
    shares,
)

#: The metric of a command, which only passes or fails.
CHECK: Final = "check"


@dataclass(frozen=True)
class Tuned:
    """The smallest set of ops to keep in fp32 that a search has found, and why.

    Printing it shows the verdict, the kept ops with reasons, and the path of the search.

    Attributes:
        kept: Ops that are not in ``low_precision_type``: by name, or ``"module:op"``. ``"add=follows"`` is in
            low precision only if all its inputs are.
            Among modules, an op's name alone stands for the modules that are not candidates themselves;
            ``candidates`` lists what each name stands for.
        error: The error with these in fp32. With several batches, the limit for 95 % of further ones.
        all_low_error: The error with nothing in fp32.
        fresh_error: The largest error on batches that the search has not seen; None without such batches.
        tolerance: The largest error allowed.
        noise: The error of fp32 against itself.
        metric: Name of the metric.
        low_precision_type: Name of the type of all other ops.
        evaluations: Number of sets evaluated.
        is_complete: Whether the search finished: no op can be removed from the set. If not, the set is
            the best so far.
        stopped_by: Why it ended early: ``"budget"``, ``"interrupt"``, ``"fresh inputs"`` (each smaller set
            failed on them), or ``""``.
        seen: Low-precision shares of the candidates that may follow their inputs, with the set.
        searched: The smaller tolerance of the last search, after a set failed on fresh inputs; else None.
        path: The evaluations, in order.
        candidates: All ops that could be kept.
        conversion: Arguments of `hmpx.convert` with which the errors were measured, besides the policy: the
            device types, and options such as ``legalize``. Empty for a command, which decides itself.
        about: What it was measured with: command, date, device, versions.

    Example:
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.ones(2, 8)
        >>> best = hmpx.tune(model, x, tolerance=0.1, device_types={"cpu"}, progress=False)
        >>> best.keep_fp32, best.is_complete, best.low_precision_flops_share
        (frozenset(), True, 1.0)
        >>> with hmpx.convert(**best.lists):
        ...     model(x).dtype
        torch.bfloat16
    """

    kept: Kept
    error: float
    all_low_error: float
    fresh_error: float | None
    tolerance: float
    noise: float
    metric: str
    low_precision_type: str
    evaluations: int
    is_complete: bool
    stopped_by: str
    path: tuple[Evaluation, ...] = field(repr=False)
    candidates: tuple[Candidate, ...] = field(repr=False)
    searched: float | None = None
    seen: Mapping[str, LowShares] = field(default_factory=dict, repr=False)
    conversion: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def keep_fp32(self) -> Kept:
        """Ops kept in fp32 throughout, by name, or ``"module:op"``."""
        return frozenset(name for name in self.kept if bare(name) == name)

    @property
    def follows(self) -> Kept:
        """Ops that are in low precision only if all their inputs are, and else in fp32."""
        return frozenset(bare(name) for name in self.kept if is_following(name))

    @property
    def types(self) -> Mapping[str, str]:
        """The type of each candidate, by name; ``"follows"`` for one that follows its inputs."""
        low = dict.fromkeys((each.name for each in self.candidates), self.low_precision_type)
        return low | {bare(each): FOLLOWS if is_following(each) else FP32 for each in self.kept}

    @property
    def policy(self) -> Policy:
        """The policy that keeps these in fp32; ops that the model does not call keep their default."""
        types = assigned(self.candidates, self.kept, self.low_precision_type)
        return policy_of(types, self.low_precision_type)

    @property
    def lists(self) -> Mapping[str, Any]:
        """All arguments of the measured conversion: ``hmpx.convert(**best.lists)``."""
        return {"policy": self.policy, **self.conversion}

    @property
    def low_precision_flops_share(self) -> float:
        """The share of the model's floating-point operations in low precision, from 0 to 1."""
        return shares(self.candidates, self.kept, self.seen)[0]

    @property
    def low_precision_bytes_share(self) -> float:
        """The share of the bytes that ops read and write, as counted in fp32, in low precision."""
        return shares(self.candidates, self.kept, self.seen)[1]

    def error_without(self, name: str) -> float | None:
        """Returns the error with the set but without ``name``; None if that was not evaluated."""
        without = self.kept - {name}
        found = [e.error for e in self.path if e.kept == without and e.stage != "fresh inputs"]
        return found[-1] if found else None

    def write(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Writes lists (or a policy file where modules differ) with reasons in comments, and reports.

        Args:
            directory: The directory, created if missing.

        Returns:
            The paths: ``bf16.txt``, ``fp32.txt``, ``widest.txt`` and ``options.yaml``, all of which
            ``convert(lists=directory)`` reads, or ``policy.yaml`` for ``convert(policy=...)``, whose first
            line holds the whole call, with `conversion`; ``report.txt`` and ``report.html``.

        Raises:
            OptionError: They can't be written, or the directory holds a file of another kind of result.
        """
        files = {
            **_files(self),
            "report.txt": f"{self}\n",
            "report.html": self.to_html(),
        }
        folder = make_directory(directory)
        others = {*FILE_NAMES.values(), OPTIONS_NAME, POLICY_NAME} - files.keys()
        if found := sorted(name for name in others if (folder / name).exists()):
            raise OptionError(
                f"{short(os.fspath(folder))} holds {found[0]} of another result, which convert would read; give "
                "another directory, or delete it"
            )
        for name, content in files.items():
            written(content, folder / name)
        return [folder / name for name in files]

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns a page that needs no network, and writes it to ``path`` if given.

        Raises:
            OptionError: It can't be written.
        """
        return written(_html_page(self), path)

    __repr__ = brief

    def __str__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        return _notebook_part(self)


# --- text --------------------------------------------------------------------------------------------

#: Text is not cut to the width of a terminal.
_WIDE: Final = 10_000


def _text(tuned: Tuned) -> str:
    tables = [_kept_table(tuned)] if tuned.kept else []
    parts = [lined(each.lines(_WIDE)) for each in (*tables, _path_table(tuned))]
    return "\n\n".join([_verdict(tuned), *parts])


def _verdict(tuned: Tuned) -> str:
    count, low, is_check = len(tuned.kept), tuned.low_precision_type, tuned.metric == CHECK
    said = (
        f"{count} of {len(tuned.candidates)} candidates stay in fp32 under {low}"
        if count
        else f"Nothing has to stay in fp32 under {low}"
    )
    if tuned.follows:
        said += f", {len(tuned.follows)} of them in calls that are given fp32"
    if is_check:
        of_all = _error_text(tuned, tuned.all_low_error)
        lines = [f"{said}: the check passes; all in {low} it {of_all}."]
    else:
        lines = [
            f"{said}: {tuned.metric} error {_shown(tuned.error)}, tolerance {_shown(tuned.tolerance)}, "
            f"all in {low} {_shown(tuned.all_low_error)}."
        ]
    lines.append(f"{_shares(tuned)}. {tuned.evaluations} evaluations.")
    if tuned.fresh_error is not None:
        lines.append(f"On inputs that the search has not seen: error {_shown(tuned.fresh_error)}.")
    if tuned.is_complete:
        failing = "the check fails" if is_check else "the error is too large"
        if tuned.searched is not None:
            failing += (
                f" for {_shown(tuned.searched)}, which was searched for since a set within the tolerance "
                "failed on fresh inputs"
            )
        if count:
            lines.append(f"None of these can be taken out: without it {failing}.")
    else:
        why = {
            "budget": "the budget was spent",
            "interrupt": "it was interrupted",
            "fresh inputs": "each smaller set that it found failed on fresh inputs",
        }[tuned.stopped_by]
        lines.append(f"The search did not end, since {why}: this is the best set so far.")
    return lined(lines)


def _shares(tuned: Tuned) -> str:
    """Returns the shares of FLOPs and bytes in low precision."""
    flops, count = tuned.low_precision_flops_share, tuned.low_precision_bytes_share
    return f"In {tuned.low_precision_type}: {flops:.1%} of FLOPs, {count:.1%} of bytes"


def _by_effect(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda each: (not each.is_hard, -(each.score or 0.0), each.name))


def _kept_table(tuned: Tuned) -> ReportTable:
    members = {bare(name): name for name in tuned.kept}
    flops = max(1, sum(each.flops for each in tuned.candidates))
    count = max(1, sum(each.bytes for each in tuned.candidates))
    rows = []
    for each in _by_effect(each for each in tuned.candidates if each.name in members):
        name = members[each.name]
        low = low_parts(each, tuned.kept, tuned.seen) if is_following(name) else (0.0, 0.0)
        rows.append(
            (
                f"{cut(each.name)} follows" if is_following(name) else cut(name),
                _effect(each),
                _rank(each, tuned.candidates),
                _error_text(tuned, tuned.error_without(name)),
                f"{each.flops * (1 - low[0]) / flops:.1%}",
                f"{each.bytes * (1 - low[1]) / count:.1%}",
            )
        )
    titles = ("kept", "effect", "rank", "error without it", "FLOPs", "bytes")
    return ReportTable.of(titles, rows, numbers=titles[1:])


def _path_table(tuned: Tuned) -> ReportTable:
    rows = [
        (
            str(number),
            each.stage,
            _names(each.kept),
            _error_text(tuned, each.error),
            "" if tuned.metric == CHECK else "passes" if each.passed else "fails",
        )
        for number, each in enumerate(tuned.path, 1)
    ]
    return ReportTable.of(("", "stage", "kept", "error", ""), rows, numbers=["error"])


def _candidate_table(tuned: Tuned) -> ReportTable:
    rows = [
        (each.name, _effect(each), tuned.types[each.name], f"{each.flops:,}", f"{each.bytes:,}")
        for each in _by_effect(tuned.candidates)
    ]
    titles = ("candidate", "effect", "type", "FLOPs", "bytes")
    return ReportTable.of(titles, rows, numbers=("effect", "FLOPs", "bytes"))


def _names(kept: Iterable[str], most: int = 4) -> str:
    """Returns the first names of a set, and the number of others."""
    found = sorted(kept)
    shown_names = ", ".join(map(cut, found[:most])) or "nothing"
    return f"{shown_names} and {len(found) - most} more" if len(found) > most else shown_names


def _effect(candidate: Candidate) -> str:
    """Returns a candidate's effect, or words if it has none."""
    if candidate.is_hard:
        return "out of range"
    if candidate.is_unseen and not candidate.score:
        return "no gradient"
    return "not known" if candidate.score is None else _shown(candidate.score)


def _rank(candidate: Candidate, candidates: Sequence[Candidate]) -> str:
    if candidate.score is None:
        return ""
    better = sum(
        (each.is_hard, each.score or 0.0) > (candidate.is_hard, candidate.score)
        for each in candidates
    )
    return str(better + 1)


def _error_text(tuned: Tuned, value: float | None) -> str:
    """Returns an error, or the verdict of a check."""
    if tuned.metric != CHECK or value is None:
        return _shown(value)
    return "passes" if value == 0 else "fails"


def _shown(value: float | None) -> str:
    if value is None:
        return "not tried"
    return "not finite" if math.isinf(value) else f"{value:.3g}"


# --- files -------------------------------------------------------------------------------------------


def _html_page(tuned: Tuned) -> str:
    details = "".join(
        f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(content)}</pre></details>"
        for name, content in _files(tuned).items()
        if name != "widest.txt"
    )
    body = [
        _notebook_part(tuned),
        section("lists", "Lists", details),
        section("search", "The search", _path_table(tuned).to_html()),
        section("candidates", "Candidates by effect", _candidate_table(tuned).to_html()),
    ]
    return page("hmpx tune", "What to keep in fp32", "\n".join(body), tuned.about)


def _notebook_part(tuned: Tuned) -> str:
    """Returns the verdict and the kept candidates as HTML without scripts or styles."""
    table = _kept_table(tuned).to_html() if tuned.kept else ""
    return f"<div>{paragraphs(_verdict(tuned).splitlines())}{table}</div>"


def _files(tuned: Tuned) -> dict[str, str]:
    low = tuned.low_precision_type
    types = assigned(tuned.candidates, tuned.kept, low)
    source = policy_source(types, low)
    if "sections" in source:
        reasons = [
            _comment(f"{bare(name)}{' follows' * is_following(name)}: {_why(tuned, name)}")
            for name in sorted(tuned.kept)
        ]
        head = _head(tuned, policy=POLICY_NAME, **tuned.conversion)
        return {POLICY_NAME: "\n".join([head, *reasons, yaml.safe_dump(source, sort_keys=False)])}
    called = {op for op, _ in types}
    followed = {op for (op, _), each in types.items() if each == FOLLOWS}
    options = {name: _plain(value) for name, value in tuned.conversion.items()}
    if low != "bfloat16":
        options["low_precision_type"] = low
    decided = yaml.safe_load(tuned.policy.to_yaml())
    found = {}
    for kind, name in FILE_NAMES.items():
        lines = decided.get(kind, [])
        ours = [line for line in lines if line.split()[0] in called]
        # Functions of other libraries come after all lists anyway.
        others = [line for line in lines if line.split()[0] not in called.union(of_libraries().ops)]
        parts = [_head(tuned, lists="DIRECTORY")]
        unlisted: set[str] = set()
        if kind == "widest":
            ours = [line for line in ours if line in followed]
            unlisted = followed - set(ours)
        parts.append(_section("What the model calls.", _explained(tuned, ours)))
        said = _explained(tuned, sorted(unlisted), is_listed=False)
        parts.append(_section("In no list, so that it follows its inputs.", said))
        parts.append(_section("What it does not call: as by default.", others))
        found[name] = "\n".join(filter(None, parts))
    if options:
        found[OPTIONS_NAME] = yaml.safe_dump(options)
    return found


def _head(tuned: Tuned, **chosen: Any) -> str:
    """Returns how to convert as measured, with these arguments; and the result."""
    given = [f"{name}={_literal(value)}" for name, value in chosen.items()]
    use = f"hmpx.convert({', '.join(given)})"
    tolerance = "" if tuned.metric == CHECK else f"tolerance {_shown(tuned.tolerance)}, "
    lines = [
        f"Written by hmpx.tune {__version__}. Use: {use}",
        f"{tuned.metric}: {_error_text(tuned, tuned.error)} with {len(tuned.kept)} kept out of "
        f"{tuned.low_precision_type}, {_error_text(tuned, tuned.all_low_error)} with none; "
        f"{tolerance}{tuned.evaluations} evaluations.",
    ]
    if not tuned.is_complete:
        lines.append("The search was ended early: some of these may not be needed.")
    return "\n".join(map(_comment, lines))


def _plain(value: Any) -> Any:
    """Returns an argument of `convert` as YAML has it."""
    if isinstance(value, set):
        return sorted(value)
    return value if isinstance(value, bool) else long_name(value)


def _literal(value: Any) -> str:
    """Returns an argument of `convert` as code: a plain value, a set of these, or a format's name."""
    if isinstance(value, set):
        return "{" + ", ".join(map(_literal, sorted(value))) + "}"
    return repr(value) if isinstance(value, bool) else json.dumps(long_name(value))


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join(["", _comment(title), *lines, ""]) if lines else ""


def _explained(tuned: Tuned, lines: Iterable[str], *, is_listed: bool = True) -> list[str]:
    kept = {bare(name): name for name in tuned.kept}
    found: list[str] = []
    for line in lines:
        op = line.split()[0].removeprefix("-")
        for each in tuned.candidates:
            if each.op == op and (each.name in kept or each.score is not None):
                said = f"effect {_effect(each)}"
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
    place = _rank(candidate, tuned.candidates)
    ranked = f", rank {place} of {len(tuned.candidates)}" if place else ""
    measured = "the check" if tuned.metric == CHECK else "error"
    return (
        f"effect {_effect(candidate)}{ranked}; {measured} {_error_text(tuned, tuned.error)} with it, "
        f"{_error_text(tuned, tuned.error_without(name))} without"
    )


def _comment(line: str) -> str:
    return f"# {' '.join(line.split())}"
