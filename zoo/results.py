"""The results file: one JSON line for each model, mode and seed, the last one counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .measuring import SEED

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


Key = tuple[str, str, str, int]


def key_of(line: Mapping[str, Any]) -> Key:
    """Returns a line's (library, model, mode, seed)."""
    return line["library"], line["model"], line["mode"], line.get("seed", SEED)


class Results:
    """Lines by (library, model, mode, seed)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: dict[Key, dict[str, Any]] = {}
        if path.exists():
            for text in path.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                self.lines[key_of(line)] = line

    def add(self, line: dict[str, Any]) -> None:
        """Keeps a line, at once."""
        self.lines[key_of(line)] = line
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def is_known(self, key: Key, version: str) -> bool:
        """Returns whether there is a line of this version."""
        return key in self.lines and self.lines[key]["version"] == version
