"""Formats whose values share scales: against slow definitions, and on hostile tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hmpx import OptionError, formats
from hmpx.formats import Block, Fixed, Float, Scaled, Table, decode, encode, get, quantize
from hmpx.number_formats import ROUNDING_MODES, rounder

from .scaled_reference import quantized
from .test_quantize import (
    FLUSHED,
    NF4,
    assert_same,
    find_library,
    implementation,  # noqa: F401  # a fixture
    name_of,
    quiet,
)

E4M3 = get("float8_e4m3fn")
E2M1 = get("float4_e2m1fn")
INT8 = Fixed("integer8", 8, 0)
assert isinstance(E4M3, Float)
assert isinstance(E2M1, Float)

ELEMENTS: tuple[Float | Fixed | Table, ...] = (E4M3, E2M1, INT8, Fixed("q2_6", 2, 6), NF4)
GRANULARITIES = ("tensor", "row", "column", 1, 4, 16, (2, 3), (16, 16))
SCALES = (("float32", False), ("e8m0", False), ("e4m3", False), ("e4m3", True))
SHIPPED = (
    *("nvfp4", "float8_e4m3fn_tensor", "float8_e4m3fn_row", "float8_e4m3fn_block128"),
    *("float8_e4m3fn_block128x128", "float8_e5m2_tensor"),
    *("float8_e4m3fn_delayed", "float8_e5m2_delayed"),
    *("int8", "int8_row", "int4", "int4_row", "int4_block128"),
)


def scaled(name: str) -> Scaled:
    """Returns a registered format."""
    format = get(name)
    assert isinstance(format, Scaled)
    return format


@st.composite
def cases(draw: st.DrawFn) -> tuple[Scaled, Tensor]:
    """Returns any format, and a tensor that has its axis."""
    scale_format, tensor_scale = draw(st.sampled_from(SCALES))
    shape = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    format = Scaled(
        "any",
        draw(st.sampled_from(ELEMENTS)),
        draw(st.sampled_from(GRANULARITIES)),  # type: ignore[arg-type]
        scale_format,  # type: ignore[arg-type]
        tensor_scale=tensor_scale,
        axis=draw(st.integers(-len(shape), len(shape) - 1)),
    )
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0, 3, 60]))
    x = generator.standard_normal(shape) * 2.0 ** generator.integers(-spread, spread + 1, shape)
    x[generator.random(shape) < 0.1] = 0.0
    if draw(st.booleans()):  # so that amaxes are powers of two, and quotients ties
        x = np.exp2(np.round(np.log2(np.abs(x) + 1e-9))) * np.sign(x)
    return format, torch.from_numpy(x.astype(np.float32))


@given(cases())
@settings(deadline=None, max_examples=80)
def test_as_the_definition(case: tuple[Scaled, Tensor]) -> None:
    """Bit for bit; codes give the same values back, and the format's own scales do when they are given."""
    format, x = case
    rounded = quantize(x, format)
    expected = torch.from_numpy(quantized(x.numpy(), format))
    if isinstance(format.element, Float):
        assert_same(rounded, expected, x)
    else:
        assert torch.equal(rounded, expected)
    parts = encode(x, format)
    assert_same(decode(parts, format), rounded, x)
    assert parts[1].shape == format.scale_shape(x.shape) or format.tensor_scale
    assert_same(quantize(x, format, scale=format.scale(format.amax(x))), rounded, x)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_formats_as_defined(name: str, implementation: str) -> None:  # noqa: F811
    """With kernels and without."""
    format = scaled(name)
    x = torch.randn(6, 300) * torch.exp2(torch.randint(-9, 9, (6, 300)).float())
    expected = torch.from_numpy(quantized(x.numpy(), format))
    assert torch.equal(quantize(x, name), expected)
    assert quantize(quantize(x, name).t(), format.along(0)).stride() == (1, 300)


def rounded_by(x: Tensor, format: Scaled | Block, mode: str, kernels: bool) -> Tensor:
    """Returns ``x`` rounded by the kernel, or by torch ops."""
    run = rounder(copy.copy(format), mode)  # with plans and kernels of its own
    if not kernels:
        run.plan(x.dtype).function = None  # type: ignore[attr-defined]
    return run(x, torch.Generator().manual_seed(0))  # type: ignore[call-arg]


