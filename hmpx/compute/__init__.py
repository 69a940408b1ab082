"""How an op computes once its inputs are settled: upcast, accumulated, emulated, legalized."""

from __future__ import annotations

from .accumulation import Accumulation
from .composition import computed_in_fp32, inputs_of, rounded, widen
from .emulation import Emulation, watched_emulation
from .legalize.capability import (
    KINDS,
    PRODUCTS,
    SMALL_PRODUCT,
    Capability,
    capability,
    is_reported_of_all,
    name_of,
    reported,
)
from .legalize.convolutions import CONVOLUTIONS, is_large
from .legalize.legalizer import (
    LEGALIZE_MODES,
    Legalizer,
    is_exported,
    is_slow,
    is_slow_in_inference,
    is_traced,
    is_watched,
    note_unrounded,
    watched_rounding,
)
from .lowering import LOWERINGS, Lowering, create_lower_func, lowerings, register_op, unregister
from .missing_kernels import Callee, Lacking, completed, lacking_kernels
from .norm_statistics import Statistics

__all__ = [
    "CONVOLUTIONS",
    "KINDS",
    "LEGALIZE_MODES",
    "LOWERINGS",
    "PRODUCTS",
    "SMALL_PRODUCT",
    "Accumulation",
    "Callee",
    "Capability",
    "Emulation",
    "Lacking",
    "Legalizer",
    "Lowering",
    "Statistics",
    "capability",
    "completed",
    "computed_in_fp32",
    "create_lower_func",
    "inputs_of",
    "is_exported",
    "is_large",
    "is_reported_of_all",
    "is_slow",
    "is_slow_in_inference",
    "is_traced",
    "is_watched",
    "lacking_kernels",
    "lowerings",
    "name_of",
    "note_unrounded",
    "register_op",
    "reported",
    "rounded",
    "unregister",
    "watched_emulation",
    "watched_rounding",
    "widen",
]
