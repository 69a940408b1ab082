"""What can be decided for an op: the `CastPolicy`, and the dtypes it computes and ends in.

Knows neither ops nor where decisions come from.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import Final

import torch

from . import dtypes
from .errors import OptionError


class CastPolicy(enum.Enum):
    """What is done with the inputs of an op."""

    LOW = "low"  #: every eligible input -> the low-precision dtype
    FP32 = "fp32"  #: every bfloat16 or float16 input -> float32
    WIDEST = "widest"  #: all floating inputs -> the widest dtype among them
    FOLLOW = "follow"  #: nothing if all have one low-precision dtype; else all -> float32
    FIRST = "first"  #: the other eligible inputs -> the dtype of the first floating one
    PASS = "pass"  #: nothing


#: As TVM's mixed-precision pass calls them.
ALLOW: Final = CastPolicy.LOW
FOLLOW: Final = CastPolicy.FOLLOW
DENY: Final = CastPolicy.FP32


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done with one op.

    Attributes:
        cast_policy: The rule for its inputs.
        dtype: The dtype that `CastPolicy.LOW` and `CastPolicy.FP32` cast to; None for the others,
            and for the low-precision dtype of the policy.
        accumulate_dtype: The op computes in it: inputs, rounded as ever, are raised to it first.
            None: as its kernel for the inputs' dtype does.
        output_dtype: Floating outputs are cast to it. None: the inputs' dtype.
        reason: Where it comes from: ``"my_bf16.txt:3"``. Not part of equality.

    Raises:
        OptionError: A value is none of these.
    """

    cast_policy: CastPolicy
    dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = field(default=None, kw_only=True)
    output_dtype: torch.dtype | None = field(default=None, kw_only=True)
    reason: str = field(default="", compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.cast_policy, CastPolicy):
            raise OptionError(
                "a decision's policy must be hmpx.ALLOW, FOLLOW or DENY, or another "
                f"hmpx.CastPolicy, not {self.cast_policy!r}"
            )
        if self.dtype is not None:
            self._check_dtype()
        for name in ("accumulate_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is not None and value not in dtypes.COMPUTED:
                known = ", ".join(str(dtype) for dtype in dtypes.COMPUTED)
                raise OptionError(f"{name} must be one of {known}, not {value!r}")
        if self.cast_policy is CastPolicy.PASS and self.is_composed:
            raise OptionError("an op that is left alone has no accumulate_dtype or output_dtype")

    def _check_dtype(self) -> None:
        allowed: tuple[torch.dtype, ...] = {
            CastPolicy.LOW: dtypes.LOW_PRECISION,
            CastPolicy.FP32: (torch.float32,),
        }.get(self.cast_policy, ())
        if self.dtype not in allowed:
            kinds = " or ".join(map(str, allowed)) or "left out"
            raise OptionError(f"dtype of {self.cast_policy.name} must be {kinds}, not {self.dtype}")

    def __repr__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("accumulate_dtype", "output_dtype"):
            if shown[name] is None:
                del shown[name]
        return f"Decision({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def is_composed(self) -> bool:
        """Whether more is done than casting inputs."""
        return self.accumulate_dtype is not None or self.output_dtype is not None
