"""One pass in fp32 that finds what may run in low precision, what it costs, and what rounding it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import ops, session
from ..casting import Options
from ..policy import DENY, Decision, Policy
from ..recording import record
from ..torch_state import unchanged
from .batches import Batch
from .candidates import Spot, called_spots
from .seeding import seed_all


def spots_of(
    model: Any, batches: Sequence[Batch], device_types: frozenset[str], options: Options, seed: int
) -> dict[Spot, tuple[int, int]]:
    """Returns each op and module that may run in low precision -> FLOPs and bytes of its calls."""
    recording = record()
    with (
        unchanged(model),
        torch.no_grad(),
        recording,  # first: wrappers are made once, with it
        session.restore(observing_policy(), device_types, options, False),
    ):
        for index, batch in enumerate(batches):
            seed_all(seed + index)
            batch.run(model)
    return called_spots(recording.rows)


def observing_policy() -> Policy:
    """Returns the policy under which each op of a program in fp32 is seen, and nothing changes.

    Functions written in Python are seen by the ops that they call, unless they call what can't be
    patched, as ``Tensor.__rsub__`` does: such ones are listed, so that they are seen themselves.
    """
    is_listed = ops.facts("python_level")
    listed = [
        name
        for name in ops.computing()
        if any(
            site.is_python
            and (
                site.attribute.startswith("__") or f"{site.namespace}.{site.attribute}" in is_listed
            )
            for site in ops.table()[name].sites
        )
    ]
    return Policy({name: Decision(DENY) for name in sorted(listed)})
