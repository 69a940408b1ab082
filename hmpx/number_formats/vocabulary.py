"""Names of formats, rounding modes and overflow behaviours: aliases and hints.

The data is ``vocabulary.ini``. Registered names override it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeGuard

import torch

from ..files import read_sections
from ..torch_internals import run_when_traced

if TYPE_CHECKING:
    from .families import Format

Overflow: TypeAlias = Literal["inf", "nan", "saturate"]

#: The overflow behaviours.
OVERFLOWS: Final[tuple[Overflow, ...]] = ("inf", "nan", "saturate")

#: In the order of the compiled kernels' numbers.
ROUNDING_MODES: Final = ("nearest", "toward_zero", "up", "down", "nearest_away", "stochastic")

#: The most steps in a history of amaxes.
MOST_STEPS: Final = 65536

#: Module prefixes of dtypes.
_PREFIXES: Final = ("torch.", "ml_dtypes.", "numpy.", "np.", "jnp.", "tl.")


def is_format(value: object) -> TypeGuard[Format]:
    """Whether ``value`` is a number format of any family; imports none of them."""
    # A format exists only if they are imported.
    families: Any = sys.modules.get(f"{__package__}.families")
    classes = getattr(families, "FORMATS", None)
    return classes is not None and isinstance(value, classes)


def spellings(section: str) -> Mapping[str, str]:
    """Returns a section of the data: a name that people use -> its meaning."""
    return _data()[section]


@functools.cache
def _data() -> Mapping[str, Mapping[str, str]]:
    return read_sections(__package__, "vocabulary.ini")


def plain(name: str) -> str:
    """Returns a name in the data's spelling: ``"e4m3fn"`` for ``"torch.E4M3FN"``."""
    name = name.strip().lower()
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace("-", "_").replace(" ", "_")


@run_when_traced
def meaning(name: str) -> str | None:
    """Returns the format with this plain name, if it is unambiguous: ``"float16"`` for ``"half"``."""
    return spellings("means").get(name)


def said_of(name: str) -> str:
    """Returns the formats that a name may mean, or other advice, as the end of a message."""
    either = spellings("either").get(plain(name))
    if either is not None:
        return f"; did you mean {' or '.join(map(repr, either.split()))}?"
    advice = spellings("advice").get(plain(name))
    return "" if advice is None else f"; {advice}"


def name_of(value: object) -> str | None:
    """Returns the format name in ``value``, text or a dtype of torch, numpy or ml_dtypes; else None."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    numpy: Any = sys.modules.get("numpy")  # its dtypes exist only if it is imported
    if numpy is not None and isinstance(value, numpy.dtype):
        return str(value.name)
    if numpy is not None and isinstance(value, type) and issubclass(value, numpy.generic):
        return value.__name__
    return None
