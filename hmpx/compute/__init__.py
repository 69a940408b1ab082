"""How an op computes after its inputs are cast: upcast, accumulated, emulated, legalized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .accumulation import Accumulation
from .amaxes import Histories, end_step, ended_steps, has_history, histories_patch
from .composition import (
    FOR_FILES,
    Inputs,
    call_raised,
    computed_in_fp32,
    folding,
    in_graph,
    inputs_of,
    is_exported,
    is_onnx_made,
    names_dtype,
    rounded,
    rounding_last,
    traced,
    widen,
    widen_matrices,
)
from .legalize import convolutions, linears
from .legalize.capability import (
    KINDS,
    PRODUCTS,
    SLOW_KINDS,
    SMALL_PRODUCT,
    UNMEASURED,
    capability,
    is_reported_of_all,
    known_capability,
    reported,
)
from .legalize.convolutions import CONVOLUTIONS
from .legalize.scratch import in_reused_memory
from .lowered import LOWERINGS
from .missing_kernels import (
    Callee,
    Lacking,
    completed,
    in_fp32,
    lacking_kernels,
    may_run_again,
    selected,
)
from .nodes import Fused, fused, legalized, looking_up, nodes_in_use
from .norm_statistics import Statistics
from .numbers import adding_masks, cast_finite, completed_by_numbers, held, taking_numbers
from .saved_tensors import (
    LEAST_ELEMENTS,
    Precision,
    keeping_low,
    keeping_parameters,
    nodes_made,
    pays,
    saved_by,
    tensors_saved_by,
)
from .watching import (
    COMPUTED,
    DECIDING_WATCHERS,
    EMULATION_WATCHERS,
    is_watched,
    note_deciding,
    note_legalized,
    note_unrounded,
    watched,
    watched_rounding,
)

if TYPE_CHECKING:
    from .emulation import Emulation, Formats
    from .float8_products import has_float8, kernels_on, why_not
    from .lowering import Lowering, create_lower_func, lowerings, register_op, unregister
else:  # only needed for number formats
    __getattr__ = shown_later(
        __name__,
        {
            "emulation": "Emulation Formats",
            "float8_products": "has_float8 kernels_on why_not",
            "lowering": "Lowering create_lower_func lowerings register_op unregister",
        },
    )
