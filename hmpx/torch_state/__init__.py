"""The current state: whether casts are off, which modules run, whether a call is training."""

from __future__ import annotations

from .conversions import (
    casts_any,
    conversion,
    conversion_patches,
    decided,
    in_force,
    is_below_dispatcher,
    is_covered,
)
from .disabling import (
    apart,
    disable_casts,
    is_off_by_program,
    keeps_state,
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
from .phases import Phase, as_recomputation, as_training, is_training, keeps_kind, phase
from .switch import (
    AUTOCAST_STATE,
    ON,
    TO_LOW,
    Region,
    close_region,
    end_conversion,
    has_casts,
    is_autocast_on,
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
