"""What the README shows is what there is; that its code runs is tested with all documents'."""

from __future__ import annotations

import inspect
import re

import pytest

import hmpx
from hmpx import CastPolicy
from tests import forks

from . import markdown

README = (markdown.ROOT / "README.md").read_text(encoding="utf-8")

DOCUMENTS = [each for each in markdown.DOCUMENTS if "hmpx.convert(" in each.read_text("utf-8")]


def test_it_is_short() -> None:
    """What a newcomer reads in one go; the rest has pages of its own."""
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("document", DOCUMENTS, ids=markdown.name)
def test_the_options_shown_exist(document: markdown.Path) -> None:
    """Each call of convert, in code or in a sentence, is made of arguments that it has."""
    known = set(inspect.signature(hmpx.convert).parameters)
    calls = re.findall(
        r"hmpx\.convert\(([^()]*(?:\([^()]*\)[^()]*)*)\)", document.read_text("utf-8")
    )
    without_calls_inside = [re.sub(r"\([^()]*\)", "", call) for call in calls]
    used = {name for call in without_calls_inside for name in re.findall(r"(\w+)=", call)}
    assert used <= known


def test_the_table_of_policies_has_each() -> None:
    """In a row of its own."""
    (table,) = re.findall(r"^## The policies\n(.*?)^## ", README, flags=re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert sorted(rows) == sorted(policy.name for policy in CastPolicy)


def test_the_log_is_as_shown(tmp_path: markdown.Path) -> None:
    """Also where the example is a script, which a person has copied."""
    python, text, *_ = (
        b for b in markdown.blocks(markdown.ROOT / "README.md") if b.language != "sh"
    )
    (tmp_path / "example.py").write_text(python.text)
    run = forks.run("example.py", cwd=tmp_path)
    assert run.stdout == text.text
