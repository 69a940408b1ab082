"""How near to float64 an op comes, in its results and gradients: legalized, and in torch's own kernels.

The exact values are those of float64 on the same inputs, which are rounded to bfloat16 first. An
element is compared where the op in fp32 gives the exact value to an eighth of an ulp of bfloat16. Where
it doesn't, as with signs of singular vectors, random numbers that are drawn per dtype, memory that was
never written, sums that cancel and iterations that stop early, there is no one right answer that less
precision could be near to.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo

import hmpx
from hmpx import Policy
from tests.integration.test_opinfo_conformance import current, op_name, uncalled
from tests.samples import sample_inputs
from tests.values import mapped, tensors

LOW, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
#: Sums near zero: elements of less than this share of the greatest are as exact as one of that size.
NEAR_ZERO = 2.0**-10
EIGHTH = 0.125
#: Where torch has no kernel to compare with: what is more off than this share of the greatest element
#: comes of a wrong formula, not of rounding.
COARSE = 2.0**-4


@dataclass(frozen=True)
class Outcome:
    """What a call gave.

    Attributes:
        found: Floating results, then gradients, as real tensors; None for those that there are not.
        error: What it raised instead.
    """

    found: tuple[Tensor | None, ...] = ()
    error: str | None = None


@dataclass
class Tally:
    """What comparisons came to.

    Attributes:
        compared: Tensors that were compared in some element.
        apart: Tensors without any: fp32 and float64 differ all over.
        without_native: Calls for which torch has no low-precision kernel.
        worse: What is less exact than torch's kernel by more than an ulp, by how many; for want of
            one, by more than `COARSE`.
        non_finite: What is inf or NaN where torch's kernel gives a number.
        raised: What raises where torch's kernel, or for want of one the op in fp32, runs.
    """

    compared: int = 0
    apart: int = 0
    without_native: int = 0
    worse: list[str] = dataclasses.field(default_factory=list)
    non_finite: list[str] = dataclasses.field(default_factory=list)
    raised: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Adds what another one counted."""
        for field in dataclasses.fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)


