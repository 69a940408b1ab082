"""Two runs side by side: which call made each tensor, and which calls of two runs are the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any, Final

from ..ops import facts, root
from .reading import TracedCall, TracedRun, TracedTensor

_CONVERTING: Final = frozenset(facts("converting"))

#: A call of each run; None for one that only the other run makes.
Aligned = tuple[TracedCall | None, TracedCall | None]


class Side:
    """A run, which call made each tensor, and which calls take the results of each call.

    Attributes:
        run: The run.
        consumers: Call -> the calls that take its results.
        users: Parameter -> the calls that take it.
        is_compiled: Whether graphs made any of its calls.
    """

    def __init__(self, run: TracedRun) -> None:
        self.run = run
        self.is_compiled = any(call.site.is_compiled for call in run.calls)
        self._makers: dict[TracedTensor, TracedCall] = {}
        self.consumers = defaultdict[TracedCall, list[TracedCall]](list)
        self.users = defaultdict[str, list[TracedCall]](list)
        for call in run.calls:
            for each in dict.fromkeys(call.inputs):
                tensor, maker = self.origin(each)
                if maker is not None:
                    self.consumers[maker].append(call)
                if tensor.name:
                    self.users[tensor.name].append(call)
            for each in call.outputs:
                if each not in call.inputs:
                    self._makers.setdefault(each, call)

    def origin(self, tensor: TracedTensor) -> tuple[TracedTensor, TracedCall | None]:
        """Returns the tensor before views and conversions, and the call that made it."""
        passed = {tensor}
        while True:
            maker = self._makers.get(tensor)
            if maker is None:
                before = tensor.base
            elif maker.site.op in _CONVERTING and maker.inputs:
                before = maker.inputs[0]
            else:
                return tensor, maker
            if before is None or before in passed:  # a damaged trace may go round in circles
                return tensor, None
            passed.add(before)
            tensor = before

    def steps(self) -> dict[int, list[TracedCall]]:
        """Returns the calls of each step, without conversions, which depend on the types of a run."""
        found: dict[int, list[TracedCall]] = {}
        for call in self.run.calls:
            if call.site.op not in _CONVERTING:
                found.setdefault(call.step, []).append(call)
        return found


def aligned(a: Sequence[TracedCall], b: Sequence[TracedCall]) -> list[Aligned]:
    """Returns which calls of two runs are the same: by module and op, by op, in any order."""
    pairs = [*_in_order(a, b)]
    moved = defaultdict[Any, list[TracedCall]](list)
    for one, other in pairs:
        if one is None and other is not None:
            moved[_key(other)].append(other)
    taken = set()
    for place, (one, other) in enumerate(pairs):
        if one is not None and other is None and moved[_key(one)]:
            found = moved[_key(one)].pop(0)
            pairs[place] = one, found
            taken.add(found)
    return [(one, other) for one, other in pairs if one is not None or other not in taken]


def _key(call: TracedCall) -> tuple[str, str, str]:
    """Returns the key of calls that are the same; a checkpoint repeats them in another phase."""
    return root(call.site.op), call.site.module, call.site.phase


def _in_order(a: Sequence[TracedCall], b: Sequence[TracedCall]) -> Iterator[Aligned]:
    for is_equal, ours, theirs in _blocks(a, b, [*map(_key, a)], [*map(_key, b)]):
        if is_equal:
            yield from zip(ours, theirs, strict=True)
            continue
        ops = [[root(call.site.op) for call in each] for each in (ours, theirs)]
        for is_same_op, left, right in _blocks(ours, theirs, *ops):
            if is_same_op:
                yield from zip(left, right, strict=True)
            else:
                yield from ((call, None) for call in left)
                yield from ((None, call) for call in right)


def _blocks(
    a: Sequence[TracedCall], b: Sequence[TracedCall], keys_a: Sequence[Any], keys_b: Sequence[Any]
) -> Iterator[tuple[bool, Sequence[TracedCall], Sequence[TracedCall]]]:
    """Yields the parts of two sequences in order, and whether their keys are equal."""
    differing = (i for i, (x, y) in enumerate(zip(keys_a, keys_b, strict=False)) if x != y)
    start = next(differing, min(len(a), len(b)))
    if start:
        yield True, a[:start], b[:start]
    matcher = SequenceMatcher(None, keys_a[start:], keys_b[start:], autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        yield tag == "equal", a[start + i : start + j], b[start + k : start + m]
