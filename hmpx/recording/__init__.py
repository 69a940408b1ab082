"""`record`: which dtypes ops ran in, why, at what cost; `draw`: a result's graph with its casts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .context import raised_at, record
from .memory import Ledger
from .recorder import Recorder

if TYPE_CHECKING:
    from .drawing import draw
    from .graph import Edge, Node
    from .picture import Drawing
else:
    __getattr__ = shown_later(
        __name__, {"drawing": "draw", "graph": "Edge Node", "picture": "Drawing"}
    )
