"""How an op computes after its inputs are cast: upcast, accumulated, emulated, legalized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .accumulation import Accumulation as Accumulation
from .amaxes import Histories as Histories
from .amaxes import end_step as end_step
from .amaxes import ended_steps as ended_steps
from .amaxes import has_history as has_history
from .amaxes import histories_patch as histories_patch
from .composition import FOR_FILES as FOR_FILES
from .composition import Inputs as Inputs
from .composition import call_raised as call_raised
from .composition import computed_in_fp32 as computed_in_fp32
from .composition import folding as folding
from .composition import in_graph as in_graph
from .composition import inputs_of as inputs_of
from .composition import is_exported as is_exported
from .composition import is_onnx_made as is_onnx_made
from .composition import names_dtype as names_dtype
from .composition import rounded as rounded
from .composition import rounding_last as rounding_last
from .composition import traced as traced
from .composition import widen as widen
from .composition import widen_matrices as widen_matrices
from .legalize import convolutions as convolutions
from .legalize import linears as linears
from .legalize.capability import KINDS as KINDS
from .legalize.capability import PRODUCTS as PRODUCTS
from .legalize.capability import SLOW_KINDS as SLOW_KINDS
from .legalize.capability import SMALL_PRODUCT as SMALL_PRODUCT
from .legalize.capability import UNMEASURED as UNMEASURED
from .legalize.capability import capability as capability
from .legalize.capability import is_reported_of_all as is_reported_of_all
from .legalize.capability import known_capability as known_capability
from .legalize.capability import reported as reported
from .legalize.convolutions import CONVOLUTIONS as CONVOLUTIONS
from .legalize.convolutions import prepare as prepare
from .legalize.scratch import in_reused_memory as in_reused_memory
from .lowered import LOWERINGS as LOWERINGS
from .missing_kernels import Callee as Callee
from .missing_kernels import Lacking as Lacking
from .missing_kernels import completed as completed
from .missing_kernels import in_fp32 as in_fp32
from .missing_kernels import lacking_kernels as lacking_kernels
from .missing_kernels import may_run_again as may_run_again
from .missing_kernels import selected as selected
from .norm_statistics import Statistics as Statistics
from .numbers import adding_masks as adding_masks
from .numbers import cast_finite as cast_finite
from .numbers import completed_by_numbers as completed_by_numbers
from .numbers import held as held
from .numbers import taking_numbers as taking_numbers
from .saved_tensors import LEAST_ELEMENTS as LEAST_ELEMENTS
from .saved_tensors import Precision as Precision
from .saved_tensors import keeping_low as keeping_low
from .saved_tensors import keeping_parameters as keeping_parameters
from .saved_tensors import nodes_made as nodes_made
from .saved_tensors import pays as pays
from .saved_tensors import saved_by as saved_by
from .saved_tensors import tensors_saved_by as tensors_saved_by
from .watching import COMPUTED as COMPUTED
from .watching import DECIDING_WATCHERS as DECIDING_WATCHERS
from .watching import EMULATION_WATCHERS as EMULATION_WATCHERS
from .watching import is_watched as is_watched
from .watching import note_deciding as note_deciding
from .watching import note_legalized as note_legalized
from .watching import note_unrounded as note_unrounded
from .watching import watched as watched
from .watching import watched_rounding as watched_rounding

if TYPE_CHECKING:
    from .emulation import Emulation as Emulation
    from .emulation import Formats as Formats
    from .lowering import Lowering as Lowering
    from .lowering import create_lower_func as create_lower_func
    from .lowering import lowerings as lowerings
    from .lowering import register_op as register_op
    from .lowering import unregister as unregister
else:  # only needed for number formats
    __getattr__ = shown_later(
        __name__,
        {
            "emulation": "Emulation Formats",
            "lowering": "Lowering create_lower_func lowerings register_op unregister",
        },
    )
