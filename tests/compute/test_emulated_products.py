"""Products in number formats: what is rounded, along which dimension, and in which of an op's formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx import formats
from hmpx.formats import quantize
from tests.values import normal, same_or_nan

#: See its README.md.
GOLDEN = {
    name: torch.from_numpy(value)
    for name, value in np.load(Path(__file__).parent / "golden" / "mx.npz").items()
}
MX = sorted({name.partition("/")[0] for name in GOLDEN if "/" in name})

#: Of sums of 64 to 300 products in fp32, in another order.
ORDER = {"rtol": 1e-5, "atol": 1e-5}


def converted(*ops: str, **options: Any) -> hmpx.Session:
    """Converts these lines of the low-precision list, alone."""
    return hmpx.convert(policy=hmpx.Policy.from_ops(low=ops), **options)


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, str, str]] = {
    "linear": (lambda x, w: F.linear(x, w), "x w g", "linear", "dx dw"),
    "matmul": (lambda x, w: x @ w.T, "x w g", "linear", "dx dw"),
    "mm": (lambda x, w: torch.mm(x, w.T), "x w g", "linear", "dx dw"),
    "einsum": (lambda x, w: torch.einsum("ij,kj->ik", x, w), "x w g", "linear", "dx dw"),
    "tensordot": (lambda x, w: torch.tensordot(x, w, ([1], [1])), "x w g", "linear", "dx dw"),
    "inner": (lambda x, w: torch.inner(x, w), "x w g", "linear", "dx dw"),
    "addmm": (
        lambda x, w: torch.addmm(torch.zeros(32), x / 1, w.T, beta=0, alpha=1),
        *("x w g", "linear", "dx dw"),
    ),
    "bmm": (lambda x, w: torch.bmm(x[None], w.T[None])[0], "x w g", "linear", "dx dw"),
    "conv2d": (lambda x, k: F.conv2d(x, k, padding=1), "image kernel g_image", "conv2d", "dx dw"),
    "conv2d, same": (
        lambda x, k: F.conv2d(x, k, padding="same"),
        *("image kernel g_image", "conv2d", "dx dw"),
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("format", MX)
@pytest.mark.parametrize("name", PRODUCTS)
def test_blocks_lie_along_what_each_product_sums_over(name: str, format: str) -> None:
    """Forward and both gradients are those of microxcaling, whichever op computes the product."""
    function, inputs, key, gradients = PRODUCTS[name]
    a, b, g = (GOLDEN[each].clone() for each in inputs.split())
    a.requires_grad_(), b.requires_grad_()
    op = name.partition(",")[0]
    with converted(f"{op} {format} output=float32", round_gradients=True):
        result = function(a, b)
    found = [result, *torch.autograd.grad(result, (a, b), g)]
    names = [key, *[f"{key}_{each}" for each in gradients.split()]]
    for actual, expected in zip(found, names, strict=True):
        torch.testing.assert_close(actual, GOLDEN[f"{format}/{expected}"], **ORDER)


@pytest.mark.parametrize("name", ["linear", "matmul", "einsum", "conv2d"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_blocks_lie_so_in_compiled_code(name: str) -> None:
    """One graph, the same results."""
    function, inputs, key, gradients = PRODUCTS[name]
    a, b, g = (GOLDEN[each].clone() for each in inputs.split())
    a.requires_grad_(), b.requires_grad_()
    with converted(f"{name} mxfp4_e2m1 output=float32", round_gradients=True):
        result = torch.compile(function, fullgraph=True, backend="aot_eager")(a, b)
        found = [result, *torch.autograd.grad(result, (a, b), g)]
    names = [key, *[f"{key}_{each}" for each in gradients.split()]]
    for actual, expected in zip(found, names, strict=True):
        torch.testing.assert_close(actual, GOLDEN[f"mxfp4_e2m1/{expected}"], **ORDER)


def blocks(axis: int, format: str = "mxfp6_e2m3") -> Callable[[Tensor], Tensor]:
    return lambda t: quantize(t.detach(), formats.get(format).along(axis))


def test_weights_of_batches_of_sequences_are_rounded_along_these() -> None:
    """Of [b, t, k] the gradient of a weight sums over b and t: blocks lie along t."""
    x, w, g = (
        normal(2, 40, 8, requires_grad=True),
        normal(6, 8, seed=1, requires_grad=True),
        normal(2, 40, 6, seed=2),
    )
    with converted("linear mxfp6_e2m3 output=float32", round_gradients=True):
        dx, dw = torch.autograd.grad(F.linear(x, w), (x, w), g)
    last, first, tokens = blocks(-1), blocks(0), blocks(1)
    torch.testing.assert_close(dx, last(g) @ first(w), **ORDER)
    torch.testing.assert_close(dw, torch.einsum("btn,btk->nk", tokens(g), tokens(x)), **ORDER)


#: What is called, by name: functions kept here would be torch's own during a conversion, too.
SETTINGS: dict[str, tuple[Any, str, tuple[Tensor, ...], dict[str, Any]]] = {
    "conv1d": (F, "conv1d", (normal(2, 6, 9), normal(4, 6, 3, seed=1)), {"stride": 2}),
    "conv1d, unbatched": (F, "conv1d", (normal(6, 9), normal(4, 6, 3, seed=1)), {"padding": 1}),
    "conv2d, groups": (
        F,
        "conv2d",
        (normal(2, 6, 5, 5), normal(4, 3, 2, 2, seed=1)),
        {"groups": 2},
    ),
    "conv2d, even same": (
        *(F, "conv2d"),
        (normal(2, 3, 5, 5), normal(4, 3, 2, 4, seed=1)),
        {"padding": "same"},
    ),
    "conv3d": (
        F,
        "conv3d",
        (normal(1, 2, 4, 4, 4), normal(3, 2, 2, 2, 2, seed=1)),
        {"dilation": 2},
    ),
    "conv_transpose2d": (
        *(F, "conv_transpose2d"),
        (normal(2, 6, 5, 5), normal(6, 4, 3, 3, seed=1)),
        {"stride": 2, "output_padding": 1, "padding": 1},
    ),
    "baddbmm": (
        *(torch, "baddbmm"),
        (normal(2, 3, 4), normal(2, 3, 8, seed=1), normal(2, 8, 4, seed=2)),
        {"beta": 0.5, "alpha": 2},
    ),
    "addbmm": (
        torch,
        "addbmm",
        (normal(3, 4), normal(2, 3, 8, seed=1), normal(2, 8, 4, seed=2)),
        {},
    ),
    "addmv": (torch, "addmv", (normal(3), normal(3, 8, seed=1), normal(8, seed=2)), {"alpha": 3}),
    "bilinear": (
        *(F, "bilinear"),
        (normal(5, 3), normal(5, 4, seed=1), normal(2, 3, 4, seed=2), normal(2, seed=3)),
        {},
    ),
    "linear, bias": (F, "linear", (normal(5, 3), normal(4, 3, seed=1), normal(4, seed=2)), {}),
    "mv": (torch, "mv", (normal(3, 8), normal(8, seed=1)), {}),
    "dot": (torch, "dot", (normal(8), normal(8, seed=1)), {}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_products_of_blocks_that_lose_nothing_are_torchs(name: str) -> None:
    """Blocks of 20 bits: every setting, shape and gradient is that of torch's own op."""
    exact = formats.Block("exact", formats.Float("e4m15", 4, 15, kind="finite"), size=4)
    owner, called, inputs, settings = SETTINGS[name]
    leaves = [t.clone().requires_grad_() for t in inputs]
    expected = getattr(owner, called)(*leaves, **settings)
    g = normal(*expected.shape, seed=9)
    gradients = torch.autograd.grad(expected, leaves, g)
    op = name.partition(",")[0]
    decision = hmpx.Decision(hmpx.ALLOW, exact, output_dtype=torch.float32)
    with hmpx.convert(policy=hmpx.Policy({op: decision}), round_gradients=True):
        actual = getattr(owner, called)(*leaves, **settings)
        found = torch.autograd.grad(actual, leaves, g)
    assert actual.grad_fn is not None
    for a, b in zip((actual, *found), (expected, *gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert any(not torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


# --- what is rounded -----------------------------------------------------------------------------


@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16])
def test_products_in_e4m3_are_those_of_the_hardware(output: torch.dtype) -> None:
    """What torch._scaled_mm gives, bias in the sum: inputs are rounded, and nothing else."""
    x, w, bias = normal(16, 32), normal(48, 32, seed=1), normal(48, seed=2)
    low = torch.float8_e4m3fn
    one = torch.ones(())
    expected = torch._scaled_mm(
        x.to(low), w.to(low).t(), scale_a=one, scale_b=one, out_dtype=torch.float32
    )
    name = str(output).removeprefix("torch.")
    with converted(f"linear float8_e4m3fn output={name}"):
        same_or_nan(F.linear(x, w), expected.to(output))
        torch.testing.assert_close(F.linear(x, w, bias), (expected + bias).to(output))
    with converted("linear float8_e4m3fn"):
        rounded = quantize(
            F.linear(quantize(x, "float8_e4m3fn"), quantize(w, "float8_e4m3fn")), "float8_e4m3fn"
        )
        same_or_nan(F.linear(x, w), rounded)


@pytest.mark.parametrize("axis", [None, -1], ids=["tensor", "row"])
@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16])
def test_products_of_scaled_e4m3_are_those_of_the_hardware(
    axis: int | None, output: torch.dtype
) -> None:
    """torch._scaled_mm with a scale a tensor, or a row, from the largest magnitude."""
    x, w = normal(16, 64) * 3, normal(32, 64, seed=1)
    scales = [
        (t.abs().amax() if axis is None else t.abs().amax(axis, keepdim=True)) / 448 for t in (x, w)
    ]
    low_x, low_w = ((t / s).to(torch.float8_e4m3fn) for t, s in zip((x, w), scales, strict=True))
    of_x, of_w = scales
    one = torch.ones(())  # before torch 2.12 its kernel for CPUs takes no scales by row
    products = torch._scaled_mm(low_x, low_w.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    expected = (products * of_x * (of_w if axis is None else of_w.t())).to(output)
    kind = "tensor" if axis is None else "row"
    with converted(f"linear float8_e4m3fn_{kind} output={str(output).removeprefix('torch.')}"):
        actual = F.linear(x, w)
    rtol = 1e-5 if output is torch.float32 else 2**-8
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-4)


