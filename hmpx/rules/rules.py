"""Decisions made by the call: functions that users register, for one op each.

A rule looks at a `Call` and decides; its verdict is kept for calls that are alike in everything that it
has looked at. Knows neither lists nor how wrappers get into torch.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar, overload

import torch
from torch import Tensor

from .. import arguments, ops, torch_state
from ..arguments import is_a
from ..errors import OptionError, RuleError, said_by, shown, suggestion
from ..ops import Parameters
from ..policy import FIELDS, Call, CastPolicy, Decision, LowType, Rule, Verdict
from ..registry import Registry, exclusive
from ..torch_state import disable_casts, is_below_dispatcher

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Registered:
    """A rule as it was registered.

    Attributes:
        op: Op name, or ``"*"``.
        function: The user's function.
        level: The higher one is asked first; of equals, the later one.
    """

    op: str
    function: Callable[[Call], Verdict]
    level: int

    def __call__(self, call: Call) -> Verdict:
        """Returns what the user's function says.

        Raises:
            RuleError: It raised an error.
        """
        try:
            return self.function(call)
        except Exception as error:
            raise RuleError(f"{self} for {call.op} raised {said_by(error)}") from error

    def names_modules(self) -> bool:
        """Whether the function's code speaks of modules; other functions that it calls may, too."""
        code = getattr(self.function, "__code__", None) or getattr(
            type(self.function).__call__, "__code__", None
        )
        asked = {"module", "module_class", "module_classes", "training"}
        return code is not None and not asked.isdisjoint(_names_in(code))

    @property
    def name(self) -> str:
        """What the function is called where it is defined."""
        return str(getattr(self.function, "__qualname__", None) or type(self.function).__qualname__)

    def __str__(self) -> str:
        name = getattr(self.function, "__qualname__", None) or shown(self.function)
        code = getattr(self.function, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        return f"rule {name}{where}"


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
    """Lets a function decide the calls of an op, before the op lists do.

    It is called with a `Call` and returns a `Decision`, or a `CastPolicy` (`ALLOW`, `FOLLOW`,
    `DENY`), or None to leave the call to the next rule and then to the lists. What it says is kept
    for all calls that are alike in what it has looked at: so it must depend on nothing else. Tensors
    that are written to keep their dtype, whatever it says.

    Holds for conversions that are in force and for those to come, until `unregister_rule`. After
    TVM's mixed-precision pass.

    Args:
        op: An op name as in the lists, several of them, or ``"*"`` for every op.
        fn: The function; None makes a decorator.
        level: Of several rules the one of the highest level is asked first; of equal ones, that
            registered last.

    Returns:
        ``fn``, or the decorator.

    Raises:
        OptionError: An op is unknown, ``fn`` can't be called, or ``level`` is no integer.

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
                rule  # but for that of a notebook's cell which is run again
                for rule in rules
                if rule.op != name or not _is_same(rule.function, function)
            )
            rules += (Registered(name, function, level),)
        RULES.change(rules)
        return function

    return register if fn is None else register(fn)


@exclusive
def unregister_rule(op: str | Iterable[str], fn: Callable[[Call], Verdict] | None = None) -> None:
    """Takes back `register_rule`.

    Args:
        op: What was given there.
        fn: The function; None for all rules of ``op``.

    Raises:
        OptionError: There is no such rule.

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
    """Returns the rules of ``op``, in the order in which they are asked.

    A rule of an op holds for its operators too, unless they have rules of their own.
    """
    rules = RULES.value
    own: str | None = op
    while own is not None and not any(rule.op == own for rule in rules):
        own = ops.covering(own)
    found = [rule for rule in rules if rule.op in (own, "*")]
    found.reverse()
    found.sort(key=lambda rule: -rule.level)
    return tuple(found)


def all_rules() -> tuple[Registered, ...]:
    """Returns all rules, in the order of their registration."""
    return RULES.value


def _resolved(op: str | Iterable[str]) -> list[str]:
    found: list[str] = []
    named = [op] if is_a(op, str) else arguments.items("op", op, "an op name, or several")
    if not named or not all(is_a(name, str) for name in named):
        raise OptionError(f"op must be an op name, or several, not {shown(op)}")
    for name in dict.fromkeys(map(str.__str__, named)):
        resolved = "*" if name == "*" else ops.resolve(name)
        if resolved is None or (resolved != "*" and not ops.is_castable(resolved)):
            raise OptionError(f"unknown op {shown(name)}{suggestion(name, ops.names())}")
        found.append(resolved)
    return found


def _is_same(a: Callable[..., Any], b: Callable[..., Any]) -> bool:
    """Whether two functions are one definition, run twice."""
    if not (isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType)):
        return a is b
    if a.__code__ is b.__code__:  # made twice by one function around it
        return _bound(a) == _bound(b)
    both = [(f.__module__, f.__qualname__) for f in (a, b)]
    return both[0] == both[1] and "<lambda>" not in a.__qualname__


def _bound(function: types.FunctionType) -> tuple[object, ...]:
    """Returns the identities of what a function was made with."""
    cells = [_content(cell) for cell in function.__closure__ or ()]
    cells = [None if content is function else content for content in cells]  # it calls itself
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return tuple(map(id, [*cells, *defaults]))


