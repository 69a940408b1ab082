"""Decides calls by rules, and caches each verdict for equivalent calls."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from ..compute import DECIDING_WATCHERS, note_deciding
from ..errors import RuleError, raised_here, shown
from ..ops import Parameters, parameter_named
from ..policy import FIELDS, Call, CastPolicy, Decision, LowType, Rule, settled_dtype
from ..tensors import LOW_DTYPES, SEQUENCES
from ..torch_state import is_below_dispatcher, place, without_casts

_T = TypeVar("_T")

#: Limit on cached verdicts: shapes may vary without end.
MOST_VERDICTS: Final = 1 << 17
#: Up to this number of tensors, every combination is tried.
_FEW: Final = 4
_SHAPES: Final = ("shapes",)
_PLACE: Final = ("place",)
_ATTRIBUTES: Final = {"shapes": "shape", "dtypes": "dtype", "devices": "device"}
_VALUES: Final = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))


class CachedRules(Generic[_T]):
    """Decides the calls of one call site by rules, and caches their verdicts."""

    def __init__(
        self,
        op: str,
        parameters: Parameters,
        rules: tuple[Rule, ...],
        low_dtype: LowType,
        follow: Callable[[Decision | None], _T],
    ) -> None:
        self._op, self._rules, self._low_dtype, self._follow = op, rules, low_dtype, follow
        self._names = parameters.names
        self._may_be_nested = "A" in parameters.kinds.values()
        # The fields that verdicts depend on, and the verdicts; replaced together: threads share them.
        self._state: tuple[tuple[str, ...], dict[Any, _T]] = ((), {})

    def judge(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _T:
        """Returns the result of ``follow`` for a call with these arguments."""
        fields, known = self._state
        if DECIDING_WATCHERS:
            return self._ask(args, kwargs)
        try:
            return known[self._key(fields, args, kwargs)]
        except raised_here(KeyError, TypeError):  # sizes that are symbols have no hash
            return self._ask(args, kwargs)

    def _key(
        self, fields: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if fields == _SHAPES and not kwargs:
            if not self._may_be_nested:
                return tuple([value.shape for value in args if isinstance(value, Tensor)])
            return tuple([tensor.shape for tensor in _tensors(args, kwargs, self._names)])
        if fields == _PLACE:
            return place()
        if not fields:
            return None
        tensors = _tensors(args, kwargs, self._names)
        return tuple([self._value(field, tensors, args, kwargs) for field in fields])

    def _value(
        self, field: str, tensors: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if field == "place":
            return place()
        if field == "kwargs":
            plain = _plain_arguments(args, kwargs, self._names)
            return tuple([(name, *_typed(value)) for name, value in plain.items()])
        return tuple([getattr(tensor, _ATTRIBUTES[field]) for tensor in tensors])

    def _ask(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _T:
        if is_below_dispatcher():  # nothing is cast there
            return self._follow(None)
        tensors = _tensors(args, kwargs, self._names)
        # Rules compare sizes, which may be symbols of a compiler, or tensors under torch.jit.trace.
        shapes = tuple([torch.Size([int(size) for size in t.shape]) for t in tensors])
        values = {
            "shapes": shapes,
            "dtypes": tuple([tensor.dtype for tensor in tensors]),
            "devices": tuple([tensor.device for tensor in tensors]),
            "kwargs": types.MappingProxyType(_plain_arguments(args, kwargs, self._names)),
            "place": place,
        }
        read: set[str] = set()
        with without_casts():
            verdict = self._verdict(Call(self._op, values, read))
            followed = self._follow(verdict)
            if DECIDING_WATCHERS and "dtypes" in read:
                note_deciding(self._op, self._deciding(tensors, values, verdict))
        before, known = self._state
        fields = tuple([name for name in FIELDS if name in read or name in before])
        if fields != before or len(known) >= MOST_VERDICTS:
            known = {}  # the verdicts depend on more fields than before
            self._state = fields, known
        if all([type(size) is int for tensor in tensors for size in tensor.shape]):  # noqa: C419
            known[self._key(fields, args, kwargs)] = followed
        return followed

    def _deciding(
        self, tensors: list[Tensor], values: Mapping[str, Any], verdict: Decision | None
    ) -> list[Tensor]:
        """Returns the float32 tensors whose storage in low precision would change the verdict."""

        def is_changed(changed: Collection[int], dtype: torch.dtype) -> bool:
            dtypes = tuple([dtype if n in changed else t.dtype for n, t in enumerate(tensors)])
            return self._verdict(Call(self._op, {**values, "dtypes": dtypes}, set())) != verdict

        wide = [n for n, tensor in enumerate(tensors) if tensor.dtype is torch.float32]
        most = len(wide) if len(wide) <= _FEW else 1
        deciding: set[int] = set()
        for size in range(1, most + 1):
            for several in itertools.combinations(wide, size):
                # If a subset decides already, the others are not needed.
                if deciding.isdisjoint(several) and any(is_changed(several, d) for d in LOW_DTYPES):
                    deciding.update(several)
        return [tensors[n] for n in sorted(deciding)]

    def _verdict(self, call: Call) -> Decision | None:
        for rule in self._rules:
            verdict = rule(call)
            if verdict is None:
                continue
            if isinstance(verdict, CastPolicy):
                verdict = Decision(verdict)
            if not isinstance(verdict, Decision):
                raise RuleError(
                    f"{rule} for {call.op} returned {shown(verdict)}; return hmpx.ALLOW, hmpx.FOLLOW, "
                    "hmpx.DENY, an hmpx.Decision, or None"
                )
            dtype = settled_dtype(verdict, self._low_dtype)
            return replace(verdict, dtype=dtype, reason=verdict.reason or str(rule))
        return None


def _tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: tuple[str, ...]
) -> list[Tensor]:
    """Returns the tensors of a call, in the order of its parameters, also those in lists."""
    values: Iterable[Any] = args
    if kwargs:
        order = {name: position for position, name in enumerate(parameters)}
        named = sorted(
            kwargs, key=lambda name: order.get(parameter_named(name, parameters), len(order))
        )
        values = (*args, *[kwargs[name] for name in named])
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, SEQUENCES):
            found.extend([item for item in value if isinstance(item, Tensor)])
    return found


def _typed(value: Any) -> tuple[Any, ...]:
    """Returns ``value`` with its type, since 1, 1.0 and True are equal."""
    if isinstance(value, tuple):
        return value, *map(type, value)
    return value, type(value), str(value) if isinstance(value, float) else None  # -0.0


def _plain_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: tuple[str, ...]
) -> dict[str, Any]:
    """Returns the arguments that are numbers, strings, dtypes and the like, by name."""
    found: dict[str, Any] = {}
    named = [(parameter_named(name, parameters), value) for name, value in kwargs.items()]
    for name, value in (*zip(parameters, args, strict=False), *named):
        plain = tuple(value) if isinstance(value, SEQUENCES) else value
        items = plain if isinstance(plain, tuple) else (plain,)
        if all([isinstance(item, _VALUES) for item in items]):  # noqa: C419
            found[name] = plain
    return found
