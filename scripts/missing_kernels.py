"""Writes ``hmpx/compute/kernels.ini``: the ops of torch whose kernels lack a low-precision dtype.

    python scripts/missing_kernels.py            # print what the installed torch lacks
    python scripts/missing_kernels.py --write    # add it to the file

On the CPU each sample of torch's OpInfo and ModuleInfo databases is run, and every op that they have
no sample of with arguments made up from its schema; an op lacks a kernel where the call raises on
bfloat16 or float16 inputs and runs on the same values in float32, or where it gives numbers that have
nothing to do with those of float32. Sums of thousands of equal terms, forward and backward, find the
kernels that add up in the low type itself and stop growing. What is found is noted for the innermost
callable, which is the one that hmpx wraps. For CUDA it is what OpInfo declares. Lines that
other versions of torch have put into the file stay: computing in float32 what has a kernel is right.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import contextlib
import functools
import itertools
import math
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal import common_cuda

# What OpInfo declares depends on the GPU that there is; here it is a new one, whatever this machine has.
for _name in [name for name in dir(common_cuda) if re.fullmatch(r"SM\d+OrLater", name)]:
    setattr(common_cuda, _name, True)

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo  # noqa: E402

from hmpx import ops, patching  # noqa: E402
from hmpx.ops import schemas as op_schemas  # noqa: E402

FILE = Path(__file__).resolve().parent.parent / "hmpx" / "compute" / "kernels.ini"
LOW = (torch.bfloat16, torch.float16)

#: Ops are given so many seconds.
LIMIT_S = 10

#: So many samples of an OpInfo are run, evenly spread.
MOST_SAMPLES = 40

#: OpInfo declares them without a kernel on CUDA for the sake of one variant, which calls another op:
#: the nuclear norm calls linalg_svd.
BY_OTHERS = {"norm"}

#: What is said of a call that runs, but does not compute.
WRONG = "gives wrong numbers"

#: Results agree that differ by less than this part of their norm.
AGREEING = 1e-3

#: Sums that stop growing lack more than this part.
STALLED = 0.2

#: The gradients of so many calls of an op are tried.
MOST_GRADIENTS = 3

#: Sums of ones are larger, and their means.
LEAST_SUM = 0.1

#: So many equal terms are added up, such that sums of the type stop growing long before.
TERMS = {torch.bfloat16: 1 << 10, torch.float16: 1 << 12}

#: Tensors in calls with sums have so many elements at most.
MOST_ELEMENTS = 300_000

#: Calls of one OpInfo may take so many seconds.
SUMS_S = 2

#: An argument is a sparse tensor that has elements to add up.
UNCOALESCED = "uncoalesced"

#: What a call with sums may allocate.
MOST_BYTES = 4 << 30

#: Ops whose sums are left to torch. As many windows of poolings overlap as a gradient has terms: few, in use. Low
#: convolutions are legalized, which are these sums. Norms of layers would take 1.6 times as long, and products of
#: sparse matrices lack nothing where these are fp32 (docs/semantics.md). Nothing is written to what is resized.
LEFT_OUT = (
    *(
        "adaptive_",
        "avg_pool",
        "fractional_max_pool",
        "im2col",
        "max_pool",
        "tensor_split",
        "unfold",
    ),
    *("conv", "_conv", "slow_conv", "thnn_conv"),
    *("layer_norm", "native_layer_norm", "_sparse_mm", "resize"),
)


@dataclass
class Found:
    """What calls of one op on low-precision inputs did: how many ran, and how many had no kernel."""

    ran: int = 0
    lacked: int = 0
    gave_complex: int = 0
    ran_backward: int = 0
    lacked_backward: int = 0
    error: float = 0
    stalled: bool = False
    stalled_backward: bool = False
    flags: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)

    def is_far_off(self, dtype: torch.dtype) -> bool:
        """Whether the forward of gradients that stop growing is further off than rounding it twice.

        It has to compute in fp32 too then: a checkpoint's forward is to give what its recomputation gives.
        """
        return self.stalled_backward and self.error > 2 * torch.finfo(dtype).eps

    def is_complex(self) -> bool:
        """Whether every call made complex numbers of real ones."""
        return 0 < self.gave_complex == self.ran + self.lacked


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns ``value`` with ``function`` applied to each tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([mapped(item, function) for item in value])
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def to(dtype: torch.dtype, *sources: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Returns what makes a detached copy, in ``dtype`` if it has one of ``sources``."""

    def copy(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().clone()
        return tensor.to(dtype) if tensor.dtype in sources else tensor

    return copy


class Prober:
    """Notes of each call of an op on low-precision inputs whether there is a kernel.

    A call that lacks one gives what float32 gives, rounded, so that what comes after it is tried too.
    In its calls it stands in all slots of torch's ops, as hmpx's wrappers do.
    """

    def __init__(
        self, dtype: torch.dtype, found: dict[str, Found], *, are_sums: bool = False
    ) -> None:
        """Adds to ``found`` what calls on tensors of ``dtype`` do; ``are_sums``: of equal terms."""
        self._dtype, self._found, self._are_sums = dtype, found, are_sums
        self._wrappers: dict[Any, Any] = {}
        self.tell: Callable[[Sum], None] = lambda _: None
        patches = []
        for name, op in ops.table().items():
            is_python = all(site.is_python for site in op.sites)
            for site in op.sites:  # a Python function beside a builtin of its op ends in that
                if not site.is_property and site.is_python == is_python:
                    patches.append(
                        patching.Patch(site.owner, site.attribute, self._wrapper(name, site))
                    )
        self._patches = patches

    def _wrapper(self, name: str, site: ops.Site) -> Any:
        function = site.function()
        names = ops.parameters(site).names

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._are_sums and not self._is_idle:
                return self._sum(name, names, function, args, kwargs)
            return self._call(name, function, args, kwargs)

        self._wrappers[function] = wrapper
        return wrapper

    def run(self, calls: Iterable[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        """Makes ``calls``; whether they raise is noted on the way."""
        applied = patching.apply(self._patches)
        try:
            for function, args, kwargs in calls:
                with contextlib.suppress(Exception):
                    self._wrappers.get(function, function)(*args, **kwargs)
        finally:
            patching.undo(applied)

    def _call(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        if self._is_idle:
            return function(*args, **kwargs)
        self._is_idle = True  # what follows calls torch, too
        try:
            given = {t.dtype for t in tensors((args, kwargs)) if t.is_floating_point()}
            if self._dtype not in given or "dtype" in kwargs:
                return self._within(function, args, kwargs)
            return self._probed(name, function, args, kwargs, is_low=given == {self._dtype})
        finally:
            self._is_idle = False

    def _sum(self, name: str, names: tuple[str, ...], function: Any, args: Any, kwargs: Any) -> Any:
        """Notes whether a call, or else its gradient, stops growing; returns the right result."""
        self._is_idle = True
        try:
            wide, wider, low = (
                mapped((args, kwargs), to(dtype, self._dtype))
                for dtype in (torch.float32, torch.float64, self._dtype)
            )
            result = self._within(function, *wide)
            if not hasattr(function, "__code__"):
                forward = backward = False
                with contextlib.suppress(Exception):  # the other calls tell of missing kernels
                    forward = stalls(lambda call: function(*call[0], **call[1]), low, wide, wider)
                    backward = not forward and stalls(
                        lambda call: differentiated(function, call), low, wide, wider
                    )
                given = {**dict(zip(names, args, strict=False)), **kwargs}
                flags = [flag for flag, value in given.items() if value is True]
                flags += [f"{flag} {value}" for flag, value in given.items() if type(value) is str]
                is_uncoalesced = any(t.is_sparse and not t.is_coalesced() for t in tensors(args))
                flags += [UNCOALESCED] * is_uncoalesced
                self.tell((name, forward, backward, flags))
            return mapped(result, to(self._dtype, torch.float32))
        finally:
            self._is_idle = False

    def _within(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Calls ``function``, noting the calls inside of it."""
        self._is_idle = False
        try:
            return function(*args, **kwargs)
        finally:
            self._is_idle = True

    def _probed(self, name: str, function: Any, args: Any, kwargs: Any, *, is_low: bool) -> Any:
        has_values = all(t.numel() for t in tensors((args, kwargs)))
        state = torch.get_rng_state()
        copies = mapped((args, kwargs), to(torch.float32, self._dtype))
        again = mapped((args, kwargs), to(self._dtype))
        low = mapped((args, kwargs), to(self._dtype))
        found = self._found.setdefault(name, Found())
        try:
            result = self._within(function, args, kwargs)
        except Exception as error:
            torch.set_rng_state(state)
            result = function(*copies[0], **copies[1])
            if is_low:
                found.lacked += 1
                found.gave_complex += any(t.is_complex() for t in tensors(result))
                found.texts.add(str(error).split("\n")[0])
            return mapped(result, to(self._dtype, torch.float32))
        if _is_complex_half(result) and not _is_complex_half(function(*copies[0], **copies[1])):
            found.lacked += 1
            found.gave_complex += 1
            found.texts.add("gives complex32")
        elif is_low and has_values:  # without values no kernel is needed
            error = self._error(function, again, result, state)
            found.error = max(found.error, error)
            if error > 1:  # further off than zeros are
                found.lacked += 1
                found.texts.add(WRONG)
                return result
            found.ran += 1
            if not hasattr(function, "__code__") and found.ran <= MOST_GRADIENTS:
                self._probe_gradients(function, low, copies, found)
        return result

    def _error(self, function: Any, call: Any, result: Any, state: Tensor) -> float:
        """Returns how far ``result`` is off where float32 and float64 agree, in parts of its norm.

        They don't agree about what is random, or memory that nothing was written to. An infinity is
        what overflows, perhaps on the way.
        """
        after = torch.get_rng_state()
        exact: list[Any] = []
        for dtype in (torch.float32, torch.float64):
            torch.set_rng_state(state)
            args, kwargs = mapped(call, to(dtype, self._dtype))
            try:
                exact.append(function(*args, **kwargs))
            except Exception:
                return 0
            finally:
                torch.set_rng_state(after)
        errors = [0.0]
        for low, wide, wider in zip(*map(tensors, (result, *exact)), strict=False):
            is_same = low.dtype is self._dtype and low.shape == wide.shape == wider.shape
            if (
                is_same
                and not low.isinf().any()
                and (wide - wider).norm() < AGREEING * wider.norm()
            ):
                error = float((low - wider).norm() / wider.norm())
                errors.append(math.inf if math.isnan(error) else error)
        return max(errors)

    _is_idle = False

    def _probe_gradients(self, function: Any, low: Any, wide: Any, found: Found) -> None:
        try:
            outcome = differentiated(function, low)
        except Exception as error:
            try:
                if differentiated(function, wide):
                    found.lacked_backward += 1
                    found.texts.add(f"backward: {str(error).splitlines()[0]}")
            except Exception:
                return  # the op has no gradients of these arguments
        else:
            found.ran_backward += bool(outcome)


def _is_complex_half(result: Any) -> bool:
    return any(t.dtype is torch.complex32 for t in tensors(result))


def stalls(function: Callable[[Any], Any], low: Any, wide: Any, wider: Any) -> bool:
    """Whether what ``function`` makes of low numbers stays below what it makes of fp32 and float64 ones."""
    made = (tensors(function(call)) for call in (low, wide))
    for sums, expected in zip(*made, strict=True):
        if sums.dtype in LOW and is_below(sums, expected, 1 - STALLED):
            exact = list(tensors(function(wider)))
            return any(is_below(sums, t, 1 - STALLED) and is_close(expected, t) for t in exact)
    return False


def is_below(tensor: Tensor, expected: Tensor, part: float) -> bool:
    """Whether a tensor's norm is less than that part of what is expected, which is finite and no rounding error."""
    if tensor.shape != expected.shape:
        return False
    norms = [float(t.double().to_dense().norm()) for t in (tensor, expected)]
    return norms[0] < part * norms[1] < math.inf and norms[1] > LEAST_SUM


def is_close(tensor: Tensor, exact: Tensor) -> bool:
    """Whether fp32 agrees with float64, which it does not about random numbers."""
    if tensor.shape != exact.shape:
        return False
    exact = exact.double().to_dense()
    return bool((tensor.double().to_dense() - exact).norm() < AGREEING * exact.norm())


def differentiated(function: Any, call: Any) -> list[Tensor]:
    """Runs forward and backward; returns the gradients."""
    args, kwargs = mapped(call, lambda t: t.requires_grad_(t.is_floating_point()))
    with torch.enable_grad():
        outputs = [t for t in tensors(function(*args, **kwargs)) if t.requires_grad]
        inputs = [t for t in tensors((args, kwargs)) if t.is_leaf and t.requires_grad]
        if not outputs or not inputs:
            return []
        found = torch.autograd.grad(
            outputs, inputs, [torch.ones_like(t) for t in outputs], allow_unused=True
        )
    return [t for t in found if t is not None]


# --- what is run -------------------------------------------------------------------------------


def samples(
    info: Any, dtype: torch.dtype
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Yields calls of one OpInfo on float32 inputs, in-place forms too."""
    given = list(info.sample_inputs("cpu", torch.float32, requires_grad=False))
    most = MOST_SAMPLES if dtype not in info.dtypes else MOST_SAMPLES // 5
    for sample in given[:: 1 + len(given) // most]:
        call = (sample.input, *sample.args)
        yield info.op, call, sample.kwargs
        if info.inplace_variant is not None:
            yield info.inplace_variant, call, sample.kwargs


def probe_samples(dtype: torch.dtype, found: dict[str, Found]) -> None:
    """Runs every OpInfo."""
    prober = Prober(dtype, found)
    for info in op_db:
        if torch.float32 not in info.dtypes or info.name.startswith("torch.ops."):
            continue
        calls = [
            (function, *mapped((args, kwargs), to(dtype, torch.float32)))
            for function, args, kwargs in samples(info, dtype)
        ]
        prober.run(calls)


#: The op, whether a call stopped growing, or its gradient did, and its arguments that are true or texts.
Sum = tuple[str, bool, bool, list[str]]


def probe_sums(dtype: torch.dtype, found: dict[str, Found]) -> None:
    """Makes sums of each OpInfo's samples, in processes of their own: sizes that don't fit may crash."""
    prober = Prober(dtype, {}, are_sums=True)
    made = [sparse_sums(TERMS[dtype])]
    for info in op_db:
        adds_up = not isinstance(info, (UnaryUfuncInfo, BinaryUfuncInfo))  # elementwise ops do not
        if dtype in info.dtypes and adds_up and not info.name.startswith("torch.ops."):
            made.append(sums(info, TERMS[dtype]))
    told: list[Sum] = []
    for calls in made:
        told += in_child(functools.partial(_probe_sums, calls, dtype, prober), 10 * SUMS_S)
    names = {name for name, *_ in told if not name.startswith(LEFT_OUT)}
    for name in names - ops.facts("random").keys():
        noted = [(*how, set(flags)) for each, *how, flags in told if each == name]
        stalled = [each for each in noted if each[0] or each[1]]
        if len(stalled) > 1:  # one may be chance: labels that are out of range read anything
            known = found.setdefault(name, Found())
            known.stalled = any(forward for forward, _, _ in stalled)
            known.stalled_backward = any(backward for _, backward, _ in stalled)
            known.flags = set.intersection(*(flags for *_, flags in stalled))
            known.flags -= set.intersection(*(flags for *_, flags in noted)) - {UNCOALESCED}


def _probe_sums(
    calls: Iterable[Any], dtype: torch.dtype, prober: Prober, tell: Callable[[Sum], None]
) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    deadline = time.process_time() + SUMS_S
    calls = itertools.takewhile(lambda _: time.process_time() < deadline, calls)
    prober.tell = tell
    prober.run((function, *mapped(call, to(dtype, torch.float32))) for function, call in calls)


def sums(info: Any, terms: int) -> Iterator[Any]:
    """Yields calls of one OpInfo on ones, with sizes and numbers of the smallest samples multiplied."""
    kinds = {}
    for sample in info.sample_inputs("cpu", torch.float32, requires_grad=False):
        call = ((sample.input, *sample.args), sample.kwargs)
        flags = [value for _, value in leaves(call) if isinstance(value, (bool, str))]
        shapes = [t.dim() for t in tensors(call)]
        size = sum(t.numel() for t in tensors(call))
        key = repr((flags, shapes))
        if all(t.dim() and t.numel() for t in tensors(call)) and size < kinds.get(key, (1e9,))[0]:
            kinds[key] = size, call
    for _, call in sorted(kinds.values(), key=lambda kind: kind[0]):
        ones = mapped(call, lambda t: torch.ones_like(t) if t.is_floating_point() else t)
        edits = list(multiplied(ones, terms))
        for first, second in itertools.combinations_with_replacement(edits, 2):
            with contextlib.suppress(Exception):  # what doesn't fit together
                larger = replaced(ones, *first)
                yield info.op, larger if first is second else replaced(larger, *second)


def sparse_sums(terms: int) -> Iterator[Any]:
    """Yields calls of ops on equal elements of a sparse tensor, of those that do nothing with a dense one."""
    index = torch.zeros(1, terms, dtype=torch.long)
    given, dense = torch.sparse_coo_tensor(index, torch.ones(terms), (1,)), torch.ones(1)
    for op in ops.table().values():
        for function in [s.function() for s in op.sites if not (s.in_place or s.is_property)]:
            result = None
            with contextlib.suppress(Exception):
                result = function(dense)
            if result is None or result is dense:
                yield function, ((given,), {})


def multiplied(call: Any, terms: int) -> Iterator[tuple[tuple[Any, ...], Callable[[Any], Any]]]:
    """Yields where a call may be enlarged, and how: dimensions of tensors, and integers."""
    for place, value in leaves(call):
        if isinstance(value, Tensor):
            for dim in range(value.dim()):
                yield place, functools.partial(repeated, dim, terms)
            if not value.is_floating_point() and value.dtype is not torch.bool:
                yield place, lambda t: t * terms  # lengths
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield place, lambda number: number * terms


def repeated(dim: int, terms: int, tensor: Tensor) -> Tensor:
    """Returns ``tensor`` as many times in one dimension, if that is not too large."""
    if tensor.numel() * terms > MOST_ELEMENTS:
        raise ValueError("too large")
    return tensor.repeat([terms if each == dim else 1 for each in range(tensor.dim())])


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields what nested lists, tuples and dicts hold, and where."""
    if isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from leaves(item, (*place, position))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, (*place, name))
    else:
        yield place, value


def replaced(value: Any, place: tuple[Any, ...], function: Callable[[Any], Any]) -> Any:
    """Returns ``value`` with ``function`` applied at ``place`` in it."""
    if not place:
        return function(value)
    if isinstance(value, dict):
        return {**value, place[0]: replaced(value[place[0]], place[1:], function)}
    items = list(value)
    items[place[0]] = replaced(items[place[0]], place[1:], function)
    return type(value)(items)


def probe_modules(dtype: torch.dtype, found: dict[str, Found]) -> None:
    """Runs every ModuleInfo."""
    prober = Prober(dtype, found)
    for info in module_db:
        if torch.float32 not in info.dtypes or issubclass(info.module_cls, LazyModuleMixin):
            continue
        inputs = info.module_inputs_func(info, "cpu", torch.float32, False, True)
        calls = []
        for given in inputs:
            if given.forward_input is None:
                continue
            made, called = given.constructor_input, given.forward_input
            module = info.module_cls(*made.args, **made.kwargs).requires_grad_(False).to(dtype)
            given_low = mapped((called.args, called.kwargs), to(dtype, torch.float32))
            calls.append((module, *given_low))
        prober.run(calls)


def probe_sparse(dtype: torch.dtype, found: dict[str, Found]) -> None:
    """Runs what is for sparse tensors alone; products are tried again in fp32 where they fail."""
    prober = Prober(dtype, found)
    given = torch.eye(3).to_sparse().to(dtype)
    prober.run([(f, (given, 1), {}) for f in (torch.sparse.softmax, torch.sparse.log_softmax)])


# --- ops without samples -----------------------------------------------------------------------

#: Shapes of the tensors that stand for an argument, tried in turn.
SHAPES = ((3, 3), (3,), (2, 3, 4), (1, 2, 4, 4), (1, 2, 4, 4, 4), ())


def by_hand() -> Mapping[str, list[tuple[Any, ...]]]:
    """Returns op name -> the arguments of calls that its schemas don't tell how to make up."""
    x, scale, zero = torch.rand(3, 4), torch.tensor(0.1), torch.tensor(0, dtype=torch.int32)
    scales, zeros = torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int32)
    on = torch.ones(1, dtype=torch.long)
    observed = x, on, on, torch.zeros(1), torch.ones(1), torch.ones(1), zeros[:1]
    return {
        "fused_moving_avg_obs_fake_quant": [(*observed, 0.01, 0, 255, -1)],
        "quantize_per_channel": [(x, scales, zeros, 0, torch.quint8)],
        "quantize_per_tensor": [
            (x, 0.1, 0, torch.quint8),
            (x, scale, zero, torch.quint8),
            ([x, x], scales[:2], zeros[:2], torch.quint8),
        ],
        "quantize_per_tensor_dynamic": [(x, torch.quint8, False)],
    }


def made_up(name: str) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Yields calls of an op on float32 inputs that its schemas allow."""
    for arguments in by_hand().get(name, ()):
        yield ops.table()[name].sites[0].function(), arguments, {}
    for site in ops.table()[name].sites:
        if site.in_place or site.is_python or site.is_property:
            continue
        for schema in op_schemas.schemas(site):
            for shape in SHAPES:
                for integers in (False, True):
                    args, kwargs = [], {}
                    for argument in schema.arguments:
                        if argument.is_out or (argument.has_default_value() and args):
                            continue
                        value = made_value(argument, shape, is_index=integers and bool(args))
                        if argument.kwarg_only:
                            kwargs[argument.name] = value
                        else:
                            args.append(value)
                    yield site.function(), tuple(args), kwargs


def made_value(argument: Any, shape: tuple[int, ...], *, is_index: bool) -> Any:
    """Returns a value of an argument's type."""
    written = str(argument.type)
    tensor = torch.rand(shape) * 0.5 + 0.25
    if len(shape) == 2:
        tensor = tensor @ tensor.mT + torch.eye(shape[0])
    if is_index:
        tensor = torch.zeros(shape, dtype=torch.long)
    return {
        "Tensor": tensor,
        "Optional[Tensor]": tensor,
        "List[Tensor]": [tensor, tensor],
        "int": 1,
        "float": 0.5,
        "bool": True,
        "number": 1,
        "List[int]": [1, 1],
        "str": "",
    }.get(written)


def probe_unsampled(
    dtype: torch.dtype, known: dict[str, Found]
) -> tuple[dict[str, Found], list[str]]:
    """Returns what calls on made-up arguments did, each op in a process of its own; and what ran none."""
    found, unprobed = {}, []
    noted: dict[str, Found] = {}  # each child has its own
    prober = Prober(dtype, noted)
    for name in sorted(ops.table()):
        if name in known or not ops.is_castable(name) or ops.is_view(name):
            continue
        answer = in_child(functools.partial(_probe_made_up, name, dtype, prober, noted))
        if answer:
            found[name] = Found(*answer[-1])
        else:
            unprobed.append(name)
    return found, unprobed


def _probe_made_up(
    name: str,
    dtype: torch.dtype,
    prober: Prober,
    noted: dict[str, Found],
    tell: Callable[[Any], None],
) -> None:
    calls = []
    for function, args, kwargs in made_up(name):
        try:
            function(*mapped(args, to(torch.float32)), **mapped(kwargs, to(torch.float32)))
        except Exception:
            continue
        calls.append((function, *mapped((args, kwargs), to(dtype, torch.float32))))
    prober.run(calls)
    if each := noted.get(name):
        tell((each.ran, each.lacked, each.gave_complex, each.ran_backward, each.lacked_backward))


def in_child(run: Callable[[Callable[[Any], None]], None], limit_s: int = LIMIT_S) -> list[Any]:
    """Returns what ``run`` tells in a child process, until that dies or takes too long."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.alarm(limit_s)
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # until the child ends
        with contextlib.suppress(Exception):
            run(lambda answer: os.write(writer, f"{answer!r}\n".encode()) and None)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answers = pipe.read().decode().splitlines()
    os.waitpid(pid, 0)
    return [ast.literal_eval(answer) for answer in answers]


# --- CUDA, as declared -------------------------------------------------------------------------


def declared(dtype: torch.dtype, cpu: Mapping[str, Found]) -> dict[str, set[str]]:
    """Returns how -> ops, of those that OpInfo declares without a kernel on CUDA, or does not declare.

    What the CPU has a kernel for, and CUDA lacks, no call of runs there. Of what both lack, OpInfo
    doesn't say whether only some calls do: those of the CPU tell. Nor does it say which callable
    inside of a Python function does: it is listed itself then. And it declares what some arguments
    alone need another op for (the spectral norm a decomposition): where the CPU lacks that, CUDA may.
    """
    found: dict[str, set[str]] = {"always": set(), "sometimes": set(), "backward": set()}
    seen = set()
    for info in op_db:
        name = op_name(info)
        if name not in ops.table() or torch.float32 not in info.dtypesIfCUDA:
            continue
        if name in BY_OTHERS:
            continue
        seen.add(name)
        if all(site.is_python for site in ops.table()[name].sites) and name not in cpu:
            continue
        on_cpu = cpu.get(name, Found())
        gives_complex_half = dtype is torch.float16 and on_cpu.is_complex()
        # OpInfo allows for wrong numbers, too: the devices share what an op is composed of.
        if dtype not in info.dtypesIfCUDA or gives_complex_half or WRONG in on_cpu.texts:
            is_of_cuda = dtype in info.dtypes and dtype not in info.dtypesIfCUDA
            never_ran = on_cpu.lacked and not on_cpu.ran
            found["always" if is_of_cuda or never_ran else "sometimes"].add(name)
        elif info.supports_autograd and dtype not in info.backward_dtypesIfCUDA:
            found["backward"].add(name)
    for name, on_cpu in cpu.items():
        # Random ops have kernels of their own, and being tried costs them a look at the generator.
        is_partial = on_cpu.ran and name not in ops.facts("random")
        is_wrong = on_cpu.lacked or on_cpu.stalled
        if is_wrong and (name not in seen or is_partial):
            found["sometimes"].add(name)
    return found


def op_name(info: Any) -> str | None:
    """Returns the hmpx op that ``info`` samples; None if it samples none."""
    if info.name.startswith("torch.ops."):
        return None
    return ops.resolve(info.name) or (ops.resolve(info.aten_name) if info.aten_name else None)


# --- the file ----------------------------------------------------------------------------------

HEADER = """\
# Where torch's ops lack a kernel for a low-precision dtype: scripts/missing_kernels.py writes this.
# A section is a device type, a dtype, and how: "always" is for ops of which no call runs, or none gives
# right numbers, "sometimes" for those of which some don't, "backward" for those whose gradients don't. Sums
# that stop growing are not right. After "=" is the argument that must be true for that, or have the value
# after it; "uncoalesced" means sparse tensors with equal indices, "beyond_input" convolutions whose kernel is
# larger than the input in some dimension (their memory is not all written: scripts/wrong_kernels.py). A
# name that the installed torch lacks is ignored, and an op that has its kernel there computes in fp32 all
# the same: one file serves every version.
"""

UNTRIED = """\
# Ops without a sample in OpInfo or ModuleInfo, of which no call made up from their schemas runs on the
# CPU in float32: they need a device, an earlier result, or tensors of their own kind.
"""


def known() -> tuple[dict[str, set[str]], dict[str, str]]:
    """Returns section -> names, and name -> argument, of the file as it is."""
    parser = configparser.ConfigParser(allow_no_value=True, delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    if FILE.exists():
        parser.read_string(FILE.read_text(encoding="utf-8"))
    sections = {name: set(parser[name]) for name in parser.sections()}
    return sections, {
        name: flag for names in parser.values() for name, flag in names.items() if flag
    }


def merged(
    dtype: torch.dtype, cpu: Mapping[str, Found], untried: Iterable[str]
) -> tuple[dict[str, set[str]], dict[str, str]]:
    """Returns section -> names, of the file as it is and of what was found, and name -> argument."""
    sections, flags = known()
    for name, each in cpu.items():
        if each.flags:
            flags[name] = min(each.flags)
    short = str(dtype).removeprefix("torch.")
    found = {
        "always": {
            name
            for name, each in cpu.items()
            if each.stalled or (each.lacked and not each.ran) or each.is_far_off(dtype)
        },
        "sometimes": {name for name, each in cpu.items() if each.lacked and each.ran},
        "backward": {
            name for name, each in cpu.items() if each.stalled_backward or each.lacked_backward
        },
    }
    for device_type, by_how in (("cpu", found), ("cuda", declared(dtype, cpu))):
        for how, names in by_how.items():
            sections.setdefault(f"{device_type} {short} {how}", set()).update(names)
        always = sections[f"{device_type} {short} always"]
        sections[f"{device_type} {short} sometimes"] -= always
        sections[f"{device_type} {short} backward"] -= always
    tried = {name for section, names in sections.items() if section != "untried" for name in names}
    sections["untried"] = (sections.get("untried", set()) | set(untried)) - tried - set(cpu)
    return sections, flags


def text(sections: Mapping[str, set[str]], flags: Mapping[str, str]) -> str:
    """Returns the file that holds ``sections``."""
    parts = [HEADER]
    for section in sorted(sections, key=lambda name: (name == "untried", name)):
        comment = UNTRIED if section == "untried" else ""
        names = "".join(
            f"{name} = {flags[name]}\n" if name in flags else f"{name}\n"
            for name in sorted(sections[section])
        )
        parts.append(f"[{section}]\n{comment}{names}")
    return "\n".join(parts)


def probe(dtype: torch.dtype) -> tuple[dict[str, Found], list[str]]:
    """Returns what calls of each op in ``dtype`` did on the CPU, and the ops that none was found for."""
    found: dict[str, Found] = {}
    probe_samples(dtype, found)
    probe_modules(dtype, found)
    probe_sparse(dtype, found)
    probe_sums(dtype, found)
    more, untried = probe_unsampled(dtype, found)
    return {**found, **more}, untried


def main() -> None:
    """Prints what the installed torch lacks; with ``--write`` adds it to the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="add what is found to kernels.ini")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], help="only this one")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for dtype in LOW if options.dtype is None else (getattr(torch, options.dtype),):
        found, untried = probe(dtype)
        for name, each in sorted(found.items()):
            if each.lacked or each.lacked_backward or each.stalled or each.stalled_backward:
                print(f"{dtype} {name}: {each}")
        if options.write:
            FILE.write_text(text(*merged(dtype, found, untried)), encoding="utf-8")


if __name__ == "__main__":
    main()
