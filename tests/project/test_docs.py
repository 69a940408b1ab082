"""The tables of what hmpx does and works with: each line names a test that exists. Links lead somewhere. The wording."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import hmpx
import hmpx.legalize

from . import markdown
from .markdown import DOCUMENTS, ROOT

TEST_LINK = re.compile(r"\[(\w+)::(\w+)\]\((?:\.\./)+(tests/\w+/\w+\.py)\)")

#: `[text](target)`, and images.
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=markdown.name)
def test_tests_that_are_named_exist(document: Path) -> None:
    """The file, and the function in it."""
    faults = []
    for module, test, file in TEST_LINK.findall(document.read_text("utf-8")):
        path = ROOT / file
        if path.stem != module or f"\ndef {test}(" not in path.read_text("utf-8"):
            faults.append(f"{module}::{test}")
    assert not faults


@pytest.mark.parametrize(
    ("name", "count"), [("evidence/works_with", 60), ("evidence/semantics", 80)]
)
def test_each_line_links_to_its_test(name: str, count: int) -> None:
    """In its last column."""
    text = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    heads = ("| what |", "| rule |", "|---")
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("| ") and "**" not in line and not line.startswith(heads)
    ]
    assert [row for row in rows if not TEST_LINK.search(row.rsplit(" | ", 1)[1])] == []
    assert len(rows) >= count
    if name == "evidence/works_with":
        assert {row.split(" | ")[1] for row in rows} <= {"yes", "note", "no", "untried"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=markdown.name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    """Those inside of the repository; a heading is spelled as GitHub and the site spell it."""
    faults = []
    for target in LINK.findall(without_code(document.read_text("utf-8"))):
        if re.match(r"\w+:", target):
            continue
        file, _, heading = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        is_there = path.exists() and path.is_relative_to(ROOT)
        if not is_there or (heading and heading not in headings(path)):
            faults.append(target)
    assert not faults


def headings(document: Path) -> set[str]:
    lines = re.findall(r"^#+ (.*)$", without_code(document.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def test_the_picture_of_the_rooms_is_that_of_the_layers() -> None:
    """Which import-linter checks; `python scripts/rooms_picture.py` draws it."""
    drawn = runpy.run_path(str(ROOT / "scripts" / "rooms_picture.py"))
    assert drawn["PICTURE"].read_text("utf-8") == drawn["picture"]()


def test_the_api_page_has_the_menu() -> None:
    """Each name once."""
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    listed = re.findall(r"^### (\S+)$", text, re.MULTILINE)
    rows = ("Row", "ComparedSite", "ComparedGradient", "RunDiffRow")
    assert {each.rpartition(".")[2] for each in listed} > {*rows}
    listed = sorted(each for each in listed if each.rpartition(".")[2] not in rows)
    constants = {"ALLOW", "DENY", "FOLLOW", "formats"}
    expected = [f"hmpx.{name}" for name in hmpx.__all__ if name not in constants]
    expected += [f"hmpx.formats.{name}" for name in hmpx.formats.__all__]
    expected += [f"hmpx.legalize.{name}" for name in hmpx.legalize.__all__]
    assert listed == sorted(expected)
    assert all(f"`hmpx.{name}`" in text for name in constants)


@pytest.mark.parametrize(("file", "made"), [("PAGE", "page"), ("SIGNATURES", "signatures")])
def test_the_api_page_and_the_signatures_are_those_of_the_code(file: str, made: str) -> None:
    """`python scripts/api_page.py` writes both; a changed signature is a decision, not an accident."""
    script = runpy.run_path(str(ROOT / "scripts" / "api_page.py"))
    assert script[file].read_text("utf-8") == script[made]()


def test_signatures_hold_all_names_arguments_and_fields() -> None:
    """Of each kind of object."""
    lines = (ROOT / "tests" / "golden" / "signatures.txt").read_text("utf-8").splitlines()
    assert len(lines) == len(set(lines)) > 500
    assert {
        "hmpx.revert() -> None",
        "hmpx.expect(contract: str | os.PathLike[str] | Mapping[str, Any], *, mode: Mode = 'raise')",
        "hmpx.expect.of(model: Callable[..., object], inputs: Any) -> str",
        "class hmpx.OptionError(HmpxError, ValueError, TypeError)",
        "hmpx.Watch.first: Offence | None",
        "hmpx.reports.Row.location: str",
        "hmpx.CastPolicy: LOW, FP32, WIDEST, FOLLOW, FIRST, PASS",
    } <= set(lines)


def test_every_page_is_in_the_menu_of_the_site() -> None:
    """But evidence, and what contributors read."""
    menu = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"layout.md"}
    listed = re.findall(r"[\w/]+\.md", menu)
    assert set(listed) == pages | {"index.md"}
    assert len(listed) <= 24


WORDED = [*(ROOT / "hmpx").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
WORDED += [ROOT / "README.md", ROOT / "CHANGELOG.md"]


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
    found = [path for path in WORDED if re.search(pattern, path.read_text("utf-8"))]
    assert len(WORDED) > 100
    assert [path.relative_to(ROOT).as_posix() for path in found] == []
