"""Torch's ops as the installed torch has them: names, spellings, call sites, parameters.

Everything here is read off torch (its namespaces, `torch.overrides`, its operator schemas); the
few facts that torch does not tell at run time are data in ``ops.ini``. Knows no policy and
patches nothing. The table is built once, while torch is unpatched, and kept.

Words: an *op* is what a list line names (``softmax``); a *site* is one slot that holds a callable
of it (``torch.Tensor.softmax``); a *spelling* is any way to write its name in a list.
"""

from __future__ import annotations

import configparser
import functools
import importlib.resources
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional
from torch.overrides import get_ignored_functions, get_overridable_functions

from ..torch_internals import (
    NN,
    NN_NAMESPACE,
    VARIABLE_FUNCTIONS,
    VF,
    VF_NAMESPACE,
    has_kernel,
    schemas_of,
)
from . import foreign

#: Where ops live, the innermost spelling of each prefix that users write. The order decides
#: which op a bare name means: ``norm`` is ``torch.norm``, not ``torch.linalg.norm``.
NAMESPACES: Mapping[str, Any] = types.MappingProxyType(
    {
        "torch": torch,
        "torch.functional": torch.functional,
        "torch.Tensor": torch.Tensor,
        "torch.nn.functional": torch.nn.functional,
        NN_NAMESPACE: NN,
        VF_NAMESPACE: VF,
        "torch.linalg": torch.linalg,
        "torch.special": torch.special,
        "torch.fft": torch.fft,
        "torch.sparse": torch.sparse,
    }
)

#: Tensor-valued properties, patched through their getters. The other properties describe a tensor.
_PROPERTIES = ("T", "mT", "H", "mH", "real", "imag")

_CALLABLES = frozenset(
    {
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.FunctionType,
    }
)
_DESCRIPTORS = frozenset({types.GetSetDescriptorType, property})

#: Their bare names give way to those of torch, Tensor and torch.nn.functional.
_QUALIFIED_ONLY = ("torch.linalg", "torch.special", "torch.fft", "torch.sparse")

#: What users write before the dot -> namespace.
_PREFIXES = {
    **{n: n for n in NAMESPACES},
    **{n.removeprefix("torch."): n for n in NAMESPACES if n != "torch"},
    "functional": "torch.nn.functional",
    "F": "torch.nn.functional",
}

_RESERVED = frozenset(_PREFIXES) | {prefix.partition(".")[0] for prefix in _PREFIXES} | {"aten"}

#: Dunder methods that Python's ``operator`` module has but that are no tensor arithmetic.
_NO_OPERATORS = frozenset({"contains", "index", "not", "concat", "iconcat", "call", "delitem"})


