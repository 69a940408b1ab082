"""Whether a program's own optimizer may step again on a copy: whether a step changes nothing else.

Its code, and the functions that it calls, may use its own plain attributes, torch, and pure functions of Python. A
file, a logger, a counter of the module or another object would keep traces of a second run.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

#: Modules whose functions change no state but that of their arguments.
_PURE: Final = frozenset(
    {"torch", "math", "cmath", "operator", "itertools", "functools", "typing", "collections", "numbers"}
)  # fmt: skip

#: Functions of Python that reach beyond their arguments.
_REACHING: Final = frozenset(
    {"print", "open", "input", "exec", "eval", "compile", "setattr", "delattr", "globals", "vars",
     "locals", "type", "breakpoint", "exit", "quit"}
)  # fmt: skip

#: Instructions that write to names of the module, or load other modules.
_WRITING: Final = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"})

#: Methods of optimizers that a step does not call.
_OTHERS: Final = frozenset({"zero_grad", "state_dict", "load_state_dict", "add_param_group"})

#: The package whose wrappers are looked through.
_HMPX: Final = __name__.partition(".")[0]

_PLAIN: Final = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range, slice, Tensor, torch.Generator,
)  # fmt: skip


def stays_within(optimizer: Optimizer, values: Iterable[Any]) -> bool:
    """Whether a step changes its optimizer alone, which has these attributes and states."""
    classes = type(optimizer).__mro__
    own: dict[str, Any] = {}
    for each in reversed(classes):
        own |= {} if each is object or _is_of(each.__module__, "torch") else vars(each)
    theirs = [each for each in classes if _is_of(each.__module__, "torch")]
    called = [
        each
        for name, each in own.items()
        if not (name.startswith("__") or name in _OTHERS) and any(hasattr(c, name) for c in theirs)
    ]
    seen: set[int] = set()
    is_code_pure = all(_is_pure(f, own, seen) for each in called for f in _functions(each))
    return not own or (is_code_pure and all(map(_is_plain, values)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_pure(function: FunctionType, own: Mapping[str, Any], seen: set[int]) -> bool:
    """Whether a function, and those that it names, write only to what they get; ``own`` are its class's."""
    if id(function) in seen:
        return True
    seen.add(id(function))
    names = vars(builtins) | function.__globals__
    used = [each.cell_contents for each in function.__closure__ or ()]
    stores = False
    for each in [each for code in _codes(function.__code__) for each in dis.get_instructions(code)]:
        name = each.argval
        if each.opname in _WRITING or (name == "__class__" and "ATTR" in each.opname):
            return False
        stores |= each.opname == "STORE_ATTR"
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if name in _REACHING:
                return False
            used.append(names.get(name))
        elif each.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER")) and name in own:
            used.append(own[name])
    return all(_is_harmless(each, own, seen, is_written=stores) for each in used)


def _is_harmless(value: Any, own: Mapping[str, Any], seen: set[int], *, is_written: bool) -> bool:
    functions = list(_functions(value))
    if functions:
        return all(_is_pure(each, own, seen) for each in functions)
    if isinstance(value, ModuleType):
        return _is_of(value.__name__, *_PURE)
    if isinstance(value, tuple):
        return all(_is_harmless(each, own, seen, is_written=is_written) for each in value)
    if isinstance(value, (*_PLAIN, BuiltinFunctionType)):
        return not isinstance(value, Tensor)
    is_its_own = isinstance(value, type) and issubclass(value, Optimizer) and not is_written
    return is_its_own or _is_of(getattr(value, "__module__", ""), "builtins", *_PURE)


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yields the program's functions behind a value: what a method, a property or a decorator wraps."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    while value is not None:
        name = getattr(value, "__globals__", {}).get("__name__")
        if isinstance(value, FunctionType) and not _is_of(name, "torch", _HMPX):
            yield value
        value = getattr(value, "__wrapped__", None)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _is_of(module: Any, *packages: str) -> bool:
    return str(module).partition(".")[0] in packages
