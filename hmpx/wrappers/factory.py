"""Wrappers out of their source: compiled once for all call sites that share it."""

from __future__ import annotations

import functools
import itertools
import linecache
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import has_torch_function, has_torch_function_variadic

from ..casting import Recipe, is_settled
from ..compute import has_own_gradients, has_own_products
from ..tensors import LOW_DTYPES, NUMBERS, PLAIN_TENSORS, Kwargs
from ..torch_internals import DisableAutocast, transforms
from ..torch_state import switch  # its gate, as it is at each call
from .overriding import is_overridden
from .retiring import Variables
from .source import VARIABLES, source_of


class Made(NamedTuple):
    """What a factory returns.

    Attributes:
        wrapper: The wrapper.
        settle: Has it call torch's function directly where it asked before whether to legalize.
        variables: Those that change when it is retired.
    """

    wrapper: Callable[..., Any]
    settle: Callable[[], None]
    variables: Variables


def factory(recipe: Recipe) -> Callable[..., Made]:
    """Returns the function of `source.PARAMETERS` that makes the wrapper for ``recipe``."""
    made = _factories.get(recipe)
    if made is None:
        made = _factories[recipe] = _compiled(source_of(recipe))
    return made


_factories: Final[weakref.WeakKeyDictionary[Recipe, Callable[..., Made]]] = (
    weakref.WeakKeyDictionary()
)


@functools.cache
def _compiled(source: str) -> Callable[..., Made]:
    """Returns the wrapper factory that ``source`` defines: many ops share one."""
    # Names are the switch's globals, its gate above all, or constants in closure cells.
    parameters = ", ".join(_CONSTANTS)
    body = "\n    ".join(source.splitlines())  # much faster than textwrap.indent
    source = f"def bind({parameters}):\n    {body}\n    return make\n"
    file_name = f"<{__name__} {next(_numbers)}>"
    # Tracebacks and debuggers show its lines.
    linecache.cache[file_name] = len(source), None, source.splitlines(keepends=True), file_name
    namespace: dict[str, Any] = {}
    exec(compile(source, file_name, "exec"), vars(switch), namespace)
    return namespace["bind"](**_CONSTANTS)  # type: ignore[no-any-return]


_numbers: Final = itertools.count(1)

# --- what the source calls ---------------------------------------------------------------------


class missing:  # noqa: N801  # a value
    """Stands for a positional argument that was not given."""

    dtype = None


def given(*values: Any) -> tuple[Any, ...]:
    """Returns a call's arguments as they were given: those with names, then the tuple of the rest."""
    *named, rest = values
    return (*[value for value in named if value is not missing], *rest)


def are_plain(kwargs: Kwargs) -> bool:
    """Whether nobody overrides a call for these arguments, and none of them is written to."""
    return "out" not in kwargs and not has_torch_function(tuple(kwargs.values()))


_CONSTANTS: Final = {
    "are_plain": are_plain,
    "missing": missing,
    "plain_tensors": PLAIN_TENSORS,
    "low_dtypes": LOW_DTYPES,
    "numbers": NUMBERS,
    "float32": torch.float32,
    "strided": torch.strided,
    "has_own_gradients": has_own_gradients,
    "has_own_products": has_own_products,
    "has_torch_function": has_torch_function,
    "has_torch_function_variadic": has_torch_function_variadic,
    "given": given,
    "is_overridden": is_overridden,
    "DisableAutocast": DisableAutocast,
    "transforms": transforms,
    "is_settled": is_settled,
    "Made": Made,
    "Variables": Variables,
    "VARIABLES": VARIABLES,
}
