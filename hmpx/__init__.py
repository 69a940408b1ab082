"""Mixed precision for PyTorch, op by op: one `convert()`, plain-text op lists, and reasons."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from .version import __version__ as __version__

# `hmpx --version` and `python -m hmpx --version` end here, before torch is imported, which takes seconds.
if [*map(os.path.basename, sys.orig_argv[1:])] in (
    ["hmpx", "--version"],
    ["-m", "hmpx", "--version"],
):
    sys.stdout.write(f"hmpx {__version__}\n")
    sys.exit()

from .casting import register_rule, unregister_rule
from .errors import (
    AlarmError,
    BenchError,
    CheckpointError,
    ContractError,
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
from .session import Session, casts_enabled, convert, is_converted, revert
from .torch_state import disable_casts

if TYPE_CHECKING:
    from . import formats
    from .checking import Breach, Finding, Lint, expect, lint
    from .comparing import Comparison, compare, contents
    from .exporting import OnnxFile, export
    from .freezing import Frozen, Weight, freeze, load_frozen
    from .monitoring import Alarm, Monitor, monitor
    from .planning import Bench, Plan, bench, plan
    from .policy import EngineSettings
    from .recording import Drawing, draw, record
    from .session import Explanation, Explanations, explain
    from .tracing import Invariance, RunDiff, Variation, diff_runs, invariance, trace
    from .tuning import Tuned, tune
    from .watching import Offence, Watch, watch
else:  # not needed by a program's first op
    __getattr__ = shown_later(
        __name__,
        {
            "formats": "",
            "comparing": "Comparison compare contents",
            "checking": "Breach Finding Lint expect lint",
            "exporting": "OnnxFile export",
            "freezing": "Frozen Weight freeze load_frozen",
            "monitoring": "Alarm Monitor monitor",
            "planning": "Bench Plan bench plan",
            "policy": "EngineSettings",
            "recording": "Drawing draw record",
            "session": "Explanation Explanations explain",
            "tracing": "Invariance RunDiff Variation diff_runs invariance trace",
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
    "Alarm",
    "AlarmError",
    "Attached",
    "Bench",
    "BenchError",
    "Breach",
    "Call",
    "CallTensors",
    "CastPolicy",
    "CheckpointError",
    "Comparison",
    "ContractError",
    "Decision",
    "Drawing",
    "EngineSettings",
    "Explanation",
    "Explanations",
    "Finding",
    "FreezeError",
    "Frozen",
    "HmpxError",
    "HmpxWarning",
    "Invariance",
    "Lint",
    "Monitor",
    "NonFiniteError",
    "Offence",
    "OnnxFile",
    "OpCall",
    "OpListError",
    "OptionError",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyFileError",
    "RuleError",
    "RunDiff",
    "Session",
    "TorchError",
    "Tuned",
    "Variation",
    "Watch",
    "Weight",
    "attach",
    "bench",
    "casts_enabled",
    "compare",
    "contents",
    "convert",
    "diff_runs",
    "disable_casts",
    "draw",
    "expect",
    "explain",
    "export",
    "formats",
    "freeze",
    "invariance",
    "is_converted",
    "lint",
    "load_frozen",
    "load_policy",
    "monitor",
    "plan",
    "record",
    "register_rule",
    "revert",
    "trace",
    "tune",
    "unregister_rule",
    "watch",
]
