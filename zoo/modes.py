"""The ways in which each model runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import hmpx


@dataclass(frozen=True)
class Mode:
    """One way to run a model."""

    #: Arguments of `hmpx.convert`; None where hmpx isn't used.
    convert: Mapping[str, Any] | None = None
    #: The dtype of a torch.autocast region around forward passes.
    autocast: torch.dtype | None = None
    #: The mode whose errors this one's are divided by.
    peer: str = "autocast"
    #: Whether it runs over long inputs, too.
    is_long: bool = True
    #: Whether weights are stored as they are used.
    is_frozen: bool = False

    def process(self, device: str) -> AbstractContextManager[Any]:
        """Returns the context in which the whole program runs, ``"cpu"`` or ``"cuda"``."""
        if self.convert is None:
            return nullcontext()
        return hmpx.convert(**self.convert, device_types={device})

    def region(self, device: str) -> AbstractContextManager[Any]:
        """Returns the context in which forward passes run."""
        return nullcontext() if self.autocast is None else torch.autocast(device, self.autocast)


MODES: Mapping[str, Mode] = {
    "fp32": Mode(),
    "autocast": Mode(autocast=torch.bfloat16),
    "autocast fp16": Mode(autocast=torch.float16, is_long=False),
    "hmpx": Mode(convert={}),
    "hmpx fast": Mode(convert={"legalize": "fast"}, is_long=False),
    "hmpx autocast-cpu": Mode(convert={"lists": "autocast-cpu"}, is_long=False),
    "hmpx fp16": Mode(
        convert={"low_precision_type": torch.float16},
        peer="autocast fp16",
        is_long=False,
    ),
    "hmpx hmp": Mode(convert={"lists": "hmp"}, is_long=True),
}
#: Those that a sweep runs unless asked for others.
DEFAULT = tuple(name for name in MODES if name != "hmpx hmp")

#: Those of the trained models.
TRAINED: Mapping[str, Mode] = {
    **{name: MODES[name] for name in ("fp32", "autocast", "hmpx")},
    "hmpx frozen": Mode(convert={}, is_frozen=True),
    "hmpx lean": Mode(convert={"lists": "lean"}),
    **{name: MODES[name] for name in ("hmpx hmp", "hmpx fp16")},
    **{
        f"hmpx {name}": Mode(convert={"low_precision_type": name})
        for name in (
            "float8_e4m3fn", "mxfp8_e4m3", "mxfp4_e2m1", "nvfp4", "posit16_1",
        )
    },
}  # fmt: skip
