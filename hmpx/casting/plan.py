"""The plan of a call site: everything known about its calls when its wrapper is created, and options of `convert`.

Derives everything that calls need, once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from .. import arguments, compute, number_formats, ops, torch_state
from ..compute import PRODUCTS, Lacking
from ..errors import OptionError, shown
from ..number_formats import OVERFLOWS, ROUNDING_MODES
from ..ops import Numbers, Parameters
from ..policy import HARDWARE_MODES, INPUT, LEGALIZE_MODES, CastPolicy, Decision, parse_format
from ..tensors import LOW_DTYPES, promoted

if TYPE_CHECKING:
    from ..compute import Emulation, Formats, Lowering
    from ..number_formats import Format


def _option(
    default: Any,
    check: Callable[[str, object], Any],
    help: str = "",
    *,
    is_of_formats: bool = False,
    **flag: Any,
) -> Any:
    """Returns a field of `Options`."""
    shown = {"help": help, **flag} if help else {}
    about = {"check": check, "flag": shown, "is_of_formats": is_of_formats}
    return field(default=default, metadata=about)


def _kept_casts(name: str, value: object) -> bool | str:
    if isinstance(value, str) and value == "auto":
        return "auto"
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise OptionError(f"{name} must be 'auto', True or False, not {shown(value)}")


def _rounded_gradients(name: str, value: object) -> bool | Format:
    if isinstance(value, str) or number_formats.is_format(value):
        return parse_format(name, value)
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise OptionError(
        f"{name} must be True, False, or a number format or its name, not {shown(value)}"
    )


def _module(name: str, value: object) -> weakref.ref[nn.Module] | None:
    if value is None:
        return None
    if not isinstance(value, nn.Module):
        raise OptionError(f"{name} must be a torch.nn.Module, not {shown(value)}")
    return weakref.ref(torch_state.unwrapped(value))


@dataclass(frozen=True, slots=True)
class Options:
    """How ops compute. Each field is an argument of `convert`, which documents it."""

    legalize: str = _option(
        "auto",
        lambda n, v: arguments.choice(n, v, LEGALIZE_MODES),
        "which low-precision ops compute in fp32 and round. auto, the default: those that are slow "
        "on this machine; always: all; never: none; fast: as auto, but fp32 inputs are not rounded",
        choices=LEGALIZE_MODES,
    )
    keep_weight_casts: bool | str = _option(
        "auto",
        _kept_casts,
        "whether autograd keeps casts of weights for the backward, instead of casting again there",
        choices=("auto", "yes", "no"),
    )
    rounding: str = _option(
        "nearest",
        lambda n, v: arguments.choice(n, v, ROUNDING_MODES, number_formats.spellings("rounding")),
        "how values are rounded",
        is_of_formats=True,
        choices=ROUNDING_MODES,
    )
    overflow: str | None = _option(
        None,
        lambda n, v: None if v is None else arguments.choice(n, v, OVERFLOWS),
        "result for values beyond a format's largest",
        is_of_formats=True,
        choices=OVERFLOWS,
    )
    round_gradients: bool | Format = _option(  # noqa: RUF009
        False,
        _rounded_gradients,
        "round gradients too: yes, to the op's format; or to FORMAT, such as float8_e5m2",
        is_of_formats=True,
        metavar="yes|FORMAT",
    )
    hardware: str = _option(
        "auto",
        lambda n, v: arguments.choice(n, v, HARDWARE_MODES),
        "which products in float8 formats a device's kernels compute. auto, the default: those that they "
        "can; never: none; require: all, else an error",
        is_of_formats=True,
        choices=HARDWARE_MODES,
    )
    within: weakref.ref[nn.Module] | None = _option(None, _module)  # noqa: RUF009

    @classmethod
    def checked(cls, given: Mapping[str, object]) -> Options:
        """Returns the options among the arguments of `convert`; raises `OptionError` for invalid ones."""
        return cls(**{f.name: f.metadata["check"](f.name, given[f.name]) for f in fields(cls)})


# --- plans of calls ------------------------------------------------------------------------------


class CallSite(NamedTuple):
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
    numbers: Numbers | None = None  # arguments with numbers that torch converts to a tensor's dtype


class OpFacts(NamedTuple):
    """Facts about torch's kernels for an op; the defaults are for other libraries' functions."""

    kind: str = "elementwise"  # one of `compute.KINDS`: determines the op's speed in low precision
    first_matrix: int | None = None  # for a product of two matrices, the position of the first
    addends: frozenset[str] = frozenset()  # added to a matrix product; torch.func.vmap adds it last
    promotes: bool = False  # takes mixed dtypes and returns the widest, also in place
    rounds_mixed: bool = False  # computes gradients of mixed-dtype inputs in the narrower dtype
    rounds_terms: bool = False  # rounds terms of second-order gradients of mixed-dtype inputs
    updates_if: str | None = None  # the argument by which statistics are updated; None for always
    #: A norm's weight and bias, which stay fp32 alongside a low-precision input on ``mixed_device_types``.
    norm_parameters: frozenset[str] = frozenset()
    mixed_device_types: frozenset[str] = frozenset()  # there a mask stays fp32, too
    rounds_statistics: bool = False  # casts running statistics to the input's dtype
    never_narrows: bool = False  # rejects a ``dtype=`` narrower than its input
    is_view: bool = False  # computes nothing
    casts_first: bool = False  # has ``dtype=``, to which it casts the input before computing
    is_random: bool = False  # draws random numbers
    selects: bool = False  # returns elements of its input, and computes nothing


@functools.cache
def facts_of(op: str) -> OpFacts:
    """Returns the facts about torch's kernels for ``op``."""
    root, (kind, first_matrix), product = ops.root(op), ops.kind(op), ops.product(op)
    return OpFacts(
        kind=kind,
        first_matrix=first_matrix,
        addends=frozenset({product.addend or ""} if product and kind == "gemm" else ()) - {""},
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


#: Ops that add a dimension to 0-dim tensors and then join them with the others.
_JOINING: Final = frozenset({"column_stack", "dstack", "hstack", "vstack"})


@dataclass(eq=False)
class CallPlan:
    """How the calls of one site are cast and computed. Equal to itself only, and never changed."""

    site: CallSite
    facts: OpFacts
    decision: Decision
    device_types: frozenset[str]  # tensors on other devices are not cast
    options: Options
    #: Functions that compute the op in a number format, instead of torch.
    lowerings: Mapping[str | None, Lowering] = field(default_factory=dict)
    is_narrowed: bool = False  # the wrapper replaces another one while some of its casts are off

    def __post_init__(self) -> None:
        """Derives the rest, once instead of in each call."""
        self._derive_arguments()
        self._derive_computation()

    def _derive_arguments(self) -> None:
        """Derives which arguments are cast, which are written to, and which stay fp32 in a norm."""
        site, names = self.site, self.site.parameters.names
        targets = [name for name in site.writes if name not in site.statistics]
        if site.in_place:
            targets = [names[0] if names else "self"]
        #: Name of the argument that every call writes to; the others are cast to its dtype.
        self.target: str | None = targets[0] if targets else None
        # The target of an in-place op is cast to its own dtype, so never; other targets need not be the
        # first argument.
        never_cast = frozenset(site.writes) - (set(targets) if site.in_place else set())
        if site.is_python:
            never_cast |= {"out"} & set(names)
        #: Names of the arguments that are never cast, and of all that are not inputs to cast.
        self.never_cast = never_cast
        self.skipped = never_cast | site.parameters.plain | {"out"}
        #: The parameters' kinds by position, without the buffers.
        kinds = site.parameters.kinds.items()
        self.cast_kinds = {p: kind for p, kind in kinds if names[p] not in never_cast}
        #: Names of the arguments that may be masks.
        self.masks = ops.masks(names)
        #: Whether it is a function in Python with an ``inplace`` argument, and whether calls may write to that one,
        #: the target, or an ``out`` with a position.
        self.has_inplace_flag = site.is_python and "inplace" in names
        self.may_write = self.has_inplace_flag or bool(targets) or "out" in never_cast
        facts = self.facts
        #: Positions of the running statistics, and whether they may be fp32 alongside such an input.
        self.statistic_positions = tuple(map(names.index, self.site.statistics))
        takes_fp32 = self.device_types <= facts.mixed_device_types
        self.takes_fp32_statistics = takes_fp32 and not facts.rounds_statistics
        #: Positions of the parameters that stay fp32; None if the call's device decides.
        self.fp32_positions: frozenset[int] | None = frozenset()
        if self.decision.dtype in LOW_DTYPES and facts.norm_parameters:
            if takes_fp32:
                self.fp32_positions = frozenset(map(names.index, facts.norm_parameters))
            elif self.device_types & facts.mixed_device_types:
                self.fp32_positions = None

    def _derive_computation(self) -> None:
        """Derives how calls are computed after their inputs are cast."""
        decision, facts, options = self.decision, self.facts, self.options
        has_target = self.target is not None
        #: Set if its low precision is a number format.
        self.emulation: Emulation | None = None
        if number_formats.is_format(decision.dtype) and not has_target:
            self.emulation = _emulation(self, decision.dtype)
        is_emulated = self.emulation is not None
        #: Whether it computes in ``accumulate_dtype``, or its outputs are cast.
        self.composes = decision.is_composed and not (has_target or is_emulated)
        may_run_low = self.is_low or (decision.dtype is None and facts.kind in compute.SLOW_KINDS)
        #: Whether calls may be computed in fp32 and rounded, where low precision is slow.
        self.legalizes = (
            options.legalize != "never"
            and may_run_low
            and not (has_target or facts.is_view or decision.accumulate_dtype is not None)
        )
        #: Whether autograd may keep parameters instead of their casts.
        self.keeps_parameters = (
            options.keep_weight_casts is not True
            and (options.keep_weight_casts is False or "cpu" in self.device_types)
            and facts.kind in compute.PRODUCTS | {"attention"}
            and not (has_target or is_emulated)
        )
        has_nodes = self.is_low and not (
            decision.is_composed
            or (self.keeps_parameters and self.site.op != "linear")
            or facts.norm_parameters
        )
        names, apart = self.site.parameters.names, self.masks if facts.mixed_device_types else ()
        together = [p for p in sorted(self.cast_kinds) if has_nodes and names[p] not in apart]
        #: Positions of the inputs that compiled autograd nodes cast together; for `linear` they also compute it.
        self.cast_together = tuple(together) if len(together) > 1 else ()

    @property
    def narrows(self) -> bool:
        """Whether some casts may be off while others are on, by device type or by low precision."""
        is_low = self.decision.cast_policy is CastPolicy.LOW
        return (is_low or len(self.device_types) > 1) and not self.is_narrowed

    @property
    def is_low(self) -> bool:
        """Whether the op runs in a low-precision dtype for any inputs."""
        return self.decision.dtype in LOW_DTYPES and self.target is None

    @property
    def is_relative(self) -> bool:
        """Whether the target dtype depends on the call."""
        return self.target is not None or self.decision.dtype is None

    @property
    def adds_in_place(self) -> bool:
        """Whether it adds a tensor, maybe a mask, to one whose dtype may be lower."""
        return self.site.in_place and self.site.op in ops.facts("sums")

    @property
    def widens_itself(self) -> bool:
        """Whether torch's kernel computes mixed dtypes, and their gradients, as if upcast to the widest."""
        return self.facts.promotes and not self.facts.rounds_mixed

    @property
    def is_fp32(self) -> bool:
        """Whether the op computes in fp32; an ``out=`` then gets the result rounded once."""
        is_fp32 = self.decision.dtype is torch.float32 and self.emulation is None
        return is_fp32 and self.target is None

    @property
    def widens_to_fp32(self) -> bool:
        """Whether torch computes in fp32 if one input with dimensions is fp32."""
        is_left_to_torch = not (
            self.site.is_python
            or self.composes
            or self.facts.rounds_terms
            or self.facts.never_narrows
        )
        return self.widens_itself and self.is_fp32 and is_left_to_torch

    @property
    def rounds_last(self) -> bool:
        """Whether a low-precision ``dtype=`` only affects the result, since the call computes in fp32."""
        return self.facts.casts_first and self.is_fp32

    @property
    def selects(self) -> bool:
        """Whether the result is cast to fp32, rather than the table that the call selects from."""
        return self.facts.selects and self.is_fp32 and not (self.composes or self.facts.is_view)

    @property
    def returns_input_dtype(self) -> bool:
        """Whether floating outputs are cast to the first input's dtype before casts."""
        return self.composes and self.decision.returns_input_dtype

    @property
    def keeps_shared_dtype(self) -> bool:
        """Whether a call whose inputs share a dtype computes in it and returns it, like torch's."""
        is_widest = self.decision.cast_policy is CastPolicy.WIDEST and not self.site.statistics
        return is_widest and self.returns_input_dtype and self.decision.accumulate_dtype is None

    @property
    def rounds_late(self) -> bool:
        """Whether a legalized call takes its inputs uncast."""
        if not (self.is_low and self.legalizes) or self.composes:
            return False
        is_layer = self.site.op in compute.CONVOLUTIONS or self.site.op == "linear"
        return is_layer or self.options.legalize == "fast"

    @property
    def casts_itself(self) -> bool:
        """Whether the op's runner casts its inputs itself."""
        is_emulated = self.emulation is not None
        return is_emulated or self.rounds_late or self.returns_input_dtype or self.selects

    @property
    def position_count(self) -> int:
        """The number of positions up to the last that may hold a tensor; 0 for Python functions."""
        if self.site.is_python:
            return 0
        return max([*self.cast_kinds, *self.statistic_positions], default=-1) + 1

    @property
    def fillable(self) -> range:
        """The positions of the optional tensors at the end, which may be filled with None."""
        first = count = self.position_count
        while first - 1 in self.site.parameters.fillable & self.cast_kinds.keys():
            first -= 1
        return range(first, count) if first else range(0)

    def widest(self, tensors: Sequence[Tensor]) -> torch.dtype:
        """Returns `torch.result_type` of all these floating tensors.

        0-dim tensors count if all are 0-dim, or if the op joins them with the others, like `torch.hstack`.
        """
        are_joined = self.site.op in _JOINING
        dtypes = [t.dtype for t in tensors if t.dim() or are_joined] or [t.dtype for t in tensors]
        return promoted(dtypes)

    def is_widened(self, inputs: Iterable[Tensor]) -> bool:
        """Whether torch itself computes a call on these floating inputs in fp32, as the plan requires."""
        fp32 = torch.float32
        return self.widens_to_fp32 and any(t.dtype is fp32 and t.dim() > 0 for t in inputs)


def formats_of(decision: Decision, format: Format, options: Options) -> Formats:
    gradients = decision.gradients
    if gradients is None and options.round_gradients is not False:
        gradients = format if options.round_gradients is True else options.round_gradients
    if gradients is not None and number_formats.rounds_nothing(gradients):
        gradients = None
    return compute.Formats(
        result=format,
        weights=decision.weights or format,
        activations=decision.activations or format,
        gradients=gradients,
        rounding=decision.rounding or options.rounding,
        overflow=decision.overflow or options.overflow,
    )


def _numbers(site: CallSite) -> frozenset[int]:
    """Returns the positions of a call that may hold a tensor or a number.

    Operators in Python have no schema for it; other numbers there may be a dimension, for example.
    """
    kinds, is_operator = site.parameters.kinds, site.parameters.names == ("self", "other")
    return frozenset([p for p, kind in kinds.items() if kind != "A" or is_operator])


def _emulation(plan: CallPlan, format: Format) -> Emulation:
    """Returns how the op is computed in a number format."""
    decision, site, hardware = plan.decision, plan.site, plan.options.hardware
    if hardware == "auto" and not any(map(compute.has_float8, plan.device_types)):
        hardware = "never"
    if hardware == "require":
        for device_type in plan.device_types:
            if compute.kernels_on(torch.device(device_type)) is None:
                raise OptionError(
                    f'{decision.reason}: hardware="require": {site.op} would be emulated: {device_type} has no float8 '
                    'kernels here; convert with hardware="auto"'
                )
    return compute.Emulation(
        formats_of(decision, format, plan.options),
        site.op,
        site.parameters.names,
        accumulate_dtype=decision.accumulate_dtype,
        output_dtype=None if decision.output_dtype == INPUT else decision.output_dtype,
        is_view=plan.facts.is_view,
        is_product=plan.facts.kind in PRODUCTS,
        lowerings=plan.lowerings,
        line=decision.reason,
        numbers=_numbers(site),
        hardware=hardware,
    )


# --- plans of torch's ops ----------------------------------------------------------------------


def is_promotion(decision: Decision, facts: OpFacts) -> bool:
    """Whether torch's own promotion gives exactly the decision's results, including gradients."""
    is_widest = decision.cast_policy is CastPolicy.WIDEST and not decision.is_composed
    return is_widest and facts.promotes and not facts.rounds_mixed


@functools.lru_cache(maxsize=10_000)  # a few policies of all ops
def plan_of(  # noqa: PLR0917  # the key
    op: str,
    site: ops.Site,
    lacking: Lacking | None,
    decision: Decision,
    reason: str,
    device_types: frozenset[str],
    options: Options,
    is_overridable: bool,
) -> CallPlan:
    """Returns the plan of one of torch's call sites of ``op``; see `CallPlan` and `CallSite`.

    Conversions share plans: deriving one takes longer than all other work on a wrapper. ``reason`` is the
    decision's, which equality ignores.
    """
    call_site = site_of(op, site, lacking, is_overridable=is_overridable)
    return CallPlan(call_site, facts_of(op), decision, device_types, options)
