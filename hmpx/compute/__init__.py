"""How an op computes after its inputs are cast: upcast, accumulated, emulated, legalized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .accumulation import Accumulation
from .amaxes import Histories, end_step, ended_steps, has_history, histories_patch
from .composition import (
    Inputs,
    computed_in_fp32,
    inputs_of,
    names_dtype,
    rounded,
    rounding_last,
    widen,
)
from .graphs import is_exported, is_onnx_made
from .kept_parameters import LEAST_ELEMENTS, keeping_parameters, pays
from .legalize.activations import ACTIVATIONS, looked_up
from .legalize.capability import KINDS, PRODUCTS, capability, reported
from .legalize.convolutions import CONVOLUTIONS, prepare
from .legalize.legalization import (
    LEGALIZE_MODES,
    SLOW_KINDS,
    Legalization,
    has_own_gradients,
    has_own_products,
    may_be_legalized,
)
from .legalize.legalizer import LegalizedCall, Legalizer
from .lowered import LOWERINGS
from .missing_kernels import Callee, Lacking, completed, in_fp32, lacking_kernels, may_run_again
from .norm_statistics import Statistics
from .numbers import completed_by_numbers, held, taking_numbers
from .saved_tensors import saved_by
from .selecting import selected
from .watching import (
    COMPUTED,
    DECIDING_WATCHERS,
    is_watched,
    note_deciding,
    note_legalized,
    note_unrounded,
    watched_deciding,
    watched_emulation,
    watched_rounding,
)

if TYPE_CHECKING:
    from .delayed import emulation_class
    from .emulation import Emulation, Formats
    from .lowering import (
        Lowering,
        create_lower_func,
        lowerings,
        register_op,
        unregister,
    )
else:  # only needed for number formats
    __getattr__ = shown_later(
        __name__,
        {
            "delayed": "emulation_class",
            "emulation": "Emulation Formats",
            "lowering": "Lowering create_lower_func lowerings register_op unregister",
        },
    )

__all__ = [
    "ACTIVATIONS",
    "COMPUTED",
    "CONVOLUTIONS",
    "DECIDING_WATCHERS",
    "KINDS",
    "LEAST_ELEMENTS",
    "LEGALIZE_MODES",
    "LOWERINGS",
    "PRODUCTS",
    "SLOW_KINDS",
    "Accumulation",
    "Callee",
    "Emulation",
    "Formats",
    "Histories",
    "Inputs",
    "Lacking",
    "Legalization",
    "LegalizedCall",
    "Legalizer",
    "Lowering",
    "Statistics",
    "capability",
    "completed",
    "completed_by_numbers",
    "computed_in_fp32",
    "create_lower_func",
    "emulation_class",
    "end_step",
    "ended_steps",
    "has_history",
    "has_own_gradients",
    "has_own_products",
    "held",
    "histories_patch",
    "in_fp32",
    "inputs_of",
    "is_exported",
    "is_onnx_made",
    "is_watched",
    "keeping_parameters",
    "lacking_kernels",
    "looked_up",
    "lowerings",
    "may_be_legalized",
    "may_run_again",
    "names_dtype",
    "note_deciding",
    "note_legalized",
    "note_unrounded",
    "pays",
    "prepare",
    "register_op",
    "reported",
    "rounded",
    "rounding_last",
    "saved_by",
    "selected",
    "taking_numbers",
    "unregister",
    "watched_deciding",
    "watched_emulation",
    "watched_rounding",
    "widen",
]
