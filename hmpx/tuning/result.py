"""The result of a search: the set, the policy and the evidence; as text, as lists with reasons, as a page."""

from __future__ import annotations

import html
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import yaml

from ..errors import OptionError, brief, cut, lined, short
from ..files import make_directory
from ..policy import FILE_NAMES, OPTIONS_NAME, POLICY_NAME, Policy, of_libraries
from ..reports import ReportTable, Written, page, paragraphs, section, written
from ..tensors import long_name
from ..version import __version__
from .candidates import (
    FOLLOWS,
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
    types_of,
)
from .metrics import LEAST_BATCHES

#: The metric of a command, which only passes or fails.
CHECK: Final = "check"


@dataclass(frozen=True, repr=False)
class Tuned(Written):
    """The smallest set of ops to keep in fp32 that a search has found, and why.

    Attributes:
        kept: Ops that are not in ``low_precision_type``: by name, or ``"module:op"``.
            ``"add=follows"`` is in low precision only if all its inputs are. With ``by="module"`` a
            name alone stands for all modules that are not candidates themselves.
        error: The error with these in fp32: the largest of ``batches``; from five batches on the limit
            for 95 % of further ones.
        all_low_error: The error with nothing in fp32.
        fresh_error: The largest error on unseen batches; None without any.
        tolerance: The largest error allowed.
        noise: The error of fp32 against itself.
        metric: Name of the metric.
        batches: Number of batches that ``error`` is of; 0 with ``measure`` and for a command.
        low_precision_type: Name of the type of all other ops.
        evaluations: Number of sets evaluated.
        is_complete: Whether no op can be removed from the set. If not, it is the best so far.
        stopped_by: Why it ended early: ``"budget"``, ``"interrupt"``, ``"fresh inputs"`` (smaller
            sets failed on them), or ``""``.
        seen: Low-precision shares of the candidates that may follow their inputs.
        searched: The smaller tolerance after a set failed on fresh inputs; else None.
        path: The evaluations, in order.
        candidates: All ops that could be kept.
        conversion: Arguments of `hmpx.convert` in the search, without the policy. Empty for a
            command, which decides itself.
        about: See [results](#results).

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
    batches: int = 0
    seen: Mapping[str, LowShares] = field(default_factory=dict, repr=False)
    conversion: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def keep_fp32(self) -> Kept:
        """Ops kept in fp32 throughout, by name, or ``"module:op"``."""
        return self.kept - {*filter(is_following, self.kept)}

    @property
    def follows(self) -> Kept:
        """Ops that are in low precision only if all their inputs are."""
        return frozenset(map(bare, filter(is_following, self.kept)))

    @property
    def types(self) -> Mapping[str, str]:
        """The type of each candidate, by name; ``"follows"`` for one that follows its inputs."""
        return types_of(self.candidates, self.kept, self.low_precision_type)

    @property
    def policy(self) -> Policy:
        """The policy that keeps these in fp32."""
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
        """Writes lists, or a policy file where modules differ, and reports.

        Args:
            directory: The directory, created if missing.

        Returns:
            The paths: ``bf16.txt``, ``fp32.txt``, ``widest.txt`` and ``options.yaml``, all of which
            ``convert(lists=directory)`` reads, or ``policy.yaml`` for ``convert(policy=...)``, whose first
            line holds the whole call, with `conversion`; ``report.txt`` and ``report.html``.

        Raises:
            OptionError: They can't be written, or the directory holds a file of another kind of result.
        """
        files = {**_files(self), "report.txt": f"{self}\n", "report.html": self.to_html()}
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

    def _data(self) -> Mapping[str, Any]:
        names = [each.name for each in fields(self)]
        left_out = {"kept", "path", "candidates", "seen", "conversion"}
        path = [{**asdict(each), "kept": sorted(each.kept)} for each in self.path]
        return {
            "hmpx_tuned": 1,
            **{name: getattr(self, name) for name in names if name not in left_out},
            "kept": sorted(self.kept),
            "types": dict(self.types),
            "path": path,
        }

    def _table(self) -> ReportTable:
        rows = [
            (each.name, _effect(each), self.types[each.name], each.flops, each.bytes)
            for each in _by_effect(self.candidates)
        ]
        titles = ("candidate", "effect", "type", "FLOPs", "bytes")
        return ReportTable.of(titles, rows, numbers=("effect", "FLOPs", "bytes"))

    def _page(self) -> str:
        details = "".join(
            f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(content)}</pre></details>"
            for name, content in _files(self).items()
            if name != "widest.txt"
        )
        parts = [
            self._repr_html_(),
            section("lists", "Lists", details),
            section("search", "The search", _path_table(self).to_html()),
            section("candidates", "Candidates by effect", self._table().to_html()),
        ]
        return page("hmpx tune", "What to keep in fp32", "\n".join(parts), self.about)

    __repr__ = brief

    def __str__(self) -> str:
        tables = [_kept_table(self)] if self.kept else []
        parts = [lined(each.lines(sys.maxsize)) for each in (*tables, _path_table(self))]
        return "\n\n".join([_verdict(self), *parts])

    def _repr_html_(self) -> str:
        table = _kept_table(self).to_html() if self.kept else ""
        return f"<div>{paragraphs(_verdict(self).splitlines())}{table}</div>"


# --- text --------------------------------------------------------------------------------------------

#: Why a search ended early.
_STOPS: Final = {
    "budget": "the budget was spent",
    "interrupt": "it was interrupted",
    "fresh inputs": "each smaller set that it found failed on fresh inputs",
}


def _verdict(tuned: Tuned) -> str:
    count, low, is_check = len(tuned.kept), tuned.low_precision_type, tuned.metric == CHECK
    said = "Nothing has to stay"
    if count:
        said = f"{count} of {len(tuned.candidates)} candidates stay"
    said += f" in fp32 under {low}"
    if tuned.follows:
        said += f", {len(tuned.follows)} of them in calls that are given fp32"
    of_all = _error_text(tuned, tuned.all_low_error)
    if is_check:
        said += f": the check passes; all in {low} it {of_all}."
    else:
        said += (
            f": {tuned.metric} error {_shown(tuned.error)}, tolerance {_shown(tuned.tolerance)}, "
            f"all in {low} {of_all}."
        )
    flops, bytes_ = tuned.low_precision_flops_share, tuned.low_precision_bytes_share
    work = f"In {low}: {flops:.1%} of FLOPs, {bytes_:.1%} of bytes."
    lines = [said, f"{work} {tuned.evaluations} evaluations."]
    if tuned.batches >= LEAST_BATCHES:
        lines.append(
            f"The error is a limit for 95 % of further batches, from {tuned.batches} of them."
        )
    elif tuned.batches:
        worst = (
            "that of one batch" if tuned.batches == 1 else f"the worst of {tuned.batches} batches"
        )
        lines.append(
            f"The error is {worst}; a limit for others needs {LEAST_BATCHES}, besides those that only check."
        )
    if tuned.fresh_error is not None:
        lines.append(f"On inputs that the search has not seen: error {_shown(tuned.fresh_error)}.")
    if not tuned.is_complete:
        why = _STOPS[tuned.stopped_by]
        lines.append(f"The search did not end, since {why}: this is the best set so far.")
    elif count:
        failing = "the check fails" if is_check else "the error is too large"
        if tuned.searched is not None:
            failing += (
                f" for {_shown(tuned.searched)}, which was searched for since a set within the tolerance "
                "failed on fresh inputs"
            )
        lines.append(f"None of these can be taken out: without it {failing}.")
    return lined(lines)


def _kept_table(tuned: Tuned) -> ReportTable:
    members = {bare(name): name for name in tuned.kept}
    flops = max(1, sum(each.flops for each in tuned.candidates))
    count = max(1, sum(each.bytes for each in tuned.candidates))
    rows = []
    for each in _by_effect(tuned.candidates):
        if (name := members.get(each.name)) is None:
            continue
        low_flops, low_bytes = low_parts(each, tuned.kept, tuned.seen)
        rows.append(
            (
                cut(each.name) + " follows" * is_following(name),
                _effect(each),
                _rank(each, tuned.candidates),
                _error_text(tuned, tuned.error_without(name)),
                f"{each.flops * (1 - low_flops) / flops:.1%}",
                f"{each.bytes * (1 - low_bytes) / count:.1%}",
            )
        )
    titles = ("kept", "effect", "rank", "error without it", "FLOPs", "bytes")
    return ReportTable.of(titles, rows, numbers=titles[1:])


def _path_table(tuned: Tuned) -> ReportTable:
    rows = []
    for number, each in enumerate(tuned.path, 1):
        names, more = sorted(each.kept), len(each.kept) - 4
        named = ", ".join(map(cut, names[:4])) or "nothing"
        verdict = "" if tuned.metric == CHECK else "passes" if each.passed else "fails"
        kept = f"{named} and {more} more" if more > 0 else named
        rows.append((str(number), each.stage, kept, _error_text(tuned, each.error), verdict))
    return ReportTable.of(("", "stage", "kept", "error", ""), rows, numbers=["error"])


def _by_effect(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda each: (not each.is_hard, -(each.score or 0.0), each.name))


def _effect(candidate: Candidate) -> str:
    """Returns a candidate's effect, or words if it has none."""
    if candidate.is_hard:
        return "out of range"
    if candidate.is_unseen and not candidate.score:
        return "no gradient"
    return "not known" if candidate.score is None else _shown(candidate.score)


