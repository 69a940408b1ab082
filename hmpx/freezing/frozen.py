"""The result of `freeze`: a report, and the way back to the fp32 weights."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .. import arguments, patches
from ..blocks import Entered, Entrance
from ..errors import FreezeError, printable
from .originals import Originals, Slot
from .seal import Seal
from .weights import Weight, listed, table


class Frozen(Entered):
    """A report of what `freeze` did to a model, and the way to undo it.

    This object holds the fp32 weights, and frees them when it is garbage-collected. As a context manager it
    undoes the freezing on exit.

    Attributes:
        weights: Every parameter and buffer, in the model's order.

    Example:
        >>> model = torch.nn.Linear(2, 3).eval()
        >>> with hmpx.convert(device_types={"cpu"}):
        ...     with hmpx.freeze(model, torch.ones(1, 2)):
        ...         model.weight.dtype
        ...     model.weight.dtype
        torch.bfloat16
        torch.float32
    """

    def __init__(
        self,
        model: nn.Module,
        weights: tuple[Weight, ...],
        seal: Seal | None,
        originals: Originals | None,
        attached: contextlib.ExitStack,
    ) -> None:
        """Called by `freeze` only."""
        self.weights = weights
        self._model = model
        self._name = printable(type(model).__name__)
        self._seal = seal
        self._originals = originals
        self._attached = attached
        self._is_undone = False
        self.entrance = Entrance(weakref.ref(self))

    def summary(self) -> str:
        """Returns a table: the bytes before and after, and for each weight its dtype and the reason."""
        return table(self._name, self.weights, is_undone=self._is_undone)

    def undo(self, *, strict: bool = True) -> None:
        """Restores the model's fp32 weights, bit for bit; does nothing the second time.

        A weight is identified by its name in its module. Anything written to it since is lost. Modules removed
        from the model are ignored.

        Args:
            strict: ``False`` skips weights that are not where they were stored, and restores the others. A
                later call restores those that are back in their places.

        Raises:
            FreezeError: The model was frozen with ``keep_fp32=False``; or some weights are not where
                they were stored: replaced, deleted, parametrized, on the meta device, or in a copy
                of their module. The model is then unchanged.
            OptionError: ``strict`` is neither True nor False.
        """
        strict = arguments.truth("strict", strict)
        if self._is_undone:
            return
        if self._originals is None:
            raise FreezeError(
                f"{self._name} was frozen with keep_fp32=False, so its fp32 weights are gone; "
                "build the model from them again, or leave out keep_fp32=False to undo()"
            )
        misplaced = dict(self._originals.misplaced(self._model))
        copies = [] if self._seal is None else self._seal.copies_in(self._model)
        if strict and (misplaced or copies):
            raise FreezeError(self._refusal(misplaced, copies))
        self._originals.restore(misplaced.keys())
        self._attached.close()
        self._is_undone = self._originals.is_empty
        patches.forget_compiled()

    def _refusal(self, misplaced: Mapping[Slot, str], copies: Sequence[str]) -> str:
        by_fault: dict[str, list[str]] = {}
        for slot, fault in misplaced.items():
            by_fault.setdefault(fault, []).append(repr(slot.name))
        for path in copies:
            by_fault.setdefault("a copy of a frozen module", []).append(repr(path))
        faults = [
            f"{listed(names, 8)} {'is' if len(names) == 1 else 'are'} {fault}"
            for fault, names in by_fault.items()
        ]
        return (
            f"{self._name} can't be given its fp32 weights back, and nothing was changed: "
            f"{'; '.join(faults)}; put back what hmpx.freeze left there and call undo() again, or "
            "call undo(strict=False) to restore the others"
        )

    def begin_block(self) -> None:
        """Checks that the fp32 weights were kept.

        Raises:
            FreezeError: The model was frozen with ``keep_fp32=False``.
        """
        if self._originals is None:
            self.entrance.renew()
            raise FreezeError(
                f"{self._name} was frozen with keep_fp32=False, so a with block can't undo() it "
                "at its end; leave out keep_fp32=False, or call hmpx.freeze without the block"
            )

    def end_block(self, block: list[Any]) -> None:
        """Undoes the freezing."""
        if self._originals is not None:
            self.undo()

    def __repr__(self) -> str:
        low = sum(weight.is_low for weight in self.weights)
        state = "undone" if self._is_undone else f"{low} of {len(self.weights)} weights low"
        return f"<hmpx.Frozen {self._name}: {state}>"
