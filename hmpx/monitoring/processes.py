"""Adds up what the processes of a distributed run have measured, in one all-reduce."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, filterfalse
from typing import Any

import torch
from torch import Tensor, distributed

from ..number_formats import get
from ..number_formats import names as formats
from ..tensors import COMPUTED, long_name
from .alarms import MonitoredRow
from .figures import ENDS, Type, added, gather

#: A row as it travels, with the name of its type: some formats have functions that can't be pickled.
_Key = tuple[MonitoredRow, str]


def is_distributed() -> bool:
    """Whether this is a process of a distributed run."""
    return distributed.is_available() and distributed.is_initialized()


def rank() -> int:
    """Returns the number of this process."""
    return distributed.get_rank() if is_distributed() else 0


class Processes:
    """The rows that all processes know, in one order.

    In the all-reduce of a step each row has a place for each sum, and for each of both ends, which don't add up, a place
    of each process. What a process has not measured is empty there. One more number counts the rows that are not in the
    order yet: if there are any, all processes pass them on, and add up again.
    """

    def __init__(self) -> None:
        """Starts with no rows."""
        self._order: dict[_Key, int] = {}
        self._types: dict[str, Type] = {long_name(each): each for each in COMPUTED}
        self._group: Any = None

    def gather(
        self, measured: Iterable[tuple[MonitoredRow, Tensor]]
    ) -> tuple[list[MonitoredRow], Tensor]:
        """Returns the rows of all processes and their vectors, on the host; every process must call this in a step."""
        if self._group is not distributed.group.WORLD:
            self._group, self._order = distributed.group.WORLD, {}
        is_on_host = "cpu:" in distributed.get_backend_config()
        device = None if is_on_host else torch.accelerator.current_accelerator()
        rows, vectors = gather(measured, device or torch.device("cpu"))
        self._types.update({long_name(row.of): row.of for row in rows})
        keys = [(row._replace(of=torch.float32), long_name(row.of)) for row in rows]
        unknown, sums = self._reduced(keys, vectors)
        if unknown:
            gathered: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(gathered, [*filterfalse(self._order.__contains__, keys)])
            for key in chain(*gathered):
                self._order.setdefault(key, len(self._order))
            _, sums = self._reduced(keys, vectors)
        others = {name for _, name in self._order} - self._types.keys()  # which has torch's dtypes
        self._types.update({name: get(name) for name in others & {*formats()}})
        known = {key: at for key, at in self._order.items() if key[1] in self._types}
        return [row._replace(of=self._types[name]) for row, name in known], sums[[*known.values()]]

    def _reduced(self, keys: list[_Key], vectors: Tensor) -> tuple[bool, Tensor]:
        """Returns whether any process has rows that are not in the order, and the sums of those that are."""
        at = [self._order.get(key, len(self._order)) for key in keys]
        own = added(vectors, at, len(self._order) + 1)[:-1]
        world, place = distributed.get_world_size(), ENDS + distributed.get_rank()
        table = own.new_zeros(len(own), ENDS + 2 * world)
        table[:, :ENDS] = own[:, :ENDS]
        table[:, place], table[:, place + world] = own[:, ENDS:].unbind(1)
        packed = torch.cat([table.flatten(), table.new_tensor([at.count(len(self._order))])])
        distributed.all_reduce(packed)
        table = packed[:-1].view_as(table)
        ends = [
            table[:, ENDS:-world].amin(1, keepdim=True),
            table[:, -world:].amax(1, keepdim=True),
        ]
        found = torch.cat([table[:, :ENDS], *ends], 1)
        whole = torch.cat([found.flatten(), packed[-1:]]).cpu()  # one copy
        return bool(whole[-1]), whole[:-1].view_as(found)
