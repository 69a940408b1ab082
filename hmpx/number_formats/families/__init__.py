"""The families of number formats.

A family is a module: a frozen dataclass derived from `CodedFormat` or `NumberFormat`, in `Format` here, and its
methods `params_in` and `round`; for codes `codes_of` and `values_of`; for kernels `kernel` and `coding`.
"""

from __future__ import annotations

import sys
from typing import Final, TypeAlias, get_args

from . import fixed, scaled
from .fixed import Exponent, Fixed
from .floats import Float
from .number_format import (
    CodedFormat,
    Custom,
    Kernel,
    NumberFormat,
    Params,
    Rounder,
    code_dtype,
    params_of,
)
from .posits import Posit, Takum
from .scaled import Block, Scaled
from .shared_scales import SharedScales
from .tables import Table

#: A format that has codes.
Coded: TypeAlias = Float | Exponent | Posit | Takum | Fixed | Block | Scaled | Table

#: A format of any family.
Format: TypeAlias = Coded | Custom

#: The classes of formats.
FORMATS: Final[tuple[type[NumberFormat], ...]] = get_args(Format)

# Earlier pickles have `Block` and `Exponent` in modules of their own.
sys.modules.update({f"{__name__}.blocks": scaled, f"{__name__}.exponents": fixed})
