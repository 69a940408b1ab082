"""Names bound before `convert`, or during a conversion: finds them in loaded modules, to be rebound.

``from torch.nn.functional import gelu`` above `convert` holds the builtin itself, which no patch of
torch reaches. This searches module globals, and one level into the dicts, lists and partials that
they name. torch's own modules are left alone. So are models: finding those in a process takes longer
than the rest of a conversion, so they are listed only on request. A table with a torch function as a
key, as in classes with a ``__torch_function__``, also torch's, gets the wrapper as an additional key,
and a set as an additional entry. Patches nothing itself.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import inspect
import itertools
import os
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import fx, nn

from ..patching import ABSENT, Applied, Draft, ItemPatch, Patch, entries, names_of
from ..tensors import Function
from ..torch_internals import NODE_KEY, NODE_TABLE, NODE_TARGET
from .compiled import is_wrapper, unwrapped

#: Their tables describe torch's own functions.
_TORCHS = ("torch", "functorch")
_LEFT_ALONE = (*_TORCHS, "hmpx")

#: torch imports these, but they don't use torch. Half of all names, so half of the time.
_WITHOUT_TORCH = ("mpmath", "numpy", "sympy")

#: Packages whose modules are not searched.
_PASSED_OVER = {*_LEFT_ALONE, *_WITHOUT_TORCH}

#: Exactly these types: methods of subclasses may do more than get and set.
_CONTAINERS = frozenset({dict, list, collections.OrderedDict})
_TABLES = frozenset({dict, set, collections.OrderedDict})
_DATA = frozenset({str, bytes, int, float, bool, type(None)})
_ATOMS = _DATA | {types.ModuleType, types.FunctionType, tuple, frozenset}
_LONGEST = 1000


def early_name_patches(replacements: Mapping[int, Any]) -> Iterator[Patch]:
    seen: set[int] = set()
    for module in _modules().values():
        yield from in_module(module, replacements, seen)
    for kind in subclasses(torch.Tensor):  # also torch's own
        yield from _class_patches(kind, replacements, seen)


def in_module(
    module: types.ModuleType, replacements: Mapping[int, Any], seen: set[int]
) -> Iterator[Patch]:
    """Yields the patches that rebind the names of one module, as `early_name_patches` does."""
    wanted, held = replacements.keys(), names_of(module)
    values = list(held.values())  # a copy: other threads may import
    rebound = {address: replacements[address] for address in wanted & set(map(id, values))}
    for value in [each for each in values if type(each) not in _ATOMS]:  # few
        kind = type(value)
        if kind in _CONTAINERS:
            if id(value) not in seen:
                seen.add(id(value))
                yield from _item_patches(value, replacements)
        elif kind is set:
            yield from _table_patches(value, replacements)
        elif kind is functools.partial:
            if id(value.func) in wanted:
                function = replacements[id(value.func)]
                rebound[id(value)] = functools.partial(function, *value.args, **value.keywords)
        elif kind in _BOUND and id(value) not in wanted and id(function_in(value)) in wanted:
            rebound[id(value)] = _bound(replacements[id(function_in(value))], value.__self__)
        elif issubclass(kind, type) and not (id(value) in seen or _is_plain(value, seen)):
            yield from _class_patches(value, replacements, seen)
    for key, value in list(held.items()) if rebound else ():
        if id(value) in rebound:
            yield Patch(module, key, rebound[id(value)], is_foreign=True)


def missed(originals: Collection[Any], depth: int = 5) -> Iterator[tuple[str, Any]]:
    """Yields the places that the patches miss: class attributes, defaults, closures, deeper tables.

    With a path such as ``package.module.Block.forward(activation=)``, and the function there.
    """
    seen: set[int] = set()
    yield from _found(originals, list(_modules().items()), depth, seen)
    yield from held_by_models(originals, seen)


def held_by_models(
    originals: Collection[Any], seen: Collection[int] = ()
) -> Iterator[tuple[str, Any]]:
    """Yields torch functions that instances of `torch.nn.Module` hold, also in partials, lists, dicts.

    With a path such as ``package.module.Block().activation``, once for all instances of a class.
    """
    kinds = subclasses(torch.nn.Module)
    living = [each for each in gc.get_objects() if type(each) in kinds and id(each) not in seen]
    models = [(f"{type(m).__module__}.{type(m).__qualname__}()", m) for m in living]
    found: dict[str, Any] = {}
    for path, function in _found(originals, models, 5, set()):
        found.setdefault(path, function)
    yield from found.items()


def subclasses(base: type) -> set[type[Any]]:
    return {base}.union(*map(subclasses, type.__subclasses__(base)))


def _found(
    originals: Collection[Any], paths: list[tuple[str, Any]], depth: int, seen: set[int]
) -> Iterator[tuple[str, Any]]:
    """Yields paths to functions among ``originals``, starting at ``paths``; adds visited ids to ``seen``."""
    wanted = {id(original) for original in originals}
    for _ in range(depth):
        inner: list[tuple[str, Any]] = []
        for path, value in paths:
            if id(value) in wanted:
                yield path, value
            elif id(value) not in seen and type(value) not in _DATA:
                seen.add(id(value))
                inner.extend(_parts(path, value))
        paths = inner


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the paths and values one step from ``value``, without running code of its class."""
    kind = type(value)
    if kind is types.FunctionType:
        if "__hmpx_site__" not in vars(value):  # not a wrapper
            yield from _function_parts(path, value)
    elif kind in (types.MethodType, staticmethod, classmethod):
        yield path, value.__func__
    elif kind is functools.partial:
        yield from ((f"{path}.func", value.func), (f"{path}.args", value.args))
        yield f"{path}.keywords", value.keywords
    elif kind in _CONTAINERS or kind is tuple:
        if len(value) <= _LONGEST:
            items = enumerate(value) if kind in (list, tuple) else value.items()
            for key, item in list(items):
                shown = repr(key) if type(key) in _DATA else f"<{type(key).__name__}>"
                yield f"{path}[{shown}]", item
    else:
        yield from _attributes(path, value)


