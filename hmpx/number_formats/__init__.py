"""Number formats: families, names, rounding, codes, and the compiled kernels that round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .vocabulary import (
    MOST_STEPS,
    OVERFLOWS,
    ROUNDING_MODES,
    is_format,
    name_of,
    said_of,
    spellings,
)

if TYPE_CHECKING:
    from .codes import decode, encode, from_uint16, to_uint16
    from .families import (
        FORMATS,
        Block,
        CodedFormat,
        Custom,
        Exponent,
        Fixed,
        Float,
        Format,
        Posit,
        Rounder,
        Scaled,
        Table,
        Takum,
        code_dtype,
    )
    from .kernels import (
        MOST_THREADS,
        Bfloat16Kernels,
        bfloat16_kernels,
        extremes_kernels,
        kernels_in_use,
        largest_magnitude,
    )
    from .packing import Packing, in_bytes, out_of_bytes, packed
    from .registered import FORMATS_BY_NAME, canonical, get, names, register, without
    from .rounding import (
        FormatRounding,
        Rounded,
        quantize,
        rounder,
        rounding_in,
        rounds_nothing,
        straight_through,
        takes_operators,
        text_of,
    )
else:  # only needed for number formats
    __getattr__ = shown_later(
        __name__,
        {
            "codes": "decode encode from_uint16 to_uint16",
            "families": "FORMATS Block CodedFormat Custom Exponent Fixed Float Format Posit Rounder Scaled Table Takum code_dtype",
            "kernels": "MOST_THREADS Bfloat16Kernels bfloat16_kernels extremes_kernels kernels_in_use largest_magnitude",
            "packing": "Packing in_bytes out_of_bytes packed",
            "registered": "FORMATS_BY_NAME canonical get names register without",
            "rounding": "FormatRounding Rounded quantize rounder rounding_in rounds_nothing straight_through takes_operators text_of",
        },
    )