@pytest.mark.parametrize("mode", ROUNDING_MODES)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("element", (*ELEMENTS, FLUSHED), ids=name_of)
def test_kernels_as_torch_ops(element: Float, granularity: str, mode: str) -> None:
    """Bit for bit, in all modes, of all scales, in other strides, and what is not finite."""
    if find_library() is None:
        pytest.skip("hmpx was installed without a C compiler")
    x = torch.randn(3, 18, 70) * torch.exp2(torch.randint(-40, 40, (3, 18, 70)).float())
    x[1, :, :40], x[2, 5], x[2, 6, 8], x[2, 10, 7], x[2, 17, 7] = (
        0.0,
        1e-41,
        2.0**126,
        math.nan,
        math.inf,
    )
    for scale_format, tensor_scale in SCALES:
        format = Scaled("f", element, granularity, scale_format, tensor_scale=tensor_scale)  # type: ignore[arg-type]
        for part in (x, x[1].t()):
            found = rounded_by(part, format, mode, kernels=True)
            assert_same(found, rounded_by(part, format, mode, kernels=False), part)


@pytest.mark.parametrize("scale_format", ["float32", "e8m0", "e4m3"])
@pytest.mark.parametrize("element", ELEMENTS, ids=name_of)
def test_what_is_not_finite(
    element: Float | Fixed | Table,
    scale_format: str,
    implementation: str,  # noqa: F811
) -> None:
    """Makes NaN of all that shares its scale, and of nothing else; in codes too."""
    format = Scaled("f", element, 4, scale_format)  # type: ignore[arg-type]
    x = torch.randn(4, 12)
    x[0, 5], x[1, 0], x[2, 11] = math.inf, math.nan, -math.inf
    rounded = quantize(x, format)
    expected = torch.zeros(4, 12, dtype=torch.bool)
    expected[0, 4:8] = expected[1, :4] = expected[2, 8:] = True
    assert torch.equal(rounded.isnan(), expected)
    assert_same(decode(encode(x, format), format), rounded, x)
    assert torch.equal(format.amax(x).isnan(), expected[:, ::4])
    flipped = encode(x.where(x.isfinite(), -x), format)[0]  # NaNs of the other sign
    assert torch.equal(flipped[expected], encode(x, format)[0][expected])
    assert quantize(x, Scaled("t", element, "tensor", scale_format)).isnan().all()  # type: ignore[arg-type]
    if scale_format == "e4m3":
        assert quantize(x, Scaled("t", element, 4, "e4m3", tensor_scale=True)).isnan().all()


