"""The callables of ops, and facts about the ops' kernels: what a `CallPlan` is derived from."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .. import ops
from ..compute import Lacking
from ..ops import Numbers, Parameters


@dataclass(frozen=True)
class CallSite:
    """One callable of an op, and how it uses its arguments."""

    op: str  # op name
    name: str  # dotted name of the slot: ``torch.nn.functional.linear``
    parameters: Parameters  # the callable's
    in_place: bool = False  # it writes to its first argument
    is_python: bool = False  # it is implemented in Python: ops inside it are not cast
    #: Modes and tensor subclasses override it, like most of torch's. They see not another library's functions, but
    #: the torch functions that those call.
    is_overridable: bool = True
    writes: tuple[str, ...] = ()  # names of the arguments that it writes to, except ``out``
    statistics: tuple[str, ...] = ()  # the running statistics of a norm among these
    lacking: Lacking | None = None  # the low-precision kernels that the op lacks
    numbers: Numbers | None = (
        None  # arguments with numbers that torch converts to its tensor's dtype
    )


@dataclass(frozen=True)
class OpFacts:
    """Facts about torch's kernels for an op; the defaults are for other libraries' functions."""

    kind: str = "elementwise"  # one of `compute.KINDS`: determines the op's speed in low precision
    first_matrix: int | None = None  # for a product of two matrices, the position of the first
    promotes: bool = False  # takes mixed dtypes and returns the widest, also in place
    rounds_mixed: bool = False  # computes gradients of mixed-dtype inputs in the narrower dtype
    rounds_terms: bool = False  # rounds terms of second-order gradients of mixed-dtype inputs
    updates_if: str | None = None  # the argument by which statistics are updated; None for always
    #: A norm's weight and bias, which stay fp32 alongside a low-precision input on ``mixed_device_types``.
    norm_parameters: frozenset[str] = frozenset()
    mixed_device_types: frozenset[str] = frozenset()
    rounds_statistics: bool = False  # casts running statistics to the input's dtype
    never_narrows: bool = False  # rejects a ``dtype=`` narrower than its input
    is_view: bool = False  # computes nothing
    casts_first: bool = False  # has ``dtype=``, to which it casts the input before computing
    is_random: bool = False  # draws random numbers
    selects: bool = False  # returns elements of its input, and computes nothing


@functools.cache
def facts_of(op: str) -> OpFacts:
    """Returns the facts about torch's kernels for ``op``."""
    root, (kind, first_matrix) = ops.root(op), ops.kind(op)
    return OpFacts(
        kind=kind,
        first_matrix=first_matrix,
        promotes=root in ops.facts("promotes"),
        rounds_mixed=root in ops.facts("rounds_mixed"),
        rounds_terms=root in ops.facts("rounds_terms"),
        updates_if=next(iter(ops.facts("writes_if").get(op, ())), None),
        norm_parameters=frozenset(ops.facts("parameters").get(op, ())),
        mixed_device_types=frozenset(ops.facts("mixed_parameters").get(op, ())),
        rounds_statistics=op in ops.facts("rounded_running"),
        never_narrows=op in ops.facts("never_narrow"),
        is_view=ops.is_view(op),
        casts_first=op in ops.facts("casts_first"),
        is_random=op in ops.facts("random"),
        selects=op in ops.facts("selects"),
    )


def site_of(op: str, site: ops.Site, lacking: Lacking | None, *, is_overridable: bool) -> CallSite:
    """Returns the `CallSite` of one of torch's call sites of ``op``."""
    return CallSite(
        op=op,
        name=site.qualified,
        parameters=ops.parameters(site),
        in_place=site.in_place,
        is_python=site.is_python,
        is_overridable=is_overridable,
        writes=ops.written(op, site),
        statistics=ops.statistics(op, site),
        lacking=lacking,
        numbers=ops.numbers(op, site),
    )
