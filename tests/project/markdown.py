"""The blocks of code in the documents of the project."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: What a reader meets; tables that programs write have no code to run but commands.
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text and line, and whether it follows the one before at once."""

    language: str
    text: str
    line: int
    follows: bool


def name(document: Path) -> str:
    """Returns the path in the repository."""
    return document.relative_to(ROOT).as_posix()


def blocks(document: Path) -> list[Block]:
    """Returns the blocks of a document, in their order."""
    return [*_blocks(document.read_text(encoding="utf-8"))]


def _blocks(text: str) -> Iterator[Block]:
    end = -1
    for match in _BLOCK.finditer(text):
        between = text[end : match.start()] if end >= 0 else "-"
        line = text.count("\n", 0, match.start()) + 2
        yield Block(match[2], textwrap.dedent(match[3]), line, not between.strip())
        end = match.end()
