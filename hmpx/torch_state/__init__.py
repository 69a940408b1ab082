"""The current state: whether casts are off, which modules run, whether a call is training."""

from __future__ import annotations

from .disabling import (
    Phase,
    apart,
    as_recomputation,
    as_training,
    disable_casts,
    is_off_by_program,
    is_training,
    keeps_kind,
    keeps_state,
    phase,
    unobserved_by,
    unobserved_casts,
    without_casts,
    without_low_casts,
)
from .model_state import (
    ModelState,
    RandomStates,
    accelerators,
    reached_by,
    seed_all,
    state_of_random_numbers,
    unchanged,
)
from .module_names import class_name, named_modules, named_tensors, unwrapped
from .module_path import (
    asked_by,
    forget_modules,
    is_outside,
    keeps_place,
    module_patches,
    place,
    running_module,
    spot,
    traced_places,
)
from .switch import (
    AUTOCAST_STATE,
    ON,
    TO_LOW,
    Region,
    casts_any,
    close_region,
    conversion,
    conversion_patches,
    decided,
    end_conversion,
    has_casts,
    in_force,
    is_autocast_on,
    is_below_dispatcher,
    is_covered,
    is_enabled,
    is_off,
    last_region,
    note_autocast,
    off,
    open_region,
    open_regions,
    partly_off,
    reserve_marks,
    settle_autocast,
)