def test_forward_e4m3_and_gradients_e5m2_are_one_line() -> None:
    """As FP8 training has it; the bias's gradient is a sum of gradients that were not rounded."""
    x, w, b = (
        normal(16, 32, requires_grad=True),
        normal(48, 32, seed=1, requires_grad=True),
        normal(48, seed=2, requires_grad=True),
    )
    g = normal(16, 48, seed=3)
    low_x, low_w = (quantize(t.detach(), "float8_e4m3fn") for t in (x, w))
    low_g = quantize(g, "float8_e5m2")
    with converted("linear float8_e4m3fn gradients=float8_e5m2 output=float32"):
        found = torch.autograd.grad(F.linear(x, w, b), (x, w, b), g)
    expected = (low_g @ low_w, low_g.T @ low_x, g.sum(0))
    for actual, each in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, each, **ORDER)


@pytest.mark.parametrize(
    "options", [{"round_gradients": "float8_e5m2"}, {"round_gradients": formats.get("float8_e5m2")}]
)
def test_round_gradients_takes_a_format(options: dict[str, Any]) -> None:
    """As a line's ``gradients=``; a line's own goes first."""
    x, w = normal(4, 8, requires_grad=True), normal(3, 8, seed=1, requires_grad=True)
    g = normal(4, 3, seed=2)

    def gradients(line: str, **options: Any) -> tuple[Tensor, ...]:
        with converted(line, **options):
            return torch.autograd.grad(F.linear(x, w), (x, w), g)

    same_or_nan(
        gradients("linear float8_e4m3fn", **options),
        gradients("linear float8_e4m3fn gradients=float8_e5m2"),
    )
    same_or_nan(
        gradients("linear float8_e4m3fn gradients=float32", **options),
        gradients("linear float8_e4m3fn"),
    )


