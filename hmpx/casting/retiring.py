"""Retires wrappers of reverted conversions: they call the function that is in their slot.

Models, tables and other programs may keep references to them. Each wrapper reads a `Control`, which retires
it, or puts it back in use if conversions share it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .. import patches
from ..patching import Patch
from ..tensors import Function
from ..torch_internals import leave_uncompiled
from .plan import CallPlan

#: Dotted name of a slot -> the wrapper in it, and the wrapped function.
_in_force: Mapping[str, tuple[Function, Function]] = {}


@dataclass(slots=True, eq=False)
class Control:
    """The mutable state of one wrapper, which starts in use."""

    legalizes: bool = False  # calls may be legalized
    looks_at_all: bool = False  # settled calls, too, don't go straight to torch's function
    forward: Function | None = None  # gets all calls once the wrapper is retired
    #: Whether a product of two matrices may be legalized, judged by their sizes alone.
    may_apply: Callable[[Any, Any], bool] = lambda a, b: True
    #: Compiled nodes that compute calls, but for unusual ones: legalized calls, once there was one; other calls, once
    #: none may be legalized; and those in use.
    offered: Function | None = None
    fused: Function | None = None
    nodes: Function | None = None
    names: list[tuple[str, str]] = field(default_factory=list)  # in use, and once it is retired
    alone: int = 0  # count of references to the wrapper when it was new
    is_held: bool = False  # other code had references when the last conversion took it

    def settle(self) -> None:
        self.legalizes = False
        self.reset()

    def reset(self) -> None:
        """Makes calls go where they go before any was legalized."""
        is_open = self.legalizes or self.forward is not None
        self.looks_at_all, self.nodes = is_open, None if is_open else self.fused


def named_after(original: Function, wrapper: Function, site: str, control: Control) -> Function:
    """Gives ``wrapper`` an importable name, so that it can be pickled."""
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
    leave_uncompiled(wrapper)
    return wrapper


def in_force(wrappers: Iterable[Function]) -> Patch:
    """Returns the patch that registers ``wrappers`` under the names of their slots."""
    found = [(vars(wrapper), wrapper) for wrapper in wrappers]
    sites = {marks["__hmpx_site__"]: (wrapper, marks["__wrapped__"]) for marks, wrapper in found}
    return Patch(sys.modules[__name__], "_in_force", sites)


def in_slot(site: str, original: Function) -> Function:
    """Returns the wrapper of ``original`` in the slot ``site``; ``original`` if there is none.

    Not a wrapper of a function that somebody else has put there since, which may call this wrapper.
    """
    current, wrapped = _in_force.get(site, (original, original))
    return current if wrapped is original else original


class _Retirement(Patch):
    """Makes the wrapper ``owner`` call the function in its slot, for all kept references, or puts it back in use."""

    __slots__ = ()

    @property
    def where(self) -> str:
        return str(vars(self.owner)["__hmpx_site__"])

    def read(self) -> bool:
        return vars(self.owner)["__hmpx_control__"].forward is not None

    def write(self, value: bool) -> None:
        """Retires the wrapper, or puts it in use."""
        wrapper, site = self.owner, self.where
        control: Control = vars(wrapper)["__hmpx_control__"]
        original = vars(wrapper)["__wrapped__"]
        if not control.names:
            in_use = wrapper.__module__, wrapper.__qualname__
            control.names = [in_use, patches.retired_name(wrapper, site)]

        def forward(*args: Any, **kwargs: Any) -> Any:
            return in_slot(site, original)(*args, **kwargs)

        wrapper.__module__, wrapper.__qualname__ = control.names[value]
        control.forward = forward if value else None
        control.reset()


def retirements(wrappers: Iterable[Function], kept: Collection[Function] = ()) -> list[Patch]:
    used = set(map(id, kept))
    return [_Retirement(w, "", True, stays_idle=True) for w in wrappers if id(w) not in used]


def in_use(wrappers: Iterable[Function]) -> list[Patch]:
    """Returns the patches that put retired wrappers in use. Apply them before a wrapper is in a slot."""
    retired = [w for w in wrappers if vars(w)["__hmpx_control__"].forward is not None]
    return [_Retirement(wrapper, "", False) for wrapper in retired]


# --- wrappers that conversions share -----------------------------------------------------------

#: ``id`` of torch's function, and plan -> the wrapper; None if the function needs none.
_shared: Final[dict[tuple[int, CallPlan], Function | None]] = {}

#: A limit, since programs may keep putting new functions in torch's slots.
_MOST: Final = 5000


def shared(
    original: Function, plan: CallPlan, make: Callable[[], Function | None]
) -> Function | None:
    """Returns the wrapper of ``original`` by ``plan`` from ``make``, or that of an earlier conversion."""
    key = id(original), plan
    if key not in _shared:
        if len(_shared) >= _MOST:
            _shared.clear()
        _shared[key] = make()
    wrapper = _shared[key]
    if wrapper is not None:
        control: Control = vars(wrapper)["__hmpx_control__"]
        control.alone = control.alone or sys.getrefcount(wrapper)
        control.is_held = sys.getrefcount(wrapper) > control.alone
    return wrapper


def held_by_others(wrappers: Iterable[Function]) -> list[Function]:
    """Returns the wrappers to which other code had references before the conversion began."""
    return [each for each in wrappers if vars(each)["__hmpx_control__"].is_held]
