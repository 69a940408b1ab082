"""Masks of finite numbers that a low-precision dtype does not hold: wholly masked rows are those of fp32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hmpx
from hmpx import ops
from tests.fake_cuda import steps

BF16, FP16 = torch.bfloat16, torch.float16
LOWEST = torch.finfo(torch.float32).min
VALUES = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
KEYS = VALUES.transpose(1, 2)
TABLE = nn.Parameter(VALUES[0, :, :6].clone())

DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


def masked() -> Tensor:
    """Returns a mask with wholly masked rows, in fp32; one row has only infinite numbers but one."""
    mask = torch.zeros(4, 6, 6)
    mask[0, :2] = LOWEST
    mask[1, :, 4:] = LOWEST
    mask[2, 3, 1:] = -math.inf
    return mask


def attended(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1) @ VALUES


def multi_head(mask: Tensor, *, need_weights: bool) -> Tensor:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True), VALUES[:2]
    return layer(x, x, x, attn_mask=mask, need_weights=need_weights)[0]  # type: ignore[no-any-return]


def biased(mask: Tensor) -> Tensor:
    """Returns attention as T5's: a learned bias and a mask, added in place."""
    bias = F.embedding(torch.arange(6), TABLE) + mask
    scores = torch.bmm(VALUES, KEYS)
    scores += bias
    return attended(scores)


def subtracted(mask: Tensor) -> Tensor:
    scores = torch.bmm(VALUES, KEYS)
    return attended(scores.sub_(-mask))


def assigned(mask: Tensor) -> Tensor:
    scores = torch.bmm(VALUES, KEYS)
    hidden = mask < 0
    scores[hidden] = mask[hidden]
    return attended(scores)


def scattered(mask: Tensor) -> Tensor:
    scores = torch.bmm(VALUES, KEYS)
    return attended(scores.scatter_(0, torch.arange(4)[:, None, None].expand(4, 6, 6), mask))


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "MultiheadAttention": lambda mask: multi_head(mask, need_weights=False),
    "MultiheadAttention, weights": lambda mask: multi_head(mask, need_weights=True),
    "baddbmm": lambda mask: attended(torch.baddbmm(mask, VALUES, KEYS)),
    "Tensor.baddbmm": lambda mask: attended(mask.baddbmm(VALUES, KEYS)),
    "baddbmm by name": lambda mask: attended(torch.baddbmm(input=mask, batch1=VALUES, batch2=KEYS)),
    "addmm": lambda mask: attended(torch.addmm(mask[0], VALUES[0], KEYS[0]).expand(4, 6, 6)),
    "attention": lambda mask: F.scaled_dot_product_attention(
        VALUES, VALUES, VALUES, attn_mask=mask
    ),
    "T5's bias": biased,
    "sub_": subtracted,
    "assignment": assigned,
    "scatter_": scattered,
}