@dataclass(frozen=True, slots=True)
class Site:
    """One slot that holds a callable of an op.

    Attributes:
        namespace: Key of `NAMESPACES`.
        attribute: Name of the slot in it.
        in_place: The callable writes to its first argument.
        is_python: The callable is implemented in Python and may call other ops.
        is_property: The slot holds a property; the callable is its getter.
    """

    namespace: str
    attribute: str
    in_place: bool = False
    is_python: bool = False
    is_property: bool = False

    @property
    def qualified(self) -> str:
        """The dotted name: ``torch.nn.functional.linear``."""
        return f"{self.namespace}.{self.attribute}"

    @property
    def owner(self) -> Any:
        """The module or class whose slot this is."""
        return NAMESPACES[self.namespace]

    def function(self) -> Callable[..., Any]:
        """Returns the callable that the slot holds now (for a property, its getter)."""
        return self.callable_of(getattr(self.owner, self.attribute))

    def callable_of(self, value: Any) -> Callable[..., Any]:
        """Returns the callable of ``value``, which the slot holds (of a property, its getter)."""
        return value.__get__ if self.is_property else value  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Op:
    """One op of torch.

    Attributes:
        name: The name that reports use and that a list line may hold.
        covered_by: The op whose list line covers this one too (``truediv`` is covered by ``div``).
        sites: The slots to patch so that every spelling of the op is caught.
        followers: Python functions that end in one of ``sites`` and so need no patch.
    """

    name: str
    covered_by: str | None
    sites: tuple[Site, ...]
    followers: tuple[Site, ...]


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a callable's arguments are.

    Attributes:
        names: Parameter names by position; keyword-only ones follow.
        kinds: Position -> ``"T"`` (a tensor), ``"O"`` (a tensor or None), ``"N"`` (a tensor, a
            number or None), ``"A"`` (anything that may hold tensors). Positions that never hold
            a tensor are absent.
        required: How many of the positions in ``kinds`` every call fills.
        plain: Names that never hold a tensor to be cast (``alpha``, ``eps``, ``dim``).
        has_keyword_tensors: A keyword-only argument may hold a tensor to be cast.
    """

    names: tuple[str, ...]
    kinds: Mapping[int, str]
    required: int
    plain: frozenset[str]
    has_keyword_tensors: bool = False

    @property
    def has_several_tensors(self) -> bool:
        """Whether a call may hold more than one tensor to be cast."""
        return len(self.kinds) > 1 or "A" in self.kinds.values() or self.has_keyword_tensors


def table() -> Mapping[str, Op]:
    """Returns every op of the installed torch by name."""
    return _tables()[0]


def is_known(name: str) -> bool:
    """Whether ``name`` is the name of an op: of torch, or what one of another library may be called."""
    return name in table() or _foreign(name) == name


def covering(name: str) -> str | None:
    """Returns the op whose list line covers op ``name`` too, if there is one."""
    op = table().get(name)
    return None if op is None else op.covered_by


def names() -> Mapping[str, str]:
    """Returns every bare name that a list line may hold -> op name."""
    return _tables()[1]


def resolve(name: str) -> str | None:
    """Returns the op that ``name`` means, or None.

    Accepts a bare name (``softmax``), an operator (``truediv``, ``__iadd__``), an in-place name
    (``add_``), a qualified name (``torch.nn.functional.softmax``, ``Tensor.add``, ``F.gelu``), and
    ATen's (``pow.Tensor_Scalar``, ``aten::nll_loss2d``). An op of another library is known by any
    dotted name that is none of these (``torchvision.ops.nms``, ``torch.ops.mylib.scaled_add``).
    """
    found = _resolve_of_torch(name)
    return _foreign(name) if found is None else found


def _foreign(name: str) -> str | None:
    """Returns the op of another library that ``name`` means, or None."""
    return foreign.canonical(name, _RESERVED, names())


def _resolve_of_torch(name: str) -> str | None:
    _, bare_names, qualified_names = _tables()
    name = name.removesuffix(".__get__")
    for prefix in ("aten::", "torch.ops.aten.", "aten."):
        name = name.removeprefix(prefix)
    if name in bare_names:
        return bare_names[name]
    prefix, _, attribute = name.rpartition(".")
    if (
        prefix == "torch.foreach"
    ):  # since torch 2.15: calls the private names that there always were
        return bare_names.get(f"_foreach_{attribute}")
    namespace = _PREFIXES.get(prefix)
    if namespace is not None:
        return qualified_names[namespace].get(attribute)
    if prefix in bare_names and _has_overload(prefix, attribute):
        return bare_names[prefix]
    return None


def root(name: str) -> str:
    """Returns the op that operator ``name`` computes: ``div`` for ``rtruediv``."""
    while name not in facts("covering") and (found := covering(name)) is not None:
        name = found
    return name


@functools.cache
def covered(name: str) -> frozenset[str]:
    """Returns op ``name`` and the ops that a line of it covers."""
    found = {name}
    for candidate in table():
        above: str | None = candidate
        while above is not None and above != name:
            above = covering(above)
        if above is not None:
            found.add(candidate)
    return frozenset(found)


def is_decisive(name: str, *, is_relative: bool) -> bool:
    """Whether a list's line may change what a call of op ``name`` does.

    It can't where all callables write to their first argument, which decides then; nor, for lists
    whose types are relative to the inputs', where there is one input.
    """
    if name not in table():
        return True  # another library's
    if _is_decisive(name, is_relative=is_relative):
        return True
    return any(_is_decisive(each, is_relative=is_relative) for each in covered(name))


def _is_decisive(name: str, *, is_relative: bool) -> bool:
    return any(
        not site.in_place
        and (not is_relative or site.is_python or parameters(site).has_several_tensors)
        for site in table()[name].sites
    )


@functools.cache
def computing() -> frozenset[str]:
    """Returns the ops that ``*`` means: they compute with tensors, and casting can't lose a write."""
    return frozenset(
        name
        for name in table()
        if name[0] != "_"
        and is_castable(name)
        and not is_view(name)
        and (covering(name) is not None or _is_decisive(name, is_relative=False))
    )