def _function_parts(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    names, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
    # Decorators may give a function more defaults than it has parameters.
    for name, default in zip(reversed(names), reversed(defaults), strict=False):
        yield f"{path}({name}=)", default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f"{path}({name}=)", default
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f"{path}<{name}>", cell.cell_contents


def _attributes(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    module = str(vars(value).get("__module__", "")) if issubclass(type(value), type) else ""
    if module.partition(".")[0] in _LEFT_ALONE:
        return
    if issubclass(type(value), types.ModuleType) and value.__name__ != path:
        return  # searched under its own name
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:  # slots only
        return
    for name, attribute in list(attributes.items()):
        yield f"{path}.{name}", attribute


def _modules() -> dict[str, types.ModuleType]:
    """Returns the loaded modules that may hold torch functions, each once, by name.

    Excludes those of torch, hmpx, Python, and of libraries that don't use torch.
    """
    found: dict[int, tuple[str, types.ModuleType]] = {}
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0] if type(name) is str else "torch"
        if top in _PASSED_OVER or not issubclass(type(module), types.ModuleType):
            continue
        if not (top in sys.stdlib_module_names and _is_pythons(module)):
            found.setdefault(id(module), (name, module))
    return dict(found.values())


def torchs_modules() -> list[tuple[str, types.ModuleType]]:
    return [
        (name, module)
        for name, module in list(sys.modules.items())
        if type(name) is str and name.partition(".")[0] in _TORCHS
        if issubclass(type(module), types.ModuleType)
    ]


def _is_pythons(module: types.ModuleType) -> bool:
    file = vars(module).get("__file__")  # a script's own module may be named like one of Python's
    if type(file) is not str:
        return False
    pythons, installed = _folders("stdlib", "platstdlib"), _folders("purelib", "platlib")
    return file.startswith(pythons) and not file.startswith(installed)


@functools.cache
def _folders(*kinds: str) -> tuple[str, ...]:
    import sysconfig

    found = sysconfig.get_paths()
    return tuple(found[kind] + os.sep for kind in kinds)


def forget_overrides() -> None:
    """Clears the lists of functions in `torch.overrides`, which classes look up."""
    for name in ("_get_overridable_functions", "_get_tensor_methods"):
        cached: Any = getattr(torch.overrides, name, None)
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


def _is_plain(kind: type, seen: set[int]) -> bool:
    """Whether a class neither has nor inherits a ``__torch_function__``; then adds it to ``seen``."""
    if "__torch_function__" in vars(kind):
        return False
    for base in kind.__bases__:
        if id(base) not in seen and not _is_plain(base, seen):
            return False
    seen.add(id(kind))
    return True


def _class_patches(
    overriding: type, replacements: Mapping[int, Any], seen: set[int]
) -> Iterator[Patch]:
    """Yields the patches of the tables of a class with a ``__torch_function__``.

    They may be inherited from classes that no module names. Searched classes, such as
    `torch.Tensor`, which many modules name, are in ``seen`` as the complement of their address: the
    address itself would mark them as plain.
    """
    for kind in overriding.__mro__:
        if ~id(kind) in seen:
            continue
        seen.add(~id(kind))
        function = getattr(vars(kind).get("__torch_function__"), "__func__", None)
        values = list(vars(kind).values())
        if type(function) is types.FunctionType:  # also the globals that it names
            names = function.__globals__
            values += [names[name] for name in function.__code__.co_names if name in names]
        for table in [each for each in values if type(each) in _TABLES]:
            yield from _table_patches(table, replacements)
            for inner in list(table.values()) if type(table) is dict else ():
                yield from _table_patches(inner, replacements)


def _item_patches(
    container: dict[Any, Any] | list[Any], replacements: Mapping[int, Any]
) -> Iterator[Patch]:
    if len(container) > _LONGEST:
        return
    values = container.values() if isinstance(container, dict) else container
    if not replacements.keys().isdisjoint(map(id, values)):
        items = list(container.items() if isinstance(container, dict) else enumerate(container))
        for key, value in items:
            if id(value) in replacements:
                yield ItemPatch(container, key, replacements[id(value)], is_foreign=True)
    yield from _table_patches(container, replacements)


def _table_patches(table: Any, replacements: Mapping[int, Any]) -> Iterator[Patch]:
    """Yields the patches that add a wrapper for each key, or entry, that is a torch function."""
    if type(table) not in _TABLES or len(table) > _LONGEST:
        return
    if replacements.keys().isdisjoint(map(id, table)):
        return
    if type(table) is set:
        found = {replacements[id(entry)] for entry in table if id(entry) in replacements} - table
        if found:
            yield entries(table, *found, is_foreign=True)
        return
    for key, value in list(table.items()):
        wrapper = replacements.get(id(key))
        if wrapper is not None and wrapper not in table:
            yield ItemPatch(table, wrapper, replacements.get(id(value), value), is_foreign=True)


# --- names taken during a conversion -----------------------------------------------------------

# ``from numpy import *`` and ``apply = Function.apply`` take replacements other than wrappers. Modules of
# torch that are imported during a conversion also take wrappers.

#: A replacement that is not a wrapper -> the function that it replaced.
_originals: Final[weakref.WeakKeyDictionary[Function, Function]] = weakref.WeakKeyDictionary()

#: The names of torch's modules that had been imported before torch was converted.
_before: set[str] = set()

_FUNCTIONS: Final = (
    *(types.FunctionType, types.BuiltinFunctionType),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType),
)