@pytest.mark.parametrize("name", SHIPPED)
def test_zeros_and_the_smallest(name: str, implementation: str) -> None:  # noqa: F811
    """Zeros stay zeros, with their sign where the element has one; nothing divides by zero."""
    format = scaled(name)
    zeros = torch.tensor([[0.0, -0.0] * 70])
    rounded = quantize(zeros, name)
    assert_same(rounded, zeros if isinstance(format.element, Float) else zeros.abs(), zeros)
    for value in (1e-45, 1e-42, 2.0**-126, 1e-30):
        x = torch.tensor([[value, -value, 0.0]])
        found = quantize(x, name)
        assert (found.abs() <= value * 2).all()
        assert found.isfinite().all()
        assert_same(decode(encode(x, name), name), found, x)
    assert quantize(torch.tensor([1e-30]), name).item() == pytest.approx(1e-30, rel=0.1)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_shapes(granularity: str) -> None:
    """No values, no dimensions, sizes that don't divide; an axis that is not there is an error."""
    format = Scaled("f", E2M1, granularity, "e4m3", tensor_scale=True)  # type: ignore[arg-type]
    for shape in ((0,), (0, 5), (5, 0), (2, 0, 3)):
        empty = torch.empty(shape)
        assert quantize(empty, format).shape == shape
        assert decode(encode(empty, format), format).shape == shape
    for element in (2.5, math.nan):
        x = torch.tensor(element)
        assert_same(decode(encode(x, format), format), quantize(x, format), x)
    turned = format.along(2)
    if granularity == "tensor":
        assert turned is format
        return
    message = r"blocks lie along axis 2, which a tensor of shape \(3, 4\) lacks"
    for call in (quantize, encode):
        with pytest.raises(OptionError, match=message):
            call(torch.ones(3, 4), turned)
    with pytest.raises(OptionError, match=message):
        Scaled("g", E2M1, granularity, axis=2).amax(torch.ones(3, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_and_strides(name: str, dtype: torch.dtype, implementation: str) -> None:  # noqa: F811
    """As float32, then in their own type; strides are kept."""
    x = torch.randn(40, 6, dtype=torch.float32).to(dtype)
    for given_ in (x, x.t(), x[::2], x[:, 1::2], x.t()[1:], x.expand(3, 40, 6)):
        found = quantize(given_, name)
        assert found.dtype is dtype
        assert found.shape == given_.shape
        if dtype is not torch.float64:
            expected = quantize(given_.float().contiguous(), name).to(dtype)
            assert_same(found, expected, given_)
    assert quantize(x.t(), name).stride() == x.t().stride()


@pytest.mark.parametrize("mode", ["toward_zero", "up", "down", "nearest_away", "stochastic"])
@pytest.mark.parametrize("name", SHIPPED)
def test_modes(name: str, mode: str, implementation: str) -> None:  # noqa: F811
    """Elements are rounded in the mode: to neighbours of the quotient, on the side that it says."""
    format = scaled(name)
    x = torch.randn(8, 256)
    x[0, :3] = torch.tensor([1e-44, -1e-44, 1e-20])
    found = quantize(x, format, mode, generator=torch.Generator().manual_seed(0))
    codes = encode(x, format, mode, generator=torch.Generator().manual_seed(0))
    assert_same(decode(codes, format), found, x)
    slack = x.abs() * 1e-6
    is_most = decode(codes[0], format.element).abs() == format.largest  # beyond it all saturates
    if mode == "up":
        assert (is_most | (found >= x - slack)).all()
        assert found[0, 0] > 0
    elif mode == "down":
        assert (is_most | (found <= x + slack)).all()
        assert found[0, 1] < 0
    elif mode == "toward_zero":
        assert (found.abs() <= x.abs() + slack).all()
    nearest = quantize(x, format)
    assert not torch.equal(found, nearest) or mode == "nearest_away"
    if mode == "stochastic":
        many = torch.stack([quantize(x, format, mode) for _ in range(200)])
        steps = (many.amax(0) - many.amin(0)).amax()
        assert (is_most | ((many.mean(0) - x).abs() <= steps * 0.2 + slack)).all()


@pytest.mark.parametrize("name", SHIPPED)
def test_traced(name: str) -> None:
    """In graphs of all kinds, bit for bit; a graph can make the scales, too."""
    format = scaled(name)
    x = torch.randn(3, 4, 130)

    def by_history(x: Tensor) -> Tensor:
        return quantize(x, format, scale=format.scale(format.amax(x)))

    functions: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: quantize(x, name), by_history)
    for function in functions:
        expected = function(x)
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), expected)
        assert torch.equal(make_fx(function)(x)(x), expected)
        with FakeTensorMode() as mode:
            fake = function(mode.from_tensor(x))
        assert fake.shape == x.shape
        each = torch.stack([function(part) for part in x])
        assert torch.equal(torch.vmap(function)(x), each)


@quiet
@pytest.mark.parametrize("name", ["nvfp4", "float8_e4m3fn_tensor", "int8_row"])
def test_gradients_pass(name: str) -> None:
    """Straight through, in both modes, with given scales too."""
    format = scaled(name)
    x = torch.randn(4, 32, requires_grad=True)
    scale = format.scale(format.amax(x)).requires_grad_()
    for rounded in (quantize(x, name), quantize(x, name, scale=scale)):
        weights = torch.randn(4, 32)
        (gradient,) = torch.autograd.grad((rounded * weights).sum(), x)
        assert torch.equal(gradient, weights)
    assert not rounder(format)(x).requires_grad
    _, tangent = torch.func.jvp(lambda x: quantize(x, name), (x,), (torch.ones(4, 32),))
    assert torch.equal(tangent, torch.ones(4, 32))


def test_given_scales() -> None:
    """As of an earlier, smaller tensor: what is beyond the largest element saturates."""
    format = scaled("float8_e4m3fn_tensor")
    earlier = torch.tensor([0.5, -4.48])
    scale = format.scale(format.amax(earlier))
    assert scale.item() == pytest.approx(0.01)
    x = torch.tensor([1.0, 100.0, -math.inf, math.nan, 0.0])
    found = quantize(x, format, scale=scale)
    most = np.float32(448) * scale.numpy()
    assert found[1].item() == -found[2].item() == most
    assert found[3].isnan()
    assert found[4].item() == 0
    assert torch.equal(
        found[:2] / scale, quantize(torch.tensor([1.0, 100.0]) / scale, E4M3, overflow="saturate")
    )
    int8 = scaled("int8")
    below = quantize(torch.tensor([-1000.0]), int8, scale=torch.tensor(1.0))
    assert below.item() == -127  # symmetric
    for useless in (0.0, -1.0, 1e-45):
        assert quantize(x, format, scale=torch.tensor(useless))[[0, 1, 4]].isfinite().all()
    assert quantize(x, format, scale=torch.tensor(math.nan)).isnan().all()
    nvfp4 = scaled("nvfp4")
    whole = torch.randn(4, 32) * 5
    parts = quantize(whole, nvfp4, scale=nvfp4.scale(torch.tensor(1000.0)))
    assert not torch.equal(parts, quantize(whole, nvfp4))
    assert (parts - whole).abs().max() < 0.2 * whole.abs().max()