def kind(name: str) -> tuple[str, int | None]:
    """Returns what the speed of op ``name`` in low precision depends on: its kind.

    Of a product of two matrices also the position of the first.
    """
    words = facts("kinds").get(name)
    if words is None:
        return ("norm" if name in facts("parameters") else "elementwise"), None
    return words[0], int(words[1]) if len(words) > 1 else None


@functools.cache
def is_castable(name: str) -> bool:
    """Whether op ``name`` takes tensors and gives tensors, so that casting it means something."""
    if foreign.is_foreign(name):
        return True  # as far as can be known
    for site in table()[name].sites:
        if site.is_property:
            return site.attribute in _PROPERTIES
        if _dunder(site.attribute) is not None:
            return True
        if site.is_python and site.namespace != "torch.Tensor":
            return True
        if site.namespace == NN_NAMESPACE and not _schemas(site):
            return site.attribute[0] != "_"
        for schema in _schemas(site):
            tensors = sum(bool(_argument_kind(a)) for a in schema.arguments)
            if tensors and (tensors > 1 or any("Tensor" in str(r.type) for r in schema.returns)):
                return True
    return False


@functools.cache
def is_view(name: str) -> bool:
    """Whether op ``name`` may return a view of its input, or only moves, copies or converts it."""
    if name in facts("views"):
        return True
    sites = table()[name].sites
    if any(s.is_property or s.attribute == "__getitem__" for s in sites):
        return True
    schemas = [schema for site in sites if not site.in_place for schema in _schemas(site)]
    return any(
        _is_alias(schema) or _makes_new(schema) or _copies_view(schema) for schema in schemas
    )


def _is_alias(schema: Any) -> bool:
    infos = [argument.alias_info for argument in schema.arguments[:1]]
    return any(info is not None and not info.is_write for info in infos)


def _makes_new(schema: Any) -> bool:
    """Whether the op takes a tensor and all that a new one is made with: ``zeros_like``."""
    names = {argument.name for argument in schema.arguments}
    return _takes_tensor(schema) and {"dtype", "layout", "device", "pin_memory"} <= names


def _copies_view(schema: Any) -> bool:
    """Whether the op is the copy of a view: ``detach_copy``, ``slice_copy``."""
    name, overload = schema.name.partition("::")[2], schema.overload_name or "default"
    if not name.endswith("_copy"):  # as all are called; slice_scatter is tagged so, too
        return False
    op = getattr(getattr(torch.ops.aten, name, None), overload, None)
    return op is not None and torch.Tag.view_copy in op.tags


def parameters(site: Site) -> Parameters:
    """Returns what the arguments of the callable at ``site`` are."""
    if site.is_python:
        return _python_parameters(site)
    return _schema_parameters(_aten_name(site), site.namespace == "torch.Tensor")


