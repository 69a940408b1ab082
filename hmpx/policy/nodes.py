"""Converts YAML, JSON and dicts to PyYAML's nodes, which have a place for every key and value, and reads these."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import torch
import yaml

from .. import tensors
from ..errors import OptionError, PolicyFileError, cut, raised_here, shown, suggestion
from ..number_formats import is_format
from ..renames import new_key
from .sections import regex_of

#: The name of a policy that is not in a file, in messages.
DICT: Final = "<policy>"

#: PyYAML's own parser takes some 5 s for a megabyte; libyaml a tenth, but with poorer messages.
_LONG: Final = 1 << 16


def of_yaml(text: str, source: str) -> yaml.Node | None:
    """Returns the node of the one document in ``text``; None for an empty one."""
    is_long = len(text) > _LONG and yaml.__with_libyaml__
    try:
        return yaml.compose(text, Loader=yaml.CSafeLoader if is_long else yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = source if mark is None else f"{source}:{mark.line + 1}"
        lines = text.splitlines()
        line = lines[mark.line] if mark and mark.line < len(lines) else ""
        is_unquoted = re.search(r"[-\[,]\s*[*@]", line)
        hint = "; put names that begin with * or @ in quotes" if is_unquoted else ""
        problem = cut(str(error.problem or error.context))
        raise PolicyFileError(f"{where}: not valid YAML: {problem}{hint}") from None
    except RecursionError:
        raise _too_deep(source) from None
    except raised_here(
        yaml.YAMLError, ValueError, OverflowError
    ) as error:  # \\U escapes, a version
        raise PolicyFileError(f"{source}: not valid YAML: {cut(str(error))}") from None


def _too_deep(source: str) -> PolicyFileError:
    return PolicyFileError(f"{source}: nested too deep to be a policy")


def of_json(text: str, source: str) -> yaml.Node | None:
    """Returns the node of the JSON in ``text``."""
    try:
        json.loads(text, parse_int=str)  # Python rejects very long ones
    except json.JSONDecodeError as error:
        raise PolicyFileError(f"{source}:{error.lineno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise _too_deep(source) from None
    return of_yaml(text.translate({9: " ", 13: " "}), source)  # no JSON string holds these


def of_mapping(mapping: Mapping[Any, Any], source: str = DICT) -> yaml.Node:
    """Returns the node of a policy that is a dict; `place` returns the keys that lead to a value."""
    try:
        return _node(source, "", mapping)
    except RecursionError:
        raise _too_deep(source) from None


def _node(source: str, path: str, value: Any) -> yaml.Node:
    node: yaml.Node
    if isinstance(value, Mapping):
        items = []
        for key, each in value.items():
            if not isinstance(key, (str, int, float, type(None))):
                raise PolicyFileError(f"{source}{path}: a key must be a string, not {shown(key)}")
            key_node = _node(source, f"{path}[{shown(key)}]", key)
            key_node.start_mark = f"{path}[{shown(key_node.value)}]"
            items.append((key_node, _node(source, key_node.start_mark, each)))
        node = yaml.MappingNode("tag:yaml.org,2002:map", items)
    elif isinstance(value, (list, tuple, set, frozenset)):
        several = [_node(source, f"{path}[{n}]", each) for n, each in enumerate(value)]
        node = yaml.SequenceNode("tag:yaml.org,2002:seq", several)
    else:
        if isinstance(value, torch.dtype) or is_format(value):
            value = tensors.long_name(value)
        elif isinstance(value, str):
            value = str.__str__(value)
        elif value is not None and type(value) not in (bool, int, float):
            raise PolicyFileError(
                f"{source}{path}: a policy holds strings, numbers, dtypes and lists, not {shown(value)}"
            )
        node = yaml.representer.SafeRepresenter().represent_data(value)
    node.start_mark = path
    return node


def place(node: yaml.Node) -> str:
    """Returns where a node begins: ``":12"``; in a dict ``"['low'][0]"``."""
    mark: Any = node.start_mark
    return mark if isinstance(mark, str) else f":{mark.line + 1}"


# --- values ------------------------------------------------------------------------------------

_T = TypeVar("_T")

#: Key -> the function that reads its value, from a reader, the key and its node.
Readers = Mapping[str, Callable[[Any, str, yaml.Node], Any]]


class Reader:
    """Converts the nodes of one file to values; keys and values with faults are skipped."""

    #: Other names of keys -> the keys.
    other_keys: ClassVar[Mapping[str, str]] = types.MappingProxyType({})

    def __init__(self, source: str, folder: Path) -> None:
        self._source, self._folder = source, folder
        self.faults: list[PolicyFileError] = []  # of the skipped ones

    def check(self) -> None:
        """Raises the first of the faults."""
        if self.faults:
            raise self.faults[0]

    def where(self, node: yaml.Node) -> str:
        """Returns where ``node`` begins: ``"policy.yaml:12"``."""
        return f"{self._source}{place(node)}"

    def error(self, node: yaml.Node, message: object) -> PolicyFileError:
        """Returns an error about ``node``."""
        return PolicyFileError(f"{self.where(node)}: {message}")

    # --- mappings, lists and single values

    def mapping(self, node: yaml.Node, readers: Readers, what: str) -> dict[str, Any]:
        """Returns the values of a mapping, each read by the function of its key."""
        self._check_tag(node)
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{what} must be a mapping of keys to values")
        found: dict[str, Any] = {}
        seen: dict[str, str] = {}
        for key_node, value in node.value:
            key = self.text("a key", key_node)
            key = new_key(key, value.value, self.where(key_node)) if "mode" in readers else key
            try:
                if key in seen:
                    earlier = seen[key].replace(":", "line ")
                    raise self.error(key_node, f"{shown(key)} is given twice, at {earlier} too")
                seen[key] = place(key_node)
                if key not in readers:
                    others = {k: v for k, v in self.other_keys.items() if v in readers}
                    hint = suggestion(key, readers, others) or f" ({', '.join(readers)})"
                    raise self.error(key_node, f"unknown key {shown(key)} of {what}{hint}")
                found[key] = readers[key](self, key, value)
            except PolicyFileError as error:
                self.faults.append(error)
        return found

    def _check_tag(self, node: yaml.Node) -> None:
        if not node.tag.startswith("tag:yaml.org,2002:") or ":python" in node.tag:
            raise self.error(node, f"the tag {shown(node.tag)} has no meaning here; leave it out")

    def items(self, key: str, node: yaml.Node) -> list[yaml.Node]:
        """Returns the items of a list; a single value is one."""
        self._check_tag(node)
        if isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{key} must be a list")
        return node.value if isinstance(node, yaml.SequenceNode) else [node]

    def each(
        self, read: Callable[[str, yaml.Node], _T], key: str, node: yaml.Node
    ) -> tuple[_T, ...]:
        """Returns the items of a list, each read by ``read``."""
        return tuple([read(key, item) for item in self.items(key, node)])

    def text(self, key: str, node: yaml.Node) -> str:
        """Returns a string."""
        self._check_tag(node)
        if not isinstance(node, yaml.ScalarNode) or node.tag.endswith(":null"):
            raise self.error(node, f"{key} must be a string")
        return str(node.value)

    def parsed(self, key: str, node: yaml.Node, parse: Callable[[str], _T], name: str = "") -> _T:
        """Returns the result of ``parse`` for a text; ``name`` prefixes its errors."""
        try:
            return parse(self.text(key, node))
        except raised_here(
            OptionError, ValueError, re.error, OverflowError, RecursionError
        ) as error:
            raise self.error(node, f"{name}{error}") from None

    def choice(self, key: str, node: yaml.Node, known: Iterable[str]) -> str:
        """Returns one of the ``known`` strings."""
        text, known = self.text(key, node), tuple(known)
        if text not in known:
            message = f"{key} must be one of {', '.join(known)}, not {shown(text)}"
            raise self.error(node, message + suggestion(text, known))
        return text

    def truth(self, key: str, node: yaml.Node) -> bool:
        """Returns true or false."""
        return self.choice(key, node, ("true", "false")) == "true"

    # --- the kinds of conditions

    def texts(self, key: str, node: yaml.Node) -> tuple[str, ...]:
        """Returns strings."""
        return self.each(self.text, key, node)

    def regexes(self, key: str, node: yaml.Node) -> tuple[str, ...]:
        """Returns regular expressions."""
        for item in self.items(key, node):
            prefix = f"{key}: not a regular expression: "
            self.parsed(key, item, lambda text: regex_of(key, text), prefix)
        return self.texts(key, node)

    def mode(self, key: str, node: yaml.Node) -> str:
        """Returns ``"train"`` or ``"eval"``."""
        return self.choice(key, node, ("train", "eval"))

    def count(self, key: str, node: yaml.Node) -> int:
        """Returns a whole number."""
        text = self.text(key, node)
        if node.tag != "tag:yaml.org,2002:int" or not re.fullmatch(r"[0-9][0-9_]{0,30}", text):
            raise self.error(node, f"{key} must be a whole number, not {shown(text)}")
        return int(text.replace("_", ""))

    def counts(self, key: str, node: yaml.Node) -> tuple[int, ...]:
        """Returns whole numbers."""
        return self.each(self.count, key, node)

    def dtypes(self, key: str, node: yaml.Node) -> tuple[torch.dtype, ...]:
        """Returns dtypes."""
        return tuple(
            self.parsed(key, item, tensors.parse_name, f"{key}: ") for item in self.items(key, node)
        )

    def devices(self, key: str, node: yaml.Node) -> tuple[str, ...]:
        """Returns device types."""
        try:
            return tuple(sorted(tensors.parse_device_types(self.texts(key, node))))
        except OptionError as error:
            raise self.error(node, str(error).replace("device_types", key)) from None
