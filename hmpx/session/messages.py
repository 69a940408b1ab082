"""What a session tells the user: warnings about its lists and patches, log lines about models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from .. import torch_state
from ..errors import HmpxWarning
from ..observers import LOGGER
from ..patches import held_by_models
from ..patching import Change
from ..policy import Policy
from ..tensors import default_device_types, is_present
from ..torch_internals import FakeTensor
from ..warning import warn


def said_of(covered: Iterable[Change]) -> str:
    """Returns the warning about slots that somebody else has patched since; ``""`` for none."""
    names = {patch.where for patch in covered if not (patch.is_foreign or patch.stays_idle)}
    if not names:
        return ""
    return (
        f"{', '.join(sorted(names))}: patched by somebody else after hmpx.convert(); their patch was "
        "left in place, without hmpx's casts beneath it. Undo theirs first, then hmpx.revert()"
    )


def say(messages: list[str]) -> None:
    """Warns of what is wrong with names in the lists."""
    if messages:
        warn("left out of the op lists:\n  " + "\n  ".join(messages))


def warn_of_absent(device_types: Collection[str]) -> None:
    """Warns if this machine has no device of these types, unless a FakeTensorMode stands in for them."""
    by_default = default_device_types()
    if any(each in by_default or is_present(each) for each in device_types):
        return
    if isinstance(torch.empty(0), FakeTensor):
        return
    here = " and ".join(sorted(by_default))
    warn(
        f"nothing will be cast: torch finds no {' or '.join(sorted(device_types))} device on this "
        f"machine; leave out device_types to cast tensors on {here}, or name the types of the devices "
        "that tensors are on"
    )


def log_what_models_keep(functions: Sequence[Callable[..., Any]]) -> None:
    """Logs which of these functions of torch models hold, so that their calls are not cast."""
    for path, function in held_by_models(functions):
        LOGGER.warning("not cast  %r  kept since before convert() by %s", function, path)


def warn_of_unmatched(policy: Policy, root: torch.nn.Module) -> None:
    """Warns of patterns of the policy's sections that match no module in ``root``, which was called."""
    unmatched = policy.unmatched([name for name, _ in torch_state.named_modules(root)])
    if unmatched:
        warnings.warn(
            f"these patterns match no module of {type(root).__name__}:\n  "
            + "\n  ".join(unmatched),
            HmpxWarning,
            stacklevel=5,  # the call of ``root``
        )
