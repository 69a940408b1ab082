"""Convolutions that are computed in kept memory, as large ones are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hmpx
from hmpx import Policy
from hmpx.compute.legalize import convolutions
from hmpx.compute.legalize import scratch as temporaries
from tests.compute.keeping import Keeping
from tests.values import normal, same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("lacks_low_precision"),
]


@pytest.fixture(autouse=True)
def every_size_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_LEAST", 0)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each convolution was computed here."""
    found: list[bool] = []
    compute = convolutions.compute

    def noting(*args: Any, **kwargs: Any) -> Tensor | None:
        result = compute(*args, **kwargs)
        found.append(result is not None)
        return result

    monkeypatch.setattr(convolutions, "compute", noting)
    return found


def low(legalize: str = "always", dtype: torch.dtype = BF16, **options: Any) -> hmpx.Session:
    policy = Policy.from_ops(low=["conv1d", "conv2d", "conv3d"], low_precision_type=dtype)
    return hmpx.convert(policy=policy, legalize=legalize, **options)


def reround(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).float()


#: Op, shapes of input, weight and bias, and the other arguments.
CASES: dict[str, tuple[str, tuple[tuple[int, ...], ...], tuple[Any, ...]]] = {
    "conv1d": ("conv1d", ((2, 4, 9), (6, 4, 3), (6,)), ()),
    "conv2d": ("conv2d", ((2, 4, 9, 8), (6, 4, 3, 3), (6,)), ()),
    "no bias": ("conv2d", ((2, 4, 9, 8), (6, 4, 3, 3)), ()),
    "strides": ("conv2d", ((2, 4, 9, 8), (6, 4, 3, 3), (6,)), (2, 1)),
    "pairs": ("conv2d", ((2, 4, 9, 8), (6, 4, 3, 3), (6,)), ((1, 2), [1, 0], (2, 1), 1)),
    "groups": ("conv2d", ((2, 4, 9, 8), (4, 1, 3, 3), (4,)), (1, 1, 1, 4)),
    "conv3d": ("conv3d", ((2, 2, 5, 5, 4), (3, 2, 2, 2, 2), (3,)), (1, 1)),
}


