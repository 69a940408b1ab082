"""Converts YAML, JSON and dicts to PyYAML's nodes, which have a place for every key and value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import torch
import yaml

from .. import tensors
from ..arguments import is_a
from ..errors import PolicyFileError, cut, shown
from ..number_formats import is_format

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
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # from \\U escapes, a version
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


def of_mapping(mapping: Mapping[Any, Any]) -> yaml.Node:
    """Returns the node of a policy that is a dict; `place` returns the keys that lead to a value."""
    try:
        return _node("", mapping)
    except RecursionError:
        raise _too_deep(DICT) from None


def _node(path: str, value: Any) -> yaml.Node:
    node: yaml.Node
    if is_a(value, Mapping):
        items = []
        for key, each in value.items():
            if not is_a(key, (str, int, float, type(None))):
                raise PolicyFileError(f"{DICT}{path}: a key must be a string, not {shown(key)}")
            key_node = _node(f"{path}[{shown(key)}]", key)
            key_node.start_mark = f"{path}[{shown(key_node.value)}]"
            items.append((key_node, _node(key_node.start_mark, each)))
        node = yaml.MappingNode("tag:yaml.org,2002:map", items)
    elif is_a(value, (list, tuple, set, frozenset)):
        several = [_node(f"{path}[{n}]", each) for n, each in enumerate(value)]
        node = yaml.SequenceNode("tag:yaml.org,2002:seq", several)
    else:
        if is_a(value, torch.dtype) or is_format(value):
            value = tensors.long_name(value)
        elif is_a(value, str):
            value = str.__str__(value)
        elif value is not None and type(value) not in (bool, int, float):
            raise PolicyFileError(
                f"{DICT}{path}: a policy holds strings, numbers, dtypes and lists, not {shown(value)}"
            )
        node = yaml.representer.SafeRepresenter().represent_data(value)
    node.start_mark = path
    return node


def place(node: yaml.Node) -> str:
    """Returns where a node begins: ``":12"``; in a dict ``"['low'][0]"``."""
    mark: Any = node.start_mark
    return mark if isinstance(mark, str) else f":{mark.line + 1}"
