"""Rules that users register, which decide the calls of an op; their verdicts are cached for equivalent calls."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar, overload

import torch
from torch import Tensor

from .. import arguments, ops
from ..compute import DECIDING_WATCHERS, note_deciding
from ..errors import OptionError, RuleError, raised_here, said_by, shown
from ..ops import Parameters, parameter_named
from ..policy import FIELDS, Call, CastPolicy, Decision, LowType, Rule, Verdict, settled_dtype
from ..registry import Registry, exclusive
from ..tensors import LOW_DTYPES, SEQUENCES
from ..torch_state import is_below_dispatcher, place, without_casts

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Registered:
    """A rule as it was registered."""

    op: str  # Op name, or ``"*"``
    function: Callable[[Call], Verdict]  # The user's function
    level: int  # The rule of the highest level is called first; of equal ones, the latest

    def __call__(self, call: Call) -> Verdict:
        """Returns the verdict of the user's function."""
        try:
            return self.function(call)
        except raised_here(Exception) as error:
            raise RuleError(f"{self} for {call.op} raised {said_by(error)}") from error

    def names_modules(self) -> bool:
        """Whether the function's own code reads modules; functions that it calls may do so too."""
        code = getattr(self.function, "__code__", None) or getattr(
            type(self.function).__call__, "__code__", None
        )
        asked = {"module", "module_class", "module_classes", "training"}
        return code is not None and not asked.isdisjoint(_names_in(code))

    @property
    def name(self) -> str:
        """The qualified name of the function."""
        return str(getattr(self.function, "__qualname__", None) or type(self.function).__qualname__)

    def __str__(self) -> str:
        name = getattr(self.function, "__qualname__", None) or shown(self.function)
        code = getattr(self.function, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        return f"rule {name}{where}"


def are_alike(one: Registered, other: Registered) -> bool:
    """Whether two rules are the same, or functions with equal code and equal captured values."""
    if (one.op, one.level) != (other.op, other.level):
        return False
    a, b = one.function, other.function
    if isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType):
        return _is_as(_parts(a), _parts(b))
    return _is_as(a, b)


def _is_as(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_as, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_is_as, one.values(), other.values()))
    return isinstance(one, Hashable) and bool(one == other)


def _parts(function: types.FunctionType) -> tuple[Any, ...]:
    """Returns everything that determines a function's behaviour, except globals."""
    code = function.__code__.replace(co_firstlineno=0, co_linetable=b"")
    cells = [_content(cell) for cell in function.__closure__ or ()]
    cells = [None if content is function else content for content in cells]  # it calls itself
    return code, function.__defaults__, function.__kwdefaults__, cells


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


# --- the registry ------------------------------------------------------------------------------

#: All rules, in the order of their registration.
RULES: Final[Registry[tuple[Registered, ...]]] = Registry(())


