"""Linear layers that are computed in kept memory in training, as large ones are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import Policy
from hmpx.compute.legalize import linears
from hmpx.compute.legalize import scratch as temporaries
from hmpx.number_formats import bfloat16_kernels
from tests.compute.keeping import Keeping
from tests.values import normal, same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = pytest.mark.usefixtures("lacks_low_precision")


@pytest.fixture(autouse=True)
def every_size_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_LEAST", 0)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each linear layer was computed here."""
    found: list[bool] = []
    compute = linears.compute

    def noting(*args: Any, **kwargs: Any) -> Tensor | None:
        result = compute(*args, **kwargs)
        found.append(result is not None)
        return result

    monkeypatch.setattr(linears, "compute", noting)
    return found


def low(legalize: str = "always", dtype: torch.dtype = BF16, **options: Any) -> hmpx.Session:
    policy = Policy.from_ops(low=["linear"], low_precision_type=dtype)
    return hmpx.convert(policy=policy, legalize=legalize, **options)


def reround(tensor: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    return tensor.to(dtype).float()


@contextlib.contextmanager
def left_to_others() -> Any:
    """Has the layers computed as small ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linears, "_LEAST", 1 << 60)
        yield


#: Shapes of input, weight and bias.
CASES: dict[str, tuple[tuple[int, ...], ...]] = {
    "matrix": ((9, 16), (24, 16), (24,)),
    "stack": ((2, 33, 40), (24, 40), (24,)),
    "stack of stacks": ((2, 3, 5, 16), (8, 16), (8,)),
    "no bias": ((9, 16), (24, 16)),
    "stack, no bias": ((2, 33, 40), (24, 40)),
    "one row": ((1, 64), (24, 64), (24,)),
    "one column": ((9, 1), (24, 1), (24,)),
    "one output": ((9, 16), (1, 16), (1,)),
    "wide": ((130, 256), (512, 256), (512,)),
}

#: How the incoming gradient is laid out.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda g: g,
    "expanded": lambda g: g.flatten()[0].expand(g.shape),
    "rows expanded": lambda g: g[..., :1].expand(g.shape),
    "transposed": lambda g: g.transpose(0, -1).contiguous().transpose(0, -1),
    "part": lambda g: torch.cat([g, g], -1)[..., : g.shape[-1]],
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("legalize", ["always", "auto", "fast"])
@pytest.mark.parametrize("leaf_dtype", [FP32, None])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_others_compute(  # noqa: PLR0917  # as parametrized
    name: str,
    dtype: torch.dtype,
    leaf_dtype: torch.dtype | None,
    legalize: str,
    layout: str,
    computed: list[bool],
) -> None:
    """Bit for bit and stride for stride, the gradients of parameters and of plain tensors too."""
    for is_parameter in (True, False):

        def results(*, is_parameter: bool = is_parameter) -> tuple[Tensor, Sequence[Tensor]]:
            inputs = [normal(*s, seed=i).to(leaf_dtype or dtype) for i, s in enumerate(CASES[name])]
            if is_parameter:
                inputs[1:] = [nn.Parameter(t) for t in inputs[1:]]
            inputs = [t.requires_grad_() for t in inputs]
            with low(legalize, dtype):
                output = F.linear(*inputs)
                incoming = LAYOUTS[layout](normal(*output.shape, seed=9).to(dtype))
            return output.detach(), torch.autograd.grad(output, inputs, incoming)

        computed.clear()
        actual = results()
        assert actual[0].dtype is dtype
        is_known = is_parameter or legalize != "fast" or leaf_dtype is None
        assert computed in ([is_known], [])  # products that are small are left to native kernels
        assert computed or legalize != "always"
        with left_to_others():
            expected = results()
        same(actual, expected, check_stride=True)


def test_it_is_the_composition_of_casts(computed: list[bool]) -> None:
    """Gradients are rounded where they go out."""
    data, layer = normal(5, 9, 16).requires_grad_(), nn.Linear(16, 24)
    inputs = (data, layer.weight, layer.bias)
    with low():
        output = layer(data)
    incoming = normal(*output.shape, seed=9).bfloat16()
    actual = torch.autograd.grad(output, inputs, incoming)
    rounded = [reround(t).detach().requires_grad_() for t in inputs]
    wide = F.linear(*rounded)
    expected = torch.autograd.grad(wide, rounded, incoming.float())
    assert computed == [True]
    same(output, wide.bfloat16(), check_stride=True)
    same(list(actual), [reround(t) for t in expected], check_stride=True)


@pytest.mark.parametrize("learning", ["input", "weight", "bias"])
def test_only_what_is_asked_for_has_a_gradient(learning: str, computed: list[bool]) -> None:
    """As in a first layer, and with frozen weights."""
    data, layer = normal(9, 16), nn.Linear(16, 24).requires_grad_(requires_grad=False)
    leaf = {"input": data, "weight": layer.weight, "bias": layer.bias}[learning].requires_grad_()
    with low():
        layer(data).sum().backward()
    assert computed == [True]
    assert [t.grad is not None for t in (data, layer.weight, layer.bias)] == [
        t is leaf for t in (data, layer.weight, layer.bias)
    ]


@pytest.mark.parametrize("legalize", ["always", "fast"])
def test_what_is_kept_is_low_or_a_parameter(legalize: str, computed: list[bool]) -> None:
    """The input in low precision, and of the parameter itself nothing new."""
    layer, packed = nn.Linear(16, 24), list[Tensor]()
    hooks = saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with low(legalize), hooks:
        output = layer(
            normal(40, 16).requires_grad_()
        )  # not so small as to be left to native kernels
    assert computed == [True]
    assert output.requires_grad
    assert [t.dtype for t in packed if t is not layer.weight] == [BF16]
    assert any(t is layer.weight for t in packed)


def test_no_two_results_share_memory() -> None:
    """Later calls, smaller and larger ones, leave earlier results as they are."""
    layers = [nn.Linear(8, n) for n in (8, 2, 32)]
    data = [normal(size, 8, seed=size).requires_grad_() for size in (8, 16, 5)]

    def gradients(legalize: str) -> list[list[Tensor]]:
        found = []
        with low(legalize):
            for _ in range(2):
                outputs = [layer(t) for layer, t in zip(layers, data, strict=True)]
                for layer, t, output in zip(layers, data, outputs, strict=True):
                    incoming = normal(*output.shape, seed=3).bfloat16()
                    wanted = (t, *layer.parameters())
                    found.append([output, *torch.autograd.grad(output, wanted, incoming)])
        return found

    for legalize in ("always", "fast"):
        actual = gradients(legalize)
        with left_to_others():
            expected = gradients(legalize)
        same(actual, expected, check_stride=True)


@pytest.mark.parametrize("shape", [(9, 16), (2, 3, 16), (1, 16)])
def test_results_may_be_written_to(shape: tuple[int, ...], computed: list[bool]) -> None:
    """As by `nn.ReLU(inplace=True)`, which follows the linear layers of VGG and AlexNet."""
    layer, x = nn.Linear(16, 24), normal(*shape)

    def gradient(relu: Callable[[Tensor], Tensor]) -> Tensor | None:
        layer.zero_grad()
        relu(layer(x)).sum().backward()
        return layer.weight.grad

    with low():
        assert torch.equal(gradient(F.relu_), gradient(F.relu))
        assert layer(x).detach_().is_leaf
    assert all(computed)


@pytest.mark.parametrize("most", [0, 100, 500])
def test_what_does_not_fit_is_new(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are those with memory for all."""
    layer, data = nn.Linear(16, 24), normal(9, 16)

    def gradients() -> list[Tensor]:
        with low():
            for _ in range(3):
                output = layer(data)
                found = torch.autograd.grad(output.float().square().sum(), layer.parameters())
        return [output, *found]

    expected = gradients()
    monkeypatch.setattr(temporaries, "_MOST", most)
    monkeypatch.setattr(temporaries._thread, "memory", None)
    same(gradients(), expected, check_stride=True)
    assert temporaries._thread.memory.numel() == most


def test_modes_may_keep_what_they_see() -> None:
    """Of forward and backward, or of the backward alone: kept memory is not shown to them."""
    layer, mode = nn.Linear(16, 24), Keeping()
    with low():
        for _ in range(2):  # the second time there is kept memory
            loss = layer(normal(9, 16)).sum()
            with mode:
                torch.autograd.grad(loss, layer.parameters())
            layer(normal(9, 16, seed=1)).sum().backward()
        with mode:
            layer(normal(9, 16)).sum().backward()
    memory = temporaries._thread.memory
    own = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
    assert len(mode.seen) > 10
    assert not any(tensor.data_ptr() in own for tensor, _ in mode.seen)


@pytest.mark.parametrize("how", ["reentrant", "hooks"])
def test_checkpoints(how: str) -> None:
    """Gradients are those without."""
    net = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
    data = normal(9, 16).requires_grad_()

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        data.grad = None
        net.zero_grad()
        with low():
            output = run(data)
            output.float().square().sum().backward()
        return [output, *[t.grad.clone() for t in (data, *net.parameters()) if t.grad is not None]]

    actual = gradients(lambda t: checkpoint(net, t, use_reentrant=how == "reentrant"))
    expected = gradients(net)
    assert len(expected) == 6
    same(actual, expected, check_stride=True)


def test_a_batch_of_gradients() -> None:
    """As for vectorized Jacobians."""
    layer, data = nn.Linear(16, 24), normal(9, 16).requires_grad_()
    wanted = (data, *layer.parameters())
    with low():
        output = layer(data)
        incoming = normal(3, *output.shape, seed=9).bfloat16()
        actual = torch.autograd.grad(
            output, wanted, incoming, is_grads_batched=True, retain_graph=True
        )
        expected = [
            torch.autograd.grad(output, wanted, each, retain_graph=True) for each in incoming
        ]
    for batch, each in zip(actual, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(batch, torch.stack(each), rtol=2**-7, atol=2**-7)


def test_second_order_gradients_are_as_near_to_exact_ones_as_native_kernels_are() -> None:
    """Each backward rounds, as it does there."""
    shapes = ((9, 16), (24, 16), (24,))

    def second(dtype: torch.dtype, legalize: str | None) -> list[Tensor]:
        leaves = [reround(normal(*s, seed=i)).to(dtype) for i, s in enumerate(shapes)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        with contextlib.nullcontext() if legalize is None else low(legalize):
            output = F.linear(*leaves)
        loss = output.to(dtype).square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        penalty = torch.stack([g.square().sum() for g in first]).sum()
        return [*first, *torch.autograd.grad(penalty, leaves)]

    exact = second(torch.float64, None)
    errors = {
        legalize: [
            ((a.double() - e).norm() / e.norm()).item()
            for a, e in zip(second(FP32, legalize), exact, strict=True)
        ]
        for legalize in ("always", "never")
    }
    assert all(error > 0 for error in errors["never"])
    for ours, native in zip(errors["always"], errors["never"], strict=True):
        assert ours <= 1.1 * native


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (normal(16), normal(24, 16), normal(24)),
        (normal(9, 16), normal(16), None),
        (normal(0, 16), normal(24, 16), normal(24)),
        (normal(9, 16), normal(24, 16), normal(1, 24)),
        (normal(16, 9).t(), normal(24, 16), normal(24)),
        (normal(9, 16), normal(16, 24).t(), normal(24)),
    ],
    ids=["vector", "weight is a vector", "empty", "bias is a matrix", "x transposed", "transposed"],
)
def test_other_calls_are_left_to_others(x: Tensor, weight: Tensor, bias: Any) -> None:
    """And give what they give there."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]

    def results() -> Any:
        with low():
            output = F.linear(*leaves)
            return [output, *torch.autograd.grad(output.float().square().sum(), leaves)]

    actual = results()
    with left_to_others():
        same(actual, results(), check_stride=True)


def test_shapes_that_do_not_fit_have_the_error_of_torch() -> None:
    """And a bias of another length, too."""
    layer = nn.Linear(16, 24)
    with low():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(normal(9, 17))
        with pytest.raises(RuntimeError, match="expan"):
            F.linear(normal(9, 16), layer.weight, nn.Parameter(normal(23)))


def test_a_weight_that_changes_before_the_backward_is_an_error() -> None:
    """It would be rounded from other values."""
    layer = nn.Linear(16, 24)
    with low():
        loss = layer(normal(9, 16).requires_grad_()).sum()
        with torch.no_grad():
            layer.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_reused_casts_have_the_gradients_of_others() -> None:
    """One cast of the weight for two layers: their gradients meet there in low precision."""
    layer, data = nn.Linear(16, 16), normal(9, 16)

    def gradients() -> list[Tensor]:
        with low(reuse_casts=True):
            return [*torch.autograd.grad(layer(layer(data)).float().sum(), layer.parameters())]

    actual = gradients()
    with left_to_others():
        same(actual, gradients(), check_stride=True)


def test_backward_twice_and_freed_graphs() -> None:
    """As of any op."""
    layer = nn.Linear(16, 24)
    with low():
        loss = layer(normal(9, 16)).sum()
    loss.backward(retain_graph=True)
    once = layer.weight.grad.clone()
    loss.backward()
    same(layer.weight.grad, once * 2, check_stride=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_small_layers_are_left_to_others(
    computed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the elements of input or output, whichever has more."""
    monkeypatch.setattr(linears, "_LEAST", 9 * 24)
    with low():
        nn.Linear(16, 24)(normal(9, 16))
        nn.Linear(24, 16)(normal(9, 24))
        nn.Linear(16, 23)(normal(9, 16))
    assert computed == [True, True, False]


def test_weights_of_the_other_low_type_are_rounded_in_the_backward_as_in_the_forward() -> None:
    """Values of float16 that bfloat16 does not have."""
    weight = nn.Parameter(normal(24, 16).to(FP16))
    x = normal(9, 16).requires_grad_()
    with low():
        F.linear(x, weight).sum().backward()
    expected = reround(torch.ones(9, 24) @ weight.detach().to(BF16).float())
    same(x.grad, expected)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_rounding_in_one_pass_gives_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By compiled kernels, which there may be or not."""
    compiled = bfloat16_kernels()
    if compiled is None:
        pytest.skip("hmpx was installed without a C compiler")
    rounded: list[int] = []

    class Noting:
        def round(self, source: Tensor, target: Tensor) -> Tensor:
            rounded.append(source.numel())
            return compiled.round(source, target)

    x, layer = normal(9, 16).requires_grad_(), nn.Linear(16, 24)
    layer.weight.data[0, :3] = torch.tensor([float("inf"), float("nan"), 1e-40])
    found: list[list[Tensor]] = []
    for kernels in (Noting, lambda: None):
        monkeypatch.setattr(temporaries, "bfloat16_kernels", kernels)
        with low(dtype=dtype):
            y = layer(x)
            gradients = torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
        found.append([y.detach(), *gradients])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        assert torch.equal(a.isnan(), b.isnan())
    # The weight and the bias in the forward; in the backward the weight, and the gradients of both.
    sizes = [16 * 24, 24] * 2 + [16 * 24]
    assert sorted(rounded) == (sorted(sizes) if dtype is BF16 else [])


def test_a_large_layer_takes_its_parameters_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no cast of the weight is made, whose gradient would have to be cast back."""
    given: list[torch.dtype] = []
    forward = linears.Linear.forward

    def noting(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        given.extend([x.dtype, weight.dtype, rest[0].dtype])
        return forward(ctx, x, weight, *rest)

    monkeypatch.setattr(linears.Linear, "forward", staticmethod(noting))
    with low():
        nn.Linear(16, 24)(normal(9, 16))
    with low(reuse_casts=True):
        nn.Linear(16, 24)(normal(9, 16))
    assert given == [BF16, FP32, FP32, BF16, BF16, BF16]
