"""Functions that users register to decide the calls of an op."""

from __future__ import annotations

from .judging import MOST_VERDICTS as MOST_VERDICTS
from .judging import Judge as Judge
from .registration import RULES as RULES
from .registration import Registered as Registered
from .registration import all_rules as all_rules
from .registration import are_alike as are_alike
from .registration import register_rule as register_rule
from .registration import registered as registered
from .registration import unregister_rule as unregister_rule
