"""Figures of speed and size in the documents are those of benchmarks/results: see scripts/figures.py."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


documents = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "figures.py")))
DOCUMENTS: list[Path] = documents.DOCUMENTS
SOURCES = sorted((ROOT / "hmpx").rglob("*.py"))

#: How much slower or faster something is, as a sentence says it.
COMPARISON = re.compile(
    rf"(?:{documents.FIGURE}|\b(?:ten|twenty|a hundred|a thousand))\s+times\s+(?:slower|faster|as\s+long)"
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_are_those_of_the_results(document: Path) -> None:
    """Those with a source, and those of the tables in docs/evidence/speed.md."""
    written = document.read_text("utf-8").splitlines()
    assert written == documents.updated(document).splitlines(), "run python scripts/figures.py"


@pytest.mark.parametrize(
    "document", DOCUMENTS + SOURCES, ids=lambda path: str(path.relative_to(ROOT))
)
def test_how_much_slower_something_is_is_said_with_its_source(document: Path) -> None:
    """Elsewhere it is said without a number."""
    text = document.read_text("utf-8")
    unsourced = documents.SOURCED.sub("", text)
    assert not COMPARISON.findall(unsourced)
