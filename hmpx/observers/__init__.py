"""Observers of calls: `attach`, `OpCall`, the log."""

from __future__ import annotations

from .attached import (
    ATTACHED,
    PAUSED,
    Attached,
    Observer,
    TensorObserver,
    ValueObserver,
    attach,
)
from .log import LOGGER, announce_conversion, announcing, log_observer, show_log
from .op_calls import CallTensors, OpCall, user_location

__all__ = [
    "ATTACHED",
    "LOGGER",
    "PAUSED",
    "Attached",
    "CallTensors",
    "Observer",
    "OpCall",
    "TensorObserver",
    "ValueObserver",
    "announce_conversion",
    "announcing",
    "attach",
    "log_observer",
    "show_log",
    "user_location",
]
