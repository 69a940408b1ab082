"""Number formats: families, names, rounding, codes, and the compiled kernels that round."""

from __future__ import annotations

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
from .kernels.cache import build_kernels, build_portable, kernels_path
from .kernels.compiler import find_compiler, shown_command
from .kernels.extremes import MOST_THREADS, extremes_kernels
from .kernels.library import kernels_state
from .plans import OVERFLOWS, ROUNDING_MODES
from .quantization import quantize, rounder, rounds_nothing
from .registered import FORMATS_BY_NAME, canonical, get, names, register, without
from .uint16 import from_uint16, to_uint16
from .vocabulary import name_of, said_of, spellings

__all__ = [
    "FORMATS",
    "FORMATS_BY_NAME",
    "MOST_THREADS",
    "OVERFLOWS",
    "ROUNDING_MODES",
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
    "build_kernels",
    "build_portable",
    "canonical",
    "code_dtype",
    "decode",
    "encode",
    "extremes_kernels",
    "find_compiler",
    "from_uint16",
    "get",
    "kernels_path",
    "kernels_state",
    "name_of",
    "names",
    "quantize",
    "register",
    "rounder",
    "rounds_nothing",
    "said_of",
    "shown_command",
    "spellings",
    "to_uint16",
    "without",
]
