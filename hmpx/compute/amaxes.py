"""Delayed scaling: the amaxes that earlier training steps have seen, and what tensors are scaled by.

A history belongs to a key: where in a model, the op, the role of a tensor in its call, and the format. Within
a step the amaxes of all tensors of a key are folded into their largest, so that recomputation, which sees
the same tensors, changes nothing; and all of them are scaled by the same earlier steps. Histories move on
where a step ends, those of keys that have seen an amax since.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor, nn

from ..errors import OptionError, shown
from ..number_formats import MOST_STEPS, is_format
from ..patching import Patch
from ..torch_internals import is_replica
from ..torch_state import class_name, without_casts
from .amax_history import MOST, DeviceHistory, HostHistory

if TYPE_CHECKING:
    from ..number_formats import Scaled


class History(Protocol):
    """What `HostHistory` and `DeviceHistory` do, each with amaxes of its own kind."""

    format: Scaled
    is_pending: bool

    @staticmethod
    def is_for(amax: float | Tensor) -> bool:
        """Whether it takes amaxes of this kind."""

    def fold(self, amax: Any) -> None:
        """Takes the amax of one more tensor."""

    def roll(self) -> None:
        """Ends a step."""

    def scale_for(self, amax: Any) -> Tensor | None:
        """Returns the scale of a tensor with this amax; None for its own."""

    def saved(self) -> dict[str, Any]:
        """Returns all that it holds, as numbers."""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes what `saved` has returned."""


#: Held while histories change. A fork waits for it, so that a child finds it free.
_LOCK: Final = threading.Lock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
    )


class Histories:
    """The amaxes that a conversion's formats with a history have seen: `Session.histories`.

    Threads share them.

    Attributes:
        ended: How many training steps have ended that have seen any.

    Example:
        >>> low = hmpx.formats.get("float8_e4m3fn_delayed")
        >>> linear = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        >>> with hmpx.convert(low_precision_type=low, device_types={"cpu"}) as session:
        ...     linear(torch.tensor([[1.0, -3.0]])).sum().backward()
        ...     optimizer.step()
        ...     session.histories.state_dict()["Linear::linear:input:float8_e4m3fn_delayed"]["reference"]
        3.0
    """

    def __init__(self) -> None:
        """Starts without any."""
        self.ended = 0
        self._known: dict[str, History] = {}
        self._loaded: Mapping[str, Mapping[str, Any]] = {}  # which belongs to keys as they come
        self._ended: set[str] = set()  # those among them whose step has ended since
        self._labels: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._given: set[str] = set()

    def label_of(self, root: nn.Module, *, is_taken: bool) -> str:
        """Returns the label of an outermost module: its class name, with a number from the second one on.

        Paths in two models of one class are the same. The label of a model that is gone may become
        another's, who inherits nothing. The copies that torch.nn.DataParallel makes for each forward have
        the class name for a label.

        Args:
            root: The module.
            is_taken: It keeps the label from now on. What is only evaluated leaves it to what will be trained,
                whose checkpoint it may be that has been loaded.
        """
        found = self._labels.get(root)
        if found is not None:
            return found
        if is_replica(root):
            return class_name(root)
        with _LOCK:
            return self._labels.get(root) or self._labelled(root, is_taken)

    def _labelled(self, root: nn.Module, is_taken: bool) -> str:
        found = name = class_name(root)
        number, others = 1, set(self._labels.values())
        while found in others:
            number += 1
            found = f"{name}#{number}"
        if not is_taken:  # what one that is gone has left is not for this one
            return f"{found}?" if found in self._given else found
        self._labels[root] = found
        if found in self._given:
            self._forget(f"{found}:")
        self._given.add(found)
        return found

    def _forget(self, start: str) -> None:
        self._known = {k: v for k, v in self._known.items() if not k.startswith(start)}
        self._loaded = {k: v for k, v in self._loaded.items() if not k.startswith(start)}

    def scale_for(
        self, key: str, format: Scaled, amax: float | Tensor, *, records: bool
    ) -> Tensor | None:
        """Returns the scale of a tensor; None for its own.

        Args:
            key: That of the tensor.
            format: What it is rounded to.
            amax: Its own, NaN if it holds infinity or NaN: 0-dim float32 on its device; a number for one on
                the CPU.
            records: It counts for later steps.
        """
        with _LOCK:
            known = self._known.get(key)
            if known is None or known.format is not format or not known.is_for(amax):
                known = self._settled(key, format, amax, records=records)
                if known is None:
                    return None
            if records:
                known.fold(amax)
            return known.scale_for(amax)

    def _settled(
        self, key: str, format: Scaled, amax: float | Tensor, *, records: bool
    ) -> History | None:
        """Returns a history that is not as it was last asked for: new, from a checkpoint, or moved."""
        known = self._known.get(key)
        if known is not None and known.format != format:  # another one of that name
            known = None
        elif known is not None and known.is_for(amax):
            return known
        saved = self._loaded.get(key) if known is None else known.saved()
        if saved is None and not records:
            return None
        made: History = (
            DeviceHistory(format, amax.device) if isinstance(amax, Tensor) else HostHistory(format)
        )
        if saved is not None:
            made.load(saved)
            if known is None and key in self._ended:
                made.roll()
        self._known[key] = made
        return made

    def end_step(self) -> None:
        """Ends a training step, for all keys that it has seen amaxes of.

        Optimizers of torch do so by themselves, whenever their ``step`` ends; this is for programs that
        update their parameters in another way.
        """
        with _LOCK, torch.no_grad(), without_casts():
            seen = [history for history in self._known.values() if history.is_pending]
            self._ended = {
                key for key, saved in self._loaded.items() if saved["pending"] is not None
            }
            self.ended += bool(seen or self._ended)
            for history in seen:
                history.roll()

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Returns all that they hold, as strings and numbers, for a checkpoint.

        A key is the outermost module's class, the path in it, the op, what the tensor is in the call, and
        the format.
        """
        with _LOCK, without_casts():
            unused = {k: dict(v) for k, v in self._loaded.items() if k not in self._known}
            return unused | {key: known.saved() for key, known in self._known.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes what `state_dict` has returned in an earlier run, and forgets what there is.

        Raises:
            OptionError: ``state`` is something else.
        """
        if not isinstance(state, Mapping):
            raise OptionError(
                f"load_state_dict takes what Histories.state_dict() returns, not {shown(state)}"
            )
        checked = {key: _checked(key, value) for key, value in state.items()}
        with _LOCK:
            self._known, self._loaded, self._ended = {}, checked, set()
            self._given = set(self._labels.values())


