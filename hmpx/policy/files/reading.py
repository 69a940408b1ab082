"""Reads policy files, and dicts like them.

Everything is checked here, with file and line; nothing in a file is ever evaluated.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from ... import arguments
from ...errors import PolicyFileError, short, shown
from .. import text_files
from ..lists.kinds import KEYS
from ..lists.sets import DEFAULT_SET
from . import gaudi_config, yaml_nodes
from .names import SUFFIXES, is_policy_file
from .plain_values import SOURCE, PlainValues
from .policy_reader import PolicyReader, format_options
from .sources import PolicySource

#: Longer ones are left out of messages.
_MOST_PATH: Final = 200

_FILE: Final = text_files.TextKind("a policy file", 1 << 20, PolicyFileError)


def read_policy_file(
    path: str | os.PathLike[str], faults: list[PolicyFileError] | None = None
) -> PolicySource:
    """Returns the content of the file.

    Args:
        path: The file.
        faults: Gets the errors of single keys and values, which are left out; None to raise the first.

    Raises:
        PolicyFileError: It can't be read, or is not a policy.
        OptionError: ``path`` is not a path.
    """
    plain = arguments.path("policy", path)
    name = short(plain)
    if not is_policy_file(plain):
        raise PolicyFileError(f"{name}: a policy file ends in {', '.join(SUFFIXES)}")
    text = text_files.read(plain, _FILE)
    if plain.endswith(".json"):
        return gaudi_config.parse(text, name, faults)
    return parse(text, name, Path(plain).parent, faults)


def from_mapping(mapping: Mapping[str, Any]) -> PolicySource:
    """Returns the content of a policy file with these keys and values.

    Raises:
        PolicyFileError: It is not a policy.
    """
    content = PlainValues().mapping("", mapping, 0)
    node = yaml_nodes.compose(yaml.safe_dump(content, sort_keys=False), SOURCE)
    paths = {} if node is None else dict(_paths(node, ""))
    return _content(node, PolicyReader(SOURCE, paths=paths), SOURCE, Path())


def _paths(node: yaml.Node, path: str) -> Iterator[tuple[int, str]]:
    """Yields `id` of each node, and the keys that lead to it: ``"['sections'][0]['low'][1]"``."""
    yield id(node), path if len(path) <= _MOST_PATH else ""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = f"{path}[{shown(key.value)}]"
            yield id(key), inner
            yield from _paths(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _paths(item, f"{path}[{index}]")


def parse(
    text: str, source: str, folder: Path, faults: list[PolicyFileError] | None = None
) -> PolicySource:
    """Returns the content of a policy file in YAML.

    Args:
        text: The whole file.
        source: What error messages call it.
        folder: The directory to which ``lists`` is relative, where that is a path.
        faults: As for `read_policy_file`.

    Raises:
        PolicyFileError: It is not a policy.
    """
    node = yaml_nodes.compose(text, source)
    return _content(node, PolicyReader(source, faults), source, folder)


def _content(
    node: yaml.Node | None, reader: PolicyReader, source: str, folder: Path
) -> PolicySource:
    if node is None:
        return PolicySource(where=source)
    found = reader.mapping(
        node,
        {
            "low_precision_type": reader.low_type,
            **reader.of_formats,
            "lists": functools.partial(reader.base, folder),
            **dict.fromkeys(KEYS, reader.op_list),
            "sections": reader.sections,
        },
        "a policy",
    )
    lists = {key: value for key, value in found.items() if key in KEYS}
    return PolicySource(
        lists={key: added for key, (added, _) in lists.items()},
        removed={key: removed for key, (_, removed) in lists.items() if removed},
        base=found.get("lists", DEFAULT_SET),
        low_precision_type=found.get("low_precision_type"),
        formats=format_options(found),
        sections=found.get("sections", ()),
        where=source,
    )
