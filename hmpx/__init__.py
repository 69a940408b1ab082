"""Mixed precision for PyTorch, op by op: one `convert()`, plain-text op lists, and reasons."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from . import formats
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
from .freezing import Frozen, Weight, freeze
from .observers import Attached, CallTensors, OpCall, attach
from .policy import ALLOW, DENY, FOLLOW, Call, CastPolicy, Decision, Policy, load_policy
from .rules import register_rule, unregister_rule
from .session import Session, casts_enabled, convert, is_converted, revert
from .torch_state import disable_casts
from .version import __version__ as __version__
from .watching import Offence, Watch, watch

if TYPE_CHECKING:
    from .benchmarking import Bench, bench
    from .comparing import Comparison, compare
    from .drawing import Drawing, draw
    from .explaining import Explanation, Explanations, explain
    from .planning import Plan, plan
    from .recording import record
    from .tuning import Tuned, tune

#: What is imported when it is first asked for -> its room: looking back at a run can wait.
_LATER: Final = {
    "Bench": "benchmarking",
    "Comparison": "comparing",
    "Drawing": "drawing",
    "Explanation": "explaining",
    "Explanations": "explaining",
    "Plan": "planning",
    "bench": "benchmarking",
    "compare": "comparing",
    "Tuned": "tuning",
    "draw": "drawing",
    "explain": "explaining",
    "plan": "planning",
    "record": "recording",
    "tune": "tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
