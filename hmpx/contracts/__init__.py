"""Contracts: what precision calls and tensors of a program must have."""

from __future__ import annotations

from .expecting import Breach, expect
from .lines import is_contract, read
from .states import differences, read_state

__all__ = ["Breach", "differences", "expect", "is_contract", "read", "read_state"]
