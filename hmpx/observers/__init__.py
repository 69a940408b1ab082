"""Observers of calls: `attach`, `OpCall`, the log."""

from __future__ import annotations

from .attached import ATTACHED, PAUSED, Attached, Observer, TensorObserver, Values, attach
from .faults import LEFT_OUT, spared
from .graphs import is_put_in_graph, number_in_graphs, put_in_graph
from .kernels import Kernels, reading_kernels
from .log import LOGGER, announce_conversion, announcing, log_observer, show_log
from .op_calls import CallTensors, OpCall, is_users, user_line, user_location