def run(function: Callable[..., Any], call: Any, *, dtype: torch.dtype) -> Outcome:
    """Calls ``function`` on bfloat16 numbers in ``dtype``, and computes the gradients of its inputs."""

    def own(tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.float32 or tensor.layout is not torch.strided:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return tensor.detach().to(LOW).to(dtype).requires_grad_(tensor.requires_grad)

    with hmpx.disable_casts():
        call = mapped(call, own)
        leaves = [t for t in tensors(call) if t.requires_grad]
    torch.default_generator.manual_seed(0)
    try:
        results = [t for t in tensors(function(*call)) if t.layout is torch.strided]
        results = [t for t in results if t.is_floating_point() or t.is_complex()]
        with hmpx.disable_casts():
            learning = [t for t in results if t.requires_grad]
            gradients: tuple[Tensor | None, ...] = ()
            if learning and leaves:
                incoming = [_incoming(t, seed) for seed, t in enumerate(learning)]
                gradients = torch.autograd.grad(learning, leaves, incoming, allow_unused=True)
            found = (None if t is None else t.detach() for t in (*results, *gradients))
            return Outcome(tuple(found))
    except Exception as error:  # whatever the op raises is the outcome
        return Outcome(error=f"{type(error).__name__}: {str(error).splitlines()[:1]}")


def _incoming(result: Tensor, seed: int) -> Tensor:
    """Returns a gradient that bfloat16 represents."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(result.shape, generator=generator) + 0.5
    signs = torch.where(torch.rand(result.shape, generator=generator) < 0.5, -1.0, 1.0)
    return (values * signs).to(LOW).to(result.dtype)


def _real(tensor: Tensor) -> Tensor:
    is_complex = tensor.layout is torch.strided and tensor.is_complex()
    return torch.view_as_real(tensor.resolve_conj()) if is_complex else tensor


def ulps(actual: Tensor, exact: Tensor) -> Tensor:
    """Returns how far each element is from the exact one, in ulps of bfloat16 there: [...] float64."""
    finite = exact[exact.isfinite()]
    least = float(finite.abs().max()) * NEAR_ZERO if finite.numel() else 0.0
    magnitude = exact.abs().clamp(min=max(least, torch.finfo(LOW).smallest_normal))
    ulp = torch.ldexp(torch.ones_like(exact), torch.frexp(magnitude).exponent - 8)
    return (actual.double() - exact).abs() / ulp


def compare(what: str, legalized: Outcome, native: Outcome, wide: Outcome, exact: Outcome) -> Tally:
    """Returns how a legalized call compares with torch's kernel, the op in fp32, and in float64."""
    tally = Tally()
    if wide.error is not None:
        return tally  # no program does that
    if native.error is not None:
        tally.without_native = 1
    if legalized.error is not None:
        if legalized.error != native.error:
            tally.raised.append(f"{what}: {legalized.error}")
        return tally
    if exact.error is not None:
        return tally
    natives = wide.found if native.error is not None else native.found
    found = zip(legalized.found, natives, wide.found, exact.found, strict=True)
    for position, several in enumerate(found):
        where = f"{what}, tensor {position}"
        present = [_real(tensor) for tensor in several if tensor is not None]
        if len(present) not in {0, len(several)}:
            tally.raised.append(f"{where}: only some of them have this gradient")
        if len(present) < len(several):
            continue
        a, b, c, e = present
        if a.layout is not torch.strided or not a.numel():
            continue
        if a.shape != b.shape or (native.error is None and a.dtype is not b.dtype):
            tally.raised.append(f"{where}: {a.dtype} {a.shape}, not {b.dtype} {b.shape}")
            continue
        if bool((~a.isfinite() & b.isfinite() & c.isfinite()).any()):
            tally.non_finite.append(where)
        if e.dtype is not torch.float64:
            tally.apart += 1  # its dtype is asked for by name
            continue
        is_known = e.isfinite() & b.isfinite() & a.isfinite() & (ulps(c, e) <= EIGHTH)
        if not bool(is_known.any()):
            tally.apart += 1
            continue
        tally.compared += 1
        if native.error is None:
            by = float((ulps(a, e) - ulps(b, e))[is_known].max())
        else:
            scale = float(e[is_known].abs().max())
            by = float((a.double() - e)[is_known].abs().max()) / (COARSE * scale) if scale else 0.0
        if by > 1:
            tally.worse.append(f"{where}: {by:.2f}")
    return tally


def samples(info: OpInfo, few: bool) -> list[Any]:
    """Returns (input, args, kwargs) of the op's samples; of the first and one more, for ``few``."""
    torch.default_generator.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sample_inputs(info, requires_grad=info.supports_autograd)
        calls = [
            (s.input, tuple(s.args), s.kwargs) for s in itertools.islice(found, 6 if few else None)
        ]
    return [calls[0], *calls[1:][-1:]] if few else calls


#: How many OpInfos one conversion serves: to convert takes longer than to call an op.
BATCH = 50


def compared(
    infos: Sequence[OpInfo], modes: tuple[str, ...], *, few: bool
) -> Iterator[tuple[str, Tally]]:
    """Yields mode -> how the samples of some ops compare in it."""
    for start in range(0, len(infos), BATCH):
        yield from _compared(infos[start : start + BATCH], modes, few=few)


def _compared(
    infos: Sequence[OpInfo], modes: tuple[str, ...], *, few: bool
) -> Iterator[tuple[str, Tally]]:
    calls = [samples(info, few) for info in infos]
    known = [
        [
            tuple(run(uncalled(info.op), call, dtype=dtype) for dtype in (LOW, FP32, FP64))
            for call in of_op
        ]
        for info, of_op in zip(infos, calls, strict=True)
    ]
    names = [op_name(info) for info in infos]
    low = sorted({name for name in names if name is not None})
    assert None not in names
    for mode in modes:
        with hmpx.convert(policy=Policy.from_ops(low=low), legalize=mode):
            legalized = [
                [run(current(info.op), call, dtype=LOW) for call in of_op]
                for info, of_op in zip(infos, calls, strict=True)
            ]
        tally = Tally()
        for info, found, others in zip(infos, legalized, known, strict=True):
            for index, (outcome, expected) in enumerate(zip(found, others, strict=True)):
                tally.add(compare(f"{info.full_name}, sample {index}", outcome, *expected))
        yield mode, tally
