"""What people call number formats and rounding modes: names that stand for others, and hints.

The data is ``vocabulary.ini``. Knows no registered format: which names are registered is asked elsewhere,
and outranks all that stands here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any, Final

import torch

from ..arguments import is_a
from ..data_files import read_sections
from ..torch_internals import run_when_traced

#: No name in ``vocabulary.ini`` is longer.
_MOST_CHARACTERS: Final = 100

#: The modules that dtypes are written with.
_PREFIXES: Final = ("torch.", "ml_dtypes.", "numpy.", "np.", "jnp.", "tl.")

_NAME_OF: Final = type.__dict__["__name__"].__get__


def spellings(section: str) -> Mapping[str, str]:
    """Returns a section of the data: a name as people write it -> what is known about it."""
    return _data()[section]


@functools.cache
def _data() -> Mapping[str, Mapping[str, str]]:
    return read_sections(__package__, "vocabulary.ini")


def plain(name: str) -> str:
    """Returns a name as the data spells it: ``"e4m3fn"`` for ``"torch.E4M3FN"``; ``""`` for a long one."""
    if len(name) > _MOST_CHARACTERS:
        return ""
    name = name.strip().lower()
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace("-", "_").replace(" ", "_")


def meaning(name: str) -> str | None:
    """Returns the format that a plain name stands for, if for one: ``"float16"`` for ``"half"``."""
    return spellings("means").get(name)


run_when_traced(meaning)


def said_of(name: str) -> str:
    """Returns which formats a name may stand for, or what else is to say, as the end of a message."""
    either = spellings("either").get(plain(name))
    if either is not None:
        return f"; did you mean {' or '.join(map(repr, either.split()))}?"
    advice = spellings("advice").get(plain(name))
    return "" if advice is None else f"; {advice}"


def name_of(value: object) -> str | None:
    """Returns the name of what stands for a format: text, or a dtype of torch, numpy or ml_dtypes.

    Returns:
        None for anything else.
    """
    if is_a(value, str):
        return str.__str__(value)
    if is_a(value, torch.dtype):
        return str(value).removeprefix("torch.")
    numpy: Any = sys.modules.get("numpy")  # who has a dtype of it has imported it
    dtype, scalar = getattr(numpy, "dtype", None), getattr(numpy, "generic", None)
    if is_a(dtype, type) and is_a(value, dtype):  # type: ignore[arg-type]
        return str(value.name)  # type: ignore[attr-defined]
    if is_a(value, type) and is_a(scalar, type) and scalar in type.mro(value):  # type: ignore[arg-type]
        return str(_NAME_OF(value))
    return None
