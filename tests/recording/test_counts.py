"""Counts of `hmpx.record`, against what torch's dispatcher sees."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import hmpx
from tests.recording.models import MODELS

aten = torch.ops.aten

#: ATen's products, and how they differ between dtypes: what an independent count can be made of.
PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten.convolution.default,
}  # fmt: skip


class Counter(TorchDispatchMode):
    """Counts casts between floating dtypes, with the bytes that they write, and products by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = self.cast_bytes = 0
        self.products: collections.Counter[torch.dtype] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is aten._to_copy.default:
            dtypes = {args[0].dtype, result.dtype}
            if len(dtypes) == 2 and all(dtype.is_floating_point for dtype in dtypes):
                self.casts += 1
                self.cast_bytes += result.numel() * result.dtype.itemsize
        elif func in PRODUCTS:
            self.products[result.dtype] += 1
        return result


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_casts_are_exact(name: str) -> None:
    """Forward and backward, those of hmpx and the program's own."""
    program = MODELS[name]()
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        with Counter() as forward:
            loss = program()
        with Counter() as backward:
            loss.backward()
        with hmpx.record() as rec:
            program().backward()
    rows = rec.rows
    found = {
        phase: (
            sum(row.casts for row in rows if (row.phase == "backward") is (phase == "backward")),
            sum(
                row.cast_bytes for row in rows if (row.phase == "backward") is (phase == "backward")
            ),
        )
        for phase in ("forward", "backward")
    }
    recomputed = sum(row.casts for row in rows if row.phase == "recompute")
    recomputed_bytes = sum(row.cast_bytes for row in rows if row.phase == "recompute")
    assert found["forward"] == (
        forward.casts + recomputed,
        forward.cast_bytes + recomputed_bytes,
    )
    assert found["backward"] == (
        backward.casts - recomputed,
        backward.cast_bytes - recomputed_bytes,
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("legalize", ["never", "always"])
@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_of_torchs_counter(name: str, legalize: str) -> None:
    """Whatever kernels compute: a legalized product counts as one in low precision."""
    program = MODELS[name]()
    with sdpa_kernel(SDPBackend.MATH), hmpx.convert(device_types={"cpu"}, legalize=legalize):
        with FlopCounterMode(display=False) as counter:
            program().backward()
        with hmpx.record() as rec:
            program().backward()
    assert rec.report().totals.flops == counter.get_total_flops()
    assert rec.report().totals.low_flops == counter.get_total_flops()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_products_in_low_precision_are_exact(name: str) -> None:
    """Each is one call, in the dtype that the kernel returns."""
    program = MODELS[name]()
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        with Counter() as counter:
            program()
        with hmpx.record() as rec:
            program()
    found: collections.Counter[torch.dtype] = collections.Counter()
    for row in rec.rows:
        if row.flops:
            found[getattr(torch, row.output_dtypes[0])] += row.calls
    assert found == counter.products
