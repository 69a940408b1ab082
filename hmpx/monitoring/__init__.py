"""`monitor`: figures of a training's tensors over time, in the logger that is there, and alarms about them."""

from __future__ import annotations

from .alarms import ALARMS, Alarm
from .monitor import Monitor, monitor
from .runs import MonitoredRun, read_run

__all__ = ["ALARMS", "Alarm", "Monitor", "MonitoredRun", "monitor", "read_run"]
