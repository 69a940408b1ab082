"""Observers, attached to the current conversion and to later ones.

The session replaces the wrappers when observers are attached or detached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from .. import arguments
from ..errors import OptionError, shown, to_the_end
from ..registry import Registry, exclusive
from .op_calls import CallTensors, OpCall

#: Gets each call of a patched op after it ran; its exceptions propagate to the user's code.
Observer = Callable[[OpCall], None]
#: Likewise, with the call's tensors, which are None while a graph is traced.
TensorObserver = Callable[[OpCall, CallTensors | None], None]
#: What parts of hmpx get after the call: its floating inputs, all arguments before casts, and its result. They
#: switch off casts and gradients for their own computations, and write to no argument.
Values = tuple[list[Tensor], tuple[Any, ...], Mapping[str, Any], Any]


@dataclass(frozen=True, eq=False)
class Attached:
    """An attached observer.

    As a context manager it attaches the observer if it is detached, and detaches it at the end.

    Attributes:
        observer: The observer passed to `attach`.
        tensors: Whether it gets tensors.
        every_op: Whether it also gets ops that the policy leaves alone.
        values: Whether it gets the call and its `Values`.
        times: Whether it gets the duration of calls. Each call then waits for its accelerator.
        kernels: Whether it gets the dtypes that kernels computed in.
        graphs: Whether it gets tensors of compiled calls, too, each time that their graph runs.
        carries: Whether it also gets ``copy_`` and ops on lists of tensors.
        thread: The thread that made it.

    Example:
        >>> attached = hmpx.attach(lambda call: print(call.op))
        >>> with hmpx.convert(device_types={"cpu"}):
        ...     y = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        mm
        >>> attached.detach()
    """

    observer: Callable[..., Any]
    tensors: bool = False
    every_op: bool = False
    values: bool = False
    times: bool = False
    kernels: bool = False
    graphs: bool = False
    carries: bool = False
    thread: int = field(default_factory=threading.get_ident, init=False)

    def tell(self, call: OpCall, tensors: CallTensors | None) -> None:
        """Passes a call on to the observer."""
        if self.tensors:
            self.observer(call, tensors)
        else:
            self.observer(call)

    def pause(self) -> None:
        """Stops passing calls to the observer until `resume`, without a change of the wrappers."""
        PAUSED.add(self)

    def resume(self) -> None:
        """Ends a pause."""
        PAUSED.discard(self)

    @exclusive
    def __enter__(self) -> Attached:
        if self not in ATTACHED.value:
            ATTACHED.change((*ATTACHED.value, self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        to_the_end(self.detach)

    @exclusive
    def detach(self) -> None:
        """Detaches the observer; does nothing if it is detached."""
        if self in ATTACHED.value:
            ATTACHED.change(tuple(each for each in ATTACHED.value if each is not self))
        PAUSED.discard(self)

    def __repr__(self) -> str:
        state = "attached" if self in ATTACHED.value else "detached"
        return f"<hmpx observer {shown(self.observer)}, {state}>"


#: All attached observers, in the order in which they get a call.
ATTACHED: Final[Registry[tuple[Attached, ...]]] = Registry(())


#: Paused observers.
PAUSED: Final[set[Attached]] = set()


def attach(
    observer: Observer | TensorObserver, tensors: bool = False, *, every_op: bool = False
) -> Attached:
    """Calls ``observer`` after each call of a patched op, until it is detached.

    Applies to the current conversion and to later ones. The observer's own torch calls are not cast
    or observed, and record no gradients unless it enables them. Its exceptions propagate to the
    program. Compiled calls are reported while torch.compile traces them, not when they run. While a
    graph is traced, and under a FakeTensorMode, it gets no tensors.

    Without observers there is no overhead.

    Args:
        observer: Called as ``observer(call)`` with an `OpCall`.
        tensors: Calls it as ``observer(call, tensors)``, with `CallTensors`: arguments as given and
            as cast, results, and the call's own function to run again.
        every_op: Also reports all other ops that compute with floating-point tensors, and calls
            with casts off.

    Returns:
        The attached observer; as a context manager it detaches at the end of its block.

    Raises:
        OptionError: ``observer`` can't be called, or an option is not a bool.

    Example:
        >>> import torch, hmpx
        >>> calls = []
        >>> with hmpx.convert(device_types={"cpu"}), hmpx.attach(calls.append):
        ...     _ = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        >>> calls[0].op, calls[0].cast_policy, calls[0].cast_dtypes
        ('mm', 'LOW', (torch.bfloat16, torch.bfloat16))
    """
    if not callable(observer):
        raise OptionError(f"an observer must be a function of a call, not {shown(observer)}")
    tensors, every_op = arguments.truth("tensors", tensors), arguments.truth("every_op", every_op)
    return Attached(observer, tensors, every_op).__enter__()
