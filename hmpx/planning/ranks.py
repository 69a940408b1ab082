"""The memory of each of several processes with FSDP2 and with DDP, by arithmetic on sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from ..reports import Memory
from ..tensors import stored_parameters, tensors_of

STRATEGIES: Final = ("fsdp2", "ddp")


class _Size(NamedTuple):
    """Shape of a tensor, and bytes of an element."""

    sizes: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Size:
        return cls(tuple(tensor.shape), tensor.dtype.itemsize)

    def shard(self, world_size: int) -> int:
        """Returns the bytes of the largest of equal numbers of rows."""
        first, *others = self.sizes or (1,)
        return -(-first // world_size) * math.prod(others) * self.itemsize


class ParameterSize(NamedTuple):
    """The size of a parameter, whether it gets a gradient, and the sizes of its optimizer state."""

    size: _Size
    learns: bool
    states: tuple[_Size, ...] = ()


#: Parameters that FSDP2 gathers together: those of one block, or the rest.
ShardGroup = tuple[ParameterSize, ...]


def groups_of(modules: Iterable[nn.Module], optimizer: object) -> tuple[ShardGroup, ...]:
    """Groups the parameters: each item of a ``ModuleList`` is a group, and the rest is the last."""
    states: Mapping[nn.Parameter, Any] = getattr(optimizer, "state", {})
    outer = list(modules)
    inner = [each for module in outer for each in module.modules()]
    blocks = [block for each in inner if isinstance(each, nn.ModuleList) for block in each]
    seen: set[int] = set()
    groups = []
    for part in (*([block] for block in blocks), outer):
        group = []
        for parameter in (each for module in part for each in stored_parameters(module)):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                kept = tuple(map(_Size.of, tensors_of(dict(states.get(parameter, {})))))
                group.append(ParameterSize(_Size.of(parameter), parameter.grad is not None, kept))
        if group:
            groups.append(tuple(group))
    return tuple(groups)


@dataclass(frozen=True)
class PerRank:
    """The bytes of tensors in one of several processes.

    Attributes:
        parameter_bytes: Its parameters.
        gradient_bytes: Their gradients.
        optimizer_bytes: The optimizer state.
        gathered_bytes: FSDP2: the whole parameters of the two largest groups, since the next one is
            gathered while one is in use.
        bucket_bytes: DDP: buckets from which gradients are sent.
        saved_bytes: Tensors that autograd keeps for the backward, without casts of weights.
        weight_cast_bytes: Casts of weights, which are kept whole even if parameters are sharded.
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
        """Their sum: a step's peak, apart from the temporary memory of single ops."""
        return sum(vars(self).values())


def per_rank(
    groups: Sequence[ShardGroup], memory: Memory, strategy: str, world_size: int
) -> PerRank:
    """Returns the bytes of the FSDP2 rank with the largest shards, or of each DDP rank."""
    is_sharded = strategy == "fsdp2"
    parts = world_size if is_sharded else 1
    every = [each for group in groups for each in group]
    whole = sorted(sum(each.size.shard(1) for each in group) for group in groups)
    gradients = sum(each.size.shard(parts) for each in every if each.learns)
    return PerRank(
        parameter_bytes=sum(each.size.shard(parts) for each in every),
        gradient_bytes=gradients,
        optimizer_bytes=sum(
            state.shard(parts if state.sizes == each.size.sizes else 1)
            for each in every
            for state in each.states
        ),
        gathered_bytes=sum(whole[-2:]) if is_sharded else 0,
        bucket_bytes=0 if is_sharded else gradients,
        saved_bytes=memory.saved_bytes,
        weight_cast_bytes=memory.weight_cast_bytes,
    )
