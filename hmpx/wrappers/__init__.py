"""The wrappers installed in torch: generated, observed, decided by rules, shared, retired."""

from __future__ import annotations

from .calls import hands_over
from .making import (
    Maker,
    make_choosing_wrapper,
    make_wrapper,
    make_wrapper_where_lacking,
    only_looks_up,
)
from .observed import make_observed_wrapper
from .retiring import (
    in_force,
    put_in_use,
    references,
    references_of_others,
    retirements,
    shared_where_lacking,
    used_as_now,
)

__all__ = [
    "Maker",
    "hands_over",
    "in_force",
    "make_choosing_wrapper",
    "make_observed_wrapper",
    "make_wrapper",
    "make_wrapper_where_lacking",
    "only_looks_up",
    "put_in_use",
    "references",
    "references_of_others",
    "retirements",
    "shared_where_lacking",
    "used_as_now",
]
