"""Mixed precision for PyTorch, op by op: one `convert()`, plain-text op lists, and reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import (
    BenchError,
    CheckpointError,
    FreezeError,
    HmpxError,
    HmpxWarning,
    NonFiniteError,
    OpListError,
    OptionError,
    PlanError,
    PolicyFileError,
    RuleError,
    TorchError,
)
from .later import shown_later
from .observers import Attached, CallTensors, OpCall, attach
from .policy import ALLOW, DENY, FOLLOW, Call, CastPolicy, Decision, Policy, load_policy
from .rules import register_rule, unregister_rule
from .session import Session, casts_enabled, convert, is_converted, revert
from .torch_state import disable_casts
from .version import __version__ as __version__

if TYPE_CHECKING:
    from . import formats
    from .benchmarking import Bench, bench
    from .comparing import Comparison, compare
    from .drawing import Drawing, draw
    from .explaining import Explanation, Explanations, explain
    from .freezing import Frozen, Weight, freeze
    from .planning import Plan, plan
    from .recording import record
    from .tuning import Tuned, tune
    from .watching import Offence, Watch, watch
else:  # not needed by a program's first op
    __getattr__ = shown_later(
        __name__,
        {
            "formats": "",
            "benchmarking": "Bench bench",
            "comparing": "Comparison compare",
            "drawing": "Drawing draw",
            "explaining": "Explanation Explanations explain",
            "freezing": "Frozen Weight freeze",
            "planning": "Plan plan",
            "recording": "record",
            "tuning": "Tuned tune",
            "watching": "Offence Watch watch",
        },
    )


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


__all__ = [
    "ALLOW",
    "DENY",
    "FOLLOW",
    "Attached",
    "Bench",
    "BenchError",
    "Call",
    "CallTensors",
    "CastPolicy",
    "CheckpointError",
    "Comparison",
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
    "Plan",
    "PlanError",
    "Policy",
    "PolicyFileError",
    "RuleError",
    "Session",
    "TorchError",
    "Tuned",
    "Watch",
    "Weight",
    "attach",
    "bench",
    "casts_enabled",
    "compare",
    "convert",
    "disable_casts",
    "draw",
    "explain",
    "formats",
    "freeze",
    "is_converted",
    "load_policy",
    "plan",
    "record",
    "register_rule",
    "revert",
    "tune",
    "unregister_rule",
    "watch",
]