def result_and_gradient(way: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    mask = masked().requires_grad_()
    result = way(mask).float()
    (gradient,) = torch.autograd.grad(result.square().sum(), mask)
    return result.detach(), gradient


def assert_like_fp32(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Compares results and gradients with those of fp32."""
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)


@DTYPES
@pytest.mark.parametrize("way", WAYS)
def test_masked_rows_are_those_of_fp32(way: str, dtype: torch.dtype) -> None:
    expected = result_and_gradient(WAYS[way])
    assert expected[0].isfinite().all()
    with hmpx.convert(low_precision_type=dtype, device_types={"cpu"}):
        assert_like_fp32(result_and_gradient(WAYS[way]), expected)
        with torch.no_grad():
            assert_like_fp32((WAYS[way](masked()).float(),), expected[:1])


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch.func.jvp
@DTYPES
@pytest.mark.parametrize("way", ["baddbmm", "attention", "T5's bias", "assignment"])
def test_masked_rows_are_those_of_fp32_in_graphs_and_transforms(
    way: str, dtype: torch.dtype
) -> None:
    function = WAYS[way]
    (expected, *_), mask = result_and_gradient(function), masked()

    class Module(nn.Module):
        def forward(self, mask: Tensor) -> Tensor:
            return function(mask)

    with hmpx.convert(low_precision_type=dtype, device_types={"cpu"}), torch.no_grad():
        found = [
            torch.compile(function, backend="aot_eager")(mask),
            torch.export.export(Module(), (mask,)).module()(mask),
        ]
        with sdpa_kernel(SDPBackend.MATH):  # CPUs' other one has no tangents
            found.append(torch.func.jvp(function, (mask,), (torch.ones_like(mask),))[0])
    if dtype is FP16 and way == "attention":
        # Transforms cast the mask. Scores show next to one of -65504; a row of -inf would give 0.
        transformed = found.pop()
        assert not (transformed[0] == 0).all(-1).any()
        torch.testing.assert_close(transformed[1:].float(), expected[1:], rtol=0.03, atol=0.03)
    for result in found:
        assert_like_fp32((result.float(),), (expected,))


@DTYPES
def test_infinities_nan_and_signs_of_a_mask_stay(dtype: torch.dtype) -> None:
    mask = torch.tensor([[math.inf, -math.inf, math.nan, -LOWEST, LOWEST, 1.0]])
    largest = torch.finfo(dtype).max
    expected = torch.tensor([[math.inf, -math.inf, math.nan, largest, -largest, 1.0]]).to(dtype)
    target = torch.zeros(1, 6, dtype=dtype)
    with hmpx.convert(low_precision_type=dtype, device_types={"cpu"}):
        product = torch.addmm(mask, torch.zeros(1, 2), torch.zeros(2, 6))
        target += mask
    torch.testing.assert_close(product, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(target, expected, rtol=0, atol=0, equal_nan=True)


@DTYPES
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_attention_on_cpus_takes_the_mask_in_fp32(needs_gradient: bool, dtype: torch.dtype) -> None:
    """There torch's kernels accept it: nothing is cast, and nothing of the mask is rounded."""
    mask = (masked() + VALUES[:, :, :6]).requires_grad_(needs_gradient)
    low = VALUES.to(dtype)
    with steps.Kernels("cpu") as by_torch:
        expected = F.scaled_dot_product_attention(low, low, low, attn_mask=mask)
    for arguments, named in [((mask,), {}), ((), {"attn_mask": mask})]:
        with (
            hmpx.convert(low_precision_type=dtype, device_types={"cpu"}, legalize="never"),
            steps.Kernels("cpu") as counted,
        ):
            found = F.scaled_dot_product_attention(low, low, low, *arguments, **named)
        assert counted.list == by_torch.list
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@DTYPES
def test_what_a_program_assigns_is_cast_as_by_torch(dtype: torch.dtype) -> None:
    """Where an index is a tensor, torch refuses fp32: that cast is of hmpx."""
    mask = masked()
    ways: list[Callable[[Tensor], Any]] = [
        lambda x: x.__setitem__(0, mask[0]),
        lambda x: x.__setitem__((0, 1, 2), mask[0, 0, 0]),
        lambda x: x.__setitem__((..., slice(None), 4), mask[..., 4]),
        lambda x: x.__setitem__((None, slice(2)), mask[:2]),
        lambda x: x.__setitem__((torch.tensor(0), slice(None)), mask[0]),
        lambda x: x.copy_(mask),
    ]
    for way in ways:
        expected, found = torch.zeros(2, 4, 6, 6, dtype=dtype)
        way(expected)
        with hmpx.convert(low_precision_type=dtype, device_types={"cpu"}):
            way(found)
        assert expected.isinf().any()
        assert torch.equal(found, expected)


def kernels_of_a_masked_product(needs_gradient: bool) -> list[list[str]]:
    """Returns the kernels of its forward and backward on a fake CUDA device."""
    with steps.fake("cuda"), hmpx.convert(device_types={"cuda"}):
        mask, low = torch.zeros(4, 4), torch.zeros(4, 4, dtype=BF16)
        with steps.Kernels("cuda") as forward:
            product = torch.addmm(mask.requires_grad_(needs_gradient), low, low)
        with steps.Kernels("cuda") as backward:
            if needs_gradient:
                torch.autograd.grad(product, mask, low)
    return [[str(kernel) for kernel in counted.list] for counted in (forward, backward)]


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_mask_takes_one_kernel_more_than_its_cast_on_accelerators(
    needs_gradient: bool, on_fake_cuda: Callable[..., Any]
) -> None:
    forward, backward = on_fake_cuda(kernels_of_a_masked_product, needs_gradient)
    assert forward == [
        "clamp float32 -> float32",
        "add float32,float32,bfloat16 -> bfloat16",
        "addmm bfloat16,bfloat16,bfloat16 -> bfloat16",
    ]
    assert backward == (["_to_copy bfloat16 -> float32"] if needs_gradient else [])


def dtype_of_mapped_attention(needs_gradient: bool) -> str:
    """Returns the dtype of attention with a batch of masks in vmap, on a fake CUDA device."""
    with steps.fake("cuda"), hmpx.convert(device_types={"cuda"}):
        low = torch.zeros(1, 4, 4, dtype=BF16)
        masks = torch.zeros(3, 4, 4).requires_grad_(needs_gradient)
        attention = functools.partial(F.scaled_dot_product_attention, low, low, low)
        return str(torch.vmap(lambda mask: attention(attn_mask=mask))(masks).dtype)


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_batch_of_masks_on_accelerators(
    needs_gradient: bool, on_fake_cuda: Callable[..., Any]
) -> None:
    """Where vmap maps the mask, no sum can cast by ``out=``."""
    assert on_fake_cuda(dtype_of_mapped_attention, needs_gradient) == "torch.bfloat16"


def test_a_bfloat16_mask_stays_finite_in_float16() -> None:
    mask = torch.full((2, 2), torch.finfo(BF16).min, dtype=BF16)
    with hmpx.convert(low_precision_type=FP16, device_types={"cpu"}):
        product = torch.addmm(mask, torch.zeros(2, 2), torch.zeros(2, 2))
    assert product.unique().tolist() == [torch.finfo(FP16).min]


def test_a_sum_is_torchs_where_casts_are_off() -> None:
    target, mask = torch.zeros(2, dtype=BF16), torch.full((2,), LOWEST)
    with hmpx.convert(device_types={"cpu"}), hmpx.disable_casts():
        target += mask
    assert target.isinf().all()


def test_all_products_and_attentions_of_torch_that_take_a_mask_are_known() -> None:
    """An op with an argument called a mask, or with a term that ``beta`` scales, clamps it."""
    found = {
        name
        for name, op in ops.table().items()
        for site in op.sites
        if ops.masks(ops.parameters(site).names)
    }
    products = {n for n in ops.table() if n.startswith("add") and ops.kind(n)[0] == "gemm"}
    assert products <= found
    assert {"baddbmm", "addr", "scaled_dot_product_attention", "masked_scatter"} <= found
    assert not found & {"linear", "local_response_norm", "celu"}
    in_place = {
        name
        for name, op in ops.table().items()
        for site in op.sites
        if site.in_place and {"self", "other", "alpha"} == {*ops.parameters(site).names}
    }
    assert in_place - {n for n in in_place if n[0] == "_"} == {*ops.facts("sums")}
