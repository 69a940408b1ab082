"""What becomes of a wrapper when its conversion is reverted: it acts as what is in its slot then.

Models, tables and other programs may keep references to it. Every wrapper is made together with
functions that read and write the variables it works with, and that are here given other values.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import patches
from ..patching import Patch
from ..tensors import Args, Kwargs

#: Dotted name of a slot -> the wrapper that is in it, and what that wraps.
_in_force: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


class Variables(NamedTuple):
    """The variables of a wrapper that change when it is retired.

    Attributes:
        names: What they are called.
        read: Returns their values.
        write: Takes new ones.
    """

    names: tuple[str, ...]
    read: Callable[[], tuple[Any, ...]]
    write: Callable[[tuple[Any, ...]], None]


def named_after(
    original: Callable[..., Any], wrapper: Callable[..., Any], site: str, variables: Variables
) -> Callable[..., Any]:
    """Gives ``wrapper`` the name by which it can be imported, so that it can be pickled.

    Args:
        original: torch's function.
        wrapper: What stands for it.
        site: Dotted name of the slot.
        variables: Those of the wrapper that change when it is retired.
    """
    module, _, name = site.rpartition(".")
    if module == "torch.Tensor":
        module, name = "torch", f"Tensor.{name}"
    is_of_module = isinstance(getattr(original, "__self__", None), types.ModuleType)
    if is_of_module and original.__name__ != name:  # torch.linalg has no "linalg_norm"
        module, name = original.__module__, original.__qualname__
    wrapper.__module__ = module
    wrapper.__name__ = getattr(original, "__name__", name)
    wrapper.__qualname__ = name
    wrapper.__doc__ = original.__doc__
    wrapper.__wrapped__ = original  # type: ignore[attr-defined]
    wrapper.__hmpx_site__ = site  # type: ignore[attr-defined]
    wrapper.__hmpx_variables__ = variables  # type: ignore[attr-defined]
    return wrapper


def in_force(wrappers: Iterable[Callable[..., Any]]) -> Patch:
    """Returns the patch by which wrappers of earlier conversions pass their calls to ``wrappers``."""
    found = [(vars(wrapper), wrapper) for wrapper in wrappers]
    sites = {marks["__hmpx_site__"]: (wrapper, marks["__wrapped__"]) for marks, wrapper in found}
    return Patch(sys.modules[__name__], "_in_force", sites)


@dataclass(frozen=True, slots=True)
class Retirement:
    """Has a wrapper act as what is in its slot from now on, wherever a reference to it was kept.

    Or as itself again, where conversions share it.

    Attributes:
        wrapper: The wrapper.
        value: Its module and name, and the values of its variables, from then on.
    """

    wrapper: Callable[..., Any]
    value: tuple[str, str, tuple[Any, ...]]
    is_foreign = False
    stays_idle = True

    @property
    def key(self) -> Hashable:
        """What tells the wrapper from others."""
        return id(self.wrapper), "retirement"

    @property
    def where(self) -> str:
        """The slot's name."""
        return str(vars(self.wrapper)["__hmpx_site__"])

    def read(self) -> tuple[str, str, tuple[Any, ...]]:
        """Returns the wrapper's module and name, and the values of its variables."""
        wrapper = self.wrapper
        return wrapper.__module__, wrapper.__qualname__, _variables(wrapper).read()

    def write(self, value: tuple[str, str, tuple[Any, ...]]) -> None:
        """Gives the wrapper this module and name, and its variables these values."""
        wrapper = self.wrapper
        wrapper.__module__, wrapper.__qualname__, values = value
        _variables(wrapper).write(values)


def retirement(wrapper: Callable[..., Any]) -> Retirement:
    """Returns the patch that retires ``wrapper``."""
    site, original = vars(wrapper)["__hmpx_site__"], vars(wrapper)["__wrapped__"]
    forward = _forwarder(site, original)
    # What calls it may pass over a layer. A function of its own: one that refers to itself would wait for
    # a collection of garbage.
    forward.__wrapped__ = _forwarder(site, original)  # type: ignore[attr-defined]
    values = retired_values(forward)
    retired = tuple([values[name] for name in _variables(wrapper).names])
    return Retirement(wrapper, (*patches.retired_name(wrapper, site), retired))


def _forwarder(site: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that passes calls on to what is in the slot ``site``."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        current, wrapped = _in_force.get(site, (original, original))
        # Not to a wrapper of what somebody else has put there since: that may call this one.
        return (current if wrapped is original else original)(*args, **kwargs)

    return forward


def retired_values(forward: Callable[..., Any]) -> Mapping[str, Any]:
    """Returns the values that a wrapper's variables have once it is retired, by name.

    Args:
        forward: Passes a call on to what is in the slot.
    """

    def override(wrapper: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        return forward(*args, **kwargs)

    def choose(args: Args, kwargs: Kwargs) -> Callable[..., Any]:
        return forward

    return {
        "own_name": None,
        "wrapper": forward,  # that refers to itself would wait for a collection of garbage
        "original": forward,
        "complete": forward,
        "override": override,
        "choose": choose,
        "cast": cast_nothing,
        "run": run_plainly,
        "retry": nothing,
        "other_dtypes": frozenset(),
        "legalizes": False,
        "is_autocast_on": bool,
        "narrowed": nothing,
        "parts": (forward, None, nothing),
    }


class OwnName:
    """The variable by which a wrapper within another one leads to itself.

    The one within is not retired, since a call may be about to enter it. But as long as it refers to
    itself, it and the other one would wait for a collection of garbage.
    """

    def __init__(self, wrapper: Callable[..., Any]) -> None:
        """Takes the wrapper within; keeps no reference to it."""
        variables = _variables(wrapper)
        self._read, self._write = variables.read, variables.write
        names = variables.names
        self._position = names.index("wrapper" if "wrapper" in names else "complete")

    def read(self) -> Callable[..., Any]:
        """Returns the variable's value, a function."""
        return self._read()[self._position]  # type: ignore[no-any-return]

    def write(self, value: Callable[..., Any]) -> None:
        """Gives the variable another value."""
        values = list(self._read())
        values[self._position] = value
        self._write(tuple(values))


def _variables(wrapper: Callable[..., Any]) -> Variables:
    return vars(wrapper)["__hmpx_variables__"]  # type: ignore[no-any-return]


def cast_nothing(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns the arguments as they are."""
    return args, kwargs


def run_plainly(function: Callable[..., Any], args: Args, kwargs: Kwargs, given: Args) -> Any:
    """Calls torch's function."""
    return function(*args, **kwargs)


def nothing(*args: object, **kwargs: object) -> None:
    """Does nothing."""
