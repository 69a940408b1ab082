"""One name for one thing: the classes of hmpx, and the nouns in docs/layout.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import hmpx

ROOT = Path(hmpx.__file__).parent
MOST = 45


def packages_by_class() -> dict[str, set[str]]:
    """Returns class -> the packages that define one of that name, private or not."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].add(path.relative_to(ROOT).parts[0])
    return found


def nouns() -> dict[str, list[str]]:
    """Returns noun -> the names that its thing does not have."""
    text = (ROOT.parent / "docs" / "layout.md").read_text("utf-8").partition("## The nouns")[2]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    return {noun: re.findall(r"`(\w+)`", others) for noun, others in rows}


def test_no_class_has_the_name_of_one_in_another_package() -> None:
    shared = {name: where for name, where in packages_by_class().items() if len(where) > 1}
    assert not shared


def test_nouns_are_few_and_name_one_class() -> None:
    defined = packages_by_class()
    found = nouns()
    assert 30 <= len(found) <= MOST
    assert {noun for noun in found if noun not in defined} == set()


def test_no_class_has_a_synonym_of_a_noun() -> None:
    defined = packages_by_class()
    assert {name for others in nouns().values() for name in others if name in defined} == set()
