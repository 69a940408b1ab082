"""One pass in fp32 that finds what may run in low precision, what it costs, and what rounding it does."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import Any, Final

import torch

from .. import ops, session
from ..casting import Options
from ..policy import DENY, Decision, Policy
from ..recording import record
from ..torch_state import unchanged
from .assignment import policy_of
from .batches import Batch
from .candidates import Seconds, Spot, called_spots
from .seeding import seed_all

#: How often the model is timed in either type, in turns; once more before, unmeasured.
_ROUNDS: Final = 5


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


def seconds_of(
    model: Any,
    batches: Sequence[Batch],
    device_types: frozenset[str],
    options: Options,
    seed: int,
    *,
    spots: Collection[Spot],
    low_type: str,
) -> dict[Spot, Seconds]:
    """Returns how long the calls of each op and module take, with their casts: medians of some forwards.

    fp32 and low precision take turns, so that what slows the machine down for a while slows both.
    """
    policies = observing_policy(), policy_of(dict.fromkeys(spots, low_type), low_type)
    rounds: tuple[list[dict[Spot, float]], list[dict[Spot, float]]] = ([], [])
    for number in range(_ROUNDS + 1):
        for policy, found in zip(policies, rounds, strict=True):
            recording = record(times=True)
            with (
                unchanged(model),
                torch.no_grad(),
                recording,
                session.restore(policy, device_types, options, False),
            ):
                for index, batch in enumerate(batches):
                    seed_all(seed + index)
                    batch.run(model)
            if number:
                found.append(_seconds(recording, spots))
    return {
        spot: Seconds(*[statistics.median([each[spot] for each in found]) for found in rounds])
        for spot in spots
    }


def _seconds(recording: record, spots: Collection[Spot]) -> dict[Spot, float]:
    found = dict.fromkeys(spots, 0.0)
    for row in recording.rows:
        spot = (row.op, row.module)
        if row.phase != "backward" and spot in found:
            found[spot] += row.seconds or 0.0
    return found


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
