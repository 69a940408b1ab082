"""The families of number formats.

A family has its formats, derived from `CodedFormat` or `NumberFormat`, and its plans, derived from `Plan`. Its
class must be listed in `Format`.
"""

from __future__ import annotations

from typing import Final, TypeAlias, get_args

from .fixed import Exponent as Exponent
from .fixed import Fixed as Fixed
from .floats import Float as Float
from .number_format import CodedFormat as CodedFormat
from .number_format import Custom as Custom
from .number_format import NumberFormat as NumberFormat
from .number_format import Rounder as Rounder
from .number_format import code_dtype as code_dtype
from .scaled import Block as Block
from .scaled import Scaled as Scaled
from .scaled import ScaledPlan as ScaledPlan
from .scaled import SharedScales as SharedScales
from .tables import Table as Table
from .tapered import Posit as Posit
from .tapered import Takum as Takum

#: A format that has codes.
Coded: TypeAlias = Float | Exponent | Posit | Takum | Fixed | Block | Scaled | Table

#: A format of any family.
Format: TypeAlias = Coded | Custom

#: The classes of formats.
FORMATS: Final[tuple[type[NumberFormat], ...]] = get_args(Format)
