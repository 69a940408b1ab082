"""Old names of arguments, fields and keys, which work for one more version with a warning."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from .errors import warn

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C")


def renamed(*, gathers: bool = False, **names: str) -> Callable[[_F], _F]:
    """Makes a function also take arguments by their old names, and several inputs that are not in a tuple.

    ``gathers`` is whether unknown names are the model's inputs; ``names`` are old name -> new name.
    """

    def decorate(function: _F) -> _F:
        known = inspect.signature(function).parameters
        positional = [
            each.name for each in known.values() if each.kind is each.POSITIONAL_OR_KEYWORD
        ]
        last = len(positional) - 1

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for old in names.keys() & kwargs.keys():
                _warn(f"{function.__name__}({old}=...) is now {names[old]}=...")
                kwargs.setdefault(names[old], kwargs.pop(old))
            named = {n: kwargs.pop(n) for n in [*kwargs] if n not in known} if gathers else {}
            given = args[last:]
            if named:
                _warn(
                    f"{function.__name__} takes named inputs as a mapping: inputs={{'x': x, ...}}"
                )
                forward = inspect.signature(args[0].forward)
                args = (*args[:last], dict(forward.bind(*given, **named).arguments))
            elif len(given) > 1 and positional[last] == "inputs":
                _warn(f"{function.__name__} takes several inputs as a tuple: inputs=(x, y)")
                args = (*args[:last], given)
            return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate


def renamed_fields(**names: str) -> Callable[[type[_C]], type[_C]]:
    """Makes the objects of a class also show fields by their old names; ``names`` are old name -> new name."""

    def decorate(cls: type[_C]) -> type[_C]:
        for old, new in names.items():

            def read(self: object, old: str = old, new: str = new) -> Any:
                _warn(f"{cls.__name__}.{old} is now .{new}")
                return getattr(self, new)

            setattr(cls, old, property(read))
        return cls

    return decorate


def new_key(key: str, value: object, where: str) -> str:
    """Returns the name that a key of a policy file or a contract has today."""
    if key != "phase" or value not in ("train", "eval"):
        return key
    _warn(f"{where}: 'phase: {value}' is now 'mode: {value}'")
    return "mode"


def old_window(steps: tuple[Any, ...]) -> range:
    """Returns the steps that a pair of the first one and the one to stop before means."""
    _warn(f"steps={steps} is now steps=range{steps}")
    return range(*steps)


def prepared_is_gone() -> None:
    """Warns about ``freeze(store="prepared")``, which stores as ``"dtype"`` does."""
    _warn('freeze(store="prepared") keeps no float32 values any more: it is store="dtype"')


#: Command -> its options under their old names -> the new ones.
OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "bench": {"--run-seconds": "--run-s", "--quiet": "--no-progress"},
    "plan": {"--loss": "--loss-fn"},
}


def _warn(message: str) -> None:
    warn(f"{message}; the old way ends with the next version", DeprecationWarning)
