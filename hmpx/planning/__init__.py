"""`plan`: the memory of a training step, without running it; `bench`: its time in each precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .planning import plan
from .result import PerRank, Plan, Run
from .runner import VARIANTS

if TYPE_CHECKING:
    from .benchmarking import bench
    from .measured import Bench, Measured, Quartiles
else:
    __getattr__ = shown_later(
        __name__, {"benchmarking": "bench", "measured": "Bench Measured Quartiles"}
    )