def test_weights_and_activations_have_formats_of_their_own() -> None:
    """An argument called weight, or a parameter; all else is an activation."""
    x, w = normal(4, 8), nn.Parameter(normal(3, 8, seed=1))
    low_w, low_x = quantize(w.detach(), "float4_e2m1fn"), quantize(x, "float8_e4m3fn")
    line = "float8_e4m3fn weights=float4_e2m1fn output=float32"
    with converted(f"linear {line}", f"matmul {line}"), torch.no_grad():
        same_or_nan(F.linear(x, w), low_x @ low_w.T)
        same_or_nan(F.linear(x, w.detach()), low_x @ low_w.T)
        same_or_nan(w @ x.T, low_w @ low_x.T)
        same_or_nan(w.detach() @ x.T, quantize(w.detach(), "float8_e4m3fn") @ low_x.T)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("gradients", ["", " gradients=float8_e5m2"])
def test_weights_that_arguments_name_are_told_in_graphs(gradients: str) -> None:
    """Of linear and convolutions no other input is a weight, not even a parameter: compiled or not."""
    x, image = nn.Parameter(normal(4, 64)), normal(2, 3, 5, 5)
    model = nn.Linear(64, 3)
    convolution = nn.Conv2d(3, 4, 3)

    def forward() -> list[Tensor]:
        return [model(x), convolution(image)]

    def run(forward: Callable[[], list[Tensor]]) -> list[Tensor]:
        results = forward()
        loss = results[0].sin().sum() + results[1].sin().sum()
        learning = [x, model.weight, model.bias, convolution.weight]
        return [*results, *torch.autograd.grad(loss, learning)]

    options = f"weights=nf4 activations=int8_row output=float32{gradients}"
    with converted(f"linear float8_e4m3fn {options}", f"conv2d float8_e4m3fn {options}"):
        expected = run(forward)
        found = run(torch.compile(forward, fullgraph=True, backend="aot_eager"))
    low_x, low_w = quantize(x.detach(), "int8_row"), quantize(model.weight.detach(), "nf4")
    same_or_nan(expected[0].detach(), F.linear(low_x, low_w, model.bias.detach()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_graphs_in_which_weights_cant_be_told_are_refused() -> None:
    """Rather than rounded otherwise than uncompiled."""
    weight = nn.Parameter(normal(8, 3))
    with converted("matmul float8_e4m3fn weights=float4_e2m1fn"):
        compiled = torch.compile(lambda x: x @ weight, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match="nothing tells which of its inputs are weights"):
            compiled(normal(4, 8))


def test_files_hold_what_lines_and_arguments_do(tmp_path: Path) -> None:
    """At the top for all ops, or on an op's line; written out again they are equal."""
    path = tmp_path / "p.yaml"
    path.write_text(
        "low_precision_type: float8_e4m3fn\nlists: none\nrounding: toward_zero\noverflow: saturate\n"
        "round_gradients: float8_e5m2\n"
        "low: [linear, matmul rounding=nearest, 'mm gradients=float32 overflow=nan rounding=nearest']\n"
        "sections:\n- min_numel: 4\n  low: [linear output=bfloat16]\n"
    )
    policy = hmpx.load_policy(path)
    linear, matmul, mm = (policy[op] for op in ("linear", "matmul", "mm"))
    assert (linear.rounding, linear.overflow) == ("toward_zero", "saturate")
    assert linear.gradients == formats.get("float8_e5m2")
    assert (matmul.rounding, matmul.overflow) == ("nearest", "saturate")
    assert (mm.gradients, mm.overflow) == (formats.get("float32"), "nan")
    assert policy.sections[0].decisions["linear"].rounding == "toward_zero"
    (tmp_path / "again.yaml").write_text(policy.to_yaml())
    assert hmpx.load_policy(tmp_path / "again.yaml") == policy
    with hmpx.convert(policy=path):
        with pytest.warns(hmpx.HmpxWarning, match="beyond float8_e4m3fn"):
            assert torch.mm(torch.full((1, 1), 1000.0), torch.ones(1, 1)).isnan().all()
        same_or_nan(torch.full((1, 1), 1000.0) @ torch.ones(1, 1), torch.full((1, 1), 448.0))


def test_overflow_is_an_argument() -> None:
    """Of all formats, unless a line has its own."""
    x = torch.tensor([[1000.0]])
    with hmpx.convert(low_precision_type="float8_e4m3fn", overflow="saturate"):
        same_or_nan(F.linear(x, torch.ones(1, 1)), torch.tensor([[448.0]]))
    warns = pytest.warns(hmpx.HmpxWarning, match="beyond float8_e5m2")
    with hmpx.convert(low_precision_type="float8_e5m2"), warns:
        same_or_nan(F.linear(x * 1000, torch.ones(1, 1)), torch.tensor([[torch.inf]]))


# --- wrong options -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounding": "stochastic"}, "rounding has no effect: no op runs in a number format;"),
        ({"overflow": "saturate"}, "overflow has no effect: "),
        ({"round_gradients": True}, "round_gradients has no effect: "),
        ({"round_gradients": "float8_e5m2"}, "round_gradients has no effect: "),
        ({"round_gradients": "float8_e5m3"}, "round_gradients: no format 'float8_e5m3' is known"),
        ({"round_gradients": 2}, "round_gradients must be True, False, or a number format or its"),
        ({"overflow": "wrap"}, "overflow must be one of 'inf', 'nan', 'saturate', not 'wrap'"),
        (
            {"low_precision_type": "float8_e4m3fn", "overflow": "inf"},
            "format float8_e4m3fn: overflow must be 'nan', 'saturate' or None, not 'inf'",
        ),
    ],
)
def test_options_that_do_nothing_are_errors(options: dict[str, Any], message: str) -> None:
    """Before anything is patched."""
    with pytest.raises(hmpx.OptionError) as error:
        hmpx.convert(**options)
    assert str(error.value).startswith(message)
    assert not hmpx.is_converted()


