"""What is running right now: whether casts are off, which modules run, whether a call is training."""

from __future__ import annotations

from .conversions import conversion, conversion_patches, decided, in_force, is_covered
from .disabling import (
    apart,
    disable_casts,
    is_off_by_program,
    is_unobserved,
    keeps_state,
    unobserved_casts,
    without_casts,
    without_low_casts,
)
from .dispatcher import is_below_dispatcher
from .marks import AUTOCAST_STATE, ON, TO_LOW, is_enabled, reserve_marks
from .model_state import ModelState, unchanged
from .module_names import class_name, named_modules
from .module_path import (
    asked_by,
    forget_modules,
    keeps_place,
    module_patches,
    place,
    running_module,
    spot,
)
from .phases import Phase, as_recomputation, phase
from .random_state import state_of_random_numbers
from .reached import Reached, reached_by
from .switch import (
    Region,
    close_region,
    count_autocast,
    end_conversion,
    forget_lost_regions,
    has_casts,
    is_off,
    last_region,
    off,
    open_region,
    partly_off,
)
from .traced_modules import traced_places
from .training import as_training, is_training, keeps_kind

__all__ = [
    "AUTOCAST_STATE",
    "ON",
    "TO_LOW",
    "ModelState",
    "Phase",
    "Reached",
    "Region",
    "apart",
    "as_recomputation",
    "as_training",
    "asked_by",
    "class_name",
    "close_region",
    "conversion",
    "conversion_patches",
    "count_autocast",
    "decided",
    "disable_casts",
    "end_conversion",
    "forget_lost_regions",
    "forget_modules",
    "has_casts",
    "in_force",
    "is_below_dispatcher",
    "is_covered",
    "is_enabled",
    "is_off",
    "is_off_by_program",
    "is_training",
    "is_unobserved",
    "keeps_kind",
    "keeps_place",
    "keeps_state",
    "last_region",
    "module_patches",
    "named_modules",
    "off",
    "open_region",
    "partly_off",
    "phase",
    "place",
    "reached_by",
    "reserve_marks",
    "running_module",
    "spot",
    "state_of_random_numbers",
    "traced_places",
    "unchanged",
    "unobserved_casts",
    "without_casts",
    "without_low_casts",
]
