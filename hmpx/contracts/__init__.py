"""Contracts: what precision calls and tensors of a program must have."""

from __future__ import annotations

from .expecting import Breach, expect

__all__ = ["Breach", "expect"]