# --- what composes -------------------------------------------------------------------------------

LINES = (
    "linear mxfp8_e4m3 output=float32",
    "linear float8_e4m3fn gradients=float8_e5m2 output=float32",
)


def test_views_of_weights_are_left_to_what_multiplies_by_them() -> None:
    """Rounded as a view, and again by the product, values would be another's."""
    x, w = normal(2, 40), normal(40, 40, seed=1)
    with converted("matmul mxfp4_e2m1 output=float32", "t mxfp4_e2m1"):
        torch.testing.assert_close(
            x @ w.t(), blocks(-1, "mxfp4_e2m1")(x) @ blocks(0, "mxfp4_e2m1")(w.t()), **ORDER
        )
        same_or_nan(w.t(), w.T)
    with converted("t float8_e4m3fn"):
        same_or_nan(w.t(), quantize(w, "float8_e4m3fn").T)


def test_calls_that_cant_be_taken_apart_round_gradients_too() -> None:
    """Along the last axes: the letters of an equation with dots depend on the call."""
    x, w = normal(2, 3, 40, requires_grad=True), normal(5, 40, seed=1, requires_grad=True)
    g = normal(2, 3, 5, seed=2)
    with converted("einsum mxfp6_e2m3 output=float32", round_gradients=True):
        result = torch.einsum("...k,nk->...n", x, w)
        dx, dw = torch.autograd.grad(result, (x, w), g)
    last = blocks(-1)
    torch.testing.assert_close(result, last(x) @ last(w).T, **ORDER)
    torch.testing.assert_close(dx, last(g) @ last(w), **ORDER)
    torch.testing.assert_close(dw, torch.einsum("bmn,bmk->nk", last(g), last(x)), **ORDER)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # by torch.func's import
