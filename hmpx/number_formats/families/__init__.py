"""The families of number formats, a module each.

A module of a family has its data, which derive from `CodedFormat` or `NumberFormat`, and its plans,
which derive from `Plan`; naming the class in `Format` makes it known everywhere.
"""

from __future__ import annotations

from typing import Final, TypeAlias, get_args

from ..plans import Plan
from .blocks import Block
from .customs import Custom
from .exponents import Exponent
from .fixed import Fixed
from .floats import Float
from .number_format import CodedFormat, NumberFormat, Rounder, code_dtype
from .posits import Posit
from .scaled import Scaled
from .tables import Table
from .takums import Takum

__all__ = [
    "FORMATS",
    "PLANS",
    "Block",
    "CodedFormat",
    "Custom",
    "Exponent",
    "Fixed",
    "Float",
    "Format",
    "Posit",
    "Rounder",
    "Scaled",
    "Table",
    "Takum",
    "code_dtype",
]

#: A format of any family: the one list of families.
Format: TypeAlias = Float | Exponent | Posit | Takum | Fixed | Block | Scaled | Table | Custom

#: The classes of formats.
FORMATS: Final[tuple[type[NumberFormat], ...]] = get_args(Format)

#: The classes of plans by their names.
PLANS: Final[dict[str, type[Plan]]] = {
    plan.__name__: plan for family in FORMATS for plan in family.plans
}
