"""Parses JSON text into PyYAML's nodes, which have a line for every key and value.

Python's `json` decides whether it is valid; its results have no lines, so the text, valid by then, is
parsed once more.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final

import yaml

from ...errors import PolicyFileError

_TAG: Final = "tag:yaml.org,2002:"
_SPACE: Final = re.compile(r"[ \t\n\r,:]*")
_WORD: Final = re.compile(r"[-+.\w]+")
_TAGS: Final = {"true": "bool", "false": "bool", "null": "null"}
_CONSTANTS: Final = re.compile(r'"(?:[^"\\]|\\.)*"|(NaN|-?Infinity)', re.DOTALL)


def compose(text: str, source: str) -> yaml.Node:
    """Returns the node of the JSON in ``text``; ``source`` is what error messages call it.

    Raises:
        PolicyFileError: It is not valid JSON, or nested deeper than Python's parser goes.
    """
    try:
        json.loads(text, parse_int=_kept, parse_float=_kept, parse_constant=_refused)
    except json.JSONDecodeError as error:
        raise PolicyFileError(f"{source}:{error.lineno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise PolicyFileError(f"{source}: nested too deep to be a policy") from None
    except _ConstantError as error:
        line = next(
            (text.count("\n", 0, m.start()) + 1 for m in _CONSTANTS.finditer(text) if m[1]), 1
        )
        raise PolicyFileError(
            f"{source}:{line}: not valid JSON: {error} is not a number in JSON"
        ) from None
    return _Composer(text).compose()


def _kept(digits: str) -> str:
    """Keeps numbers as they are written: Python refuses to convert very long ones."""
    return digits


class _ConstantError(Exception):
    """A number that Python's parser accepts, but JSON does not have."""


def _refused(constant: str) -> Any:
    raise _ConstantError(constant)


class _Composer:
    """Parses valid JSON with a stack of its own, so that nesting needs no recursion."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._line = 0
        self._counted = 0  # position up to which lines are counted

    def compose(self) -> yaml.Node:
        text = self._text
        position = _end_of_space(text, 0)
        open_nodes: list[yaml.CollectionNode] = []
        keys: list[yaml.Node | None] = []  # of the mappings among them: the key that waits
        while True:
            start = text[position]
            node: yaml.Node | None = None
            if start in "]}":
                node = open_nodes.pop()
                keys.pop()
                position += 1
            elif start in "[{":
                kind = yaml.SequenceNode if start == "[" else yaml.MappingNode
                tag = f"{_TAG}{'seq' if start == '[' else 'map'}"
                open_nodes.append(kind(tag, [], self._mark(position)))
                keys.append(None)
                position = _end_of_space(text, position + 1)
                continue
            else:
                node, position = self._scalar(position)
            if not open_nodes:
                return node
            position = _end_of_space(text, position)
            parent = open_nodes[-1]
            if isinstance(parent, yaml.SequenceNode):
                parent.value.append(node)
            elif keys[-1] is None:
                keys[-1] = node
            else:
                parent.value.append((keys[-1], node))
                keys[-1] = None

    def _scalar(self, position: int) -> tuple[yaml.Node, int]:
        text, mark = self._text, self._mark(position)
        if text[position] == '"':
            value, end = scanstring(text, position + 1, True)
            return yaml.ScalarNode(f"{_TAG}str", value, mark), end
        match = _WORD.match(text, position)
        assert match is not None  # the text is JSON
        word = match[0]
        kind = _TAGS.get(word) or ("int" if word.lstrip("-").isdigit() else "float")
        return yaml.ScalarNode(f"{_TAG}{kind}", word, mark), match.end()

    def _mark(self, position: int) -> yaml.Mark:
        self._line += self._text.count("\n", self._counted, position)
        self._counted = position
        return yaml.Mark("", position, self._line, 0, None, 0)


def _end_of_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None  # it matches nothing, too
    return match.end()