@overload
def register_rule(
    op: str | Iterable[str], fn: None = None, level: int = 10
) -> Callable[[_F], _F]: ...
@overload
def register_rule(op: str | Iterable[str], fn: _F, level: int = 10) -> _F: ...
def register_rule(
    op: str | Iterable[str], fn: Callable[[Call], Verdict] | None = None, level: int = 10
) -> Any:
    """Registers a function that decides the calls of an op before the op lists do.

    It is called with a `Call` and returns a `Decision`, or a `CastPolicy` (`ALLOW`, `FOLLOW`,
    `DENY`), or None to leave the call to the next rule and then to the lists. Its result is cached
    by the fields that it read, so it must depend on nothing else. Tensors that an op writes to
    always keep their dtype.

    Applies to current and later conversions, until ``unregister_rule``.

    Args:
        op: An op name as in the lists, several of them, or ``"*"`` for every op.
        fn: The function; None makes a decorator.
        level: The rule of the highest level is called first; of equal ones, the one registered last.

    Returns:
        ``fn``, or the decorator.

    Raises:
        OptionError: An op is unknown, ``fn`` can't be called, or ``level`` is not an integer.

    Example:
        >>> @hmpx.register_rule("linear")
        ... def keep_small_layers(call):
        ...     return hmpx.DENY if call.shapes[1].numel() < 100 else None
        >>> with hmpx.convert(device_types={"cpu"}):
        ...     torch.nn.Linear(2, 3)(torch.ones(1, 2)).dtype
        ...     torch.nn.Linear(20, 30)(torch.ones(1, 20)).dtype
        torch.float32
        torch.bfloat16
        >>> hmpx.unregister_rule("linear", keep_small_layers)
    """
    names = _resolved(op)
    if type(level) is not int:
        raise OptionError(f"level must be an integer, not {shown(level)}")

    @exclusive
    def register(function: _F) -> _F:
        if not callable(function):
            raise OptionError(f"a rule must be a function of a call, not {shown(function)}")
        rules = RULES.value
        for name in names:
            rules = tuple(
                rule  # except one that a notebook cell defines again
                for rule in rules
                if rule.op != name or not _is_same(rule.function, function)
            )
            rules += (Registered(name, function, level),)
        RULES.change(rules)
        return function

    return register if fn is None else register(fn)


@exclusive
def unregister_rule(op: str | Iterable[str], fn: Callable[[Call], Verdict] | None = None) -> None:
    """Removes rules that `register_rule` added.

    Args:
        op: The same as there.
        fn: The function; None for all rules of ``op``.

    Raises:
        OptionError: No such rule is registered.

    Example:
        >>> fn = hmpx.register_rule(["mm", "bmm"], lambda call: hmpx.DENY)
        >>> hmpx.unregister_rule("mm")
        >>> hmpx.unregister_rule("bmm", fn)
    """
    if fn is not None and not callable(fn):
        raise OptionError(f"a rule must be a function of a call, not {shown(fn)}")
    gone: list[Registered] = []
    for name in _resolved(op):
        found = [r for r in RULES.value if r.op == name and fn in (None, r.function)]
        if not found:
            which = "no rule" if fn is None else f"no such rule: {shown(fn)}"
            raise OptionError(f"{name!r} has {which}; register_rule adds one")
        gone += found
    RULES.change(tuple(rule for rule in RULES.value if rule not in gone))


def registered(op: str) -> tuple[Registered, ...]:
    """Returns the rules of ``op``, or of the op that covers it, in the order in which they are called."""
    rules = RULES.value
    own = ops.covering_among(op, {rule.op for rule in rules})
    found = [rule for rule in rules if rule.op in (own, "*")]
    found.reverse()
    found.sort(key=lambda rule: -rule.level)
    return tuple(found)


def all_rules() -> tuple[Registered, ...]:
    return RULES.value


def _resolved(op: str | Iterable[str]) -> list[str]:
    found: list[str] = []
    named = [op] if isinstance(op, str) else arguments.items("op", op, "an op name, or several")
    if not named or not all(isinstance(name, str) for name in named):
        raise OptionError(f"op must be an op name, or several, not {shown(op)}")
    for name in dict.fromkeys(map(str.__str__, named)):
        resolved = "*" if name == "*" else ops.resolve(name)
        if resolved is None or (resolved != "*" and not ops.is_castable(resolved)):
            raise OptionError(ops.unknown(name))
        found.append(resolved)
    return found


def _is_same(a: Callable[..., Any], b: Callable[..., Any]) -> bool:
    """Whether two functions come from one definition, executed twice."""
    if not (isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType)):
        return a is b
    if a.__code__ is b.__code__:  # created twice by one enclosing function
        return _is_as(_parts(a), _parts(b))
    both = [(f.__module__, f.__qualname__) for f in (a, b)]
    return both[0] == both[1] and "<lambda>" not in a.__qualname__


def _content(cell: types.CellType) -> Any:
    """Returns the content of ``cell``; None if it is empty, as a decorated function's own cell is."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


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
