"""Changes to torch other than the wrappers: regions, filled tensors, early names, gradients, operators, pickling, compilers, numpy."""

from __future__ import annotations

from .compiled import compile_patches, forget_compiled
from .control_flow import control_flow_patches
from .early_names import (
    early_name_patches,
    forget_overrides,
    held_by_models,
    missed,
)
from .filled import filled_patches
from .foreign_sites import ForeignSite, following, foreign_sites_of, is_renewed
from .gradients import gradient_patches
from .held_functions import held_function_patches
from .kept_values import kept_value_patches
from .numpy_values import numpy_patches
from .operators import operator_patches
from .pickling import pickle_patch, retired, retired_name
from .regions import SCALERS, region_patches
from .taken_names import function_in, note_torchs_modules, standing_for, taken_name_patches

__all__ = [
    "SCALERS",
    "ForeignSite",
    "compile_patches",
    "control_flow_patches",
    "early_name_patches",
    "filled_patches",
    "following",
    "foreign_sites_of",
    "forget_compiled",
    "forget_overrides",
    "function_in",
    "gradient_patches",
    "held_by_models",
    "held_function_patches",
    "is_renewed",
    "kept_value_patches",
    "missed",
    "note_torchs_modules",
    "numpy_patches",
    "operator_patches",
    "pickle_patch",
    "region_patches",
    "retired",
    "retired_name",
    "standing_for",
    "taken_name_patches",
]
