"""Each op of OpInfo under the default lists is at least as right as under torch.autocast's CUDA policy.

The inputs are low, or low and fp32 mixed; the truth is the op in fp64 on the same numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo

import hmpx
from tests.integration.test_opinfo_conformance import INFOS
from tests.samples import sample_inputs, spread
from tests.values import FP32, FP64, mapped, tensors

LOW = torch.bfloat16
#: Follow their input, and round once what is fp32 inside; torch.autocast returns fp32.
NORMS = {"nn.functional.layer_norm", "nn.functional.group_norm", "nn.functional.rms_norm"}
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


def outputs(info: OpInfo, call: Any) -> list[Tensor] | None:
    """Returns the op's floating and complex outputs; None where it raises an error."""
    torch.manual_seed(0)
    first, args, kwargs = mapped(call, torch.clone)
    try:
        found = info.op(first, *args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    return [t for t in tensors(found) if t.is_floating_point() or t.is_complex()]


def error(actual: Tensor, exact: Tensor) -> float:
    """Returns the norm of the difference over the norm, where the truth is finite."""
    known = exact.isfinite()
    exact = exact[known]
    return float((actual.to(exact.dtype)[known] - exact).norm() / exact.norm().clamp_min(1e-30))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.full_name)
def test_no_less_right_than_autocast(info: OpInfo) -> None:
    """No narrower result, no larger error, and no stop, where torch.autocast's lists have none."""
    samples = [(s.input, s.args, s.kwargs) for s in sample_inputs(info, FP32)]
    calls = [
        with_dtypes(sample, *dtypes)
        for sample in spread(samples, 4)
        for dtypes in ((LOW, LOW), (LOW, FP32), (FP32, LOW))
    ]
    exact = [
        outputs(info, mapped(call, lambda t: t.to(FP64) if t.is_floating_point() else t))
        for call in calls
    ]
    with hmpx.convert(lists="autocast-cuda"):
        peers = [outputs(info, call) for call in calls]
    with hmpx.convert():
        mine = [outputs(info, call) for call in calls]
    for call, truths, theirs, ours in zip(calls, exact, peers, mine, strict=True):
        if truths is None or theirs is None:
            continue
        assert ours is not None, call
        for truth, their, our in zip(truths, theirs, ours, strict=True):
            peer = their.to(our.dtype) if info.full_name in NORMS else their
            if info.full_name not in SELECTING:
                assert torch.promote_types(our.dtype, peer.dtype) is our.dtype, call
            if truth.layout is torch.strided and truth.shape == peer.shape:
                assert not error(our, truth) > 1.1 * error(peer, truth) + 1e-5, call
