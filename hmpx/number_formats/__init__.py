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
    from .graph_op import is_compiled
    from .kernels import kernels_in_use
    from .kernels.calls import (
        MOST_THREADS,
        Bfloat16Kernels,
        bfloat16_kernels,
        extremes_kernels,
        largest_magnitude,
    )
    from .quantization import quantize, rounder, rounds_nothing
    from .registered import FORMATS_BY_NAME, canonical, get, names, register, without
    from .rounding import Rounding
else:  # only needed for number formats
    __getattr__ = shown_later(
        __name__,
        {
            "codes": "decode encode from_uint16 to_uint16",
            "families": "FORMATS Block CodedFormat Custom Exponent Fixed Float Format Posit Rounder Scaled Table Takum code_dtype",
            "graph_op": "is_compiled",
            "kernels": "kernels_in_use",
            "kernels.calls": "MOST_THREADS Bfloat16Kernels bfloat16_kernels extremes_kernels largest_magnitude",
            "quantization": "quantize rounder rounds_nothing",
            "registered": "FORMATS_BY_NAME canonical get names register without",
            "rounding": "Rounding",
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
