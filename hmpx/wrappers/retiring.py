"""Retires wrappers of reverted conversions: they call the function that is in their slot.

Models, tables and other programs may keep references to them. Each wrapper reads a `Control`, which retires
it, or puts it back in use if conversions share it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .. import patches
from ..compute import Lacking
from ..patching import Change, Patch

#: Dotted name of a slot -> the wrapper in it, and the wrapped function.
_in_force: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


class Control:
    """The mutable state of one wrapper.

    Attributes:
        forward: Gets all calls once the wrapper is retired; else None.
        legalizes: Calls may be legalized.
        looks_at_all: Even calls whose inputs need no cast don't go straight to torch's function.
        may_apply: Whether a product of two matrices may be legalized, judged by their sizes alone.
    """

    __slots__ = ("forward", "legalizes", "looks_at_all", "may_apply")

    def __init__(self, *, legalizes: bool = False, looks_at_all: bool = False) -> None:
        """Starts in use."""
        self.forward: Callable[..., Any] | None = None
        self.legalizes = legalizes
        self.looks_at_all = looks_at_all or legalizes
        self.may_apply: Callable[[Any, Any], bool] = lambda a, b: True

    def settle(self) -> None:
        """Ends the legalization of calls."""
        self.legalizes, self.looks_at_all = False, self.forward is not None


def named_after(
    original: Callable[..., Any], wrapper: Callable[..., Any], site: str, control: Control
) -> Callable[..., Any]:
    """Gives ``wrapper`` an importable name, so that it can be pickled.

    Args:
        original: torch's function.
        wrapper: Its wrapper.
        site: Dotted name of the slot.
        control: The wrapper's.
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
    wrapper.__hmpx_control__ = control  # type: ignore[attr-defined]
    return wrapper


def in_force(wrappers: Iterable[Callable[..., Any]]) -> Patch:
    """Returns the patch that registers ``wrappers`` under the names of their slots."""
    found = [(vars(wrapper), wrapper) for wrapper in wrappers]
    sites = {marks["__hmpx_site__"]: (wrapper, marks["__wrapped__"]) for marks, wrapper in found}
    return Patch(sys.modules[__name__], "_in_force", sites)


def in_slot(site: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the wrapper of ``original`` in the slot ``site``; ``original`` if there is none.

    Not a wrapper of a function that somebody else has put there since, which may call this wrapper.
    """
    current, wrapped = _in_force.get(site, (original, original))
    return current if wrapped is original else original


@dataclass(frozen=True, slots=True)
class Retirement:
    """Makes a wrapper call the function in its slot, for all kept references; or puts it back in use.

    Attributes:
        wrapper: The wrapper.
        value: Its new module and name, and the function that gets its calls.
    """

    wrapper: Callable[..., Any]
    value: tuple[str, str, Callable[..., Any] | None]
    is_foreign = False
    stays_idle = True

    @property
    def key(self) -> Hashable:
        """Identifies the wrapper."""
        return id(self.wrapper), "retirement"

    @property
    def where(self) -> str:
        """The slot's name."""
        return str(vars(self.wrapper)["__hmpx_site__"])

    def read(self) -> tuple[str, str, Callable[..., Any] | None]:
        """Returns the present value."""
        wrapper = self.wrapper
        control: Control = vars(wrapper)["__hmpx_control__"]
        return wrapper.__module__, wrapper.__qualname__, control.forward

    def write(self, value: tuple[str, str, Callable[..., Any] | None]) -> None:
        """Sets the value."""
        control: Control = vars(self.wrapper)["__hmpx_control__"]
        self.wrapper.__module__, self.wrapper.__qualname__, forward = value
        control.forward, control.looks_at_all = forward, forward is not None or control.legalizes


def used_as_now(wrapper: Callable[..., Any]) -> Retirement:
    """Returns the patch that restores the present state of ``wrapper``."""
    return Retirement(wrapper, Retirement(wrapper, ("", "", None)).read())


def _retirement(wrapper: Callable[..., Any]) -> Retirement:
    site, original = vars(wrapper)["__hmpx_site__"], vars(wrapper)["__wrapped__"]

    def forward(*args: Any, **kwargs: Any) -> Any:
        return in_slot(site, original)(*args, **kwargs)

    return Retirement(wrapper, (*patches.retired_name(wrapper, site), forward))


def retirements(
    wrappers: Iterable[Callable[..., Any]], kept: Collection[Callable[..., Any]]
) -> list[Change]:
    """Returns the patches that retire ``wrappers`` except those in ``kept``."""
    in_use = set(map(id, kept))
    return [
        vars(each).get("__hmpx_retirement__") or _retirement(each)
        for each in wrappers
        if id(each) not in in_use
    ]


# --- wrappers that conversions share -----------------------------------------------------------

# Wrappers that cast nothing and only add fallbacks depend on these keys alone, and are half of all
# wrappers of a conversion.

#: ``id`` of torch's function, op, call site, whether it looks up -> the wrapper, torch's function, the
#: kernels that it lacks, and the count of references to the wrapper while it was unused.
_shared: Final[
    dict[tuple[int, str, str, bool], tuple[Callable[..., Any], object, Lacking | None, int]]
] = {}

#: A limit, since programs may keep putting new functions in torch's slots.
_MOST: Final = 1000


def shared_where_lacking(
    original: Callable[..., Any],
    op: str,
    site: str,
    lacking: Lacking | None,
    make: Callable[[], Callable[..., Any] | None],
    *,
    looks_up: bool = False,
) -> Callable[..., Any] | None:
    """Returns the wrapper of a function that is never cast; reuses one of an earlier conversion.

    Args:
        original: torch's function.
        op: Op name.
        site: Dotted name of the slot.
        lacking: The kernels that it lacks; None for none.
        make: As `making.make_wrapper_where_lacking`.
        looks_up: Large calls may use lookup tables.
    """
    key = id(original), op, site, looks_up
    found = _shared.get(key)
    if found is not None and found[2] is lacking:
        vars(found[0])["__hmpx_kept__"] = references((found[0],))[0] - found[3]
        return found[0]
    wrapper = make()
    if wrapper is not None:
        wrapper.__hmpx_retirement__ = _retirement(wrapper)  # type: ignore[attr-defined]
        wrapper.__hmpx_use__ = used_as_now(wrapper)  # type: ignore[attr-defined]
        if len(_shared) >= _MOST:
            _shared.clear()
        (count,) = references(
            (wrapper,)
        )  # the local name stands for the reference that `_shared` holds
        _shared[key] = wrapper, original, lacking, count
    return wrapper


def references(objects: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns the reference count of each, including the reference in ``objects``."""
    return tuple(map(sys.getrefcount, objects))


def references_of_others(wrappers: Iterable[Callable[..., Any]]) -> list[int]:
    """Returns the reference count of each before the conversion that is being drafted."""
    return [vars(each).get("__hmpx_kept__", 0) for each in wrappers]


def put_in_use(
    wrappers: Iterable[Callable[..., Any]], in_use: Collection[Callable[..., Any]]
) -> list[Change]:
    """Returns the patches that put wrappers of earlier conversions back in use.

    Apply them before a wrapper is in a slot.

    Args:
        wrappers: A conversion's wrappers.
        in_use: Wrappers already in use.
    """
    known = set(map(id, in_use))
    found = [vars(each).get("__hmpx_use__") for each in wrappers if id(each) not in known]
    return [patch for patch in found if patch is not None]
