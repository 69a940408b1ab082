"""Values of the kinds that policy files hold, read from the nodes of YAML or JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from ... import tensors
from ...errors import OptionError, PolicyFileError, shown, suggestion
from .. import regexes
from ..decisions import LowType, parse_format, parse_low_type

if TYPE_CHECKING:
    import yaml

    from ...number_formats import Format

#: Of all lists in a file together.
MOST_ITEMS: Final = 100_000


def _kind(node: Any) -> str:
    """Returns ``"mapping"``, ``"sequence"`` or ``"scalar"``; yaml is not imported for its classes."""
    return str(node.id)


class NodeReader:
    """Makes values of the nodes of one file; errors name its lines.

    Attributes:
        faults: Errors that were put aside for one after the other to be shown; None to raise the first.
    """

    def __init__(
        self,
        source: str,
        faults: list[PolicyFileError] | None = None,
        paths: Mapping[int, str] | None = None,
    ) -> None:
        """Starts without having read anything.

        Args:
            source: The name of the file, as messages show it.
            faults: Where errors are put aside; None to raise the first.
            paths: Of a policy that is a dict: `id` of a node -> the keys that lead to it.
        """
        self.faults = faults
        self._source, self._paths = source, paths
        self._item_count = 0

    def where(self, node: yaml.Node) -> str:
        """Returns where a node begins: ``"policy.yaml:12"``; of a dict ``"<policy>['low'][0]"``."""
        if self._paths is not None:
            return f"{self._source}{self._paths.get(id(node), '')}"
        return f"{self._source}:{node.start_mark.line + 1}"

    def refuse(self, error: PolicyFileError) -> None:
        """Raises ``error``, or puts it aside."""
        if self.faults is None:
            raise error
        self.faults.append(error)

    def error(self, node: yaml.Node, message: str) -> PolicyFileError:
        """Returns an error about a node."""
        return PolicyFileError(f"{self.where(node)}: {message}")

    def mapping(
        self, node: yaml.Node, readers: Mapping[str, Callable[[str, yaml.Node], Any]], what: str
    ) -> dict[str, Any]:
        """Returns key -> the value that its reader makes of the key and the node."""
        self._check_tag(node)
        if _kind(node) != "mapping":
            raise self.error(node, f"{what} must be a mapping of keys to values")
        found: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value in node.value:
            key = self.text("a key", key_node)
            if key in lines:
                why = f"{shown(key)} is given twice, at line {lines[key]} too"
                self.refuse(self.error(key_node, why))
                continue
            lines[key] = key_node.start_mark.line + 1
            if key not in readers:
                hint = suggestion(key, readers) or f" ({', '.join(readers)})"
                self.refuse(self.error(key_node, f"unknown key {shown(key)} of {what}{hint}"))
                continue
            try:
                found[key] = readers[key](key, value)
            except PolicyFileError as error:
                self.refuse(error)
        return found

    def _check_tag(self, node: yaml.Node) -> None:
        if not node.tag.startswith("tag:yaml.org,2002:") or ":python" in node.tag:
            raise self.error(node, f"the tag {shown(node.tag)} has no meaning here; leave it out")

    def items(self, key: str, node: yaml.Node) -> list[yaml.Node]:
        """Returns the items of a list; a single value is one."""
        self._check_tag(node)
        if _kind(node) == "mapping":
            raise self.error(node, f"{key} must be a list")
        nodes: list[yaml.Node] = node.value if _kind(node) == "sequence" else [node]
        self._item_count += len(nodes)
        if self._item_count > MOST_ITEMS:
            raise self.error(node, f"more than {MOST_ITEMS:,} items in one file")
        return nodes

    def text(self, key: str, node: yaml.Node) -> str:
        """Returns a scalar as it is written."""
        self._check_tag(node)
        if _kind(node) != "scalar" or node.tag.endswith(":null"):
            raise self.error(node, f"{key} must be a string")
        return str(node.value)

    def texts(self, key: str, node: yaml.Node) -> tuple[str, ...]:
        """Returns the strings of a list."""
        return tuple([self.text(key, item) for item in self.items(key, node)])

    def count(self, key: str, node: yaml.Node) -> int:
        """Returns a whole number, 0 or greater."""
        text = self.text(key, node)
        if node.tag != "tag:yaml.org,2002:int" or not re.fullmatch(r"[0-9][0-9_]{0,30}", text):
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise self.error(node, f"{key} must be a whole number, not {shown!r}")
        return int(text.replace("_", ""))

    def counts(self, key: str, node: yaml.Node) -> tuple[int, ...]:
        """Returns the whole numbers of a list."""
        return tuple([self.count(key, item) for item in self.items(key, node)])

    def choice(self, key: str, node: yaml.Node, known: Iterable[str]) -> str:
        """Returns a text that is one of ``known``."""
        text, known = self.text(key, node), tuple(known)
        if text not in known:
            raise self.error(
                node,
                f"{key} must be one of {', '.join(known)}, not {shown(text)}{suggestion(text, known)}",
            )
        return text

    def truth(self, key: str, node: yaml.Node) -> bool:
        """Returns ``true`` or ``false`` as a bool."""
        return self.choice(key, node, ("true", "false")) == "true"

    def dtype(self, key: str, node: yaml.Node) -> torch.dtype:
        """Returns the dtype of that name."""
        try:
            return tensors.parse_name(self.text(key, node))
        except OptionError as error:
            raise self.error(node, f"{key}: {error}") from None

    def low_type(self, key: str, node: yaml.Node) -> LowType:
        """Returns the low-precision type of that name: a dtype or a number format."""
        try:
            return parse_low_type(self.text(key, node))
        except OptionError as error:
            raise self.error(node, str(error)) from None

    def truth_or_format(self, key: str, node: yaml.Node) -> bool | Format:
        """Returns ``true`` or ``false`` as a bool, and any other name as the number format of it."""
        text = self.text(key, node)
        if text in ("true", "false"):
            return text == "true"
        try:
            return parse_format(key, text)
        except OptionError as error:
            raise self.error(node, str(error)) from None

    def dtypes(self, key: str, node: yaml.Node) -> tuple[torch.dtype, ...]:
        """Returns the dtypes of a list."""
        return tuple([self.dtype(key, item) for item in self.items(key, node)])

    def devices(self, key: str, node: yaml.Node) -> tuple[str, ...]:
        """Returns the device types of a list, sorted."""
        try:
            return tuple(sorted(tensors.parse_device_types(self.texts(key, node))))
        except OptionError as error:
            raise self.error(node, str(error).replace("device_types", key)) from None

    def regexes(self, key: str, node: yaml.Node) -> tuple[str, ...]:
        """Returns the regular expressions of a list."""
        for item in self.items(key, node):
            try:
                regexes.compiled(self.text(key, item))
            except ValueError as error:
                raise self.error(item, f"{key}: {error}") from None
        return self.texts(key, node)
