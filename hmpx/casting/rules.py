"""Rules that users register: functions that decide the calls of an op."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar, overload

from torch import Tensor

from .. import arguments, ops
from ..errors import OptionError, RuleError, raised_here, said_by, shown
from ..policy import Call, Verdict
from ..registry import Registry, exclusive

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
    """Returns all rules, in the order of their registration."""
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