def test_amaxes() -> None:
    """Of each granularity, in one shape with its scales."""
    x = torch.arange(24.0).reshape(4, 6) - 30
    expected = {
        "tensor": torch.tensor(30.0),
        "row": torch.tensor([[30.0], [24.0], [18.0], [12.0]]),
        "column": torch.tensor([[30.0, 29.0, 28.0, 27.0, 26.0, 25.0]]),
        4: torch.tensor([[30.0, 26.0], [24.0, 20.0], [18.0, 14.0], [12.0, 8.0]]),
        (3, 4): torch.tensor([[30.0, 26.0], [12.0, 8.0]]),
    }
    for granularity, amax in expected.items():
        format = Scaled("f", INT8, granularity)  # type: ignore[arg-type]
        assert torch.equal(format.amax(x), amax)
        assert torch.equal(format.amax(x.double()), amax)
        assert torch.equal(format.scale(amax), amax / 127)
        across = format.along(0)
        assert torch.equal(across.amax(x.t()), amax.t() if amax.dim() else amax)


MISTAKES: list[tuple[Callable[[], object], str]] = [
    (
        lambda: Scaled("s", "int8"),  # type: ignore[arg-type]
        "format s: element must be a Float, Fixed or Table, not 'int8'; get(name) returns a "
        "registered one",
    ),
    (
        lambda: Scaled("s", Float("e11m52", 11, 52)),
        "format s: element e11m52 does not fit in float32",
    ),
    (
        lambda: Scaled("s", E2M1, "rows"),  # type: ignore[arg-type]
        "format s: granularity must be one of 'tensor', 'row', 'column', a size from 1 to 65536, or a "
        "pair of sizes, not 'rows'; did you mean 'row'?",
    ),
    (
        lambda: Scaled("s", E2M1, scale_format="e5m3"),  # type: ignore[arg-type]
        "format s: scale_format must be one of 'float32', 'e8m0', 'e4m3', not 'e5m3'; did you mean "
        "'e4m3'?",
    ),
    (
        lambda: Scaled("s", E2M1, tensor_scale=True),
        "format s: tensor_scale is for scales in e4m3, not float32",
    ),
    (
        lambda: quantize(torch.ones(2), "float16", scale=torch.ones(())),
        "format float16 has no scales to be given; a Scaled format has",
    ),
    (
        lambda: quantize(torch.ones(2), "int8", scale=torch.ones(2)),
        "format int8: scales must be of shape (), not (2,)",
    ),
    (
        lambda: decode(torch.ones(2).byte(), "nvfp4"),
        "format nvfp4: decode takes (codes, scales, the tensor's scale)",
    ),
    (
        lambda: decode((torch.ones(2).byte(), torch.ones(3)), "int8_row"),
        "format int8_row: scales must be of shape (1,), not (3,)",
    ),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes(number: int) -> None:
    """Each message says what is wrong, and what would be right."""
    make, message = MISTAKES[number]
    with pytest.raises(OptionError) as error:
        make()
    assert str(error.value) == message


assert set(SHIPPED) <= set(formats.names())


@pytest.mark.parametrize("tensor_scale", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**60])
def test_elements_as_large_as_float32(tensor_scale: bool, scale: float) -> None:
    """Elements times scales in e4m3 may be beyond float32, which formats and their values never are."""
    element = Float("wide", 8, 7)
    format = Scaled("wide_block16", element, 16, "e4m3", tensor_scale=tensor_scale)
    assert element.max <= format.max <= torch.finfo(torch.float32).max
    x = torch.randn(6, 80) * scale
    y = quantize(x, format)
    torch.testing.assert_close(y, x, rtol=2.0**-4, atol=0.0)  # a scale in e4m3 may be too small
    assert_same(decode(encode(x, format), format), y, x)
