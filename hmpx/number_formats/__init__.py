"""Number formats: families, names, rounding, codes, and the compiled kernels that round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .instances import is_format
from .modes import MOST_STEPS, OVERFLOWS, ROUNDING_MODES
from .vocabulary import name_of, said_of, spellings

if TYPE_CHECKING:
    from .codes import decode, encode
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
    from .graph_op import is_compiled
    from .kernels.bfloat16 import Bfloat16Kernels, bfloat16_kernels
    from .kernels.extremes import MOST_THREADS, extremes_kernels, largest_magnitude
    from .kernels.library import kernels_in_use
    from .quantization import quantize, rounder, rounds_nothing
    from .registered import FORMATS_BY_NAME, canonical, get, names, register, without
    from .rounding import Rounding
    from .uint16 import from_uint16, to_uint16
else:  # programs without number formats need none of it
    __getattr__ = shown_later(
        __name__,
        {
            "codes": "decode encode",
            "families": "FORMATS Block CodedFormat Custom Exponent Fixed Float Format Posit Rounder Scaled Table Takum code_dtype",
            "kernels.bfloat16": "Bfloat16Kernels bfloat16_kernels",
            "graph_op": "is_compiled",
            "kernels.extremes": "MOST_THREADS extremes_kernels largest_magnitude",
            "kernels.library": "kernels_in_use",
            "quantization": "quantize rounder rounds_nothing",
            "registered": "FORMATS_BY_NAME canonical get names register without",
            "rounding": "Rounding",
            "uint16": "from_uint16 to_uint16",
        },
    )

__all__ = [
    "FORMATS",
    "FORMATS_BY_NAME",
    "MOST_STEPS",
    "MOST_THREADS",
    "OVERFLOWS",
    "ROUNDING_MODES",
    "Bfloat16Kernels",
    "Block",
    "CodedFormat",
    "Custom",
    "Exponent",
    "Fixed",
    "Float",
    "Format",
    "Posit",
    "Rounder",
    "Rounding",
    "Scaled",
    "Table",
    "Takum",
    "bfloat16_kernels",
    "canonical",
    "code_dtype",
    "decode",
    "encode",
    "extremes_kernels",
    "from_uint16",
    "get",
    "is_compiled",
    "is_format",
    "kernels_in_use",
    "largest_magnitude",
    "name_of",
    "names",
    "quantize",
    "register",
    "rounder",
    "rounds_nothing",
    "said_of",
    "spellings",
    "to_uint16",
    "without",
]
