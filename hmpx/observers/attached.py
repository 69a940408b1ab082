"""Who observes: observers attached to whatever conversion is in force, now or later.

Knows nothing of wrappers: these are made anew, by the session, when observers come or go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from torch import Tensor

from .. import arguments
from ..blocks import Entered, Entrance
from ..errors import OptionError, shown
from ..registry import Registry, exclusive
from .op_calls import CallTensors, OpCall


class Observer(Protocol):
    """Something that gets each call of a patched op, after it ran."""

    def __call__(self, call: OpCall, /) -> None:
        """Takes one call; an exception propagates to the user's code."""


class TensorObserver(Protocol):
    """Something that gets each call of a patched op, after it ran, with its tensors."""

    def __call__(self, call: OpCall, tensors: CallTensors | None, /) -> None:
        """Takes one call; ``tensors`` is None in graphs that are being made."""


class ValueObserver(Protocol):
    """A part of hmpx that gets each call of a patched op, after it ran, with its very arguments.

    It runs amid the program: what it computes with torch must neither be cast nor record gradients,
    and it must not write to anything that it is given.
    """

    def __call__(
        self,
        call: OpCall,
        inputs: list[Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        /,
    ) -> None:
        """Takes one call, its floating inputs and all arguments before any cast, and what it returned."""


@dataclass(frozen=True, eq=False)
class Attached(Entered):
    """An observer that is attached.

    As a context manager it is detached at the end of the block; it begins there, unless `attach` has
    begun it.

    Attributes:
        observer: What `attach` was given.
        tensors: Whether it asked for tensors.
        every_op: Whether it asked for the ops that the policy leaves alone, too.
        values: Whether it is a `ValueObserver`.
        times: Whether it asked for the seconds that calls take. Each call then waits for its accelerator.
        entrance: The functions that ``with`` calls.

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
    entrance: Entrance = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Makes the functions that ``with`` calls."""
        object.__setattr__(self, "entrance", Entrance(weakref.ref(self)))

    def tell(self, call: OpCall, tensors: CallTensors | None) -> None:
        """Passes a call on to the observer."""
        if self.tensors:
            self.observer(call, tensors)
        else:
            self.observer(call)

    def pause(self) -> None:
        """Stops telling the observer of calls, without a change of the wrappers, until `resume`."""
        PAUSED.add(self)

    def resume(self) -> None:
        """Ends a pause."""
        PAUSED.discard(self)

    @exclusive
    def begin_block(self) -> None:
        """Begins the observation; does nothing if it has begun."""
        if self not in ATTACHED.value:
            ATTACHED.change((*ATTACHED.value, self))

    @exclusive
    def detach(self) -> None:
        """Ends the observation; does nothing if it has ended."""
        if self in ATTACHED.value:
            ATTACHED.change(tuple(each for each in ATTACHED.value if each is not self))
        PAUSED.discard(self)

    def end_block(self, block: list[Any]) -> None:
        """Ends the observation."""
        self.detach()

    def __repr__(self) -> str:
        state = "attached" if self in ATTACHED.value else "detached"
        return f"<hmpx observer {shown(self.observer)}, {state}>"


#: All attached observers, in the order in which they get a call.
ATTACHED: Final[Registry[tuple[Attached, ...]]] = Registry(())


#: Those that are paused.
PAUSED: Final[set[Attached]] = set()


def attach(
    observer: Observer | TensorObserver, tensors: bool = False, *, every_op: bool = False
) -> Attached:
    """Has ``observer`` called after each call of a patched op, until it is detached.

    Holds for the conversion in force, and for those to come. What the observer computes with torch is
    not cast, not observed in turn and not seen by the program's modes, and records no gradients unless it
    asks for them. An exception that it raises propagates to the program. Of a
    compiled call it is notified while torch.compile traces it, and not when it runs. Wherever a graph is
    made, and under a FakeTensorMode, it gets no tensors.

    While nothing is attached, wrappers are what they would be without observers: there is no cost.

    Args:
        observer: Called as ``observer(call)`` with an `OpCall`.
        tensors: Calls it as ``observer(call, tensors)``, with `CallTensors`: arguments as given and
            as cast, results, and the call's own function to run again.
        every_op: Also passes on calls of ops that the policy leaves alone, or whose casts are switched
            off: each op of torch's that computes with floating-point tensors.

    Returns:
        What to detach; a context manager that does so at the end of its block.

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
    attached = Attached(
        observer, arguments.truth("tensors", tensors), arguments.truth("every_op", every_op)
    )
    try:
        attached.begin_block()
        return attached  # from here on, `with` detaches it
    except BaseException:
        attached.detach()
        raise
