"""Mixed precision for PyTorch, op by op: one `convert()`, plain-text op lists, and reasons."""

from . import formats
from .calls import Call
from .decisions import ALLOW, DENY, FOLLOW, CastPolicy, Decision
from .errors import (
    CheckpointError,
    FreezeError,
    HmpxError,
    HmpxWarning,
    OpListError,
    OptionError,
    PolicyFileError,
    RuleError,
    TorchError,
)
from .freeze import Frozen, Weight, freeze
from .policy import Policy, load_policy
from .rules import register_rule, unregister_rule
from .session import Session, casts_enabled, convert, is_converted, revert
from .switch import disable_casts
from .version import __version__ as __version__

__all__ = [
    "ALLOW",
    "DENY",
    "FOLLOW",
    "Call",
    "CastPolicy",
    "CheckpointError",
    "Decision",
    "FreezeError",
    "Frozen",
    "HmpxError",
    "HmpxWarning",
    "OpListError",
    "OptionError",
    "Policy",
    "PolicyFileError",
    "RuleError",
    "Session",
    "TorchError",
    "Weight",
    "casts_enabled",
    "convert",
    "disable_casts",
    "formats",
    "freeze",
    "is_converted",
    "load_policy",
    "register_rule",
    "revert",
    "unregister_rule",
]