@pytest.mark.parametrize("line", LINES)
def test_func_and_checkpoints_and_second_derivatives_work(line: str) -> None:
    """The same gradients each way; second ones are of rounded values, too."""
    w = normal(4, 40, seed=1)

    def loss(a: Tensor) -> Tensor:
        return F.linear(a, w).square().sum()

    with converted(line, round_gradients=True):
        rows = normal(3, 2, 40)
        expected = torch.stack([F.linear(row, w) for row in rows])
        torch.testing.assert_close(torch.vmap(lambda a: F.linear(a, w))(rows), expected, **ORDER)
        leaf = normal(2, 40, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss(leaf), leaf)
        same_or_nan(torch.func.grad(loss)(leaf.detach()), gradient)
        each = torch.vmap(torch.func.grad(loss))(rows)
        for row, found in zip(rows, each, strict=True):
            torch.testing.assert_close(found, torch.func.grad(loss)(row), **ORDER)
        for is_reentrant in (False, True):
            torch.utils.checkpoint.checkpoint(loss, leaf, use_reentrant=is_reentrant).backward()
            same_or_nan(leaf.grad, gradient)
            leaf.grad = None
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        assert second.isfinite().all() and second.count_nonzero() > 0
        _, tangent = torch.func.jvp(lambda a: F.linear(a, w), (rows[0],), (rows[1],))
        assert torch.linalg.norm(tangent - rows[1] @ w.T) < 0.2 * torch.linalg.norm(tangent)


