"""Products of float8 values by kernels: `hardware="require"` takes torch's, also for CPUs, of the emulation's codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.functional import ScalingType

import hmpx
from hmpx import formats

from ..values import normal

FP32 = torch.float32

pytestmark = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="before torch 2.12 CPUs have no F.scaled_mm",
)

#: Recipes: the rest of an op's line.
RECIPES = {
    "plain": "float8_e4m3fn",
    "saturate": "float8_e4m3fn overflow=saturate",
    "tensor": "float8_e4m3fn_tensor",
    "row": "float8_e4m3fn_row",
    "mixed": "float8_e4m3fn_tensor weights=float8_e4m3fn_row",
    "powers of two": "float8_e4m3fn_pow2",
    "plain gradients": "float8_e4m3fn gradients=float8_e5m2",
    "tensor gradients": "float8_e4m3fn_tensor gradients=float8_e5m2_tensor",
    "delayed": "float8_e4m3fn_delayed gradients=float8_e5m2_delayed",
}

#: Op -> a call, and the shapes of its inputs; of matrices [m, k] and [k, n].
CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[int, int, int], list[tuple[int, ...]]]]] = {
    "linear": (lambda *x: F.linear(*x), lambda m, k, n: [(m, k), (n, k)]),
    "linear of 3 dimensions": (
        lambda *x: F.linear(*x),
        lambda m, k, n: [(2, m, k), (n, k), (n,)],
    ),
    "mm": (lambda *x: torch.mm(*x), lambda m, k, n: [(m, k), (k, n)]),
    "addmm": (lambda *x: torch.addmm(*x), lambda m, k, n: [(n,), (m, k), (k, n)]),
    "matmul": (lambda *x: torch.matmul(*x), lambda m, k, n: [(2, m, k), (k, n)]),
    "matmul of batches": (
        lambda *x: torch.matmul(*x),
        lambda m, k, n: [(2, 3, m, k), (2, 3, k, n)],
    ),
    "matmul of a shared batch": (
        lambda *x: torch.matmul(*x),
        lambda m, k, n: [(2, 3, m, k), (3, k, n)],
    ),
    "bmm": (lambda *x: torch.bmm(*x), lambda m, k, n: [(3, m, k), (3, k, n)]),
    "baddbmm": (
        lambda *x: torch.baddbmm(*x),
        lambda m, k, n: [(3, m, n), (3, m, k), (3, k, n)],
    ),
}

#: m, k and n of [m, k] and [k, n]: those that need no padding, odd ones, a single row, empty ones.
SIZES = ((16, 32, 48), (5, 17, 7), (1, 64, 16), (0, 16, 8), (4, 0, 8))


@pytest.fixture(autouse=True)
def _powers_of_two() -> Iterator[None]:
    element: Any = formats.get("float8_e4m3fn")
    formats.register(formats.Scaled("float8_e4m3fn_pow2", element, scale_format="e8m0"))
    yield
    formats.unregister("float8_e4m3fn_pow2")


def converted(op: str, recipe: str, hardware: str, output: str = "float32") -> Any:
    line = f"{op.partition(' ')[0]} {recipe} output={output}"
    policy = {"lists": "none", "low": [line]}
    return hmpx.convert(policy=policy, device_types={"cpu"}, hardware=hardware)


def given(shapes: list[tuple[int, ...]], *, is_transposed: bool) -> list[Tensor]:
    found = []
    for seed, shape in enumerate(shapes):
        x = normal(*shape, seed=seed) * 2.0 ** (3 * seed)
        if is_transposed and len(shape) > 1:
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        found.append(x.requires_grad_())
    return found


def results(
    function: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor | None = None
) -> list[Tensor]:
    """Returns the result and the gradients."""
    result = function(*inputs)
    if gradient is None:
        gradient = normal(*result.shape, seed=9)
    result.backward(gradient.to(result.dtype))
    return [result.detach(), *[x.grad for x in inputs if x.grad is not None]]


@pytest.mark.parametrize("output", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("call", CALLS)
def test_kernels_and_emulation_differ_by_roundings_of_sums(
    call: str, recipe: str, output: str
) -> None:
    """By k + 4 roundings to fp32 of the sum of magnitudes, in either, and one to the output's dtype."""
    function, shapes = CALLS[call]

    def inputs(index: int) -> list[Tensor]:
        return given(shapes(*SIZES[index]), is_transposed=index % 2 == 1)

    found = []
    for hardware in ("never", "require"):
        with converted(call, RECIPES[recipe], hardware, output):
            found.append([results(function, inputs(index)) for index in range(len(SIZES))])
    for index, (m, k, n) in enumerate(SIZES):
        wide = [x.detach().double().abs().requires_grad_() for x in inputs(index)]
        magnitudes = results(function, wide, normal(*found[0][index][0].shape, seed=9).abs())
        if m and k:
            assert not torch.equal(found[1][index][0], function(*inputs(index)))
        for emulated, ours, most in zip(found[0][index], found[1][index], magnitudes, strict=True):
            assert ours.dtype is emulated.dtype
            assert ours.shape == emulated.shape
            bound = 2.5 * (max(2 * m, k, n) + 4) * 2.0**-24 * most
            bound = bound + (output == "bfloat16") * 2.0**-7 * emulated.double().abs()
            assert ((ours.double() - emulated.double()).abs() <= bound).all()