def written(op: str, site: Site) -> tuple[str, ...]:
    """Returns the parameters of the callable at ``site`` whose tensors it writes to, ``out`` aside.

    They are what the schemas declare, with the first of an in-place callable; ``ops.ini`` has what
    schemas can't say. Running statistics are declared for one op of their family only, and updated
    by every op that takes them, but for those that say they don't.
    """
    names = parameters(site).names
    found = set(facts("writes").get(op, ())) | set(names[:1] if site.in_place else ())
    if not site.is_python:
        found |= _declared_written(_aten_name(site))
    if not op.endswith(_READ_STATISTICS):
        found |= _statistics()
    return tuple(name for name in names if name in found)


def statistics(op: str, site: Site) -> tuple[str, ...]:
    """Returns the running statistics among what the callable at ``site`` writes to."""
    return tuple(name for name in written(op, site) if name in _statistics())


def facts(section: str) -> Mapping[str, tuple[str, ...]]:
    """Returns one section of ``ops.ini``: op (or alias, or site) -> the words of its value."""
    return _all_facts()[section]


@functools.cache
def _all_facts() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    parser = configparser.ConfigParser(allow_no_value=True, delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]  # names are case-sensitive
    parser.read_string(
        importlib.resources.files(__package__).joinpath("ops.ini").read_text("utf-8")
    )
    return {
        section: types.MappingProxyType({k: tuple((v or "").split()) for k, v in values.items()})
        for section, values in parser.items()
    }


# --- building the table ------------------------------------------------------------------------


@functools.cache
def _tables() -> tuple[Mapping[str, Op], Mapping[str, str], Mapping[str, Mapping[str, str]]]:
    aliases = {alias: words[0] for alias, words in facts("aliases").items()}
    members = [(n, a, value, _bare_name(n, a, value)) for n, a, value in _members()]
    known = {bare for *_, bare in members}
    slots: dict[str, list[Site]] = {}
    bare_names: dict[str, str] = {}
    qualified_names: dict[str, dict[str, str]] = {namespace: {} for namespace in NAMESPACES}
    for namespace, attribute, value, bare in members:
        name = aliases.get(bare, bare)
        if name not in known:  # the alias' target is absent from this torch
            name = bare
        site = Site(
            namespace,
            attribute,
            in_place=_is_in_place(attribute),
            is_python=type(value) is types.FunctionType,
            is_property=type(value) in _DESCRIPTORS,
        )
        slots.setdefault(name, []).append(site)
        qualified_names[namespace][attribute] = name
        bare_names.setdefault(bare, name)
        if namespace not in _QUALIFIED_ONLY:
            bare_names.setdefault(attribute, name)
    for namespace in _QUALIFIED_ONLY:  # their bare names: only what is still free
        for attribute, name in qualified_names[namespace].items():
            bare_names.setdefault(attribute, name)
    for bare, words in facts("libraries").items():
        bare_names.setdefault(bare, words[0])
    ops = {}
    for name, sites in slots.items():
        followers = tuple(site for site in sites if site.is_python and _follows(site, sites))
        patched = tuple(site for site in sites if site not in followers)
        ops[name] = Op(name, _covering(name, sites, slots), patched, followers)
    return types.MappingProxyType(ops), bare_names, qualified_names


def _members() -> Iterator[tuple[str, str, Any]]:
    """Yields (namespace, attribute, callable or property) of everything that may be an op."""
    overridable = {id(f) for functions in get_overridable_functions().values() for f in functions}
    ignored = {id(f) for f in get_ignored_functions()}
    methods = {f.__name__.rstrip("_") for f in get_overridable_functions()[torch.Tensor]}
    public: set[str] = set()
    for namespace, owner in NAMESPACES.items():
        source = VARIABLE_FUNCTIONS if namespace == VF_NAMESPACE else owner
        is_method = namespace == "torch.Tensor"
        for attribute in dir(source):
            value = getattr(source, attribute, None)
            kind = type(value)
            if kind in _DESCRIPTORS and is_method:
                yield namespace, attribute, value
            stem = attribute.rstrip("_")
            is_known = stem in methods or (is_method and stem in public)
            if kind not in _CALLABLES or (id(value) in ignored and not is_known):
                continue
            is_builtin = kind is types.BuiltinFunctionType
            if (
                id(value) in overridable
                or (is_builtin and stem in methods)
                or namespace == NN_NAMESPACE
                or (is_builtin and namespace == "torch.sparse")
                or (is_method and (stem in public or _dunder(attribute) is not None))
                or (namespace == VF_NAMESPACE and attribute in public)
                or (is_builtin and stem != attribute and stem in public)
                # private builtins, such as torch._convolution: ATen's own names are listed too
                or (is_builtin and namespace == "torch" and attribute[0] == "_" != attribute[1])
            ):
                public.add(attribute)
                yield namespace, attribute, value


