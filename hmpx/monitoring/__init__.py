"""`monitor`: figures of a training's tensors over time, in the logger that is there, and alarms about them."""

from __future__ import annotations

from .alarms import ALARMS, Alarm
from .monitoring import Monitor, monitor
from .runs import MonitoredRun, page_of, read_run

__all__ = ["ALARMS", "Alarm", "Monitor", "MonitoredRun", "monitor", "page_of", "read_run"]
