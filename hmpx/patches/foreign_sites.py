"""The call sites of other libraries' ops: slots in modules loaded now or later.

A function is replaced in the module or class that holds it. An operator of `torch.library` is
replaced where its object keeps the function that it calls, so all references to the operator are covered.
Modules that are imported later, and operators that are defined later, trigger a notification.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from .. import ops
from ..later import AfterImport
from ..ops import OPERATORS, Found
from ..patching import ABSENT, Draft, Patch, entries
from ..torch_internals import (
    OPERATORS_MODULE,
    REFRESH_PACKET,
    TOGGLE_DISPATCH,
    OpNamespace,
    OpOverload,
    OpOverloadPacket,
)


@dataclass(frozen=True, slots=True)
class ForeignSite:
    """One slot with a callable of an op."""

    qualified: str  # Its dotted name
    owner: Any  # The module, class or operator that has the slot
    attribute: str  # Name of the slot
    function: Callable[..., Any]  # The callable
    parameters: ops.Parameters
    writes: tuple[str, ...] = ()  # The parameters that it writes to
    in_place: bool = False  # It writes to its first argument
    # Class of the object around the callable in the slot: for methods, e.g. `classmethod`
    binding: Callable[[Any], Any] | None = None
    is_python = True

    def holding(self, wrapper: Callable[..., Any]) -> Patch:
        value: Any = wrapper
        if isinstance(self.owner, (OpOverload, OpOverloadPacket)):
            value = _WrapperCall(wrapper, self.function)
        elif self.binding is not None:
            value = self.binding(wrapper)
        # Others also write to these slots: torch refreshes operators, and modules are reloaded.
        return Patch(self.owner, self.attribute, value, stays_idle=True, is_foreign=True)


class _WrapperCall:
    """The function that an operator's object calls instead of the kernels; the object's hash depends on it."""

    def __init__(self, wrapper: Callable[..., Any], original: Callable[..., Any]) -> None:
        self._wrapper, self._original = wrapper, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper(*args, **kwargs)

    def __hash__(self) -> int:
        return hash(self._original)

    def __eq__(self, other: object) -> bool:
        return self is other or self._original == other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def foreign_sites_of(name: str, draft: Draft) -> Iterator[ForeignSite]:
    """Yields the slots of the op ``name``; none while its module is not loaded."""
    found = ops.find_foreign(name)
    if found is None or ops.why_not(name, found):
        return
    value = ops.operator_of(found.value) or found.value
    packet = value.overloadpacket if isinstance(value, OpOverload) else value
    if isinstance(packet, OpOverloadPacket):
        yield from _operator_sites(packet, draft)
    else:
        yield _function_site(name, found, draft)


def _function_site(name: str, found: Found, draft: Draft) -> ForeignSite:
    holders = found.owner.__mro__ if isinstance(found.owner, type) else (found.owner,)
    values = (draft.read(Patch(holder, found.attribute, None)) for holder in holders)
    value = next(value for value in values if value is not ABSENT)
    binding = type(value) if isinstance(value, (classmethod, staticmethod)) else None
    function = value if binding is None else value.__func__
    if isinstance(value, types.ClassMethodDescriptorType):  # from C, called with the class
        binding = classmethod
    if isinstance(found.owner, type) and isinstance(value, types.BuiltinFunctionType):
        binding = staticmethod
    parameters = ops.python_parameters(function)
    is_in_place = name.endswith("_") and not name.endswith("__")
    target = parameters.names[:1] if is_in_place else ()
    return ForeignSite(
        name,
        found.owner,
        found.attribute,
        function,
        parameters,
        writes=target,
        in_place=is_in_place,
        binding=binding,
    )


def is_renewed(patch: Patch) -> bool:
    """Whether torch itself has replaced, in an operator, the function that ``patch`` put there."""
    is_of_operator = isinstance(getattr(patch, "owner", None), (OpOverload, OpOverloadPacket))
    return is_of_operator and patch.read() is not patch.value


def _operator_sites(packet: OpOverloadPacket[..., Any], draft: Draft) -> Iterator[ForeignSite]:
    names = [each or "default" for each in packet._overload_names]
    overloads: list[OpOverload] = [getattr(packet, each) for each in names]
    schemas = [overload._schema for overload in overloads]
    base = f"{OPERATORS}.{packet!s}"
    yield _operator_site(base, packet, schemas, draft)
    for overload, schema in zip(overloads, schemas, strict=True):
        yield _operator_site(f"{base}.{overload._overloadname}", overload, [schema], draft)


def _operator_site(qualified: str, owner: Any, schemas: list[Any], draft: Draft) -> ForeignSite:
    longest = max(schemas, key=lambda schema: len(schema.arguments)).arguments
    arguments = [argument for schema in schemas for argument in schema.arguments]
    tensors = {a.name for a in arguments if "Tensor" in str(a.type)}
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    names = tuple([argument.name for argument in longest])
    parameters = ops.Parameters(
        names,
        {position: "A" for position, name in enumerate(names) if name in tensors},
        0,
        frozenset({a.name for a in arguments} - tensors),
    )
    return ForeignSite(
        qualified,
        owner,
        "_op",
        draft.read(Patch(owner, "_op", None)),
        parameters,
        writes=tuple([name for name in names if name in written]),
    )


# --- later modules and operators ---------------------------------------------------------------


def following(
    names: Collection[str], draft: Draft, follow: Callable[[Collection[str], object], None]
) -> Iterator[Patch]:
    """Yields the patches that call ``follow`` when modules are imported or operators are defined."""
    by_module: dict[str, list[str]] = {}
    operators = {name for name in names if name.startswith(f"{OPERATORS}.")}
    for name in names:
        if name not in operators:
            for module in ops.modules_of(name):
                by_module.setdefault(module, []).append(name)
    if by_module:
        actions = {name: functools.partial(follow, found) for name, found in by_module.items()}
        yield entries(sys.meta_path, AfterImport(actions))
    if not operators:
        return

    def followed(owner: Any, name: str, name_of: Callable[..., str]) -> Patch:
        def following(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            operator = f"{OPERATORS}.{name_of(*args)}"
            if operator in operators:
                follow([operator], None)
            return result

        return draft.around(owner, name, following)

    yield followed(OpNamespace, "__getattr__", lambda self, op_name: f"{self.name}.{op_name}")
    if hasattr(OpOverload, TOGGLE_DISPATCH):  # since torch 2.14
        yield followed(OpOverload, TOGGLE_DISPATCH, lambda self, *args: str(self.overloadpacket))
    if hasattr(OPERATORS_MODULE, REFRESH_PACKET):
        yield followed(OPERATORS_MODULE, REFRESH_PACKET, str)
