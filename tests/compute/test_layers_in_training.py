"""Linear layers, and convolutions that are computed in kept memory, as large ones are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hmpx
from hmpx import Policy
from hmpx.casting import legalized, retiring
from hmpx.compute import layers, nodes
from tests.compute.keeping import Keeping
from tests.values import normal, same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NEVER_LARGE = 1 << 60

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("lacks_low_precision"),
]


class Kind(NamedTuple):
    """A layer: whether it is a convolution, how to make one with ``n`` outputs, and a shape of its input."""

    convolves: bool
    layer: Callable[..., nn.Module]
    shape: tuple[int, ...]
    name: str

    @property
    def function(self) -> Callable[..., Tensor]:
        """The function of torch as it is now: one that a tuple of this module held would not be wrapped."""
        return getattr(F, self.name)  # type: ignore[no-any-return]

    def data(self, seed: int = 0, rows: int = 0) -> Tensor:
        """Returns an input, which has more or fewer rows if asked to."""
        first, *others = self.shape
        return normal(rows or first, *others, seed=seed)


KINDS = {
    "linear": Kind(False, lambda n=24: nn.Linear(16, n), (9, 16), "linear"),
    "conv2d": Kind(True, lambda n=6: nn.Conv2d(4, n, 3), (2, 4, 9, 8), "conv2d"),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def compute_from(least: int, patches: pytest.MonkeyPatch) -> None:
    """Has convolutions of this size and larger ones computed here."""
    patches.setattr(layers, "LEAST", least)


@pytest.fixture(autouse=True)
def every_size_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_from(0, monkeypatch)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each convolution was computed here."""
    found: list[bool] = []

    def noting(compute: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def computing(*args: Any, **kwargs: Any) -> Tensor | None:
            result = compute(*args, **kwargs)
            found.append(result is not None)
            return result

        return computing

    monkeypatch.setattr(legalized, "convolution", noting(legalized.convolution))
    return found


def low(legalize: str = "always", dtype: torch.dtype = BF16, **options: Any) -> hmpx.Session:
    ops = ["linear", "conv1d", "conv2d", "conv3d"]
    policy = Policy.from_ops(low=ops, low_precision_type=dtype)
    return hmpx.convert(policy=policy, legalize=legalize, **options)


def reround(tensor: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    return tensor.to(dtype).float()


#: The wrappers without compiled nodes.
_WRAPPERS: dict[object, object] = {}


@contextlib.contextmanager
def left_to_others() -> Iterator[None]:
    """Has convolutions computed as small ones are, and linear layers without compiled nodes."""
    with pytest.MonkeyPatch.context() as patch:
        compute_from(NEVER_LARGE, patch)
        patch.setattr(nodes, "nodes_in_use", nodes.Nodes)
        patch.setattr(retiring, "_shared", _WRAPPERS)
        yield


#: Op, shapes of input, weight and bias, and the other arguments.
CASES: dict[str, tuple[str, tuple[tuple[int, ...], ...], tuple[Any, ...]]] = {
    "matrix": ("linear", ((9, 16), (24, 16), (24,)), ()),
    "stack": ("linear", ((2, 33, 40), (24, 40), (24,)), ()),
    "stack of stacks": ("linear", ((2, 3, 5, 16), (8, 16), (8,)), ()),
    "matrix, no bias": ("linear", ((9, 16), (24, 16)), ()),
    "stack, no bias": ("linear", ((2, 33, 40), (24, 40)), ()),
    "one row": ("linear", ((1, 64), (24, 64), (24,)), ()),
    "one column": ("linear", ((9, 1), (24, 1), (24,)), ()),
    "one output": ("linear", ((9, 16), (1, 16), (1,)), ()),
    "wide": ("linear", ((130, 256), (512, 256), (512,)), ()),
    "conv1d": ("conv1d", ((2, 4, 9), (6, 4, 3), (6,)), ()),
    "conv2d": ("conv2d", ((2, 4, 9, 8), (6, 4, 3, 3), (6,)), ()),
    "no bias": ("conv2d", ((2, 4, 9, 8), (6, 4, 3, 3)), ()),
    "strides": ("conv2d", ((2, 4, 9, 8), (6, 4, 3, 3), (6,)), (2, 1)),
    "channels_last": ("conv2d", ((2, 4, 9, 8), (6, 4, 3, 3), (6,)), (2, 1)),
    "pairs": ("conv2d", ((2, 4, 9, 8), (6, 4, 3, 3), (6,)), ((1, 2), [1, 0], (2, 1), 1)),
    "groups": ("conv2d", ((2, 4, 9, 8), (4, 1, 3, 3), (4,)), (1, 1, 1, 4)),
    "conv3d": ("conv3d", ((2, 2, 5, 5, 4), (3, 2, 2, 2, 2), (3,)), (1, 1)),
}
CONVOLUTIONS = [name for name, (op, *_) in CASES.items() if op != "linear"]

#: How the incoming gradient is laid out.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda g: g,
    "expanded": lambda g: g.flatten()[0].expand(g.shape),
    "rows expanded": lambda g: g[..., :1].expand(g.shape),
    "transposed": lambda g: g.transpose(0, -1).contiguous().transpose(0, -1),
    "part": lambda g: torch.cat([g, g], -1)[..., : g.shape[-1]],
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *[(name, layout) for name in CASES if name not in CONVOLUTIONS for layout in LAYOUTS],
        *[(name, "contiguous") for name in CONVOLUTIONS],
    ],
)
@pytest.mark.parametrize("legalize", ["always", "auto", "fast"])
@pytest.mark.parametrize("leaf_dtype", [FP32, None])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_it_is_what_others_compute(  # noqa: PLR0917  # as parametrized
    name: str,
    dtype: torch.dtype,
    leaf_dtype: torch.dtype | None,
    legalize: str,
    layout: str,
    computed: list[bool],
) -> None:
    """Bit for bit and stride for stride, the gradients of parameters and of plain tensors too."""
    op, shapes, arguments = CASES[name]
    for is_parameter in (True, False):

        def results(*, is_parameter: bool = is_parameter) -> tuple[Tensor, Sequence[Tensor]]:
            inputs = [normal(*s, seed=i).to(leaf_dtype or dtype) for i, s in enumerate(shapes)]
            if name == "channels_last":
                inputs[0] = inputs[0].to(memory_format=torch.channels_last)
            if is_parameter:
                inputs[1:] = [nn.Parameter(t) for t in inputs[1:]]
            inputs = [t.requires_grad_() for t in inputs]
            given = [*inputs, *[None] * (3 - len(inputs)), *arguments]
            with low(legalize, dtype):
                for _ in range(2):  # compiled nodes compute a linear layer from the second call on
                    output = getattr(F, op)(*given)
                incoming = LAYOUTS[layout](normal(*output.shape, seed=9).to(dtype))
            return output.detach(), torch.autograd.grad(output, inputs, incoming)

        computed.clear()
        actual = results()
        assert actual[0].dtype is dtype
        is_known = is_parameter or legalize != "fast" or leaf_dtype is None
        assert computed == ([] if op == "linear" else [is_known] * 2)
        with left_to_others():
            expected = results()
        same(actual, expected, check_stride=True)