@pytest.mark.parametrize("by", ["tensor", "row"])
def test_the_kernel_gets_the_codes_of_the_format(by: str) -> None:
    """Bit for bit torch's product of what `formats.encode` returns."""
    x, weight = normal(5, 48), normal(16, 48, seed=1)
    with converted("linear", f"float8_e4m3fn_{by}", "require"):
        found = F.linear(x, weight)
    kind = ScalingType.TensorWise if by == "tensor" else ScalingType.RowWise
    (a, scale_a), (b, scale_b) = (
        formats.encode(each, f"float8_e4m3fn_{by}") for each in (x, weight)
    )
    codes = [each.view(torch.float8_e4m3fn) for each in (a, b)]
    expected = F.scaled_mm(
        codes[0],
        codes[1].t(),
        scale_a,
        kind,
        scale_b.t() if by == "row" else scale_b,
        kind,
        output_dtype=FP32,
    )
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:.* is beyond float8_e4m3fn")
@pytest.mark.parametrize("recipe", ["plain", "saturate", "tensor", "row"])
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 1e5, -460.0, 464.0, 448.0, 1e-9, 2.0**-10, 0.0]
)
def test_values_at_the_ends_of_the_range(recipe: str, value: float) -> None:
    """Overflow, NaN and subnormals are the emulation's."""
    x = normal(4, 16)
    x[1, 3] = value
    found = []
    for hardware in ("never", "require"):
        with converted("mm", RECIPES[recipe], hardware):
            found.append(torch.mm(x, normal(16, 8, seed=1)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5, equal_nan=True)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (4, 8)).transpose(1, 2)
            for each in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(x)))


