"""What formats, rounding modes and overflows are called; names that stand for others, and hints.

The data is ``vocabulary.ini``. Which formats are registered is asked elsewhere, and outranks it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeGuard

import torch

from ..arguments import is_a
from ..data_files import read_sections
from ..torch_internals import run_when_traced

if TYPE_CHECKING:
    from .families import Format

Overflow: TypeAlias = Literal["inf", "nan", "saturate"]

#: What values beyond the largest may become.
OVERFLOWS: Final[tuple[Overflow, ...]] = ("inf", "nan", "saturate")

#: In the order of the compiled kernels' numbers.
ROUNDING_MODES: Final = ("nearest", "toward_zero", "up", "down", "nearest_away", "stochastic")

#: Steps of the longest history of amaxes.
MOST_STEPS: Final = 65536

#: No name in ``vocabulary.ini`` is longer.
_MOST_CHARACTERS: Final = 100

#: The modules that dtypes are written with.
_PREFIXES: Final = ("torch.", "ml_dtypes.", "numpy.", "np.", "jnp.", "tl.")


def is_format(value: object) -> TypeGuard[Format]:
    """Whether ``value`` is a number format of any family; imports none of them."""
    families: Any = sys.modules.get(f"{__package__}.families")  # who has a format has imported them
    classes = getattr(families, "FORMATS", None)
    return classes is not None and is_a(value, classes)


def spellings(section: str) -> Mapping[str, str]:
    """Returns a section of the data: a name as people write it -> its meaning."""
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


@run_when_traced
def meaning(name: str) -> str | None:
    """Returns the format that a plain name stands for, if for one: ``"float16"`` for ``"half"``."""
    return spellings("means").get(name)


def said_of(name: str) -> str:
    """Returns which formats a name may stand for, or other advice, as the end of a message."""
    either = spellings("either").get(plain(name))
    if either is not None:
        return f"; did you mean {' or '.join(map(repr, either.split()))}?"
    advice = spellings("advice").get(plain(name))
    return "" if advice is None else f"; {advice}"


def name_of(value: object) -> str | None:
    """Returns the name that stands for a format: text, or a dtype of torch, numpy or ml_dtypes.

    Returns:
        None for anything else.
    """
    if is_a(value, str):
        return str.__str__(value)
    if is_a(value, torch.dtype):
        return str(value).removeprefix("torch.")
    numpy: Any = sys.modules.get("numpy")  # who has a dtype of it has imported it
    if numpy is not None and is_a(value, numpy.dtype):
        return str(value.name)  # type: ignore[attr-defined]
    if numpy is not None and isinstance(value, type) and issubclass(value, numpy.generic):
        return value.__name__
    return None
