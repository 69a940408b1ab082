"""``habana_frameworks.torch.utils.debug``: settings of Gaudi's graph compiler, and its reports.

Settings have no effect, certainly not on results. There are no reports, and asking for one raises an
error.
"""

from __future__ import annotations

from typing import Any

from ...absent import absent, unknown, without_effect


def _is_enabled_weight_permute_pass() -> bool:
    """Returns True: convolutions take weights as torch has them."""
    return True


def _is_enabled_synapse_layout_handling() -> bool:
    """Returns True: torch takes care of the layout of tensors."""
    return True


def _is_enabled_lazy_collectives() -> bool:
    """Returns False."""
    return False


def _get_fallback_op_count() -> dict[str, int]:
    """Returns an empty count: no op fell back to the CPU."""
    return {}


def __getattr__(name: str) -> Any:
    if name.startswith(("_dump_", "load_ds_", "save_ds_", "get_tensor_info", "_get_")):
        return absent(__name__, name, "look with torch.profiler")
    if name.startswith(_SETTINGS):
        return without_effect(__name__, name)
    raise unknown(__name__, name)


_SETTINGS = (
    "_enable_",
    "_disable_",
    "_set_",
    "_memstat_",
    "_mem_log",
    "_hb_print",
    "_hg_print",
    "_bridge_cleanup",
    "_clear_",
    "_towl_",
    "clear_",
)
