"""Mixed precision for PyTorch, op by op: one `convert()`, plain-text op lists, and reasons."""

from .errors import FreezeError, HmpxError, HmpxWarning, OpListError, OptionError
from .freeze import Frozen, Weight, freeze
from .policy import CastPolicy, Decision, Policy, load_policy
from .session import Session, casts_enabled, convert, is_converted, revert
from .switch import disable_casts

__version__ = "0.1.0"

__all__ = [
    "CastPolicy",
    "Decision",
    "FreezeError",
    "Frozen",
    "HmpxError",
    "HmpxWarning",
    "OpListError",
    "OptionError",
    "Policy",
    "Session",
    "Weight",
    "casts_enabled",
    "convert",
    "disable_casts",
    "freeze",
    "is_converted",
    "load_policy",
    "revert",
]
