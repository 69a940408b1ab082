"""Each op of OpInfo under the default lists is at least as right as under torch.autocast's CUDA policy.

The inputs are low, or low and fp32 mixed; the truth is the op in fp64 on the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo

import hmpx
from tests.integration.test_opinfo_conformance import INFOS, current
from tests.samples import sample_inputs, spread
from tests.values import FP32, FP64, mapped, tensors

LOW = torch.bfloat16
#: Return values of their input, which torch.autocast only puts into a wider type.
SELECTING = {"nn.functional.interpolate.nearest", "nn.functional.interpolate.nearest-exact"}

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.opinfo,
    pytest.mark.usefixtures("no_search_for_early_names"),
]


def with_dtypes(call: Any, first: torch.dtype, rest: torch.dtype) -> Any:
    """Returns a call whose first dense fp32 tensor has one dtype, and the others the other."""
    dtypes = iter((first,))

    def cast(t: Tensor) -> Tensor:
        is_cast = t.dtype is FP32 and t.layout is torch.strided
        return t.detach().to(next(dtypes, rest)) if is_cast else t

    return mapped(call, cast)


def results(
    op: Callable[..., Any],
    call: Any,
    with_gradients: bool,
    region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> list[Tensor] | None:
    """Returns the op's floating and complex outputs, or the gradients of their sum; None after an error.

    The backward runs outside of the ``region``, as torch advises.
    """
    torch.manual_seed(0)
    first, args, kwargs = mapped(call, torch.clone)
    leaves = [t for t in tensors((first, args, kwargs)) if t.is_floating_point()]
    for leaf in leaves if with_gradients else ():
        leaf.requires_grad_()
    try:
        with region():
            found = tensors(op(first, args, kwargs))
            outputs = [t for t in found if t.is_floating_point() or t.is_complex()]
        if not with_gradients:
            return outputs
        ends = [t for t in outputs if t.requires_grad]
        ones = [torch.ones_like(t) for t in ends]
        gradients = torch.autograd.grad(ends, leaves, ones, allow_unused=True) if ends else ()
        return [g for g in gradients if g is not None]
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None


def is_narrower(actual: Tensor, expected: Tensor) -> bool:
    """Returns whether a result's dtype does not hold all values of the expected one's."""
    return torch.promote_types(actual.dtype, expected.dtype) is not actual.dtype


def error(actual: Tensor, exact: Tensor) -> float:
    """Returns the norm of the difference over the norm, where the truth is finite."""
    known = exact.isfinite()
    exact = exact[known]
    return float((actual.to(exact.dtype)[known] - exact).norm() / exact.norm().clamp_min(1e-30))


def less_right(
    info: OpInfo,
    region: Callable[[], contextlib.AbstractContextManager[Any]],
    device: str = "cpu",
    with_gradients: bool = False,
) -> list[str]:
    """Returns each call that stops, has a narrower result than in ``region`` or alone, or a larger error."""
    op = current(info.op)  # as a program spells it: OpInfo has kept functions from before `convert`
    samples = [(s.input, s.args, s.kwargs) for s in sample_inputs(info, FP32)]
    calls = [
        mapped(with_dtypes(sample, *dtypes), lambda t: t.to(device))
        for sample in spread(samples, 4)
        for dtypes in ((LOW, LOW), (LOW, FP32), (FP32, LOW))
    ]
    exactly = [mapped(c, lambda t: t.to(FP64) if t.is_floating_point() else t) for c in calls]
    exact = [results(op, call, with_gradients) for call in exactly]
    alone = [results(op, call, with_gradients) for call in calls]
    peers = [results(op, call, with_gradients, region) for call in calls]
    with hmpx.convert():
        mine = [results(op, call, with_gradients) for call in calls]
    found = []
    for call, truths, plain, theirs, ours in zip(calls, exact, alone, peers, mine, strict=True):
        dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors(call)]
        name = f"{info.full_name} of {dtypes}"
        if ours is None:
            found += [] if plain is theirs is None else [f"{name}: stops"]
            continue
        for each, our in zip(plain or [], ours, strict=plain is not None):
            if is_narrower(our, each):
                found.append(f"{name}: {our.dtype}, and {each.dtype} without a conversion")
        dimensions = [t.dim() for t in tensors(call) if t.is_floating_point()]
        if truths is None or theirs is None or (0 in dimensions and any(dimensions)):
            continue  # numbers in tensors decide nothing, as torch promotes; under torch.autocast they do
        for truth, their, our in zip(truths, theirs, ours, strict=True):
            if is_narrower(our, their) and info.full_name not in SELECTING:
                found.append(f"{name}: {our.dtype} instead of {their.dtype}")
            if truth.layout is torch.strided and truth.shape == their.shape:
                errors = error(our, truth), error(their, truth)
                if errors[0] > 1.1 * errors[1] + 1e-5:
                    found.append(f"{name}: error {errors[0]:.1e} instead of {errors[1]:.1e}")
    return found


@pytest.mark.sampled(45)
@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.full_name)
def test_no_less_right_than_autocast(info: OpInfo) -> None:
    """No narrower result, no larger error, and no stop, where torch.autocast's lists have none."""
    assert not less_right(info, lambda: hmpx.convert(lists="autocast-cuda"))