def _rank(candidate: Candidate, candidates: Iterable[Candidate]) -> str:
    if candidate.score is None:
        return ""
    own = candidate.is_hard, candidate.score
    return str(1 + sum((each.is_hard, each.score or 0.0) > own for each in candidates))


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


def _files(tuned: Tuned) -> dict[str, str]:
    """Returns name -> content of the lists, or of the policy file where modules differ."""
    low = tuned.low_precision_type
    types = assigned(tuned.candidates, tuned.kept, low)
    source = policy_source(types, low)
    if "sections" in source:
        lines = [_head(tuned, policy=POLICY_NAME, **tuned.conversion)]
        for name in sorted(tuned.kept):
            said = f"{bare(name)}{' follows' * is_following(name)}: {_why(tuned, name)}"
            lines.append(_comment(said))
        return {POLICY_NAME: "\n".join([*lines, yaml.safe_dump(source, sort_keys=False)])}
    called = {op for op, _ in types}
    followed = {op for (op, _), each in types.items() if each == FOLLOWS}
    # Functions of other libraries come after all lists anyway.
    known = called.union(of_libraries().ops)
    decided = yaml.safe_load(tuned.policy.to_yaml())
    found = {}
    for kind, name in FILE_NAMES.items():
        ours: list[str] = []
        unlisted: list[str] = []
        others: list[str] = []
        wanted = followed if kind == "widest" else called
        listed = {line.split()[0]: line for line in decided.get(kind, [])}
        for op, line in listed.items():
            if op in wanted:
                ours += [*_reasons(tuned, op), line]
            elif op not in known:
                others.append(line)
        if kind == "widest":
            for op in sorted(followed - listed.keys()):
                unlisted += _reasons(tuned, op, is_named=True)
        content = [_head(tuned, lists="DIRECTORY")]
        for title, part in (
            ("What the model calls.", ours),
            ("In no list, so that it follows its inputs.", unlisted),
            ("What it does not call: as by default.", others),
        ):
            content += ["", _comment(title), *part, ""] if part else []
        found[name] = "\n".join(content)
    options = {name: _plain(value) for name, value in tuned.conversion.items()}
    if low != "bfloat16":
        options["low_precision_type"] = low
    if options:
        found[OPTIONS_NAME] = yaml.safe_dump(options)
    return found


def _head(tuned: Tuned, **chosen: Any) -> str:
    """Returns how to convert as measured, with these arguments; and the result."""
    given = ", ".join(f"{name}={_literal(value)}" for name, value in chosen.items())
    tolerance = "" if tuned.metric == CHECK else f"tolerance {_shown(tuned.tolerance)}, "
    lines = [
        f"Written by hmpx.tune {__version__}. Use: hmpx.convert({given})",
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
    plain = _plain(value)
    if isinstance(plain, list):
        return "{" + ", ".join(map(json.dumps, plain)) + "}"
    return repr(plain) if isinstance(plain, bool) else json.dumps(plain)


def _reasons(tuned: Tuned, op: str, *, is_named: bool = False) -> Iterator[str]:
    """Yields a comment for each candidate of an op; ``is_named`` is whether all say of which one."""
    kept = {bare(name): name for name in tuned.kept}
    for each in tuned.candidates:
        if each.op == op and (each.name in kept or each.score is not None):
            name = kept.get(each.name)
            said = f"effect {_effect(each)}" if name is None else _why(tuned, name)
            is_clear = each.name == op and not is_named
            yield _comment(said if is_clear else f"{each.name}: {said}")


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
