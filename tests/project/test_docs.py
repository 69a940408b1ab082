"""The table of what hmpx works with: each line names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_examples_for_users_of_hmp_run() -> None:
    """As they are."""
    text = (ROOT / "docs" / "hmp.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})


def test_each_line_links_to_its_test() -> None:
    """The file and the function in it."""
    text = (ROOT / "docs" / "works_with.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "**" not in line][1:]
    faults = []
    for row in rows:
        link = re.search(r"\[(\w+)::(\w+)\]\(\.\./tests/(\w+/\w+)\.py\) \|$", row)
        if link is None:
            faults.append(row)
            continue
        module, test, file = link.groups()
        source = ROOT / "tests" / f"{file}.py"
        if module != Path(file).name or f"\ndef {test}(" not in source.read_text("utf-8"):
            faults.append(row)
        if row.split(" | ")[1] not in {"yes", "note", "no", "untried"}:
            faults.append(row)
    assert not faults
    assert len(rows) > 50
