"""The families of number formats, one module each.

A family's module has its formats, derived from `CodedFormat` or `NumberFormat`, and its plans, derived from
`Plan`. Its class must be listed in `Format`.
"""

from __future__ import annotations

from typing import Final, TypeAlias, get_args

from .blocks import Block
from .customs import Custom
from .exponents import Exponent
from .fixed import Fixed
from .floats import Float
from .number_format import CodedFormat, NumberFormat, Rounder, code_dtype
from .scaled import Scaled
from .shared_scales import SharedScales
from .tables import Table
from .tapered import Posit, Takum

__all__ = [
    "FORMATS",
    "Block",
    "Coded",
    "CodedFormat",
    "Custom",
    "Exponent",
    "Fixed",
    "Float",
    "Format",
    "Posit",
    "Rounder",
    "Scaled",
    "SharedScales",
    "Table",
    "Takum",
    "code_dtype",
]

#: A format that has codes.
Coded: TypeAlias = Float | Exponent | Posit | Takum | Fixed | Block | Scaled | Table

#: A format of any family.
Format: TypeAlias = Coded | Custom

#: The classes of formats.
FORMATS: Final[tuple[type[NumberFormat], ...]] = get_args(Format)