@pytest.mark.parametrize("line", LINES)
def test_exported_programs_hold_the_rounding(line: str) -> None:
    """They need no conversion to run."""
    model = nn.Linear(40, 4)
    with converted(line, round_gradients=True):
        expected = model(normal(2, 40))
        program = torch.export.export(model, (normal(2, 40),))
    same_or_nan(program.module()(normal(2, 40)), expected)


# --- overflow ------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A layer whose inputs a format can't hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value * 1e5)


def test_values_that_overflow_are_warned_of_once(tmp_path: Path) -> None:
    """With op, module, line and remedy; again in the next conversion."""
    path = tmp_path / "low.txt"
    path.write_text("# mine\nlinear\n")
    model, value = Wide(), torch.full((2, 4), 0.5)
    for _ in range(2):
        with (
            hmpx.convert(path, low_precision_type="float8_e4m3fn", device_types={"cpu"}),
            pytest.warns(hmpx.HmpxWarning) as caught,
        ):
            model(value)
            model(value)
        (warning,) = caught
        assert str(warning.message) == (
            "linear in layer: an input of 5e+04 is beyond float8_e4m3fn, whose largest is 448, and became "
            'infinite or NaN; convert(overflow="saturate"), or overflow=saturate on the op\'s line '
            f"({path}:2), keeps the largest value instead. Said once"
        )
        assert warning.filename == __file__


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"overflow": "saturate"}, 0.5),
        ({}, 1e-3),
        ({}, float("inf")),
        ({}, float("nan")),
        ({"low_precision_type": "mxfp8_e4m3"}, 0.5),
    ],
)
def test_values_that_fit_or_were_not_finite_are_not_warned_of(
    options: dict[str, Any], value: float
) -> None:
    """Nor what a format saturates."""
    with hmpx.convert(**{"low_precision_type": "float8_e4m3fn", **options}):
        Wide()(torch.full((2, 4), value))
