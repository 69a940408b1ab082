"""Delayed scaling: the amaxes of earlier training steps, and the scales of tensors.

A history belongs to a key: the place in a model, the op, the role of a tensor in its call, and the format.
Within a step it keeps the largest amax of all tensors of a key, so that recomputation, which has the same
tensors, has no effect; all of them are scaled by the same earlier steps. At the end of a step, the histories
with new amaxes advance.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from ..errors import OptionError, shown
from ..forks import new_lock
from ..number_formats import MOST_STEPS, is_format
from ..patching import Patch, unpatched
from ..tensors import is_captured
from ..torch_internals import is_replica
from ..torch_state import class_name, without_casts

if TYPE_CHECKING:
    from ..number_formats import Scaled


# Unpatched: op lists may name any of them.
_fmax, _where, _gt, _max, _eq = unpatched(torch.fmax, torch.where, torch.gt, torch.max, torch.eq)
_and, _mul, _clamp, _roll = unpatched(torch.logical_and, torch.mul, torch.clamp, torch.roll)
_zeros, _tensor = unpatched(torch.zeros, torch.tensor)

#: The largest amax.
MOST: Final = torch.finfo(torch.float32).max


class History:
    """The amaxes of one key in earlier steps, the latest first; 0 for none.

    On the CPU an amax is a number. Elsewhere it stays on its device, since reading it would
    synchronize; it is written in place, for CUDA graphs.
    """

    def __init__(self, format: Scaled, first: float | Tensor) -> None:
        """Starts empty, for amaxes like ``first``."""
        assert format.history is not None
        self.format = format
        self.steps, self.is_pending = 0, False  # ended steps with an amax; whether this one has any
        self.is_replayed = False  # by CUDA graphs, which fold in amaxes without Python
        device = first.device if isinstance(first, Tensor) else "cpu"
        with torch.inference_mode(False):
            memory = _zeros(format.history + 2, dtype=torch.float32, device=device)
        self.pending: float | Tensor
        self.reference, self.amaxes = memory[1], memory[2:]  # the amax of the scale; 0 if all are 0
        self.pending = memory[0] if isinstance(first, Tensor) else 0.0  # this step's
        self.scale: Tensor | None = None  # on the CPU

    def is_for(self, amax: float | Tensor) -> bool:
        """Whether it accepts amaxes of this type and device."""
        return isinstance(amax, Tensor) is isinstance(self.pending, Tensor)

    def fold(self, amax: float | Tensor) -> None:
        """Adds a tensor's amax; ignores NaN, the amax of tensors with infinity or NaN."""
        if isinstance(self.pending, Tensor):
            _fmax(self.pending, amax.to(self.pending.device), out=self.pending)  # type: ignore[union-attr]
        else:
            self.pending = max(self.pending, amax)  # ignores NaN
        self.is_pending = True
        self.is_replayed |= isinstance(amax, Tensor) and is_captured(amax)

    def roll(self) -> None:
        self.amaxes.copy_(_roll(self.amaxes, 1))
        self.amaxes[0].fill_(self.pending)
        amax = self.amaxes[0] if self.format.amax_rule == "most_recent" else _max(self.amaxes)
        if self.format.margin:
            amax = _clamp(_mul(amax, 2.0**self.format.margin), max=MOST)
        self.reference.copy_(_where(_gt(amax, 0), amax, self.reference))
        self._rescale()
        if isinstance(self.pending, Tensor):
            self.pending.zero_()
        else:
            self.pending = 0.0
        self.is_pending = self.is_replayed
        self.steps += 1

    def _rescale(self) -> None:
        if not isinstance(self.pending, Tensor) and self.reference.item():
            with torch.inference_mode(False):
                self.scale = self.format.scale(self.reference.clone())

    def scale_for(self, amax: float | Tensor) -> Tensor | None:
        """Returns the divisor for a tensor with this amax; None for its own scale.

        None if there is no earlier amax, or if this one is NaN, so that the whole tensor becomes NaN.
        """
        if not isinstance(amax, Tensor):
            return None if math.isnan(amax) else self.scale
        if not (self.steps or self.is_replayed):
            return None
        reference = self.reference.to(amax.device)
        is_known = _and(_gt(reference, 0), _eq(amax, amax))
        return self.format.scale(_where(is_known, reference, amax))

    def saved(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "pending": float(self.pending) if self.is_pending else None,
            "reference": self.reference.item(),
            "amaxes": self.amaxes.tolist(),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        amaxes = saved["amaxes"][: self.amaxes.numel()]
        self.amaxes[: len(amaxes)].copy_(_tensor(amaxes, dtype=torch.float32, device="cpu"))
        self.reference.fill_(saved["reference"])
        self.steps, self.is_pending = saved["steps"], saved["pending"] is not None
        pending = saved["pending"] or 0.0
        if isinstance(self.pending, Tensor):
            self.pending.fill_(pending)
        else:
            self.pending = pending
        self._rescale()


#: Held while histories change.
_LOCK: Final = new_lock()


class Histories:
    """The amax histories of a conversion's formats with delayed scaling: `Session.histories`.

    Threads share them.

    Attributes:
        ended: The number of ended training steps with amaxes.

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
        """Starts empty."""
        self.ended = 0
        self._known: dict[str, History] = {}
        self._loaded: Mapping[str, Mapping[str, Any]] = {}  # assigned to keys on their first use
        self._ended: set[str] = set()  # those of them whose step has ended since
        self._labels: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._given: set[str] = set()

    def label_of(self, root: nn.Module, *, is_taken: bool) -> str:
        """Returns the label of an outermost module: its class name, and a number from the second one on.

        The label of a deleted model may become another's, which inherits nothing. A module that is only
        evaluated does not reserve its label, which stays free for one that is trained.
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
        if not is_taken:  # a deleted model's histories are not for this one
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
        """Returns the scale of a tensor with this key and amax; None for its own scale.

        The amax is NaN if the tensor contains infinity or NaN. With ``records`` it affects later steps.
        """
        with _LOCK:
            known = self._known.get(key)
            if known is not None and known.format is not format and known.format != format:
                known = None  # it is for another format of that name
            if known is None or not known.is_for(amax):
                saved = self._loaded.get(key) if known is None else known.saved()
                if saved is None and not records:
                    return None
                made = History(format, amax)
                if saved is not None:
                    made.load(saved)
                    if known is None and key in self._ended:
                        made.roll()
                known = self._known[key] = made
            if records:
                known.fold(amax)
            return known.scale_for(amax)

    def end_step(self) -> None:
        """Ends a training step, for all keys with amaxes.

        Optimizers of torch do so at the end of their ``step``; this is for programs that update their
        parameters in another way.
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
        """Returns the content as strings and numbers, for a checkpoint.

        A key consists of the outermost module's class, the path in it, the op, the tensor's role in the
        call, and the format.
        """
        with _LOCK, without_casts():
            unused = {k: dict(v) for k, v in self._loaded.items() if k not in self._known}
            return unused | {key: known.saved() for key, known in self._known.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces the content by the `state_dict` of an earlier run.

        Raises:
            OptionError: ``state`` is not such a dict.
        """
        if not isinstance(state, Mapping):
            raise OptionError(
                f"load_state_dict takes the result of Histories.state_dict(), not {shown(state)}"
            )
        checked = {key: _checked(key, value) for key, value in state.items()}
        with _LOCK:
            self._known, self._loaded, self._ended = {}, checked, set()
            self._given = set(self._labels.values())


def _checked(key: object, saved: object) -> Mapping[str, Any]:
    is_right = isinstance(key, str) and isinstance(saved, Mapping) and saved.keys() == _FIELDS
    if is_right:
        found: Any = saved
        steps, amaxes = found["steps"], found["amaxes"]
        is_right = isinstance(amaxes, list) and len(amaxes) <= MOST_STEPS
        is_right = is_right and type(steps) is int and steps >= 0
    if is_right:
        pending = 0.0 if found["pending"] is None else found["pending"]
        numbers = [*amaxes, found["reference"], pending]
        if all(type(each) in (int, float) and 0 <= each <= MOST for each in numbers):
            return dict(found)
    raise OptionError(
        f"amaxes of {shown(key)}: not in the form of Histories.state_dict(): {shown(saved)}"
    )


#: The keys of `History.saved`.
_FIELDS: Final = {"steps", "pending", "reference", "amaxes"}


# --- the current conversion's histories ----------------------------------------------------------

_in_force: Histories | None = None


def in_force() -> Histories | None:
    """Returns the histories of the current conversion; None if it can't have any."""
    return _in_force


def histories_patch(histories: Histories) -> Patch:
    """Returns the patch that puts a conversion's histories in force."""
    return Patch(sys.modules[__name__], "_in_force", histories)


def has_history(format: object) -> bool:
    """Whether ops use scales of earlier steps to round to ``format``."""
    return is_format(format) and getattr(format, "history", None) is not None


def ended_steps() -> int:
    """Returns the number of ended training steps that change scales."""
    return 0 if _in_force is None else _in_force.ended


def end_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Ends a training step; every optimizer calls this at the end of its step."""
    if torch.compiler.is_dynamo_compiling():
        from .delayed import step_ended  # rarely needed

        for group in optimizer.param_groups:
            for parameter in group["params"][:1]:
                return step_ended(parameter)
    return end_step_in_force()


def end_step_in_force() -> None:
    """Ends a training step, if the current conversion has histories."""
    if _in_force is not None:
        _in_force.end_step()
