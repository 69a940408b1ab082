"""Sees what the calls of an evaluation computed in, which costs no further one."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch

from ..observers import OpCall
from ..tensors import LOW_DTYPES
from .assignment import reads_first
from .candidates import Candidate, Spot
from .evaluation import Seen


class Observed:
    """An observer that counts calls: all, those in low precision, those that were given nothing else."""

    def __init__(self) -> None:
        """Has seen none."""
        self._counts: dict[Spot, list[int]] = {}

    def __call__(self, call: OpCall) -> None:
        """Counts one call."""
        if not call.input_dtypes:
            return
        counts = self._counts.setdefault((call.op, call.module), [0, 0, 0])
        given = call.input_dtypes[:1] if reads_first(call.op) else call.input_dtypes
        dtype = call.dtype
        if dtype is None:  # it was left alone: it computes in what it is given
            dtype = functools.reduce(torch.promote_types, call.cast_dtypes)
        counts[0] += 1
        counts[1] += dtype in LOW_DTYPES
        counts[2] += all(each in LOW_DTYPES for each in given)

    def seen(
        self, candidates: Iterable[Candidate], spots: Mapping[Spot, tuple[int, int]]
    ) -> dict[str, Seen]:
        """Returns what was seen of each candidate that may follow; ``spots`` has what its calls cost."""
        return {
            each.name: Seen(
                self._share([(spot, spots[spot][0]) for spot in sorted(each.spots)], 1),
                self._share([(spot, spots[spot][1]) for spot in sorted(each.spots)], 1),
                self._share([(spot, spots[spot][1]) for spot in sorted(each.spots)], 2),
            )
            for each in candidates
            if each.may_follow
        }

    def _share(self, costs: Iterable[tuple[Spot, int]], counted: int) -> float:
        """Returns the share of a cost that is of calls that were counted; of each spot all cost the same."""
        part = whole = 0.0
        for spot, cost in costs:
            counts = self._counts.get(spot, [0, 0, 0])
            whole += cost
            part += cost * counts[counted] / (counts[0] or 1)
        return part / whole if whole else 1.0
