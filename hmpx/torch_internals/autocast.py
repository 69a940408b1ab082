"""The private side of torch.autocast: its state, its regions and its decorators."""

from __future__ import annotations

import types
from typing import Any, Final

from .torch_part import rely_on

#: Whether torch.autocast is on for any device type here; and a context in which it casts nothing.
is_any_autocast_enabled, DisableAutocast = rely_on(
    "torch._C._is_any_autocast_enabled",
    "torch._C._DisableAutocast",
    feature="calls inside of torch.autocast",
    without="what is cast there would be unknown",
)


#: Modules of torch that open regions on behalf of the user's code.
AUTOCAST_OPENERS: Final = (
    "torch.amp.autocast_mode",  # decorators, and graphs
    "torch._higher_order_ops.wrap",
    "torch._dynamo.variables.higher_order_ops",
)

#: Device types that torch knows but that don't exist. torch.compile guards on their autocast states, and
#: backward threads inherit these, so they can carry states of hmpx.
OFF_MARK, TRAINING_MARK = "maia", "ipu"

enter_autocast, exit_autocast = rely_on(
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    feature="regions of torch.autocast in exported graphs",
    without="exported graphs cast inside of regions that are off",
    instead=(None, None),
)


def _code_in(function: Any, name: str) -> types.CodeType | None:
    """Returns the code of the function ``name`` that is defined inside ``function``."""
    codes = [c for c in function.__code__.co_consts if isinstance(c, types.CodeType)]
    return next((code for code in codes if code.co_name == name), None)


_custom_fwd, _custom_bwd = rely_on(
    "torch.amp.autocast_mode.custom_fwd",
    "torch.amp.autocast_mode.custom_bwd",
    feature="torch.amp.custom_fwd",
    without="functions that it decorates run with casts on, whatever their cast_inputs say",
    instead=(lambda: None, lambda: None),
)
#: Code of all functions decorated by these. Libraries decorate them before a conversion.
CUSTOM_FORWARD: Final = _code_in(_custom_fwd, "decorate_fwd")
CUSTOM_BACKWARD: Final = _code_in(_custom_bwd, "decorate_bwd")
