"""The wording that CONTRIBUTING.md asks for, as far as a search can check it."""

from __future__ import annotations

import re

import pytest

from tests.project.markdown import ROOT

FILES = [*(ROOT / "hmpx").rglob("*.py"), *(ROOT / "docs").glob("*.md")]
FILES += [ROOT / "README.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize(
    "pattern",
    [
        r"\bReturns what\b",
        r"\bsuch that\b",
        r"\bby way of\b",
        r"\bthere and back\b",
        r"Knows neither",
        r"\banew\b",
        r"(?<![Tt]here )\b(?:is|are) no (?!longer|faster|slower|more|less|worse|better|such)",
    ],
)
def test_a_construction_is_not_used(pattern: str) -> None:
    """Each has a plainer word; a subject stands where "what" would."""
    found = [path for path in FILES if re.search(pattern, path.read_text("utf-8"))]
    assert len(FILES) > 100
    assert [path.relative_to(ROOT).as_posix() for path in found] == []