def note_torchs_modules() -> None:
    """Records the loaded modules of torch, which hold its own functions: torch is not converted now."""
    _before.update(name for name, _ in torchs_modules())


def standing_for(applied: Iterable[Applied]) -> dict[int, Function]:
    """Returns ``id`` of a function -> its replacement in ``applied``, if that is not a wrapper.

    The functions include replacements of earlier conversions.
    """
    found: dict[int, Function] = {}
    for done in applied:
        value, before = function_in(done.patch.value), unwrapped(function_in(done.previous))
        is_name = not done.patch.is_foreign
        is_function = type(value) is types.FunctionType and isinstance(before, _FUNCTIONS)
        if is_name and is_function and "__hmpx_site__" not in vars(value):
            is_ours = type(before) is types.FunctionType  # methods of torch can't be keys
            original = _originals[value] = _originals.get(before, before) if is_ours else before
            found[id(original)] = value
    for earlier, original in list(_originals.items()):
        if id(original) in found:
            found[id(earlier)] = found[id(original)]
    return found


def function_in(value: Any) -> Any:
    """Returns the function in a method or a partial, and any other value unchanged."""
    if isinstance(value, functools.partial):
        return value.func
    if type(value) is types.BuiltinFunctionType and isinstance(value.__self__, type):
        # `Function.apply` since torch 2.14
        return inspect.getattr_static(value.__self__, value.__name__, value)
    return value.__func__ if isinstance(value, _METHODS) else value


