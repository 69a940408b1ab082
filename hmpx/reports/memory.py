"""The memory that a run's tensors took: by kind, at its peak, and what autograd kept. Data alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from .cells import clean, short_dtype, size, wrapped

#: Kinds of tensors, in the order in which they are shown.
KINDS: Final = (
    "parameters",
    "gradients",
    "optimizer state",
    "saved",
    "weight casts",
    "buffers",
    "other",
)


class Moment(NamedTuple):
    """How much memory tensors took at one time.

    Attributes:
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        kinds: Kind of tensors -> their bytes; the kinds are those of `KINDS`.
    """

    phase: str = ""
    kinds: Mapping[str, int] = {}

    @property
    def bytes(self) -> int:
        """All of them."""
        return sum(self.kinds.values())


_NEVER: Final = Moment()


@dataclass(frozen=True)
class Memory:
    """The memory that tensors took, by their storages: each counts once, whatever views there are of it.

    What an allocator adds is not in it: rounding, fragments, workspaces of kernels, other libraries.

    Attributes:
        parameter_bytes: Bytes of parameters, and
        buffer_bytes: of buffers, of all modules that were called.
        gradient_bytes: Bytes of their gradients.
        optimizer_bytes: Bytes of what optimizers have kept for them.
        saved: Dtype -> bytes of the tensors that autograd kept for the backward when these were most;
            without parameters, buffers and casts of parameters.
        weight_cast_bytes: Bytes of the casts of parameters that it kept then.
        peak: The moment at which all tensors took most.
        phases: The same for each phase.
    """

    parameter_bytes: int = 0
    buffer_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    saved: Mapping[str, int] = field(default_factory=dict)
    weight_cast_bytes: int = 0
    peak: Moment = _NEVER
    phases: tuple[Moment, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Bytes of all in ``saved``."""
        return sum(self.saved.values())

    @property
    def peak_bytes(self) -> int:
        """Bytes of all tensors at their peak."""
        return self.peak.bytes

    def __str__(self) -> str:
        saved = sorted(self.saved.items(), key=lambda each: -each[1])
        by_dtype = ", ".join(f"{clean(short_dtype(dtype))} {size(count)}" for dtype, count in saved)
        shown = (
            ("parameters", self.parameter_bytes, ""),
            ("buffers", self.buffer_bytes, ""),
            ("gradients", self.gradient_bytes, ""),
            ("optimizer state", self.optimizer_bytes, ""),
            ("saved for the backward", self.saved_bytes, by_dtype),
            ("weight casts kept for it", self.weight_cast_bytes, ""),
            ("peak of tensors", self.peak_bytes, f"in {self.peak.phase}"),
        )
        lines = [f"{n:25} {size(count):>8}  {note}".rstrip() for n, count, note in shown if count]
        return "\n".join(each for line in lines for each in wrapped(line))