def leaves_of(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, memory_format: torch.memory_format | None
) -> list[Tensor]:
    leaves = [normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    if memory_format is not None:
        leaves[0] = leaves[0].to(memory_format=memory_format)
    return [t.requires_grad_() for t in leaves]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("legalize", ["always", "fast"])
@pytest.mark.parametrize("leaf_dtype", [FP32, None])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", [*CASES, "channels_last"])
def test_it_is_what_others_compute(
    name: str,
    dtype: torch.dtype,
    leaf_dtype: torch.dtype | None,
    legalize: str,
    computed: list[bool],
) -> None:
    """Bit for bit and stride for stride, the gradients of parameters and of plain tensors too."""
    op, shapes, arguments = CASES["strides" if name == "channels_last" else name]
    memory_format = torch.channels_last if name == "channels_last" else None
    for is_parameter in (True, False):

        def results(*, is_parameter: bool = is_parameter) -> tuple[Tensor, Sequence[Tensor]]:
            inputs = leaves_of(shapes, leaf_dtype or dtype, memory_format)
            if is_parameter:
                inputs[1:] = [nn.Parameter(t.detach()) for t in inputs[1:]]
            with low(legalize, dtype):
                output = getattr(F, op)(*inputs, *[None] * (3 - len(inputs)), *arguments)
                incoming = normal(*output.shape, seed=9).to(dtype)
            return output.detach(), torch.autograd.grad(output, inputs, incoming)

        computed.clear()
        actual = results()
        is_known = is_parameter or legalize == "always" or leaf_dtype is None
        assert computed == [is_known]
        assert actual[0].dtype is dtype
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(convolutions, "_LEAST", 1 << 40)
            expected = results()
        same(actual, expected, check_stride=True)


def test_it_is_the_composition_of_casts() -> None:
    """Gradients are rounded where they go out."""
    data, layer = normal(2, 4, 9, 8).requires_grad_(), nn.Conv2d(4, 6, 3)
    inputs = (data, layer.weight, layer.bias)
    with low():
        output = layer(data)
    incoming = normal(*output.shape, seed=9).bfloat16()
    actual = torch.autograd.grad(output, inputs, incoming)
    rounded = [reround(t, BF16).detach().requires_grad_() for t in inputs]
    wide = F.conv2d(*rounded)
    expected = torch.autograd.grad(wide, rounded, incoming.float())
    same(output, wide.bfloat16(), check_stride=True)
    same(list(actual), [reround(t, BF16) for t in expected], check_stride=True)


@pytest.mark.parametrize("learning", ["input", "weight", "bias"])
def test_only_what_is_asked_for_has_a_gradient(learning: str, computed: list[bool]) -> None:
    """As in a first layer, and with frozen weights."""
    data, layer = normal(2, 4, 9, 8), nn.Conv2d(4, 6, 3).requires_grad_(requires_grad=False)
    leaf = {"input": data, "weight": layer.weight, "bias": layer.bias}[learning].requires_grad_()
    with low():
        layer(data).sum().backward()
    assert leaf.grad is not None
    assert [t.grad is None for t in (data, layer.weight, layer.bias)].count(True) == 2
    assert computed == [True]


@pytest.mark.parametrize("legalize", ["always", "fast"])
def test_what_is_kept_is_low_or_a_parameter(legalize: str, computed: list[bool]) -> None:
    """No fp32 copy outlives the forward."""
    layer, data, packed = nn.Conv2d(4, 6, 3), normal(2, 4, 9, 8).requires_grad_(), []
    with low(legalize), saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        layer(data * 1)
    assert [t.dtype for t in packed if t is not layer.weight] == [BF16]
    assert computed == [True]


@pytest.mark.parametrize("name", CASES)
def test_inference_gives_what_training_does(name: str) -> None:
    """In kept memory too, fp32 and low inputs, whatever is kept by whoever else."""
    op, shapes, arguments = CASES[name]
    inputs = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    inputs += [None] * (3 - len(inputs))
    parameters = [None if t is None else nn.Parameter(t) for t in inputs]
    with low():
        function = getattr(F, op)
        expected = function(*parameters, *arguments).detach()
        with torch.no_grad():
            outputs = [function(*given, *arguments) for given in (inputs, parameters) for _ in "ab"]
        with torch.inference_mode():
            outputs.append(function(*inputs, *arguments))
            if not arguments:
                outputs.append(function(inputs[0], weight=inputs[1], bias=inputs[2]))
    for output in outputs:
        same(output, expected, check_stride=True)


def test_inference_in_forward_mode_and_under_modes() -> None:
    """Tangents are not lost, and nothing that a mode keeps is written to."""
    weight, mode = normal(6, 4, 3, 3, seed=1), Keeping()
    data, tangent = normal(2, 4, 9, 8), normal(2, 4, 9, 8, seed=2)
    with low(), torch.no_grad():
        plain = F.conv2d(data, weight)
        with mode:
            F.conv2d(data, weight)
            F.conv2d(tangent, weight)
        with torch.autograd.forward_ad.dual_level() as _:
            dual = torch.autograd.forward_ad.make_dual(data, tangent)
            found = torch.autograd.forward_ad.unpack_dual(F.conv2d(dual, weight))
    same(found.primal, plain, check_stride=True)
    expected = F.conv2d(reround(tangent, BF16), reround(weight, BF16)).bfloat16()
    assert found.tangent is not None
    same(found.tangent, expected, check_stride=True)
    for tensor, before in mode.seen:
        assert torch.equal(tensor, before)


def test_no_two_results_share_memory() -> None:
    """Later calls, smaller and larger ones, leave earlier results as they are."""
    layers = [nn.Conv2d(4, n, 3, padding=1) for n in (8, 2, 32)]
    data = [normal(2, 4, size, size, seed=size).requires_grad_() for size in (8, 16, 5)]

    def gradients() -> list[list[Tensor]]:
        found = []
        with low():
            for _ in range(2):
                outputs = [layer(t) for layer, t in zip(layers, data, strict=True)]
                for layer, t, output in zip(layers, data, outputs, strict=True):
                    incoming = normal(*output.shape, seed=3).bfloat16()
                    wanted = (t, *layer.parameters())
                    found.append([output, *torch.autograd.grad(output, wanted, incoming)])
        return found

    actual = gradients()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolutions, "_LEAST", 1 << 40)
        expected = gradients()
    same(actual, expected, check_stride=True)