def trained(hardware: str, recipe: str) -> tuple[list[float], hmpx.record, dict[str, Any]]:
    """Returns the losses, the record and the histories of amaxes."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block(), nn.Linear(32, 16)), normal(2, 16, 32)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    with (
        converted("linear", RECIPES[recipe], hardware, "bfloat16") as session,
        hmpx.record() as rec,
    ):
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).float().flatten(0, 1), torch.arange(32) % 16)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, rec, session.histories.state_dict()


@pytest.mark.parametrize("recipe", ["tensor gradients", "delayed"])
def test_a_gpt_trains_without_an_emulated_call(recipe: str) -> None:
    losses, rec, amaxes = trained("require", recipe)
    expected, emulated, emulated_amaxes = trained("never", recipe)
    assert amaxes.keys() == emulated_amaxes.keys()
    assert len(amaxes) == 27 * (recipe == "delayed")  # input, weight and gradient of 9 layers
    for key, each in amaxes.items():
        assert each["steps"] == 5
        assert each["amaxes"] == pytest.approx(emulated_amaxes[key]["amaxes"], rel=0.05), key
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses[-1] < 0.8 * losses[0]
    for each, is_emulated in ((rec, False), (emulated, True)):
        rows = [row for row in each.rows if row.op == "linear" and row.phase == "forward"]
        assert len(rows) == 9
        assert {row.legalized for row in rows} == {is_emulated}


def test_cpus_emulate_unless_kernels_are_required() -> None:
    """They have no such hardware."""
    x, weight = normal(5, 300), normal(7, 300, seed=1)
    found = {}
    for hardware in ("auto", "never", "require"):
        with converted("linear", "float8_e4m3fn_tensor", hardware):
            found[hardware] = F.linear(x, weight)
    assert torch.equal(found["auto"], found["never"])
    assert not torch.equal(found["auto"], found["require"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "linear float8_e4m3fn",
            "its results are rounded to the format: add output=bfloat16 to its line",
        ),
        ("gelu float8_e4m3fn output=bfloat16", "only products of two matrices have kernels"),
        ("conv2d float8_e4m3fn output=bfloat16", "only products of two matrices have kernels"),
        ("linear posit8_2 output=bfloat16", "not posit8_2"),
        ("linear nvfp4 output=bfloat16", "not nvfp4"),
        ("mm float8_e4m3fn gradients=mxfp8_e4m3 output=float32", "not mxfp8_e4m3"),
        ("linear float8_e4m3fn output=bfloat16 rounding=stochastic", "rounded to nearest"),
        (
            "linear float8_e4m3fn output=bfloat16 accumulate=float64",
            "kernels sum in float32, not in torch.float64",
        ),
    ],
)
def test_a_line_without_a_kernel_is_an_error_before_anything_is_patched(
    line: str, said: str
) -> None:
    before = F.linear
    with pytest.raises(hmpx.OptionError) as error:
        hmpx.convert(
            policy={"lists": "none", "low": [line]}, device_types={"cpu"}, hardware="require"
        )
    assert f'hardware="require": {line.split(maxsplit=1)[0]} would be emulated: ' in str(
        error.value
    )
    assert said in str(error.value)
    assert F.linear is before
    assert not hmpx.is_converted()


def test_a_device_without_kernels() -> None:
    policy = {"lists": "none", "low": ["linear float8_e4m3fn output=bfloat16"]}
    with pytest.raises(
        hmpx.OptionError, match=r"linear would be emulated: meta has no float8 kernels here"
    ):
        hmpx.convert(policy=policy, device_types={"cpu", "meta"}, hardware="require")
    assert not hmpx.is_converted()


def test_explain_says_what_computes() -> None:
    with converted("linear", "float8_e4m3fn_tensor", "require"):
        assert "computed by kernels for float8 where they take" in str(hmpx.explain("linear"))
    with converted("linear", "float8_e4m3fn_tensor", "auto"):
        assert "kernels" not in str(hmpx.explain("linear"))
    policy = {"lists": "none", "low": ["linear float8_e4m3fn"]}
    with hmpx.convert(policy=policy, device_types={"cuda", "cpu"}, hardware="auto"):
        said = " ".join(str(hmpx.explain("linear")).split())
    assert "not by kernels for float8: its results are rounded to the format: add output=" in said


def _square(x: Tensor) -> Tensor:
    return torch.matmul(x, x)


def _times_ones(x: Tensor) -> Tensor:
    return torch.matmul(x, torch.ones(4, 4))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: torch.matmul(normal(2, 1, 4, 4), normal(3, 4, 4)),
            "matmul of (2, 1, 4, 4) and (3, 4, 4) would be emulated: kernels multiply two",
        ),
        (lambda: torch.vmap(_square)(normal(2, 4, 4)), "neither tangents nor rules for transforms"),
        (
            lambda: torch.func.jvp(_times_ones, (normal(4, 4),), (normal(4, 4),)),
            "neither tangents nor rules",
        ),
    ],
)
def test_a_call_without_a_kernel(call: Callable[[], Any], said: str) -> None:
    with converted("matmul", "float8_e4m3fn_tensor", "auto"):
        call()
    with (
        converted("matmul", "float8_e4m3fn_tensor", "require"),
        pytest.raises(hmpx.OptionError) as error,
    ):
        call()
    assert said in str(error.value)
    assert 'convert with hardware="auto"' in str(error.value)


def test_a_step_between_forward_and_backward_changes_no_scale() -> None:
    """As of a discriminator that trains while the generator's graph waits."""
    found = []
    for hardware in ("never", "require"):
        x, weight = normal(4, 16), normal(8, 16, seed=1, requires_grad=True)
        other = nn.Parameter(torch.ones(2))
        with converted("linear", RECIPES["delayed"], hardware) as session:
            for scale in (1.0, 8.0, 64.0):
                loss = F.linear(x * scale, weight).square().sum()
                other.grad = torch.ones(2)
                torch.optim.SGD([other], 1.0).step()
                loss.backward()
                torch.optim.SGD([weight], 1e-6).step()
            assert weight.grad is not None
            found.append((weight.grad, session.histories.state_dict()))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-4)
    for key, each in found[0][1].items():
        assert found[1][1][key]["steps"] == each["steps"], key


