"""Reads policy files, and dicts like them.

Everything is checked here, with file and line; nothing in a file is ever evaluated.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from ... import arguments
from ...errors import PolicyFileError, short
from .. import text_files
from ..lists.kinds import KEYS
from ..lists.sets import DEFAULT_SET
from . import gaudi_config, yaml_nodes
from .names import SUFFIXES, is_policy_file
from .plain_values import SOURCE, PlainValues
from .policy_reader import PolicyReader, format_options
from .sources import PolicySource

_FILE: Final = text_files.TextKind("a policy file", 1 << 20, PolicyFileError)


def read_policy_file(path: str | os.PathLike[str]) -> PolicySource:
    """Returns the content of the file.

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
        return gaudi_config.parse(text, name)
    return parse(text, name, Path(plain).parent)


def from_mapping(mapping: Mapping[str, Any]) -> PolicySource:
    """Returns the content of a policy file with these keys and values.

    Raises:
        PolicyFileError: It is not a policy.
    """
    content = PlainValues().mapping("", mapping, 0)
    return parse(yaml.safe_dump(content, sort_keys=False), SOURCE, Path())


def parse(text: str, source: str, folder: Path) -> PolicySource:
    """Returns the content of a policy file in YAML.

    Args:
        text: The whole file.
        source: What error messages call it.
        folder: The directory to which ``lists`` is relative, where that is a path.

    Raises:
        PolicyFileError: It is not a policy.
    """
    node = yaml_nodes.compose(text, source)
    if node is None:
        return PolicySource(where=source)
    reader = PolicyReader(source)
    found = reader.mapping(
        node,
        {
            "low_precision_type": reader.low_type,
            **reader.of_formats,
            "lists": functools.partial(reader.base, folder),
            **dict.fromkeys(KEYS, reader.op_list),
            "sections": lambda key, each: tuple(map(reader.section, reader.items(key, each))),
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
