"""Findings of `lint`, and their formats: text, JSON, SARIF, GitHub annotations."""

from __future__ import annotations

import json
import linecache
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ..errors import fielded
from ..places import located
from ..reports import Column, ReportTable, clean, exponential, page, paragraphs, table_section
from ..reports import count as count_of
from ..version import __version__

#: An effect must be larger, since less harms nobody, and that many times the remedy's.
LEAST: Final = 0.01
TIMES: Final = 4.0
#: Larger errors are of results that are almost zero.
MOST: Final = 1000.0

#: Code -> its name, and what it finds.
RULES: Final = {
    "HP101": ("late upcast", "an fp32 op on values that were rounded before"),
    "HP102": ("rounded integers", "whole numbers beyond what the low type counts"),
    "HP103": ("cancellation", "a difference much smaller than its rounded inputs"),
    "HP104": ("long sum", "more terms than the type that adds them holds"),
    "HP105": ("silent fp32", "a low stream that a smaller fp32 tensor made fp32"),
    "HP106": ("useless island", "an fp32 op between two roundings that gives the low op's bits"),
    "HP107": ("stuck weights", "updates too small for low-precision parameters"),
    "HP108": ("mixed siblings", "inputs of one kind in two dtypes"),
    "HP109": ("range", "values near the largest or below the least normal number"),
    "HP110": ("unscaled fp16", "a backward through float16 without a loss scaler"),
    "HP111": ("made low", "fp32 tensors whose values were rounded when they were made"),
}


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        code: ``"HP101"``.
        op: Op name; the tensor's name for parameters.
        module: Qualified name of the module with the largest effect; ``""`` for none.
        location: ``"train.py:40"``; ``""`` for tensors by name.
        evidence: The values that prove it.
        effect: Relative error of the call, or the share of values or bytes that it costs.
        remedied: The same with the remedy; None where it was not tried.
        remedy: A line of a list or policy, or what to change in the program.
        calls: Number of calls.

    Example:
        >>> with hmpx.lint() as findings:
        ...     t = torch.arange(1000).to(torch.bfloat16)
        >>> findings.findings[0].name
        'rounded integers'
    """

    code: str
    op: str
    module: str
    location: str
    evidence: str
    effect: float
    remedied: float | None
    remedy: str
    calls: int = 1

    __repr__ = fielded

    @property
    def name(self) -> str:
        """``"late upcast"``."""
        return RULES[self.code][0]

    def __str__(self) -> str:
        where = located(self.location) or self.module or self.op
        inside = f" in {self.module}" if self.module else ""
        inside += f" ({self.calls:,} calls)" if self.calls > 1 else ""
        effect = f"{self.effect:.2g}" if self.effect < MOST else f"over {MOST:,.0f}"
        tried = "" if self.remedied is None else f"; {self.remedied:.2g} with: {self.remedy}"
        hint = f"; remedy: {self.remedy}" if self.remedied is None and self.remedy else tried
        return (
            f"{where}: {self.code} {self.name}: {self.op}{inside}: {self.evidence}; "
            f"effect {effect}{hint}"
        )

    @property
    def key(self) -> str:
        """Identifies it in a baseline: without line numbers, which edits move."""
        return f"{self.code} {self.op} {self.module} {_file(self.location)}".strip()


def _file(location: str) -> str:
    return located(location).rpartition(":")[0]


_IGNORED: Final = re.compile(r"#\s*hmpx:\s*ignore(?:\[([A-Z0-9, ]+)\])?")


def function_of(location: str) -> tuple[str, int]:
    """Returns the file and the line where the function begins that holds a line."""
    path, _, line = location.rpartition(":")
    lines = linecache.getlines(path)[: int(line)] if line.isdigit() else []
    starts = [n for n, text in enumerate(lines) if text.lstrip().startswith(("def ", "async def "))]
    return path, max(starts, default=-1)


def is_ignored(finding: Finding) -> bool:
    """Whether the program's line says ``# hmpx: ignore[HP103]``, or ``# hmpx: ignore`` for all codes."""
    path, _, line = finding.location.rpartition(":")
    found = _IGNORED.search(linecache.getline(path, int(line)) if line.isdigit() else "")
    return found is not None and (
        found[1] is None or finding.code in [each.strip() for each in found[1].split(",")]
    )


def as_json(findings: Iterable[Finding]) -> str:
    """Returns a JSON list of objects with the fields of `Finding`."""
    return json.dumps([asdict(each) for each in findings], indent=2)


def findings_page(findings: Sequence[Finding], about: Mapping[str, str]) -> str:
    """Returns a page: the findings, and what the codes among them mean."""
    count = len(findings)
    codes = dict.fromkeys(each.code for each in findings)
    meanings = [f"{code} {RULES[code][0]}: {RULES[code][1]}" for code in codes]
    note = (
        "Effect: the relative error of the call, or the share of values or bytes that it costs. With the remedy: the "
        "same, where it was tried. A line of the program is left out by # hmpx: ignore[CODE] on it."
    )
    verdict = f"{count} finding{'s' * (count != 1)}" if count else "no findings"
    parts = [
        paragraphs([verdict], "verdict"),
        paragraphs(meanings),
        table_section(
            "findings", "Findings, the largest effect of a code first", paragraphs([note], "note")
        ),
    ]
    tables = {"findings": _table(findings)}
    return page(
        "hmpx lint", "Calls that lose precision or time", "\n".join(parts), about, tables=tables
    )


def _table(findings: Sequence[Finding]) -> ReportTable:
    tried = [math.nan if each.remedied is None else each.remedied for each in findings]
    texts = {
        "code": [f"{each.code} {each.name}" for each in findings],
        "op": [each.op for each in findings],
        "module": [each.module for each in findings],
        "line": [located(each.location) for each in findings],
        "evidence": [each.evidence for each in findings],
        "remedy": [each.remedy for each in findings],
    }
    columns = [Column(title, [*map(clean, of)], is_number=False) for title, of in texts.items()]
    columns += [
        Column("calls", [each.calls for each in findings], count_of),
        Column("effect", [each.effect for each in findings], exponential),
        Column(
            "with the remedy", tried, lambda each: "" if math.isnan(each) else exponential(each)
        ),
    ]
    return ReportTable(columns)


def as_github(findings: Iterable[Finding]) -> str:
    """Returns a workflow command for each finding, which GitHub shows at its line."""
    lines = []
    for each in findings:
        path, _, line = located(each.location).rpartition(":")
        place = f" file={path},line={line}," if path else " "
        message = str(each).replace("%", "%25").replace("\n", "%0A")
        lines.append(f"::warning{place}title={each.code} {each.name}::{message}")
    return "\n".join(lines)


def as_sarif(findings: Iterable[Finding]) -> str:
    """Returns SARIF 2.1.0."""
    driver = {
        "name": "hmpx",
        "version": __version__,
        "rules": [
            {"id": code, "name": name, "shortDescription": {"text": text}}
            for code, (name, text) in RULES.items()
        ],
    }
    results = [
        {"ruleId": each.code, "level": "warning", "message": {"text": str(each)}, **_region(each)}
        for each in findings
    ]
    run = {"tool": {"driver": driver}, "results": results}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2)


def _region(finding: Finding) -> dict[str, Any]:
    path, _, line = located(finding.location).rpartition(":")
    if not path:
        return {}
    region = {"artifactLocation": {"uri": path}, "region": {"startLine": int(line)}}
    return {"locations": [{"physicalLocation": region}]}