def _content(cell: types.CellType) -> Any:
    """Returns what ``cell`` holds; None while it is empty, as a decorated function's own is."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


# --- asking ------------------------------------------------------------------------------------

#: Verdicts that are kept, and what follows from them: for shapes without end.
MOST_VERDICTS: Final = 4096
_SEQUENCES: Final = (list, tuple)
_SHAPES: Final = ("shapes",)
_PLACE: Final = ("place",)
_VALUES: Final = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))


class Judge(Generic[_T]):
    """Decides the calls of one call site by rules, and keeps what follows from their verdicts."""

    def __init__(
        self,
        op: str,
        parameters: Parameters,
        rules: tuple[Rule, ...],
        low_dtype: LowType,
        follow: Callable[[Decision | None], _T],
    ) -> None:
        """Starts without verdicts.

        Args:
            op: Op name.
            parameters: What the callable's arguments are.
            rules: In the order in which they are asked.
            low_dtype: That of decisions that name none.
            follow: Returns what follows from a decision; from None, what follows from the lists.
        """
        self._op, self._rules, self._low_dtype, self._follow = op, rules, low_dtype, follow
        self._names = parameters.names
        self._may_be_nested = "A" in parameters.kinds.values()
        # What the verdicts depend on, and they; replaced together, since threads share them.
        self._state: tuple[tuple[str, ...], dict[Any, _T]] = ((), {})

    def judge(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _T:
        """Returns what follows from the decision for a call with these arguments."""
        fields, known = self._state
        try:
            return known[self._key(fields, args, kwargs)]
        except (KeyError, TypeError):  # sizes that are symbols have no hash
            return self._ask(args, kwargs)

    def _key(
        self, fields: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if fields == _SHAPES and not kwargs:
            if not self._may_be_nested:
                return tuple([value.shape for value in args if isinstance(value, Tensor)])
            return tuple([tensor.shape for tensor in _tensors(args, kwargs, self._names)])
        if fields == _PLACE:
            return torch_state.place()
        if not fields:
            return None
        tensors = _tensors(args, kwargs, self._names)
        return tuple([self._value(field, tensors, args, kwargs) for field in fields])

    def _value(
        self, field: str, tensors: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        match field:
            case "shapes":
                return tuple([tensor.shape for tensor in tensors])
            case "dtypes":
                return tuple([tensor.dtype for tensor in tensors])
            case "devices":
                return tuple([tensor.device for tensor in tensors])
            case "place":
                return torch_state.place()
            case _:
                plain = _plain_arguments(args, kwargs, self._names)
                return tuple([(name, *_typed(value)) for name, value in plain.items()])

    def _ask(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _T:
        if is_below_dispatcher():  # nothing is cast there
            return self._follow(None)
        tensors = _tensors(args, kwargs, self._names)
        # Sizes may be symbols of a compiler, or tensors under torch.jit.trace: a rule compares them.
        shapes = tuple([torch.Size([int(size) for size in t.shape]) for t in tensors])
        values = {
            "shapes": shapes,
            "dtypes": tuple([tensor.dtype for tensor in tensors]),
            "devices": tuple([tensor.device for tensor in tensors]),
            "kwargs": types.MappingProxyType(_plain_arguments(args, kwargs, self._names)),
            "place": torch_state.place,
        }
        read: set[str] = set()
        with disable_casts():
            followed = self._follow(self._verdict(Call(self._op, values, read)))
        before, known = self._state
        fields = tuple([name for name in FIELDS if name in read or name in before])
        if fields != before or len(known) >= MOST_VERDICTS:
            known = {}  # what rules have said depends on more than was known
            self._state = fields, known
        if all([type(size) is int for tensor in tensors for size in tensor.shape]):  # noqa: C419
            known[self._key(fields, args, kwargs)] = followed
        return followed

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
            return self._settled(verdict, rule)
        return None

    def _settled(self, decision: Decision, rule: Rule) -> Decision:
        """Returns ``decision`` with the dtype and the reason that it leaves out."""
        dtype = decision.dtype
        if dtype is None and decision.cast_policy is CastPolicy.LOW:
            dtype = self._low_dtype
        if dtype is None and decision.cast_policy is CastPolicy.FP32:
            dtype = torch.float32
        return replace(decision, dtype=dtype, reason=decision.reason or str(rule))


def _tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: tuple[str, ...]
) -> list[Tensor]:
    """Returns the tensors of a call, in the order of its parameters, also those in lists."""
    values: Iterable[Any] = args
    if kwargs:
        order = {name: position for position, name in enumerate(parameters)}
        named = sorted(kwargs, key=lambda name: order.get(name, len(order)))
        values = (*args, *[kwargs[name] for name in named])
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _SEQUENCES):
            found.extend([item for item in value if isinstance(item, Tensor)])
    return found


def _typed(value: Any) -> tuple[Any, ...]:
    """Returns ``value`` with what tells it from others that are equal: 1, 1.0 and True."""
    if isinstance(value, tuple):
        return value, *map(type, value)
    return value, type(value), str(value) if isinstance(value, float) else None  # -0.0


def _plain_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: tuple[str, ...]
) -> dict[str, Any]:
    """Returns the arguments that are numbers, strings, dtypes and the like, by name."""
    found: dict[str, Any] = {}
    for name, value in (*zip(parameters, args, strict=False), *kwargs.items()):
        plain = tuple(value) if isinstance(value, _SEQUENCES) else value
        items = plain if isinstance(plain, tuple) else (plain,)
        if all([isinstance(item, _VALUES) for item in items]):  # noqa: C419
            found[name] = plain
    return found
