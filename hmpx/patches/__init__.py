"""Patches of torch other than wrappers: regions, names, gradients, operators, pickling, compilers, numpy."""

from __future__ import annotations

from .compiled import compile_patches as compile_patches
from .compiled import forget_compiled as forget_compiled
from .early_names import early_name_patches as early_name_patches
from .early_names import forget_overrides as forget_overrides
from .early_names import function_in as function_in
from .early_names import held_by_models as held_by_models
from .early_names import missed as missed
from .early_names import note_torchs_modules as note_torchs_modules
from .early_names import standing_for as standing_for
from .early_names import taken_name_patches as taken_name_patches
from .foreign_sites import ForeignSite as ForeignSite
from .foreign_sites import following as following
from .foreign_sites import foreign_sites_of as foreign_sites_of
from .foreign_sites import is_renewed as is_renewed
from .held_functions import held_function_patches as held_function_patches
from .kept_values import kept_value_patches as kept_value_patches
from .pickling import pickle_patch as pickle_patch
from .pickling import retired as retired
from .pickling import retired_name as retired_name
from .regions import SCALERS as SCALERS
from .regions import region_patches as region_patches
from .values import value_patches as value_patches
