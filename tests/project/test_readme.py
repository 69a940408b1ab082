"""What the README shows is what there is; that its code runs is tested with all documents'."""

from __future__ import annotations

import inspect
import itertools
import re
import shutil

import pytest

import hmpx
from hmpx import CastPolicy
from tests import forks

from . import markdown

README = (markdown.ROOT / "README.md").read_text(encoding="utf-8")

#: What documents take to be there.
FILES = markdown.ROOT / "tests" / "project" / "snippets" / "files"

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
    semantics = (markdown.ROOT / "docs" / "semantics.md").read_text("utf-8")
    (table,) = re.findall(r"^## The policies\n(.*?)^## ", semantics, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| \*\*`(\w+)`\*\* \|", table, flags=re.MULTILINE)
    assert sorted(rows) == sorted(policy.name for policy in CastPolicy)


def blocks_of_python() -> list[markdown.Block]:
    blocks = markdown.blocks(markdown.ROOT / "README.md")
    return [block for block in blocks if block.language == "python"]


def shown() -> list[tuple[markdown.Block, markdown.Block]]:
    blocks = markdown.blocks(markdown.ROOT / "README.md")
    pairs = itertools.pairwise(blocks)
    return [pair for pair in pairs if [each.language for each in pair] == ["python", "text"]]


@pytest.mark.parametrize(("python", "text"), shown())
def test_the_log_is_as_shown(
    python: markdown.Block, text: markdown.Block, tmp_path: markdown.Path
) -> None:
    """Also where the example is a script, which a person has copied."""
    (tmp_path / "example.py").write_text(python.text)
    run = forks.run("example.py", cwd=tmp_path)
    assert run.stdout == text.text


def test_two_examples_show_what_they_print() -> None:
    """A NaN and the log."""
    first, log = (text.text for _, text in shown())
    assert first.startswith("nan\n")
    assert "casting  linear" in log


def test_its_code_is_one_program(tmp_path: markdown.Path) -> None:
    """All blocks in their order, given nothing but the files of lists that they name."""
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    (tmp_path / "readme.py").write_text("\n".join(block.text for block in blocks_of_python()))
    run = forks.run("readme.py", cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_its_figures_of_speed_are_those_of_the_evidence() -> None:
    """Which names their sources, in comments that would make the README hard to read."""
    speed = (markdown.ROOT / "docs" / "evidence" / "speed.md").read_text("utf-8")
    said = [re.findall(r"^- .*", section(text), re.MULTILINE) for text in (README, speed)]
    assert len(said[0]) == 3
    assert said[0] == [re.sub(r"<!--.*?-->", "", line) for line in said[1]]
    assert "<!--" not in README


def section(text: str) -> str:
    """Returns the part of a document about speed, in short."""
    (found,) = re.findall(r"^## (?:Speed|In short)\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    return found
