"""The parts of a policy file, read from the nodes of YAML or JSON: op lists and sections."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from ...errors import OpListError, PolicyFileError, shown, suggestion
from ...number_formats import OVERFLOWS, ROUNDING_MODES
from ..conditions import CONDITIONS, contradiction_of
from ..decisions import FormatOptions
from ..lists.kinds import KEYS
from ..lists.op_list import NOTHING, Entry, OpList
from ..lists.sets import from_lines, set_names
from .node_reader import NodeReader
from .sources import SectionSource


def format_options(found: Mapping[str, Any]) -> FormatOptions:
    """Returns what the keys of `PolicyReader.of_formats` say, among what was found in a file."""
    return FormatOptions(*[found.get(each.name) for each in fields(FormatOptions)])


class PolicyReader(NodeReader):
    """Makes lists and sections of the nodes of one file."""

    def lines(self, node: yaml.Node, kind: str) -> OpList:
        """Returns an op list; ``kind`` is a name in `lists.kinds.KINDS`."""
        nodes = self.items(kind, node)
        lines = [(self.text(f"an op of {kind}", item), self.where(item)) for item in nodes]
        refused: list[OpListError] | None = None if self.faults is None else []
        try:
            found = from_lines(lines, kind, refused)
        except OpListError as error:
            raise PolicyFileError(str(error)) from None
        for each in refused or ():
            self.refuse(PolicyFileError(str(each)))
        return found

    def op_list(self, kind: str, node: yaml.Node) -> tuple[OpList, tuple[Entry, ...]]:
        """Returns the ops that are added to a list, and those that are removed."""
        if not isinstance(node, yaml.MappingNode):
            return self.lines(node, kind), ()
        readers = {
            "add": lambda key, each: self.lines(each, kind),
            "remove": lambda key, each: self._removed(each, kind),
        }
        found = self.mapping(node, readers, kind)
        return found.get("add", NOTHING), found.get("remove", ())

    def _removed(self, node: yaml.Node, kind: str) -> tuple[Entry, ...]:
        items = self.items(kind, node)
        return tuple([Entry(self.text("an op", item), self.where(item)) for item in items])

    @property
    def of_formats(self) -> dict[str, Callable[[str, yaml.Node], Any]]:
        """The readers of what a file says of all ops in number formats: keys are `FormatOptions`'."""
        return {
            "rounding": lambda key, each: self.choice(key, each, ROUNDING_MODES),
            "overflow": lambda key, each: self.choice(key, each, OVERFLOWS),
            "round_gradients": self.truth_or_format,
        }

    def section(self, node: yaml.Node) -> SectionSource:
        """Returns the content of a section."""
        readers = {key: functools.partial(each.read, self) for key, each in CONDITIONS.items()}
        own: dict[str, Callable[[str, yaml.Node], Any]] = {
            "low_precision_type": self.low_type,
            **{kind: lambda key, each: self.lines(each, key) for kind in KEYS},
        }
        known = len(self.faults or ())
        found = self.mapping(node, {**readers, **own}, "a section")
        conditions = {key: value for key, value in found.items() if key in readers}
        lists = {key: value for key, value in found.items() if key in KEYS}
        source = SectionSource(lists, conditions, found.get("low_precision_type"), self.where(node))
        if len(self.faults or ()) > known:
            return source  # what it lacks may be what is wrong
        empty = [key for key, value in conditions.items() if value == ()]
        if empty:
            raise self.error(node, f"{empty[0]} is empty; name at least one, or leave it out")
        if not lists:
            raise self.error(node, f"a section decides nothing; give it {' or '.join(KEYS)}")
        if not conditions:
            raise self.error(
                node, f"a section holds for every call; give it {' or '.join(readers)}"
            )
        if contradiction := contradiction_of(conditions):
            raise self.error(node, contradiction)
        return source

    def sections(self, key: str, node: yaml.Node) -> tuple[SectionSource, ...]:
        """Returns the sections of a file, in their order."""
        found = []
        for each in self.items(key, node):
            try:
                found.append(self.section(each))
            except PolicyFileError as error:
                self.refuse(error)
        return tuple(found)

    def base(self, folder: Path, key: str, each: yaml.Node) -> str | None:
        """Returns the shipped set or the directory of that name; None for ``none``."""
        name = self.text(key, each)
        if name == "none":
            return None
        known = set_names()
        if name not in known and not _is_directory(folder / name):
            hint = suggestion(name, known)
            raise self.error(
                each,
                f"lists {shown(name)} is neither a shipped set ({', '.join(known)}), nor a directory, nor "
                f"none{hint}",
            )
        return name if name in known else os.fspath(folder / name)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # too long, or it holds a null byte
        return False