def _bare_name(namespace: str, attribute: str, value: Any) -> str:
    operator_name = _dunder(attribute)
    if operator_name is not None:
        return operator_name
    if namespace in _QUALIFIED_ONLY:
        return str(value.__name__)  # torch.linalg.norm is the builtin linalg_norm
    if attribute.startswith("__"):
        return attribute
    stripped = attribute.rstrip("_")
    return stripped or attribute


def _dunder(attribute: str) -> str | None:
    """Returns ``"add"`` for ``"__add__"``, ``"rsub"`` for ``"__rsub__"``; None if no operator."""
    if not (attribute.startswith("__") and attribute.endswith("__")):
        return None
    name = attribute[2:-2]
    return name if _operator_base(name) is not None else None


def _operator_base(name: str) -> str | None:
    """Returns the plain operator of ``name``: ``"sub"`` for ``"rsub"``, ``"isub"``, ``"sub"``."""
    for base in (name, name[1:] if name[:1] in ("r", "i") else ""):
        is_operator = f"__{base}__" in vars(operator) and base not in _NO_OPERATORS
        if base and (is_operator or base == "div"):
            in_place_of = base[1:]  # operator.__iadd__ exists: its plain operator is add
            if base.startswith("i") and f"__{in_place_of}__" in vars(operator):
                return in_place_of
            return base
    return None


def _covering(name: str, sites: list[Site], slots: Mapping[str, list[Site]]) -> str | None:
    """Returns the op whose line covers op ``name``: rtruediv -> truediv -> div."""
    below = facts("covering").get(name, ("",))[0]
    if below in slots:
        return below
    if not any(site.attribute == f"__{name}__" for site in sites):
        return None
    base = _operator_base(name)
    if base is not None and base != name and base in slots:
        return base
    covering = facts("operators").get(base or "", (base,))[0]
    return covering if covering in slots and covering != name else None


def _is_in_place(attribute: str) -> bool:
    name = _dunder(attribute)
    if name is not None:
        return name == "setitem" or (name.startswith("i") and _operator_base(name) == name[1:])
    return attribute.endswith("_") and not attribute.endswith("__")


def _follows(site: Site, sites: list[Site]) -> bool:
    """Whether the Python function at ``site`` ends in a builtin among ``sites``."""
    if _dunder(site.attribute) or f"{site.namespace}.{site.attribute}" in facts("python_level"):
        return False
    return any(not other.is_python and not other.in_place for other in sites)


# --- schemas -----------------------------------------------------------------------------------


def _aten_name(site: Site) -> str:
    """Returns the name under which ATen knows the callable at ``site``, if it does."""
    operator_name = _dunder(site.attribute)
    if operator_name is not None:
        base = _operator_base(operator_name) or operator_name
        return facts("operators").get(base, (base,))[0] + ("_" if site.in_place else "")
    name = site.attribute
    if site.namespace in _QUALIFIED_ONLY:
        name = f"{site.namespace.removeprefix('torch.')}_{name}"
        if site.namespace == "torch.sparse" and not _schemas_of(name):
            return f"_{name}"  # torch.sparse.mm is _sparse_mm
    elif name in _SPARSE_ALIASES:
        return facts("aliases")[name][0]
    return name


def _schemas(site: Site) -> tuple[Any, ...]:
    """Returns the ATen schemas of the callable at ``site``; () if it has none."""
    return _schemas_of(_aten_name(site))


