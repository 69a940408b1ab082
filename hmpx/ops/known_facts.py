"""Facts about torch's ops that torch does not tell at run time: the data in ``ops.ini``."""

from __future__ import annotations

import configparser
import functools
import importlib.resources
import types
from collections.abc import Mapping


def facts(section: str) -> Mapping[str, tuple[str, ...]]:
    """Returns one section of ``ops.ini``: op (or alias, or site) -> the words of its value."""
    return _all_facts()[section]


@functools.cache
def renamings(section: str) -> Mapping[str, str]:
    """Returns a section of ``ops.ini`` in which each name stands for one other name."""
    return types.MappingProxyType({name: words[0] for name, words in facts(section).items()})


@functools.cache
def _all_facts() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    parser = configparser.ConfigParser(allow_no_value=True, delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]  # names are case-sensitive
    parser.read_string(
        importlib.resources.files(__package__).joinpath("ops.ini").read_text("utf-8")
    )
    return {
        section: types.MappingProxyType({k: tuple((v or "").split()) for k, v in values.items()})
        for section, values in parser.items()
    }