@pytest.mark.parametrize("most", [0, 100, 500])
def test_what_does_not_fit_is_new(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are those with memory for all."""
    layer, data = nn.Conv2d(4, 6, 3), normal(2, 4, 9, 8)

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


def test_no_two_calls_share_memory() -> None:
    """Though one begins before the other has ended."""
    for _ in range(2):
        outer = temporaries.Temporaries(torch.device("cpu"))
        kept = outer.widen(torch.ones(64, dtype=BF16))
        inner = temporaries.Temporaries(torch.device("cpu"))
        inner.widen(torch.zeros(64, dtype=BF16))
        inner.free()
        same(kept, torch.ones(64), check_stride=True)
        outer.free()


def test_calls_from_within() -> None:
    """A hook of a gradient that convolves, and a call that fails half-way."""
    layer, data = nn.Conv2d(4, 6, 3), normal(2, 4, 9, 8).requires_grad_()

    def train(gradient: Tensor) -> None:
        with torch.enable_grad():
            layer(data).sum().backward()

    def gradients(*, has_hook: bool) -> list[Tensor]:
        with low():
            output = layer(data)
            if has_hook:
                output.register_hook(train)
            found = torch.autograd.grad(output, (data, layer.weight), torch.ones_like(output))
        return [output, *found]

    expected = gradients(has_hook=False)
    same(gradients(has_hook=True), expected, check_stride=True)
    with low(), pytest.raises(RuntimeError, match="to have 4 channels"):
        layer(normal(2, 5, 9, 8))
    same(gradients(has_hook=False), expected, check_stride=True)


def test_modes_may_keep_what_they_see() -> None:
    """Nothing that they are shown is written to later."""
    layer, mode = nn.Conv2d(4, 6, 3), Keeping()
    with low():
        layer(normal(2, 4, 9, 8)).sum().backward()  # now there is kept memory
        layer.zero_grad()
        with mode:
            first, second = layer(normal(2, 4, 9, 8)), layer(normal(2, 4, 9, 8, seed=1))
            (first.sum() + second.sum()).backward()
    assert len(mode.seen) > 10
    gradients = {p.grad.data_ptr() for p in layer.parameters() if p.grad is not None}
    for tensor, before in mode.seen:
        if tensor.data_ptr() not in gradients:  # which accumulate
            assert torch.equal(tensor, before)


@pytest.mark.parametrize("how", ["reentrant", "hooks", "selective"])
def test_checkpoints(how: str) -> None:
    """Gradients are those without."""
    net = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Conv2d(6, 2, 3))
    data = normal(2, 4, 9, 8).requires_grad_()

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with low():
            output = run(data)
            found = torch.autograd.grad if how != "reentrant" else None
            if found is not None:
                return [output, *found(output.float().square().sum(), [data, *net.parameters()])]
            data.grad = None
            net.zero_grad()
            output.float().square().sum().backward()
            return [output, *[t.grad for t in (data, *net.parameters()) if t.grad is not None]]

    options: dict[str, Any] = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        kept = [torch.ops.aten.convolution.default]
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(kept)
    same(gradients(lambda t: checkpoint(net, t, **options)), gradients(net), check_stride=True)


def test_modes_may_keep_what_they_see_of_the_backward_alone() -> None:
    """Though the forward was not seen by them."""
    layer, mode = nn.Conv2d(4, 6, 3), Keeping()
    with low():
        for _ in range(2):  # the second time there is kept memory
            loss = layer(normal(2, 4, 9, 8)).sum()
            with mode:
                torch.autograd.grad(loss, layer.parameters())
            layer(normal(2, 4, 9, 8, seed=1)).sum().backward()
    memory = temporaries._thread.memory
    own = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
    assert not any(tensor.data_ptr() in own for tensor, _ in mode.seen)


def test_a_batch_of_gradients() -> None:
    """As for vectorized Jacobians."""
    layer, data = nn.Conv2d(4, 6, 3), normal(2, 4, 9, 8).requires_grad_()
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
        mapped = torch.func.vmap(
            lambda each: torch.autograd.grad(output, wanted, each, retain_graph=True)
        )(incoming)
    for found in (actual, mapped):
        for batch, each in zip(found, zip(*expected, strict=True), strict=True):
            assert torch.equal(batch, torch.stack(each))


def test_second_order_gradients_are_as_near_to_exact_ones_as_native_kernels_are() -> None:
    """Each backward rounds, as it does there."""
    shapes = ((2, 3, 7, 7), (4, 3, 3, 3), (4,))

    def second(dtype: torch.dtype, legalize: str | None) -> list[Tensor]:
        leaves = [
            reround(normal(*s, seed=i), BF16).to(dtype).requires_grad_()
            for i, s in enumerate(shapes)
        ]
        with contextlib.nullcontext() if legalize is None else low(legalize):
            output = F.conv2d(*leaves, 2, 1)
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
    ("data", "arguments", "keywords"),
    [
        (normal(2, 4, 9, 8), (1, "same"), {}),
        (normal(2, 4, 9, 8), (1, "valid"), {}),
        (normal(4, 9, 8), (), {}),
        (normal(2, 4, 9, 8), (), {"stride": 2}),
        (normal(0, 4, 9, 8), (), {}),
        (normal(2, 4, 9, 8), ([1], [0]), {}),
    ],
)
def test_other_calls_are_left_to_others(
    data: Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any], computed: list[bool]
) -> None:
    """Named paddings, no batch, keywords, nothing at all, short lists."""
    layer = nn.Conv2d(4, 6, 3)
    with low():
        output = F.conv2d(data, layer.weight, layer.bias, *arguments, **keywords)
    rounded = [reround(t, BF16) for t in (data, layer.weight, layer.bias)]
    same(output, F.conv2d(*rounded, *arguments, **keywords).bfloat16(), check_stride=True)
    assert True not in computed


def test_tensors_of_two_devices_are_left_to_others(computed: list[bool]) -> None:
    """Not copied in silence."""
    with low():
        F.conv2d(normal(2, 4, 9, 8), nn.Parameter(torch.empty(6, 4, 3, 3, device="meta")))
    assert computed == [False]


def test_reused_casts_have_their_gradients() -> None:
    """One cast of the weight, which is kept, for two convolutions."""
    layer, data = nn.Conv2d(4, 4, 3, padding=1), normal(2, 4, 9, 8)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, value: Tensor) -> Tensor:
            return self.layer(self.layer(value))

    found = []
    for options in ({}, {"reuse_casts": True}):
        packed: list[Tensor] = []
        hooks = saved_tensors_hooks(lambda t, packed=packed: packed.append(t) or t, lambda t: t)
        with low(**options), hooks:
            found.append(torch.autograd.grad(Twice()(data).float().sum(), layer.parameters()))
        assert any(t is layer.weight for t in packed) is not bool(options)
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)


def test_backward_twice_and_freed_graphs() -> None:
    """As of any op."""
    layer, data = nn.Conv2d(4, 6, 3), normal(2, 4, 9, 8)
    with low():
        loss = layer(data).sum()
    loss.backward(retain_graph=True)
    once = layer.weight.grad.clone()
    loss.backward()
    same(layer.weight.grad, once * 2, check_stride=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_threads() -> None:
    """Each has memory of its own."""
    layers = [nn.Conv2d(4, n, 3) for n in (2, 6, 16)]
    data = [normal(2, 4, size, size, seed=size) for size in (9, 12, 20)]

    def step(index: int) -> list[Tensor]:
        output = layers[index](data[index])
        loss = output.float().square().sum()
        return [output, *torch.autograd.grad(loss, layers[index].parameters())]

    found: dict[int, list[list[Tensor]]] = {}
    with low():
        expected = [step(index) for index in range(3)]

        def work(index: int) -> None:
            found[index] = [step(index) for _ in range(30)]

        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index in range(3):
        for actual in found[index]:
            same(actual, expected[index], check_stride=True)
