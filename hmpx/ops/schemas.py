"""The schemas of ops' callables, and facts derived from them: parameters, written arguments, numbers."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ..errors import raised_here
from ..torch_internals import VF_NAMESPACE, has_kernel, schemas_of
from .sites import QUALIFIED_ONLY, Site, facts, operator_in, plain_operator, renamings

#: Names of sparse products that ATen does not have.
_SPARSE_ALIASES = frozenset({"dsmm", "hsmm", "saddmm", "spmm"})


def aten_name(site: Site) -> str:
    """Returns the name under which ATen knows the callable at ``site``, if it does."""
    operator_name = operator_in(site.attribute)
    if operator_name is not None:
        base = plain_operator(operator_name) or operator_name
        return renamings("operators").get(base, base) + ("_" if site.in_place else "")
    name = site.attribute
    if site.namespace in QUALIFIED_ONLY:
        name = f"{site.namespace.removeprefix('torch.')}_{name}"
        if site.namespace == "torch.sparse" and not schemas_named(name):
            return f"_{name}"  # torch.sparse.mm is _sparse_mm
    elif name in _SPARSE_ALIASES:
        return renamings("aliases")[name]
    return name


@functools.cache
def schemas_named(name: str) -> tuple[Any, ...]:
    return tuple(schemas_of(f"aten::{name}"))


class Argument(NamedTuple):
    """An argument of a schema."""

    name: str
    kind: str  # The letter of `Parameters.kinds`; ``""`` if it holds no tensor to cast
    is_keyword: bool  # It is keyword-only
    has_default: bool
    is_written: bool  # Calls write to its tensor, and it is not ``out``


class Schema(NamedTuple):
    """A schema of ATen's, read once: torch creates its arguments again at each access."""

    arguments: tuple[Argument, ...]
    has_tensors: bool  # An argument holds tensors
    is_view: bool  # The result shares memory with the first argument
    torchs: Any


@functools.cache
def read_schemas(name: str) -> tuple[Schema, ...]:
    """Returns the schemas of ATen's op ``name`` as they are used here."""
    return tuple(map(_read, schemas_named(name)))


def _read(schema: Any) -> Schema:
    found: list[Argument] = []
    has_tensors = is_view = False
    for a in schema.arguments:
        written, kind, is_written = str(a.type), "", False
        if "Tensor" in written:
            has_tensors, alias = True, a.alias_info
            is_view = is_view or not (found or alias is None or alias.is_write)
            if not a.is_out:
                kind, is_written = _LETTERS.get(written, "A"), alias is not None and alias.is_write
        found.append(Argument(a.name, kind, a.kwarg_only, a.has_default_value(), is_written))
    return Schema(tuple(found), has_tensors, is_view, schema)


_LETTERS: Final = {"Tensor": "T", "Optional[Tensor]": "O"}


def has_overload(base: str, overload: str) -> bool:
    """Whether ATen's op ``base`` has that overload, or may have had it in another version of torch."""
    found = schemas_of(f"aten::{base}")
    # `.default` is the overload without a name; `.deprecated` and older ones may be gone.
    return not found or overload in {"default", "deprecated", *(s.overload_name for s in found)}


@functools.cache
def declared_written(name: str) -> frozenset[str]:
    """Returns the tensor arguments, except ``out``, that a schema of ATen's op declares as written to."""
    return frozenset(
        argument.name
        for schema in read_schemas(name)
        for argument in schema.arguments
        if argument.is_written
        # Without a kernel it is TorchScript's own (``sort`` of a list).
        and has_kernel(f"{schema.torchs.name}.{schema.torchs.overload_name}".rstrip("."))
    )


# --- parameters --------------------------------------------------------------------------------

#: Suffixes of the names of ops that only read their running statistics.
_READ_STATISTICS = ("_backward", "_no_training")


class Parameters(NamedTuple):
    """The parameters of a callable."""

    names: tuple[str, ...]  # Parameter names by position; keyword-only ones follow
    # Position -> ``"T"`` (a tensor), ``"O"`` (a tensor or None), ``"N"`` (a tensor, a number or
    # None), ``"A"`` (anything that may hold tensors). Positions that never hold a tensor are
    # absent.
    kinds: Mapping[int, str]
    required: int  # How many positions in ``kinds`` have no default
    plain: frozenset[str]  # Names that never hold a tensor to be cast (``alpha``, ``eps``, ``dim``)
    has_keyword_tensors: bool = False  # A keyword-only argument may hold a tensor to be cast
    # Positions of ``"O"`` that may be filled with None if a call omits them
    fillable: frozenset[int] = frozenset()

    @property
    def has_several_tensors(self) -> bool:
        """Whether a call may hold more than one tensor to be cast."""
        return len(self.kinds) > 1 or "A" in self.kinds.values() or self.has_keyword_tensors


#: Keywords that torch's functions also accept: the first is not a keyword in schemas, and the others
#: are numpy's.
_KEYWORDS: Final = {
    "input": "self",
    "a": "self",
    "x": "self",
    "x1": "self",
    "x2": "other",
    "axis": "dim",
    "keepdims": "keepdim",
}


def parameter_named(keyword: str, names: Sequence[str]) -> str:
    """Returns the parameter's name, among these, that stands for the argument ``keyword``."""
    if keyword in names:
        return keyword
    name = _KEYWORDS.get(keyword, keyword)
    return "input" if name == "self" and "self" not in names else name