def test_it_is_the_composition_of_casts(kind: Kind, computed: list[bool]) -> None:
    """Gradients are rounded where they go out."""
    data, layer = kind.data().requires_grad_(), kind.layer()
    inputs = (data, layer.weight, layer.bias)
    with low():
        output = layer(data)
    incoming = normal(*output.shape, seed=9).bfloat16()
    actual = torch.autograd.grad(output, inputs, incoming)
    rounded = [reround(t).detach().requires_grad_() for t in inputs]
    wide = kind.function(*rounded)
    expected = torch.autograd.grad(wide, rounded, incoming.float())
    assert computed == [True] * kind.convolves
    same(output, wide.bfloat16(), check_stride=True)
    same(list(actual), [reround(t) for t in expected], check_stride=True)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_layer_of_few_rows_is_the_composition_of_casts(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the order of sums in the forward, where the weight is rounded while it is read."""
    monkeypatch.setattr(layers, "LEAST", 0)
    data, layer = normal(rows, 64).requires_grad_(), nn.Linear(64, 256)
    inputs = (data, layer.weight, layer.bias)
    with low():
        output = layer(data)
    assert type(output.grad_fn).__name__ == "_LinearBackward"
    incoming = normal(*output.shape, seed=9).bfloat16()
    actual = torch.autograd.grad(output, inputs, incoming)
    rounded = [reround(t).detach().requires_grad_() for t in inputs]
    wide = F.linear(*rounded)
    torch.testing.assert_close(output, wide.bfloat16(), rtol=2**-7, atol=1e-3)
    expected = torch.autograd.grad(wide, rounded, incoming.float())
    same(list(actual), [reround(t) for t in expected], check_stride=True)


@pytest.mark.parametrize("learning", ["input", "weight", "bias"])
def test_only_what_is_asked_for_has_a_gradient(
    learning: str, kind: Kind, computed: list[bool]
) -> None:
    """As in a first layer, and with frozen weights."""
    data, layer = kind.data(), kind.layer().requires_grad_(requires_grad=False)
    leaf = {"input": data, "weight": layer.weight, "bias": layer.bias}[learning].requires_grad_()
    with low():
        layer(data).sum().backward()
    assert computed == [True] * kind.convolves
    tensors = (data, layer.weight, layer.bias)
    assert [t.grad is not None for t in tensors] == [t is leaf for t in tensors]


@pytest.mark.parametrize("legalize", ["always", "fast"])
def test_what_is_kept_is_low_or_a_parameter(
    legalize: str, kind: Kind, computed: list[bool]
) -> None:
    """The input in low precision, and of the parameter itself nothing new."""
    layer, packed = kind.layer(), list[Tensor]()
    hooks = saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with low(legalize), hooks:
        # Not so small as to be left to native kernels.
        output = layer(kind.data(rows=40).requires_grad_() * 1)
    assert computed == [True] * kind.convolves
    assert output.requires_grad
    weight = layer.weight.untyped_storage().data_ptr()
    own = [t for t in packed if t.untyped_storage().data_ptr() == weight]
    assert [t.dtype for t in packed if not any(t is each for each in own)] == [BF16]
    assert len(own) == 1
    assert not kind.convolves or own[0] is layer.weight


def test_no_two_results_share_memory(kind: Kind) -> None:
    """Later calls, smaller and larger ones, leave earlier results as they are."""
    layers = [kind.layer(n) for n in (8, 2, 32)]
    data = [kind.data(seed=rows, rows=rows).requires_grad_() for rows in (8, 16, 5)]

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
def test_results_may_be_written_to(shape: tuple[int, ...]) -> None:
    """As by `nn.ReLU(inplace=True)`, which follows the linear layers of VGG and AlexNet."""
    layer, x = nn.Linear(16, 24), normal(*shape)

    def gradient(relu: Callable[[Tensor], Tensor]) -> Tensor | None:
        layer.zero_grad()
        relu(layer(x)).sum().backward()
        return layer.weight.grad

    with low():
        assert torch.equal(gradient(F.relu_), gradient(F.relu))
        assert layer(x).detach_().is_leaf


def test_modes_may_keep_what_they_see(kind: Kind) -> None:
    """Of forward and backward, or of the backward alone: kept memory is not shown to them."""
    layer, mode = kind.layer(), Keeping()
    with low():
        for _ in range(2):  # the second time there is kept memory
            loss = layer(kind.data()).sum()
            with mode:
                torch.autograd.grad(loss, layer.parameters())
            layer(kind.data(seed=1)).sum().backward()
        with mode:
            first, second = layer(kind.data()), layer(kind.data(seed=1))
            torch.autograd.grad(first.sum() + second.sum(), layer.parameters())
    memory = layers._thread.memory
    own = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
    assert len(mode.seen) > 10
    for tensor, before in mode.seen:
        assert tensor.data_ptr() not in own
        assert torch.equal(tensor, before)


@pytest.mark.parametrize("how", ["reentrant", "hooks", "selective"])
def test_checkpoints(how: str, kind: Kind) -> None:
    """Gradients are those without."""
    net = nn.Sequential(kind.layer(), nn.Tanh(), kind.layer())
    net[2] = nn.Conv2d(6, 2, 3) if kind.convolves else nn.Linear(24, 8)
    data = kind.data().requires_grad_()

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        data.grad = None
        net.zero_grad()
        with low():
            output = run(data)
            output.float().square().sum().backward()
        return [output, *[t.grad.clone() for t in (data, *net.parameters()) if t.grad is not None]]

    options: dict[str, Any] = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        kept = [torch.ops.aten.convolution.default, torch.ops.aten.addmm.default]
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(kept)
    actual, expected = gradients(lambda t: checkpoint(net, t, **options)), gradients(net)
    assert len(expected) == 6
    same(actual, expected, check_stride=True)


def test_a_batch_of_gradients(kind: Kind) -> None:
    """As for vectorized Jacobians."""
    layer, data = kind.layer(), kind.data().requires_grad_()
    wanted = (data, *layer.parameters())
    with low():
        output = layer(data)
        incoming = normal(3, *output.shape, seed=9).bfloat16()

        def gradients(each: Tensor, **options: Any) -> tuple[Tensor, ...]:
            return torch.autograd.grad(output, wanted, each, retain_graph=True, **options)

        batches = gradients(incoming, is_grads_batched=True), torch.func.vmap(gradients)(incoming)
        expected = [gradients(each) for each in incoming]
    for found in batches:
        for batch, each in zip(found, zip(*expected, strict=True), strict=True):
            torch.testing.assert_close(batch, torch.stack(each), rtol=2**-7, atol=2**-7)


@pytest.mark.sampled(1)
def test_second_order_gradients_are_as_near_to_exact_ones_as_native_kernels_are(
    kind: Kind,
) -> None:
    """Each backward rounds, as it does there."""
    layer = kind.layer(128)
    values = [kind.data(rows=64), *[p.detach() for p in layer.parameters()]]

    def second(dtype: torch.dtype, legalize: str | None) -> list[Tensor]:
        leaves = [nn.Parameter(reround(each).to(dtype)) for each in values]
        with contextlib.nullcontext() if legalize is None else low(legalize):
            output = kind.function(*leaves)
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
        for legalize in ("auto", "always", "fast", "never")
    }
    native = errors.pop("never")
    assert all(error > 0 for error in native)
    for mode, ours in errors.items():
        assert all(a <= 1.1 * b for a, b in zip(ours, native, strict=True)), (mode, ours, native)


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
def test_other_linear_layers_are_left_to_others(x: Tensor, weight: Tensor, bias: Any) -> None:
    """And give what they give there."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]

    def results() -> Any:
        with low():
            output = F.linear(*leaves)
            return [output, *torch.autograd.grad(output.float().square().sum(), leaves)]

    actual = results()
    with left_to_others():
        same(actual, results(), check_stride=True)


def test_a_weight_that_changes_before_the_backward_is_an_error(kind: Kind) -> None:
    """It would be rounded from other values."""
    layer = kind.layer()
    with low():
        loss = layer(kind.data().requires_grad_()).sum()
        with torch.no_grad():
            layer.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_in_inference_give_what_those_in_training_do(name: str) -> None:
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
