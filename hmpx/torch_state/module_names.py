"""Names of modules: those of the outermost one's ``named_modules``, without wrappers' additions."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from ..places import Place

_OUTSIDE: Final = Place()


def place_in(running: Sequence[nn.Module]) -> Place:
    """Returns the place of the innermost of these running modules, which are listed outermost first."""
    if not running:
        return _OUTSIDE
    classes = tuple([_class_name(type(each)) for each in running])
    if _OPTIMIZED in classes and any(_optimized(each) is not None for each in running):
        return place_in(without_optimized(running))
    module = running[-1]
    return Place(_name(running[0], module), classes, module.training)


_OPTIMIZED: Final = "OptimizedModule"

#: Names under which wrappers of any class hold the user's module.
_INNER: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
#: Class name of a wrapper -> the name under which it holds that module.
_AROUND: Final = {"DistributedDataParallel": "module", "DataParallel": "module"}
#: Prefixes of class names of modules whose class torch has replaced.
_MADE: Final = ("FSDP", "Parametrized", "Replicate")

#: The attribute names that lead from the outermost module to this one.
_Keys = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _NamedModule:
    """A module as found inside another one."""

    module: weakref.ref[nn.Module]
    keys: _Keys
    path: str


#: Outermost module -> id of a module -> its `_NamedModule`; a weak reference if it is not inside.
_found_in: weakref.WeakKeyDictionary[nn.Module, dict[int, _NamedModule | weakref.ref[nn.Module]]]
_found_in = weakref.WeakKeyDictionary()


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules in ``root``, each with the first of its names."""
    for _, path, module in _walk(root, (), "", set()):
        yield path, module


def named_tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters, then the buffers of the modules in ``root``, each with the first of its names.

    Names leave out wrappers such as torch.compile's, as those of modules do.
    """
    seen: set[int] = set()
    modules = [*named_modules(root)]
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        for path, module in modules:
            for key, tensor in named(module, recurse=False):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield (f"{path}.{key}" if path else key), tensor


def _walk(
    module: nn.Module, keys: _Keys, path: str, seen: set[int]
) -> Iterator[tuple[_Keys, str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield keys, path, module
    around = _AROUND.get(type(module).__name__)
    for key, child in module._modules.items():
        if child is not None:
            is_inner = key in _INNER or key == around
            inner = path if is_inner else f"{path}.{key}" if path else key
            yield from _walk(child, (*keys, key), inner, seen)


def _name(root: nn.Module, module: nn.Module) -> str:
    """Returns the qualified name of ``module`` in ``root``, or that of its class if it is not inside."""
    for is_again in (False, True):
        known = _found_in.get(root)
        if known is None or is_again:
            absent = {k: v for k, v in (known or {}).items() if type(v) is not _NamedModule}
            present = {
                id(each): _NamedModule(weakref.ref(each), keys, path)
                for keys, path, each in _walk(root, (), "", set())
            }
            known = _found_in[root] = {**absent, **present}
        found = known.get(id(module))
        if isinstance(found, _NamedModule):
            if found.module() is module and _is_at(root, found.keys, module):
                return found.path
        elif found is not None and found() is module:
            break  # it is not inside, and the outermost module has not changed
    else:
        _found_in[root][id(module)] = weakref.ref(module)
    return _class_name(type(module))


def _is_at(root: nn.Module, keys: _Keys, module: nn.Module) -> bool:
    """Whether ``module`` is still there: items of a ModuleList may move without notification."""
    at: Any = root
    for key in keys:
        at = at._modules.get(key)
        if at is None:
            return False
    return at is module


def names_change(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Forgets names when ``module`` gets a submodule of this name."""
    _found_in.clear()


def _users_class_name(cls: type) -> str:
    """Returns the name of the user's class if torch has derived ``cls`` from one."""
    if cls.__module__.startswith("torch."):
        for base in cls.__bases__:
            if cls.__name__ in [f"{front}{base.__name__}" for front in _MADE]:
                return _users_class_name(base)
    return cls.__name__


_class_name: Callable[[Any], str] = functools.lru_cache(maxsize=1 << 12)(_users_class_name)


def without_optimized(running: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns ``running`` with torch.compile's wrappers replaced by the user's modules in them."""
    found: list[nn.Module] = []
    for module in running:
        if found and _optimized(found[-1]) is module:
            found[-1] = module
        else:
            found.append(module)
    for position in range(len(found)):
        while (inner := _optimized(found[position])) is not None:
            found[position] = inner
    return found


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the user's module if ``module`` is torch.compile's or DDP's wrapper around one, else itself."""
    while True:
        inner = _optimized(module)
        if inner is None and (name := _AROUND.get(type(module).__name__)) is not None:
            inner = module._modules.get(name)
        if inner is None:
            return module
        module = inner


#: Module -> a unique number.
_serials: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_numbers: Final = itertools.count(1)


def serial_of(module: nn.Module) -> int:
    """Returns a number that identifies a module, and is never reused."""
    return _serials.get(module) or _serials.setdefault(module, next(_numbers))


def class_name(module: nn.Module) -> str:
    """Returns the name of a module's class, or of the user's if torch has derived it from one."""
    return _class_name(type(module))


def _optimized(module: nn.Module) -> nn.Module | None:
    """Returns the user's module if ``module`` is torch.compile's wrapper around one, else None."""
    is_optimized = type(module).__name__ == _OPTIMIZED
    return module._modules.get("_orig_mod") if is_optimized else None
