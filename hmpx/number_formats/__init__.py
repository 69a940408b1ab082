"""Number formats: families, names, rounding, codes, and the compiled kernels that round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .vocabulary import MOST_STEPS as MOST_STEPS
from .vocabulary import OVERFLOWS as OVERFLOWS
from .vocabulary import ROUNDING_MODES as ROUNDING_MODES
from .vocabulary import is_format as is_format
from .vocabulary import name_of as name_of
from .vocabulary import said_of as said_of
from .vocabulary import spellings as spellings

if TYPE_CHECKING:
    from .codes import decode as decode
    from .codes import encode as encode
    from .codes import from_uint16 as from_uint16
    from .codes import to_uint16 as to_uint16
    from .families import FORMATS as FORMATS
    from .families import Block as Block
    from .families import CodedFormat as CodedFormat
    from .families import Custom as Custom
    from .families import Exponent as Exponent
    from .families import Fixed as Fixed
    from .families import Float as Float
    from .families import Format as Format
    from .families import Posit as Posit
    from .families import Rounder as Rounder
    from .families import Scaled as Scaled
    from .families import Table as Table
    from .families import Takum as Takum
    from .families import code_dtype as code_dtype
    from .kernels import MOST_THREADS as MOST_THREADS
    from .kernels import Bfloat16Kernels as Bfloat16Kernels
    from .kernels import bfloat16_kernels as bfloat16_kernels
    from .kernels import extremes_kernels as extremes_kernels
    from .kernels import kernels_in_use as kernels_in_use
    from .kernels import largest_magnitude as largest_magnitude
    from .registered import FORMATS_BY_NAME as FORMATS_BY_NAME
    from .registered import canonical as canonical
    from .registered import get as get
    from .registered import names as names
    from .registered import register as register
    from .registered import without as without
    from .rounding import Rounding as Rounding
    from .rounding import is_compiled as is_compiled
    from .rounding import quantize as quantize
    from .rounding import rounder as rounder
    from .rounding import rounding_in as rounding_in
    from .rounding import rounds_nothing as rounds_nothing
    from .rounding import text_of as text_of
else:  # only needed for number formats
    __getattr__ = shown_later(
        __name__,
        {
            "codes": "decode encode from_uint16 to_uint16",
            "families": "FORMATS Block CodedFormat Custom Exponent Fixed Float Format Posit Rounder Scaled Table Takum code_dtype",
            "kernels": "MOST_THREADS Bfloat16Kernels bfloat16_kernels extremes_kernels kernels_in_use largest_magnitude",
            "registered": "FORMATS_BY_NAME canonical get names register without",
            "rounding": "Rounding is_compiled quantize rounder rounding_in rounds_nothing text_of",
        },
    )
