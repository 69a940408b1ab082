"""Mixed precision for PyTorch, op by op: one `convert()`, plain-text op lists, and reasons."""

from . import formats
from .drawing import Drawing, draw
from .errors import (
    CheckpointError,
    FreezeError,
    HmpxError,
    HmpxWarning,
    NonFiniteError,
    OpListError,
    OptionError,
    PolicyFileError,
    RuleError,
    TorchError,
)
from .explaining import Explanation, Explanations, explain
from .freezing import Frozen, Weight, freeze
from .observers import Attached, CallTensors, OpCall, attach
from .policy import ALLOW, DENY, FOLLOW, Call, CastPolicy, Decision, Policy, load_policy
from .recording import record
from .rules import register_rule, unregister_rule
from .session import Session, casts_enabled, convert, is_converted, revert
from .torch_state import disable_casts
from .version import __version__ as __version__
from .watching import Offence, Watch, watch

__all__ = [
    "ALLOW",
    "DENY",
    "FOLLOW",
    "Attached",
    "Call",
    "CallTensors",
    "CastPolicy",
    "CheckpointError",
    "Decision",
    "Drawing",
    "Explanation",
    "Explanations",
    "FreezeError",
    "Frozen",
    "HmpxError",
    "HmpxWarning",
    "NonFiniteError",
    "Offence",
    "OpCall",
    "OpListError",
    "OptionError",
    "Policy",
    "PolicyFileError",
    "RuleError",
    "Session",
    "TorchError",
    "Watch",
    "Weight",
    "attach",
    "casts_enabled",
    "convert",
    "disable_casts",
    "draw",
    "explain",
    "formats",
    "freeze",
    "is_converted",
    "load_policy",
    "record",
    "register_rule",
    "revert",
    "unregister_rule",
    "watch",
]
