"""Facts about torch's ops that torch does not tell at run time: the data in ``ops.ini``."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping

from ..data_files import read_sections


def facts(section: str) -> Mapping[str, tuple[str, ...]]:
    """Returns one section of ``ops.ini``: op (or alias, or site) -> the words of its value."""
    return _all_facts()[section]


@functools.cache
def renamings(section: str) -> Mapping[str, str]:
    """Returns a section of ``ops.ini`` in which each name stands for one other name."""
    return types.MappingProxyType({name: words[0] for name, words in facts(section).items()})


@functools.cache
def _all_facts() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    return {
        section: types.MappingProxyType(
            {name: tuple(value.split()) for name, value in keys.items()}
        )
        for section, keys in read_sections(__package__, "ops.ini").items()
    }
