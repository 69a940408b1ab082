"""The wrappers installed in torch: generated, observed, decided by rules, shared, retired."""

from __future__ import annotations

from .calls import hands_over
from .making import make_choosing_wrapper, make_wrapper, make_wrapper_where_lacking
from .observed import make_observed_wrapper
from .retiring import in_force, in_use, references, references_of_others, retirements, shared
