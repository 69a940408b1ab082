"""Wrappers that conversions share: of functions that nothing casts, and that do what torch's lack.

They follow from torch's functions alone, and are half of all that a conversion would make. Each is retired
with its conversion, as others are, and put back in use by the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NamedTuple

from ..compute import Lacking
from ..patching import Change
from .retiring import Retirement, retirement


class _Shared(NamedTuple):
    """A wrapper, what it was made of, and the references to it when nobody had it."""

    wrapper: Callable[..., Any]
    original: Callable[..., Any]
    lacking: Lacking | None
    references: int


#: ``id`` of torch's function, op, call site, whether it looks up -> its wrapper.
_shared: Final[dict[tuple[int, str, str, bool], _Shared]] = {}

#: So many, where programs put ever new functions in torch's slots.
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
    """Returns the wrapper of a function that nothing casts, that of an earlier conversion if there is one.

    Args:
        original: torch's function.
        op: What it computes.
        site: Dotted name of the slot.
        lacking: The kernels that it lacks; None for none.
        make: As `making.make_wrapper_where_lacking`.
        looks_up: Large calls may be looked up in tables.
    """
    key = id(original), op, site, looks_up
    found = _shared.get(key)
    if found is not None and found.lacking is lacking:
        vars(found.wrapper)["__hmpx_kept__"] = references((found.wrapper,))[0] - found.references
        return found.wrapper
    wrapper = make()
    if wrapper is not None:
        wrapper.__hmpx_retirement__ = retirement(wrapper)  # type: ignore[attr-defined]
        wrapper.__hmpx_use__ = used_as_now(wrapper)  # type: ignore[attr-defined]
        if len(_shared) >= _MOST:
            _shared.clear()
        (count,) = references((wrapper,))  # this name is the reference that `_Shared` is above
        _shared[key] = _Shared(wrapper, original, lacking, count)
    return wrapper


def references(objects: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns how many references there are to each, that of ``objects`` included."""
    return tuple(map(sys.getrefcount, objects))


def references_of_others(wrappers: Iterable[Callable[..., Any]]) -> list[int]:
    """Returns how many references to each there were before the conversion that is being drafted."""
    return [vars(each).get("__hmpx_kept__", 0) for each in wrappers]


def used_as_now(wrapper: Callable[..., Any]) -> Retirement:
    """Returns the patch that gives ``wrapper`` its present name and variables again."""
    patch = Retirement(wrapper, ("", "", ()))
    return Retirement(wrapper, patch.read())


def put_in_use(
    wrappers: Iterable[Callable[..., Any]], in_use: Collection[Callable[..., Any]]
) -> list[Change]:
    """Returns the patches that put those of ``wrappers`` in use that an earlier conversion has used.

    To be made before a wrapper is where calls find it.

    Args:
        wrappers: Those of a conversion.
        in_use: Those that are in use already.
    """
    known = set(map(id, in_use))
    patches = [vars(each).get("__hmpx_use__") for each in wrappers if id(each) not in known]
    return [patch for patch in patches if patch is not None]


def retirements(
    wrappers: Iterable[Callable[..., Any]], kept: Collection[Callable[..., Any]]
) -> list[Change]:
    """Returns the patches that retire ``wrappers``, but not those of ``kept``."""
    in_use = set(map(id, kept))
    return [
        vars(each).get("__hmpx_retirement__") or retirement(each)
        for each in wrappers
        if id(each) not in in_use
    ]