@functools.cache
def _schemas_of(name: str) -> tuple[Any, ...]:
    return tuple(schemas_of(f"aten::{name}"))


@functools.cache
def _schema_parameters(name: str, is_method: bool) -> Parameters:
    schemas = [
        [(a.name, _argument_kind(a), a.kwarg_only, a.has_default_value()) for a in s.arguments]
        for s in _schemas_of(name)
        if _takes_tensor(s)
    ]
    if is_method:  # x.polygamma(n) is polygamma(n, self), x.where(c, y) is where(c, self, y)
        schemas = [sorted(s, key=lambda argument: argument[0] != "self") for s in schemas]
    if not schemas:  # a property or a builtin of its own kind: its one input is self
        return Parameters(("self",), {0: "T"}, 1, frozenset())
    longest = max(schemas, key=len)
    kinds: dict[int, str] = {}
    for position in range(len(longest)):
        seen = {s[position][1] for s in schemas if position < len(s) and not s[position][2]}
        if seen - {""}:
            kinds[position] = _merged_kind(seen)
    arguments = [argument for s in schemas for argument in s]
    tensors = {name for name, kind, *_ in arguments if kind}
    return Parameters(
        names=tuple(name for name, *_ in longest),
        kinds=kinds,
        required=min(sum(not kw and not default for *_, kw, default in s) for s in schemas),
        plain=frozenset({name for name, *_ in arguments} - tensors),
        has_keyword_tensors=any(kind and is_keyword for _, kind, is_keyword, _ in arguments),
    )


#: Other names of sparse products, of which ATen knows nothing.
_SPARSE_ALIASES = frozenset({"dsmm", "hsmm", "saddmm", "spmm"})

#: Ends of the names of ops that only read the running statistics they take.
_READ_STATISTICS = ("_backward", "_no_training")


@functools.cache
def _statistics() -> frozenset[str]:
    """Returns what ATen calls the running statistics that a norm updates."""
    return _declared_written("_native_batch_norm_legit")


@functools.cache
def _declared_written(name: str) -> frozenset[str]:
    """Returns the tensor arguments, ``out`` aside, that a schema of ATen's op declares written to."""
    return frozenset(
        argument.name
        for schema in _schemas_of(name)
        for argument in schema.arguments
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and not argument.is_out
        and "Tensor" in str(argument.type)
        and _is_dispatched(schema)
    )


def _is_dispatched(schema: Any) -> bool:
    """Whether the schema is of a kernel, rather than of TorchScript's own (``sort`` of a list)."""
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    return has_kernel(schema.name + overload)


def _has_overload(base: str, overload: str) -> bool:
    schemas = schemas_of(f"aten::{base}")
    # `.default` is the overload without a name; `.deprecated` and older ones may be gone.
    return not schemas or overload in {"default", "deprecated", *(s.overload_name for s in schemas)}


def _argument_kind(argument: Any) -> str:
    written = str(argument.type)
    if "Tensor" not in written or argument.is_out:
        return ""
    return {"Tensor": "T", "Optional[Tensor]": "O"}.get(written, "A")


def _merged_kind(kinds: set[str]) -> str:
    """Returns the kind of a position whose overloads have these kinds; ``""`` holds no tensor."""
    if kinds <= {"T", "O"}:
        return "O" if "O" in kinds else "T"
    return "N" if kinds <= {"T", "O", ""} else "A"


def _takes_tensor(schema: Any) -> bool:
    return any("Tensor" in str(a.type) for a in schema.arguments)


def _python_parameters(site: Site) -> Parameters:
    """Every argument of a Python function may hold tensors, however deep they are nested."""
    return python_parameters(site.function())


def python_parameters(function: Callable[..., Any]) -> Parameters:
    """Returns what the arguments of a function are of which no schema is known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # no signature: cast by what the call holds
        return Parameters((), {}, 0, frozenset())
    names = tuple(
        p.name for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD
    )
    return Parameters(names, dict.fromkeys(range(len(names)), "A"), 0, frozenset())
