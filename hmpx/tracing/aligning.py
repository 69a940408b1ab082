"""Two runs side by side: which call made each tensor, and which calls of two runs are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Any, Final

import torch

from ..ops import facts
from .reading import Run, TracedCall

_CONVERTING: Final = frozenset(facts("converting"))


class Side:
    """A run, which call made each tensor, and which calls take the results of each call."""

    def __init__(self, run: Run) -> None:
        self.calls, self.tensors = run.calls, run.tensors
        self._makers: dict[int, int] = {}
        self.consumers: dict[int, list[int]] = {}
        self.users: dict[str, list[int]] = {}  # of parameters
        for index, call in enumerate(run.calls):
            for each in set(call.inputs):
                tensor, maker = self.origin(each)
                if maker is not None:
                    self.consumers.setdefault(maker, []).append(index)
                if self.tensors[tensor].name:
                    self.users.setdefault(self.tensors[tensor].name, []).append(index)
            for each in call.outputs:
                if each not in call.inputs:
                    self._makers.setdefault(each, index)

    def origin(self, tensor: int) -> tuple[int, int | None]:
        """Returns the tensor before views and conversions, and the call that made it."""
        while True:
            maker, base = self._makers.get(tensor), self.tensors[tensor].base
            if maker is not None:
                call = self.calls[maker]
                if call.site.op not in _CONVERTING or not call.inputs:
                    return tensor, maker
                tensor = call.inputs[0]
            elif base >= 0:
                tensor = base
            else:
                return tensor, None

    def type_of(self, call: TracedCall) -> str:
        """Returns the dtype that a call computed in: the decision's, or the first result's."""
        return call.site.dtype or next((self.tensors[each].dtype for each in call.outputs), "")

    def steps(self) -> dict[int, list[int]]:
        """Returns the calls of each step, without conversions, which depend on the types of a run."""
        found: dict[int, list[int]] = {}
        for index, call in enumerate(self.calls):
            if call.site.op not in _CONVERTING:
                found.setdefault(call.step, []).append(index)
        return found


def aligned(
    calls_a: Sequence[TracedCall],
    a: Sequence[int],
    calls_b: Sequence[TracedCall],
    b: Sequence[int],
) -> Iterator[tuple[int | None, int | None]]:
    """Yields pairs of calls, None for one that only the other run makes: first by module and op, then by op."""
    by_module = [
        [(_plain(calls[i].site.op), calls[i].site.module) for i in found]
        for calls, found in ((calls_a, a), (calls_b, b))
    ]
    for is_equal, (i, j), (k, m) in _blocks(*by_module):
        if is_equal:
            yield from zip(a[i:j], b[k:m], strict=True)
            continue
        by_op = [key[0] for key in by_module[0][i:j]], [key[0] for key in by_module[1][k:m]]
        for is_same_op, (p, q), (r, s) in _blocks(*by_op):
            if is_same_op:
                yield from zip(a[i + p : i + q], b[k + r : k + s], strict=True)
            else:
                yield from ((each, None) for each in a[i + p : i + q])
                yield from ((None, each) for each in b[k + r : k + s])


@cache
def _plain(op: str) -> str:
    """Returns an op without what an operator adds to its name: ``"pow"`` for ``"rpow"`` and ``"ipow"``."""
    is_other = op[:1] in ("r", "i") and hasattr(torch.Tensor, f"__{op[1:]}__")
    return op[1:] if is_other and hasattr(torch.Tensor, f"__{op}__") else op


def _blocks(
    a: Sequence[Any], b: Sequence[Any]
) -> Iterator[tuple[bool, tuple[int, int], tuple[int, int]]]:
    """Yields which parts of two sequences are equal, and which are not, in order."""
    start = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    if start:
        yield True, (0, start), (0, start)
    matcher = SequenceMatcher(None, a[start:], b[start:], autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        yield tag == "equal", (start + i, start + j), (start + k, start + m)
