"""Two runs side by side: which call made each tensor, and which calls of two runs are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Final

from ..ops import facts, root
from .reading import TracedCall, TracedRun, TracedSite

_CONVERTING: Final = frozenset(facts("converting"))


class Side:
    """A run, which call made each tensor, and which calls take the results of each call."""

    def __init__(self, run: TracedRun) -> None:
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
        for _ in self.tensors:  # a damaged trace may go round in circles
            maker, base = self._makers.get(tensor), self.tensors[tensor].base
            if maker is not None:
                call = self.calls[maker]
                if call.site.op not in _CONVERTING or not call.inputs:
                    return tensor, maker
                tensor = call.inputs[0]
            elif base >= 0:
                tensor = base
            else:
                break
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
    """Yields pairs of calls, None for one that only the other run makes: by module and op, by op, in any order."""
    keys = [
        {i: _key(calls[i].site) for i in found} for calls, found in ((calls_a, a), (calls_b, b))
    ]
    pairs = [*_in_order(a, b, *keys)]
    moved: dict[Any, list[int]] = {}
    for i, j in pairs:
        if i is None and j is not None:
            moved.setdefault(keys[1][j], []).append(j)
    partners = {
        i: moved[key].pop(0)
        for i, j in pairs
        if i is not None and j is None and moved.get(key := keys[0][i])
    }
    taken = {*partners.values()}
    for i, j in pairs:
        if i is not None:
            yield i, partners.get(i, j)
        elif j not in taken:
            yield None, j


def _key(site: TracedSite) -> tuple[str, str, str]:
    """Returns the key of calls that are the same; a checkpoint repeats them in another phase."""
    return root(site.op), site.module, site.phase


def _in_order(
    a: Sequence[int], b: Sequence[int], keys_a: Mapping[int, Any], keys_b: Mapping[int, Any]
) -> Iterator[tuple[int | None, int | None]]:
    by_module = [keys_a[i] for i in a], [keys_b[i] for i in b]
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
