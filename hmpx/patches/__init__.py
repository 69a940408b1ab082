"""Patches of torch other than wrappers: regions, names, gradients, operators, pickling, compilers, numpy."""

from __future__ import annotations

from .compiled import compile_patches, forget_compiled
from .early_names import (
    early_name_patches,
    forget_overrides,
    function_in,
    held_by_models,
    held_function_patches,
    missed,
    note_torchs_modules,
    standing_for,
    taken_name_patches,
)
from .foreign_sites import ForeignSite, following, foreign_sites_of, is_renewed
from .pickling import pickle_patch, retired, retired_name
from .regions import ON_SKIP, SCALERS, region_patches
from .values import kept_value_patches, value_patches