def test_an_empty_batch() -> None:
    with converted("bmm", "float8_e4m3fn_row", "require"):
        assert torch.bmm(torch.ones(0, 4, 16), torch.ones(0, 16, 8)).shape == (0, 4, 8)


def test_scales_of_earlier_steps_need_values() -> None:
    with (
        converted("linear", RECIPES["delayed"], "require"),
        FakeTensorMode(),
        pytest.raises(hmpx.OptionError, match="scales by earlier steps are emulated in graphs"),
    ):
        F.linear(torch.ones(4, 16), torch.ones(8, 16))


def test_gradients_by_row_over_several_dimensions_have_no_kernel() -> None:
    x, weight = normal(2, 3, 16, requires_grad=True), normal(4, 16, seed=1, requires_grad=True)
    recipe = "float8_e4m3fn_row gradients=float8_e4m3fn_row"
    with converted("linear", recipe, "require"):
        result = F.linear(x, weight)
        with pytest.raises(hmpx.OptionError, match="it sums over several dimensions"):
            result.sum().backward()


def test_gradients_of_gradients() -> None:
    """Are computed by emulation, as without kernels."""
    found = []
    for hardware in ("never", "require"):
        x, weight = normal(4, 16), normal(8, 16, seed=1, requires_grad=True)
        with converted("linear", RECIPES["tensor gradients"], hardware):
            loss = F.linear(x, weight).square().sum()
            (first,) = torch.autograd.grad(loss, weight, create_graph=True)
            found.append([first, *torch.autograd.grad(first.sum(), weight)])
    for ours, emulated in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, emulated, rtol=1e-5, atol=1e-4)


def test_compiled_without_a_graph_break() -> None:
    model, x = nn.Linear(32, 16), normal(4, 32)
    with converted("linear", RECIPES["tensor gradients"], "require"):
        expected = results(model, [x.clone().requires_grad_()])
        model.zero_grad()
        found = results(
            torch.compile(model, fullgraph=True, backend="aot_eager"), [x.clone().requires_grad_()]
        )
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("a", "b"), [((16,), (8, 16)), ((16,), (16, 8)), ((8, 16), (16,)), ((16,), (16,))]
)
def test_vectors(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    found = []
    for hardware in ("never", "require"):
        inputs = [
            normal(*shape, seed=seed, requires_grad=True) for seed, shape in enumerate((a, b))
        ]
        with converted(
            "linear" if b == (8, 16) else "matmul", RECIPES["tensor gradients"], hardware
        ):
            result = F.linear(*inputs) if b == (8, 16) else torch.matmul(*inputs)
            result.sum().backward()
        found.append([result.detach(), *[x.grad for x in inputs]])
    assert not torch.equal(
        found[1][0], F.linear(*inputs) if b == (8, 16) else inputs[0] @ inputs[1]
    )
    for ours, emulated in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, emulated, rtol=1e-5, atol=1e-5)
        assert ours.stride() == emulated.stride()


def test_shapes_that_do_not_fit_are_torchs_error() -> None:
    with (
        converted("matmul", "float8_e4m3fn_tensor", "require"),
        pytest.raises(RuntimeError, match="shapes"),
    ):
        torch.matmul(normal(4, 16), normal(17, 8))


def test_weights_frozen_to_codes() -> None:
    model, x = nn.Linear(32, 16).eval(), normal(4, 32)
    with converted("linear", "float8_e4m3fn", "require"), torch.no_grad():
        expected = model(x)
        with hmpx.freeze(model, x, store="codes"):
            assert model.weight.dtype is torch.uint8
            assert torch.equal(model(x), expected)