def argument(
    name: str, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Returns the argument for one of a callable's parameters, by position or keyword; None if it is missing."""
    if name in kwargs or name not in names:
        return kwargs.get(name)
    position = names.index(name)
    if position < len(args):
        return args[position]
    return next((kwargs[each] for each in kwargs if parameter_named(each, names) == name), None)


def parameters(site: Site) -> Parameters:
    if site.is_python:
        return python_parameters(site.function())
    return schema_parameters(aten_name(site), site.namespace == "torch.Tensor")


@functools.cache
def written(op: str, site: Site) -> tuple[str, ...]:
    """Returns the parameters of the callable at ``site`` whose tensors it writes to, except ``out``.

    Schemas declare running statistics for one op of a family only, but every op of the family updates
    them, except those with a suffix in `_READ_STATISTICS`.
    """
    names = parameters(site).names
    found = set(facts("writes").get(op, ())) | set(names[:1] if site.in_place else ())
    if not site.is_python:
        found |= declared_written(aten_name(site))
    if not op.endswith(_READ_STATISTICS):
        found |= _statistics()
    return tuple(name for name in names if name in found)


def statistics(op: str, site: Site) -> tuple[str, ...]:
    """Returns the running statistics that the callable at ``site`` writes to, by parameter."""
    return tuple(name for name in written(op, site) if name in _statistics())


@functools.cache
def schema_parameters(name: str, is_method: bool) -> Parameters:
    """Returns the parameters of ATen's op ``name``, as a function or as a method of tensors."""
    schemas = [schema.arguments for schema in read_schemas(name) if schema.has_tensors]
    if is_method:  # x.polygamma(n) is polygamma(n, self), x.where(c, y) is where(c, self, y)
        schemas = [(*sorted(s, key=lambda each: each.name != "self"),) for s in schemas]
    if not schemas:  # a property or another builtin: its one input is self
        return Parameters(("self",), {0: "T"}, 1, frozenset())
    longest = max(schemas, key=len)
    kinds: dict[int, str] = {}
    fillable = set()
    for position, last in enumerate(longest):
        each = [s[position] for s in schemas if position < len(s)]
        seen = {argument.kind for argument in each if not argument.is_keyword}
        if seen - {""}:
            mixed = "N" if "" in seen else "O" if "O" in seen else "T"
            kinds[position] = mixed if seen <= {"T", "O", ""} else "A"
        # The same argument in all overloads: a tensor or None, None by default.
        optional = (last.name, "O", False, True)
        if last[:4] == optional and [a[:4] for a in each] == [optional] * len(schemas):
            fillable.add(position)
    given = [*itertools.chain.from_iterable(schemas)]
    tensors = [each for each in given if each.kind]
    plain = {each.name for each in given}.difference([each.name for each in tensors])
    required = [[a for a in s if not (a.is_keyword or a.has_default)] for s in schemas]
    return Parameters(
        names=tuple([each.name for each in longest]),
        kinds=kinds,
        required=min(map(len, required)),
        plain=frozenset(plain),
        has_keyword_tensors=any([each.is_keyword for each in tensors]),  # noqa: C419  # in less time
        fillable=frozenset(fillable),
    )


def python_parameters(function: Callable[..., Any]) -> Parameters:
    """Returns the parameters of a function without a schema: each may hold tensors, also nested."""
    try:
        signature = inspect.signature(function)
    except raised_here(TypeError, ValueError):  # no signature: each call's own arguments decide
        return Parameters((), {}, 0, frozenset())
    names = tuple(
        p.name for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD
    )
    return Parameters(names, dict.fromkeys(range(len(names)), "A"), 0, frozenset())


@functools.cache
def _statistics() -> frozenset[str]:
    """Returns ATen's names of the running statistics that a norm updates."""
    return declared_written("_native_batch_norm_legit")


#: Names of arguments whose elements an op stores in another tensor.
_STORED: Final = frozenset({"source", "src", "values"})


@functools.cache
def masks(names: tuple[str, ...]) -> frozenset[str]:
    """Returns the parameters, among these, that may be masks of numbers such as ``finfo.min``.

    They are called so, are stored in another tensor, or are scaled by ``beta`` and added to a product.
    """
    found = {name for name in names if name.endswith(("mask", "attn_bias"))}
    if {"alpha", "beta"} <= set(names) and names[0] == "self":
        found |= {"self", "input"}
    return frozenset(found | _STORED.intersection(names[1:]))


# --- numbers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Numbers:
    """The arguments in which a call of a site may hold numbers that torch converts to its tensor's dtype."""

    positions: frozenset[int]  # By position
    names: frozenset[str]  # By name
    are_factors: bool  # They enter a computation; otherwise they are stored, or are bounds


@functools.cache
def converting() -> frozenset[str]:
    """Returns the ops with numbers, or added masks, that torch converts to the dtype of a tensor argument."""
    return frozenset().union(*map(facts, ("stored_numbers", "factors", "sums")))


def converts_numbers(op: str, site: Site) -> bool:
    """Whether calls of ``op`` at ``site`` hold such arguments; in ``torch._VF`` they never do."""
    is_known = op in converting() and not site.is_property and site.namespace != VF_NAMESPACE
    return is_known and (site.in_place or op not in facts("sums"))


@functools.cache
def numbers(op: str, site: Site) -> Numbers | None:
    """Returns where the calls of ``op`` at ``site`` hold such numbers; None if nowhere."""
    if not converts_numbers(op, site) or op in facts("sums"):
        return None
    are_factors = op in facts("factors")
    names = frozenset(facts("factors" if are_factors else "stored_numbers")[op])
    positions = set()
    for schema in read_schemas(aten_name(site)):
        arguments = [a.name for a in schema.arguments if not a.is_keyword]
        if site.namespace == "torch.Tensor":  # x.where(c, y) is where(c, self, y)
            arguments.sort(key=lambda name: name != "self")
        positions |= {p for p, name in enumerate(arguments) if name in names}
    return Numbers(frozenset(positions), names, are_factors)
