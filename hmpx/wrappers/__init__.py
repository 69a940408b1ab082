"""The wrappers installed in torch: generated, observed, decided by rules, shared, retired."""

from __future__ import annotations

from .calls import hands_over as hands_over
from .making import make_choosing_wrapper as make_choosing_wrapper
from .making import make_wrapper as make_wrapper
from .making import make_wrapper_where_lacking as make_wrapper_where_lacking
from .observed import make_observed_wrapper as make_observed_wrapper
from .retiring import in_force as in_force
from .retiring import in_use as in_use
from .retiring import references as references
from .retiring import references_of_others as references_of_others
from .retiring import retirements as retirements
from .retiring import shared as shared
