"""What is said of calls, and to whom: `OpCall`, the log."""

from __future__ import annotations

from .log import LOGGER, announce_conversion, announcing, log_observer, show_log
from .op_calls import Observer, OpCall, user_location

__all__ = [
    "LOGGER",
    "Observer",
    "OpCall",
    "announce_conversion",
    "announcing",
    "log_observer",
    "show_log",
    "user_location",
]
