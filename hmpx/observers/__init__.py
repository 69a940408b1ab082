"""Observers of calls: `attach`, `OpCall`, the log."""

from __future__ import annotations

from .attached import ATTACHED as ATTACHED
from .attached import PAUSED as PAUSED
from .attached import Attached as Attached
from .attached import Observer as Observer
from .attached import TensorObserver as TensorObserver
from .attached import ValueObserver as ValueObserver
from .attached import attach as attach
from .graphs import is_put_in_graph as is_put_in_graph
from .graphs import number_in_graphs as number_in_graphs
from .graphs import put_in_graph as put_in_graph
from .kernels import Kernels as Kernels
from .log import LOGGER as LOGGER
from .log import announce_conversion as announce_conversion
from .log import announcing as announcing
from .log import log_observer as log_observer
from .log import show_log as show_log
from .op_calls import CallTensors as CallTensors
from .op_calls import OpCall as OpCall
from .op_calls import user_location as user_location