def _bound(function: Any, owner: Any) -> Any:
    if isinstance(function, types.ClassMethodDescriptorType):
        return function.__get__(None, owner)
    return types.MethodType(function, owner)


_METHODS: Final = (classmethod, staticmethod, types.MethodType)
_BOUND: Final = (types.MethodType, types.BuiltinFunctionType)


def taken_name_patches(draft: Draft, wrappers: Iterable[Function]) -> Iterator[Patch]:
    """Yields the patches that rebind names taken during a conversion to torch's functions.

    A table built meanwhile, with wrappers as keys, gets the functions as additional keys: after a
    conversion, a wrapper calls its function, but is another key.
    """
    functions = {id(function): original for function, original in list(_originals.items())}
    functions |= {id(wrapper): vars(wrapper)["__wrapped__"] for wrapper in wrappers}
    later = [module for name, module in torchs_modules() if name not in _before]
    in_torch = [in_module(module, functions, set()) for module in later]
    for patch in itertools.chain(early_name_patches(functions), *in_torch):
        value = draft.read(patch)
        # Otherwise the draft restores it.
        if value is patch.read() or id(function_in(value)) in functions:
            yield patch


# --- functions in torch.fx graphs and in class bodies --------------------------------------------
# A node stores torch's own function. While torch is converted, `Node.target` returns the wrapper instead. So a program
# can call a node's function, or compare it with torch's, no matter when the graph was traced.


def held_function_patches(draft: Draft, replacements: Mapping[int, Function]) -> Iterator[Patch]:
    """Yields the patches of subclasses of `torch.nn.Module`, of nodes, and of the search for nodes."""
    slot = Patch(nn.Module, "__init_subclass__", None)
    yield slot._replace(value=classmethod(_unbinding(draft.read(slot))))
    if NODE_TARGET is None:
        return
    # Without ATen's operators: graphs of these hold their casts.
    functions = (types.BuiltinFunctionType, types.FunctionType)
    wrappers = {
        address: wrapper
        for address, wrapper in replacements.items()
        if isinstance(vars(wrapper)["__wrapped__"], functions)
    }
    full = draft.attribute(torch, "full")  # as patched: it clamps numbers
    wrappers[id(unwrapped(full))] = full
    get, put = NODE_TARGET.__get__, NODE_TARGET.__set__

    def read(self: fx.Node) -> Any:
        target = get(self)
        return wrappers.get(id(target), target)

    def write(self: fx.Node, target: Any) -> None:
        put(self, unwrapped(target))

    def find(original: Any, graph: fx.Graph, *, target: Any = None, **kwargs: Any) -> Any:
        return original(graph, target=unwrapped(target), **kwargs)

    def key(original: Any, self: Any, node: fx.Node) -> Any:
        op, target = original(self, node)
        return op, unwrapped(target)

    yield Patch(fx.Node, "target", property(read, write))
    yield draft.around(
        fx.Node,
        "__init__",
        lambda original, node, graph, name, op, target, *more, **kwargs: original(
            node, graph, name, op, unwrapped(target), *more, **kwargs
        ),
    )
    yield draft.around(fx.Graph, "find_nodes", find)
    yield draft.around(NODE_TABLE, NODE_KEY, key)


def _unbinding(before: Any) -> Callable[..., None]:
    """Returns an ``__init_subclass__`` that makes wrappers of builtins static methods.

    A Python function in a class body becomes a method, and a builtin does not. Wrappers are Python functions.
    """

    def init_subclass(cls: type[nn.Module], /, **kwargs: Any) -> None:
        if before is ABSENT:
            super(nn.Module, cls).__init_subclass__(**kwargs)
        else:
            before.__get__(None, cls)(**kwargs)
        for owner in cls.__mro__[: cls.__mro__.index(nn.Module)]:  # skips mixins
            for name, value in list(vars(owner).items()):
                if isinstance(unwrapped(value), types.BuiltinFunctionType) and is_wrapper(value):
                    setattr(owner, name, staticmethod(value))

    return init_subclass
