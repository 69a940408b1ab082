"""The families of number formats.

A family has its formats, derived from `CodedFormat` or `NumberFormat`, and its plans, derived from `Plan`. Its
class must be listed in `Format`.
"""

from __future__ import annotations

from typing import Final, TypeAlias, get_args

from .fixed import Exponent, Fixed
from .floats import Float
from .number_format import CodedFormat, Custom, NumberFormat, Rounder, code_dtype
from .scaled import Block, Scaled, ScaledPlan, SharedScales
from .tables import Table
from .tapered import Posit, Takum

#: A format that has codes.
Coded: TypeAlias = Float | Exponent | Posit | Takum | Fixed | Block | Scaled | Table

#: A format of any family.
Format: TypeAlias = Coded | Custom

#: The classes of formats.
FORMATS: Final[tuple[type[NumberFormat], ...]] = get_args(Format)
