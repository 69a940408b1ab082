"""The results file: one JSON line for each model and mode, the last one counts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Modes without hmpx stay valid when hmpx changes.
_WITHOUT_HMPX = ("fp32", "autocast")


def digest(*folders: str) -> str:
    """Returns a short digest of the files of these folders of the repository."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".txt", ".ini"}:
                found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]


def version(mode: str) -> str:
    """Returns what a line of this mode depends on, apart from the model."""
    return "" if mode.startswith(_WITHOUT_HMPX) else digest("hmpx", "lists")


class Results:
    """Lines by (library, model, mode)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: dict[tuple[str, str, str], dict[str, Any]] = {}
        if path.exists():
            for text in path.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                self.lines[line["library"], line["model"], line["mode"]] = line

    def add(self, line: dict[str, Any]) -> None:
        """Keeps a line, at once."""
        self.lines[line["library"], line["model"], line["mode"]] = line
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def is_known(self, library: str, model: str, mode: str, version: str) -> bool:
        """Returns whether there is a line of this version."""
        line = self.lines.get((library, model, mode))
        return line is not None and line["version"] == version