def _checked(key: object, saved: object) -> Mapping[str, Any]:
    """Returns a history that was saved, which may have come from a file.

    Raises:
        OptionError: It is none.
    """
    wrong = OptionError(
        f"amaxes of {shown(key)}: not as Histories.state_dict() returns them: {shown(saved)}"
    )
    if not isinstance(key, str) or not isinstance(saved, Mapping) or saved.keys() != _FIELDS:
        raise wrong
    amaxes, pending = saved["amaxes"], saved["pending"]
    if (
        not isinstance(amaxes, list)
        or len(amaxes) > MOST_STEPS
        or type(saved["steps"]) is not int
        or saved["steps"] < 0
    ):
        raise wrong
    numbers = [*amaxes, saved["reference"], 0.0 if pending is None else pending]
    if not all(type(each) in (int, float) and 0 <= each <= MOST for each in numbers):
        raise wrong
    return dict(saved)


#: Of `History.saved`.
_FIELDS: Final = {"steps", "pending", "reference", "amaxes"}


# --- those of the conversion in force ------------------------------------------------------------

_in_force: Histories | None = None


def in_force() -> Histories | None:
    """Returns the histories of the conversion in force; None without one that may have any."""
    return _in_force


def histories_patch(histories: Histories) -> Patch:
    """Returns the patch that puts a conversion's histories in force."""
    return Patch(sys.modules[__name__], "_in_force", histories)


def has_history(format: object) -> bool:
    """Whether ops scale by earlier steps to round to ``format``."""
    return is_format(format) and getattr(format, "history", None) is not None


def ended_steps() -> int:
    """Returns how many training steps have ended of those that change scales."""
    return 0 if _in_force is None else _in_force.ended


def end_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Ends a training step: what each optimizer calls at the end of its own."""
    if torch.compiler.is_dynamo_compiling():
        from .opaque_rounding import step_ended  # which few programs need

        for group in optimizer.param_groups:
            for parameter in group["params"][:1]:
                return step_ended(parameter)
    return end_step_in_force()


def end_step_in_force() -> None:
    """Ends a training step, if the conversion in force has histories."""
    if _in_force is not None:
        _in_force.end_step()
