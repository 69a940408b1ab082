"""Draws the autograd graph of a result, with its casts."""

from __future__ import annotations

from .graph import Edge, Node
from .making import draw
from .picture import Drawing

__all__ = ["Drawing", "Edge", "Node", "draw"]
