"""Custom formats, defined by a rounding function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import OptionError, shown
from .number_format import NumberFormat, Rounder, check_name


@dataclass(frozen=True)
class Custom(NumberFormat):
    """A format that is defined by a rounding function alone.

    Attributes:
        name: An identifier.
        quantize: Takes a floating tensor, to which it may write, and returns one of the same shape and
            dtype. Casts call it without autograd.

    Example:
        >>> whole = hmpx.formats.Custom("whole", torch.round)
        >>> hmpx.formats.quantize(torch.tensor([1.4, 2.6]), whole)
        tensor([1., 3.])
    """

    name: str
    quantize: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        """Checks the fields; raises `OptionError`."""
        check_name(self.name)
        if not callable(self.quantize):
            raise OptionError(
                f"format {self.name}: quantize must be a function of a tensor, not {shown(self.quantize)}"
            )

    @property
    def own_function(self) -> Rounder:
        """The user's function, whose result is checked."""
        return self._rounded

    def _rounded(self, x: Tensor) -> Tensor:
        found = self.quantize(x.clone())  # it may work in place
        if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype != x.dtype:
            what = (
                f"{found.dtype} of shape {tuple(found.shape)}"
                if isinstance(found, Tensor)
                else type(found).__name__
            )
            raise OptionError(
                f"format {self.name}: its quantize must return {x.dtype} of shape {tuple(x.shape)}, "
                f"as it was given, not {what}"
            )
        return found

    def check_rounding(self, mode: object, overflow: object) -> None:
        """Raises `OptionError` if a rounding mode or an overflow behaviour is given."""
        super().check_rounding(mode, None)
        for what, is_chosen in (
            ("rounding", mode != "nearest"),
            ("overflow", overflow is not None),
        ):
            if is_chosen:
                raise OptionError(
                    f"format {self.name}: {what} can't be chosen, its own function rounds to it"
                )

    def plan(self, dtype: torch.dtype, mode: str, overflow: str | None) -> None:
        """Returns None: the function rounds."""
