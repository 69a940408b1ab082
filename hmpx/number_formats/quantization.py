"""Rounding tensors to number formats: any floating dtype, strides and device, with or without autograd.

Knows how to run a plan: by compiled kernels on the CPU, else by torch ops. Knows no plan's inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn

from ..errors import OptionError, shown
from ..tensors import CAST
from ..torch_internals import (
    dispatch_modes,
    has_tangents,
    jit_tracing_state,
    run_when_traced,
    transforms,
)
from .families import Block, Custom, Format, check_overflow, resolved_overflow
from .kernels import calls
from .kernels import library as kernel_library
from .registered import get
from .rounding import (
    BlockPlan,
    Key,
    Plan,
    check_mode,
    constants_of,
    from_constants,
    plan,
    random_bits,
)

Rounder: TypeAlias = Callable[[Tensor], Tensor]

# As they were before anything was patched.
_EMPTY, _EMPTY_LIKE = torch.empty, torch.empty_like
_RANDINT, _MOVEDIM = torch.randint, torch.movedim
_CONTIGUOUS, _CLONE = Tensor.contiguous, Tensor.clone

#: Torch runs smaller work on one thread, too.
_THREADED: Final = 32768

#: Elements of a part: intermediate results stay in the cache, and calls take little of the time.
_CACHED: Final = 131072

_PLAIN_TYPES: Final = (Tensor, nn.Parameter)


_NO_KEYS: Final = (0, 0)

_SPARSE: Final = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)


def quantize(
    x: Tensor,
    format: str | Format,
    rounding: str = "nearest",
    overflow: str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns ``x`` rounded to a number format, in the same shape and dtype.

    Rounds once: float64 is not rounded to float32 first. Where ``x``'s dtype lacks values of the
    format (float16 numbers in bfloat16), the result is rounded to that dtype, too. NaN stays NaN,
    even if the format has none. Gradients pass unchanged, as if nothing had been rounded. Where
    every value of the dtype is one of the format, ``x`` itself is returned, as by `Tensor.to`.

    Args:
        x: float32, float64, bfloat16 or float16; on any device; dense, of any strides.
        format: A format, or the name of a registered one.
        rounding: ``"nearest"`` (ties to even), ``"nearest_away"`` (ties away from zero),
            ``"toward_zero"``, ``"up"``, ``"down"``, or ``"stochastic"``: to one of the neighbours,
            by chance in proportion to how near they are.
        overflow: What becomes of values beyond the largest: ``"saturate"``, ``"inf"`` or ``"nan"``,
            if the format has them; None: what its standard says.
        generator: Gives ``"stochastic"`` its seed; None: torch's own. One draw a call.

    Raises:
        OptionError: There is no such format, or it can't be rounded to so, or ``x`` is no floating
            tensor of these dtypes; or ``HMPX_KERNELS`` is wrong.

    Example:
        >>> x = torch.tensor([1.1, 1000.0])
        >>> hmpx.formats.quantize(x, "float8_e4m3fn")
        tensor([1.1250,    nan])
        >>> hmpx.formats.quantize(x, "float8_e4m3fn", rounding="up", overflow="saturate")
        tensor([  1.1250, 448.0000])
    """
    if not isinstance(x, Tensor):
        raise OptionError(f"quantize takes a tensor, not {type(x).__name__}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(f"generator must be a torch.Generator, not {shown(generator)}")
    if torch.compiler.is_dynamo_compiling():
        run = _Run(get(format), rounding, overflow)  # its arguments are checked at trace time
        function: type[_StraightThrough] = _StraightThrough  # dynamo knows no jvp
    else:
        run, function = _run_of(get(format), rounding, overflow), _ForwardToo
    if torch.is_grad_enabled() and (x.requires_grad or has_tangents()):
        return cast(Tensor, function.apply(x, run, generator))  # type: ignore[no-untyped-call]
    return run(x, generator)


def rounder(
    format: str | Format,
    rounding: str = "nearest",
    overflow: str | None = None,
    generator: torch.Generator | None = None,
) -> Rounder:
    """Returns the function that rounds a tensor as `quantize` does, but has no gradient.

    Made once and called often: nothing is looked up by name in a call.

    Raises:
        OptionError: There is no such format, or it can't be rounded to so; or ``HMPX_KERNELS`` is
            wrong.
    """
    run = _run_of(get(format), rounding, overflow)
    if generator is None:
        return run
    return lambda x: run(x, generator)


class _StraightThrough(torch.autograd.Function):
    """Rounds; gradients pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, run: _Run, generator: torch.Generator | None) -> Tensor:
        rounded = run(x, generator)
        return x.view_as(x) if rounded is x else rounded

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _ForwardToo(_StraightThrough):
    """The same, in forward mode, too."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return tangent.view_as(tangent)


class _Run:
    """What rounds to one format in one way; plans and kernels are made once for each dtype."""

    __slots__ = ("_by_dtype", "format", "mode", "overflow")

    def __init__(self, format: Format, mode: str, overflow: str | None) -> None:
        self.format, self.mode, self.overflow = format, mode, overflow
        self._by_dtype: dict[torch.dtype, _Step] = {}

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Returns ``x`` rounded; records no gradient."""
        if torch.compiler.is_dynamo_compiling():
            if isinstance(self.format, Custom):
                return _call_custom(self.format.quantize, x, self.format)
            constants = _constants_of(self.format, self.mode, self.overflow, x.dtype)
            if not constants:
                return x
            axis = self.format.axis if isinstance(self.format, Block) else None
            return _round_traced(x, from_constants(*constants), axis, generator)
        step = self._by_dtype.get(x.dtype)
        if step is None:
            step = _step_of(self, x.dtype)
        if step.plan is None:
            return x if step.function is None else _call_custom(step.function, x, self.format)
        if (
            type(x) not in _PLAIN_TYPES
            or not x.is_cpu
            or dispatch_modes()
            or transforms() is not None
            or jit_tracing_state() is not None
            or x.layout is not torch.strided
        ):
            check_dense(x)
            with torch.no_grad():
                return _round_traced(x, step.plan, step.axis, generator)
        if x.is_neg() or x._is_zerotensor():  # without memory of its values
            x = _EMPTY_LIKE(x).copy_(x.detach())
        keys = _NO_KEYS if self.mode != "stochastic" else _draw(generator)
        kernel = step.kernel or step.find_kernel()
        count = x.numel()
        threads = 1 if count < _THREADED else torch.get_num_threads()
        length = 0
        if step.axis is not None:
            if kernel is not None and x.dim() and step.axis in (-1, x.dim() - 1):
                length = x.shape[-1]
            if not length or not step.is_native or not x.is_contiguous():
                kernel = None
        if kernel is None:
            with torch.no_grad():
                return _round_arranged(x, step, keys)
        if not step.is_native:
            with torch.no_grad():
                work = CAST[step.plan.binary.dtype](_CONTIGUOUS(x))
                address = work.data_ptr()
                kernel(address, address, count, *keys, threads, 0)
                found = CAST[x.dtype](work)
                return found if x.is_contiguous() else _EMPTY_LIKE(x).copy_(found)
        if x.is_contiguous():
            result = _EMPTY_LIKE(x)
            kernel(x.data_ptr(), result.data_ptr(), count, *keys, threads, length)
            return result
        with torch.no_grad():
            if self.mode == "stochastic":  # an element's noise depends on its place, not on strides
                work = _CONTIGUOUS(x)
                kernel(work.data_ptr(), work.data_ptr(), count, *keys, threads, 0)
                return _EMPTY_LIKE(x).copy_(work)
            result = _CLONE(x)
            kernel(result.data_ptr(), result.data_ptr(), count, *keys, threads, 0)
            return result


class _Step:
    """How tensors of one dtype are rounded to a format.

    Attributes:
        plan: How to round; None if nothing is to do, or if ``function`` does it.
        function: The user's own.
        kernel: The compiled plan, once there is one.
        is_native: The plan computes in the tensors' own dtype.
        axis: The axis of blocks.
    """

    __slots__ = ("axis", "function", "has_no_kernel", "is_native", "kernel", "plan")

    def __init__(self, run: _Run, dtype: torch.dtype) -> None:
        format = run.format
        self.function: Rounder | None = None
        self.plan: Plan | None = None
        if isinstance(format, Custom):
            self.function = format.quantize
        else:
            overflow = resolved_overflow(format, run.overflow)
            self.plan = plan(format, dtype, run.mode, overflow)
        self.axis = format.axis if isinstance(format, Block) else None
        self.is_native = self.plan is not None and self.plan.binary.dtype is dtype
        self.kernel: calls.Kernel | None = None
        self.has_no_kernel = False

    def find_kernel(self) -> calls.Kernel | None:
        """Returns the compiled plan; None while there is none."""
        if self.has_no_kernel or self.plan is None:
            return None
        library = kernel_library.library()
        if library is not None:
            self.kernel = calls.kernel(self.plan, library)
            self.has_no_kernel = self.kernel is None
        return self.kernel


def _run_of(format: Format, rounding: str, overflow: str | None) -> _Run:
    key = (_Run, rounding, overflow)
    run: _Run | None
    try:
        run = format.derived.get(key)
    except Exception:  # what has no hash is no string; it is refused below
        run = None
    if run is None:
        message = check_mode(format, rounding)
        if message is not None:
            raise OptionError(message)
        check_overflow(format, overflow)
        kernel_library.check_setting()
        mode, beyond = str.__str__(rounding), None if overflow is None else str.__str__(overflow)
        run = format.derived[_Run, mode, beyond] = _Run(format, mode, beyond)
    return run


def _step_of(run: _Run, dtype: torch.dtype) -> _Step:
    step = run._by_dtype.get(dtype)
    if step is None:
        if dtype not in CAST:
            raise OptionError(
                f"quantize takes tensors of {', '.join(str(known) for known in CAST)}, not {dtype}; "
                "cast it first"
            )
        step = run._by_dtype[dtype] = _Step(run, dtype)
    return step


def check_dense(x: Tensor) -> None:
    """Refuses sparse tensors.

    Raises:
        OptionError: ``x`` is one.
    """
    if x.layout in _SPARSE:
        raise OptionError(
            f"number formats take dense tensors, not one of {x.layout}; its values() are dense"
        )


def _constants_of(
    format: Format, mode: str, overflow: str | None, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Returns the plan that dynamo is to trace, empty if nothing is to do."""
    return constants_of(_step_of(_run_of(format, mode, overflow), dtype).plan)


run_when_traced(_constants_of)


def _draw(generator: torch.Generator | None) -> tuple[int, int]:
    device = "cpu" if generator is None else generator.device
    key = int(_EMPTY(1, dtype=torch.int64, device=device).random_(generator=generator).item())
    return key & 0xFFFFFFFF, key >> 32


def _signed(key: int) -> int:
    return key - 2**32 if key >= 2**31 else key


def _round_traced(
    x: Tensor, plan: Plan, axis: int | None, generator: torch.Generator | None
) -> Tensor:
    """Returns ``x`` rounded by torch ops on the whole of it: traceable, on any device."""
    x = x.detach()
    keys: tuple[Key, Key] = _NO_KEYS
    if plan.mode == "stochastic":
        device = x.device if generator is None else generator.device
        drawn = _RANDINT(
            -(2**31), 2**31, (2,), generator=generator, dtype=torch.int64, device=device
        )
        drawn = drawn.to(x.device, torch.int32)
        keys = (drawn[0], drawn[1])
    work = CAST[plan.binary.dtype](x)
    work = _to_rows(work, axis)
    noise = None
    if plan.mode == "stochastic":
        noise = random_bits(work.numel(), 0, keys, x.device).view(work.shape)
    return CAST[x.dtype](_from_rows(plan.round(work, noise), x, axis))


def _round_arranged(x: Tensor, step: _Step, keys: tuple[int, int]) -> Tensor:
    """Returns ``x`` rounded: laid out as kernels and blocks want it, and back."""
    assert step.plan is not None
    work = CAST[step.plan.binary.dtype](x)
    rows = _CONTIGUOUS(_to_rows(work, step.axis))
    is_own = rows.data_ptr() != x.data_ptr()
    result = rows if is_own else _EMPTY_LIKE(rows)
    if step.kernel is not None:
        if rows.numel():
            threads = 1 if rows.numel() < _THREADED else torch.get_num_threads()
            length = rows.shape[-1]
            step.kernel(rows.data_ptr(), result.data_ptr(), rows.numel(), *keys, threads, length)
    else:
        _round_in_parts(rows, result, step.plan, keys)
    found = CAST[x.dtype](_from_rows(result, x, step.axis))
    if found.stride() == x.stride() or (x.is_contiguous() and found.is_contiguous()):
        return found
    return _EMPTY_LIKE(x).copy_(found)


def _round_in_parts(source: Tensor, target: Tensor, plan: Plan, keys: tuple[int, int]) -> None:
    """Rounds contiguous tensors by torch ops, a part at a time that fits into the cache."""
    is_block = isinstance(plan, BlockPlan)
    length = source.shape[-1] if is_block and source.dim() else 1
    source, target = source.view(-1, length), target.view(-1, length)
    rows = max(_CACHED // max(length, 1), 1)
    signed = (_signed(keys[0]), _signed(keys[1]))
    for start in range(0, source.shape[0], rows):
        part = source[start : start + rows]
        part = part if is_block else part.view(-1)
        noise = None
        if plan.mode == "stochastic":
            noise = random_bits(part.numel(), start * length, signed, part.device)
            noise = noise.view(part.shape)
        target[start : start + rows].view(part.shape).copy_(plan.round(part, noise))


def _to_rows(x: Tensor, axis: int | None) -> Tensor:
    """Returns ``x`` with the axis of blocks last; without one, as it is.

    Raises:
        OptionError: ``x`` has no such axis.
    """
    if axis is None:
        return x
    if x.dim() == 0:
        x = x.view(1)
    if not -x.dim() <= axis < x.dim():
        raise OptionError(
            f"blocks lie along axis {axis}, which a tensor of shape {tuple(x.shape)} lacks"
        )
    return _MOVEDIM(x, axis, -1)


def _from_rows(rows: Tensor, x: Tensor, axis: int | None) -> Tensor:
    if axis is None:
        return rows
    return _MOVEDIM(rows, -1, axis).view(x.shape) if x.dim() else rows.view(())


def _call_custom(function: Rounder, x: Tensor, format: Format) -> Tensor:
    """Returns what the user's function does.

    Raises:
        OptionError: That is no tensor of the same shape and dtype.
    """
    found = function(x)
    if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype != x.dtype:
        what = (
            f"{found.dtype} of shape {tuple(found.shape)}"
            if isinstance(found, Tensor)
            else type(found).__name__
        )
        raise OptionError(
            f"format {format.name}: its quantize must return {x.dtype} of shape {tuple(x.shape)}, "
            f"as it was given, not {what}"
        )
    return found
