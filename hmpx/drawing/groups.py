"""Groups of steps: what is drawn as one node, while the drawing is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..observers import OpCall
from .graph import Kind


@dataclass
class Group:
    """Steps that are drawn as one node.

    Attributes:
        steps: Positions of the steps; the one that made the result first.
        kind: See `Node`; so are
        label: that and
        dtype: that and
        module: that; None while it is unknown.
        result: Position of the step whose result has the shape; None for the first one.
        call: The call that was observed.
        is_legalized: See `Node`, and
        times: there.
        inputs: Positions of the groups that it takes tensors of, with the step and the output.
    """

    steps: list[int]
    kind: Kind
    label: str
    dtype: str = ""
    module: str | None = None
    result: int | None = None
    call: OpCall | None = None
    is_legalized: bool = False
    times: int = 1
    inputs: list[tuple[int, int, int]] = field(default_factory=list)
