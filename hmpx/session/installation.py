"""What a session has put into torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import compute, patching
from ..casting import Options
from ..observers import Attached
from ..policy import Policy
from ..rules import Registered


@dataclass(frozen=True, slots=True)
class Installation:
    """What a session has put into torch.

    Attributes:
        applied: The patches, in the order in which they were applied.
        wrappers: The wrappers in them.
        rules: The rules that the wrappers ask.
        observers: The observers that get calls.
        notes_modules: Whether the running modules are noted.
    """

    applied: tuple[patching.Applied, ...] = ()
    wrappers: tuple[Callable[..., Any], ...] = ()
    rules: tuple[Registered, ...] = ()
    notes_modules: bool = False
    observers: tuple[Attached, ...] = ()


def asks_for_modules(policy: Policy, registered: tuple[Registered, ...]) -> bool:
    """Whether to note running modules from the start; otherwise that begins when they are asked for."""
    return any(section.is_placed for section in policy.sections) or any(
        rule.names_modules() for rule in registered
    )


def has_history(policy: Policy, options: Options) -> bool:
    """Whether an op rounds to a format whose amaxes are kept by module."""
    decided = [*policy.decisions.values()]
    for section in policy.sections:
        decided += section.decisions.values()
    formats: list[object] = [policy.low_precision_type, options.round_gradients]
    for decision in decided:
        formats += (decision.dtype, decision.weights, decision.activations, decision.gradients)
    return any(map(compute.has_history, formats))
