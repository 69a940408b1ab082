"""The ways to run one fp32 program that `bench` compares: how each changes torch, and undoes it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from .. import session

#: The variant that all others are compared with.
BASE: Final = "fp32"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a program."""

    name: str  # The name that users give
    label: str  # The name in tables
    legalize: str | None = None  # Argument of `hmpx.convert`; None leaves torch unconverted
    is_autocast: bool = False  # Steps run in regions of torch.autocast
    store: str | None = None  # How `hmpx.freeze` stores weights; None leaves them alone


#: Name -> variant, in the order of tables.
VARIANTS: Final[Mapping[str, Variant]] = {
    variant.name: variant
    for variant in (
        Variant(BASE, BASE),
        Variant("autocast", "torch.autocast", is_autocast=True),
        Variant("auto", "hmpx auto", legalize="auto"),
        Variant("fast", "hmpx fast", legalize="fast"),
        Variant("frozen", "hmpx frozen", legalize="auto", store="dtype"),
        Variant("prepared", "hmpx prepared", legalize="auto", store="prepared"),
        Variant("always", "hmpx always", legalize="always"),
        Variant("never", "hmpx never", legalize="never"),
    )
}

#: The default variants; ``"frozen"`` only for a model.
DEFAULT: Final = (BASE, "autocast", "auto", "fast", "frozen")


@dataclass(frozen=True, slots=True)
class Conditions:
    """The device, torch.autocast's dtype (None for a number format), convert's options and the clock of all variants."""

    device_type: str
    low_dtype: torch.dtype | None
    conversion: Mapping[str, Any]
    clock: Callable[[], float] = time.perf_counter

    def step(self, variant: Variant, step: Callable[[], Any]) -> Callable[[], Any]:
        """Returns ``step`` as ``variant`` runs it."""
        if not variant.is_autocast:
            return step

        def in_region() -> Any:
            # A region for each step: a region keeps its casts of weights, which optimizers change.
            with torch.autocast(self.device_type, self.low_dtype):
                return step()

        return in_region

    def region(self, variant: Variant) -> contextlib.AbstractContextManager[Any]:
        """Returns the context that the steps of ``variant`` run in."""
        if variant.legalize is None:
            return contextlib.nullcontext()
        return session.convert(
            legalize=variant.legalize, device_types={self.device_type}, **self.conversion
        )
