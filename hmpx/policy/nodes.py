"""Converts YAML, JSON and dicts to PyYAML's nodes, which have a place for every key and value.

Nothing is evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import torch
import yaml

from .. import tensors
from ..arguments import is_a
from ..errors import PolicyFileError, cut, printable, shown
from ..number_formats import is_format

#: The name of a policy that is not in a file, in messages.
DICT: Final = "<policy>"

#: PyYAML's own parser takes some 5 s for a megabyte; libyaml a tenth, but with poorer messages.
_LONG: Final = 1 << 16

#: A policy has four: itself, its sections, a section, its list.
_MOST_LEVELS: Final = 16

#: Longer paths of keys are left out of messages.
_MOST_PATH: Final = 200

#: In JSON: a string, with the colon that may follow; characters between values that YAML rejects;
#: numbers that JSON does not allow.
_JSON: Final = re.compile(
    r'(?P<string>"(?:[^"\\]|\\.)*")(?P<space>\s*)(?P<colon>:?)|[\t\r]|(?P<constant>NaN|-?Infinity)'
)


def of_yaml(text: str, source: str) -> yaml.Node | None:
    """Returns the node of the one document in ``text``; None for an empty one."""
    try:
        if len(text) > _LONG and yaml.__with_libyaml__:
            _check_depth(text)
            return yaml.compose(text, Loader=yaml.CSafeLoader)
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = source if mark is None else f"{source}:{mark.line + 1}"
        lines = text.splitlines()
        line = lines[mark.line] if mark and mark.line < len(lines) else ""
        is_unquoted = re.search(r"[-\[,]\s*[*@]", line)
        hint = "; put names that begin with * or @ in quotes" if is_unquoted else ""
        problem = cut(str(error.problem or error.context))
        raise PolicyFileError(f"{where}: not valid YAML: {problem}{hint}") from None
    except yaml.YAMLError as error:
        raise PolicyFileError(f"{source}: not valid YAML: {cut(str(error))}") from None
    except RecursionError:
        raise _too_deep(source) from None
    except (ValueError, OverflowError) as error:  # from \\U escapes, from a version number
        raise PolicyFileError(f"{source}: not valid YAML: {error}") from None


def _too_deep(source: str) -> PolicyFileError:
    return PolicyFileError(f"{source}: nested too deep to be a policy")


def _check_depth(text: str) -> None:
    """Raises a RecursionError for deep nesting: libyaml's own recursion has no limit."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > 100:
            raise RecursionError


def of_json(text: str, source: str) -> yaml.Node | None:
    """Returns the node of the JSON in ``text``; error messages call it ``source``."""
    try:
        json.loads(text, parse_int=str)  # Python rejects very long ones
    except json.JSONDecodeError as error:
        raise PolicyFileError(f"{source}:{error.lineno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise _too_deep(source) from None

    def as_yaml(found: re.Match[str]) -> str:
        if constant := found["constant"]:
            line = text.count("\n", 0, found.start()) + 1
            raise PolicyFileError(
                f"{source}:{line}: not valid JSON: {constant} is not a number in JSON"
            )
        if found["string"] is None:
            return " "
        string = printable(json.dumps(json.loads(found["string"]), ensure_ascii=False))
        return string + found["colon"] + re.sub(r"[\t\r]", " ", found["space"])

    return of_yaml(_JSON.sub(as_yaml, text), source)


def of_mapping(mapping: Mapping[Any, Any]) -> yaml.Node:
    """Returns the node of a policy that is a dict; `place` returns the keys that lead to a value."""
    return _node("", mapping, 0)


def _node(path: str, value: Any, level: int) -> yaml.Node:
    if level > _MOST_LEVELS:
        raise _too_deep(DICT)
    node: yaml.Node
    mark: Any = path if len(path) <= _MOST_PATH else ""
    if is_a(value, Mapping):
        items = []
        for key, each in value.items():
            if not is_a(key, (str, int, float, type(None))):
                raise PolicyFileError(f"{DICT}{mark}: a key must be a string, not {shown(key)}")
            key_node = _node(f"{path}[{shown(key)}]", key, level)
            inner = f"{path}[{shown(key_node.value)}]"
            key_node.start_mark = inner
            items.append((key_node, _node(inner, each, level + 1)))
        node = yaml.MappingNode("tag:yaml.org,2002:map", items)
    elif is_a(value, (list, tuple, set, frozenset)):
        several = [_node(f"{path}[{n}]", each, level + 1) for n, each in enumerate(value)]
        node = yaml.SequenceNode("tag:yaml.org,2002:seq", several)
    else:
        node = yaml.representer.SafeRepresenter().represent_data(_scalar(mark, value))
    node.start_mark = mark
    return node


def _scalar(mark: str, value: Any) -> Any:
    if is_a(value, torch.dtype) or is_format(value):
        return tensors.long_name(value)
    if is_a(value, str):
        return str.__str__(value)
    if value is None or type(value) in (bool, float):
        return value
    if type(value) is int and value.bit_length() <= 200:
        return value
    raise PolicyFileError(
        f"{DICT}{mark}: a policy holds strings, numbers, dtypes and lists, not {shown(value)}"
    )


def place(node: yaml.Node) -> str:
    """Returns where a node begins: ``":12"``; in a dict ``"['low'][0]"``."""
    mark: Any = node.start_mark
    return mark if isinstance(mark, str) else f":{mark.line + 1}"
