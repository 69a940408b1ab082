"""What each process holds when several train one model, by arithmetic on the parameters of one.

The formulas are those of torch's FSDP2 (`torch.distributed.fsdp.fully_shard`) and DDP with their defaults;
docs/plan.md has them in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from ..tensors import tensors_of


class ParameterSize(NamedTuple):
    """The sizes that one parameter has.

    Attributes:
        sizes: Its shape.
        itemsize: Bytes of an element.
        learns: Whether it gets a gradient.
        states: Shape and bytes of an element, of each tensor that the optimizer keeps for it.
    """

    sizes: tuple[int, ...]
    itemsize: int
    learns: bool
    states: tuple[tuple[tuple[int, ...], int], ...] = ()

    @property
    def bytes(self) -> int:
        """The bytes of all of it."""
        return math.prod(self.sizes) * self.itemsize

    def shard(self, world_size: int) -> int:
        """Returns the bytes of the largest part, of equally many rows each."""
        return _shard(self.sizes, self.itemsize, world_size)


#: Parameters that FSDP2 gathers together: those of one block, and the rest.
ShardGroup = tuple[ParameterSize, ...]


@dataclass(frozen=True)
class PerRank:
    """The bytes of tensors in one process of several.

    Attributes:
        parameter_bytes: Its parameters.
        gradient_bytes: Their gradients.
        optimizer_bytes: What the optimizer keeps.
        gathered_bytes: FSDP2: the whole parameters of the two largest groups, of which one is used
            while the next is gathered.
        bucket_bytes: DDP: buckets, which gradients are copied to and sent from.
        saved_bytes: What autograd keeps for the backward, without
        weight_cast_bytes: casts of weights, which are kept whole even where parameters are sharded.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    bucket_bytes: int
    saved_bytes: int
    weight_cast_bytes: int

    @property
    def bytes(self) -> int:
        """Their sum: no step takes more at a time, but for what single ops need while they run."""
        return (
            self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.gathered_bytes
            + self.bucket_bytes + self.saved_bytes + self.weight_cast_bytes
        )  # fmt: skip


def fsdp2(
    groups: Sequence[ShardGroup], world_size: int, saved_bytes: int, weight_cast_bytes: int
) -> PerRank:
    """Returns what a rank of FSDP2 holds: that of the largest parts, rank 0."""
    every = [each for group in groups for each in group]
    whole = sorted((sum(each.bytes for each in group) for group in groups), reverse=True)
    return PerRank(
        parameter_bytes=sum(each.shard(world_size) for each in every),
        gradient_bytes=sum(each.shard(world_size) for each in every if each.learns),
        optimizer_bytes=sum(
            _shard(sizes, itemsize, world_size) if sizes == each.sizes else _bytes(sizes, itemsize)
            for each in every
            for sizes, itemsize in each.states
        ),
        gathered_bytes=sum(whole[:2]),
        bucket_bytes=0,
        saved_bytes=saved_bytes,
        weight_cast_bytes=weight_cast_bytes,
    )


def ddp(groups: Sequence[ShardGroup], saved_bytes: int, weight_cast_bytes: int) -> PerRank:
    """Returns what each rank of DDP holds, however many there are."""
    every = [each for group in groups for each in group]
    gradients = sum(each.bytes for each in every if each.learns)
    return PerRank(
        parameter_bytes=sum(each.bytes for each in every),
        gradient_bytes=gradients,
        optimizer_bytes=sum(_bytes(*state) for each in every for state in each.states),
        gathered_bytes=0,
        bucket_bytes=gradients,
        saved_bytes=saved_bytes,
        weight_cast_bytes=weight_cast_bytes,
    )


def groups_of(modules: Iterable[nn.Module], optimizer: object) -> tuple[ShardGroup, ...]:
    """Returns groups of parameters: each item of a ``ModuleList`` is one, and what is in none the last.

    Args:
        modules: The outermost modules.
        optimizer: What has made a step, or None.
    """
    states = getattr(optimizer, "state", {})
    seen: set[int] = set()
    groups: list[ShardGroup] = []
    modules = list(modules)
    for module in modules:
        for each in module.modules():
            if isinstance(each, nn.ModuleList):
                groups += [_group(block.parameters(), states, seen) for block in each]
    groups.append(_group((p for module in modules for p in module.parameters()), states, seen))
    return tuple([group for group in groups if group])


def _group(parameters: Iterable[nn.Parameter], states: object, seen: set[int]) -> ShardGroup:
    found = []
    for parameter in parameters:
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        kept = states.get(parameter, {}) if hasattr(states, "get") else {}
        found.append(
            ParameterSize(
                tuple(parameter.shape),
                parameter.dtype.itemsize,
                parameter.grad is not None,
                tuple([_size(each) for each in tensors_of(dict(kept))]),
            )
        )
    return tuple(found)


def _size(tensor: Tensor) -> tuple[tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.dtype.itemsize


def _shard(sizes: tuple[int, ...], itemsize: int, world_size: int) -> int:
    first, *others = sizes or (1,)
    return -(-first // world_size) * math.prod(others) * itemsize


def _bytes(sizes: tuple[int, ...], itemsize: int) -> int:
    return math.prod(sizes) * itemsize
