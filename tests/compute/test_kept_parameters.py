"""What autograd keeps for the backward of products: parameters, and the same gradients."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import OptionError
from tests.values import normal, same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: Name -> the shapes of its parameters, that of its input, and the op, looked up when it is called.
OPS: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[int, ...], Callable[..., Tensor]]] = {
    "linear": (((8, 6), (8,)), (5, 6), lambda *all: F.linear(*all)),
    "linear of batches": (((8, 6), (8,)), (2, 5, 6), lambda *all: F.linear(*all)),
    "linear without bias": (((8, 6),), (2, 5, 6), lambda *all: F.linear(*all)),
    "linear by keywords": (((8, 6), (8,)), (5, 6), lambda x, w, b: F.linear(x, bias=b, weight=w)),
    "matmul": (((6, 8),), (5, 6), lambda *all: torch.matmul(*all)),
    "matmul of a view": (((8, 6),), (5, 6), lambda x, w: x @ w.t()),
    "matmul of parts": (((9, 6),), (5, 6), lambda x, w: x @ w[:].t() + x @ w[:, :].t()),
    "matmul from the left": (((8, 5),), (5, 6), lambda x, w: w @ x),
    "mm": (((6, 8),), (5, 6), lambda *all: torch.mm(*all)),
    "bmm": (((2, 6, 8),), (2, 5, 6), lambda *all: torch.bmm(*all)),
    "addmm": (((8,), (6, 8)), (5, 6), lambda x, b, w: torch.addmm(b, x, w)),
    "baddbmm": (((2, 1, 8), (2, 6, 8)), (2, 5, 6), lambda x, b, w: torch.baddbmm(b, x, w)),
    "einsum": (((6, 2, 4),), (3, 5, 6), lambda x, w: torch.einsum("btd,dhk->bhtk", x, w)),
    "tensordot": (((6, 8),), (3, 5, 6), lambda x, w: torch.tensordot(x, w, 1)),
    "conv1d": (((4, 3, 3), (4,)), (2, 3, 9), lambda *all: F.conv1d(*all)),
    "conv2d": (((4, 3, 3, 3), (4,)), (2, 3, 9, 9), lambda *all: F.conv2d(*all)),
    "conv2d of groups": (((6, 1, 3, 3),), (2, 3, 9, 9), lambda x, w: F.conv2d(x, w, groups=3)),
    "conv3d": (((4, 3, 3, 3, 3),), (2, 3, 5, 5, 5), lambda *all: F.conv3d(*all)),
    "conv_transpose2d": (((3, 4, 3, 3), (4,)), (2, 3, 5, 5), lambda *all: F.conv_transpose2d(*all)),
    "both parameters": (((6, 5), (5, 8)), (8, 1), lambda x, a, b: (a @ b) @ x),
    "one parameter twice": (((6, 6),), (5, 6), lambda x, w: x @ w @ w.t()),
}


def converted(keep_weight_casts: bool | str, **options: Any) -> Any:
    """Converts such that torch's own kernels compute in bfloat16."""
    options = {"legalize": "never", "device_types": {"cpu"}, **options}
    return hmpx.convert(keep_weight_casts=keep_weight_casts, **options)


def low_matrices(run: Callable[[], Tensor], shapes: set[tuple[int, ...]]) -> int:
    """Returns how many distinct low-precision matrices of these many elements a forward saves."""
    sizes = {torch.Size(shape).numel() for shape in shapes if len(shape) > 1}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if tensor.dtype in {BF16, FP16} and memory.nbytes() // 2 in sizes:
            seen[memory.data_ptr()] = tensor  # alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return len(seen)


def gradients(run: Callable[[], Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Returns the output and the gradients."""
    result = run()
    for each in inputs:
        each.grad = None
    result.float().sin().sum().backward()  # type: ignore[no-untyped-call]
    return [result.detach(), *[each.grad for each in inputs if each.grad is not None]]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", OPS)
def test_gradients_are_the_same_and_no_cast_is_kept(
    tmp_path: Path, case: str, dtype: torch.dtype
) -> None:
    """Bit for bit, for each product that takes a parameter; torch's own count says what is saved."""
    low = tmp_path / "bf16.txt"
    low.write_text("@hmpx\neinsum\nbaddbmm\ntensordot\n", encoding="utf-8")
    shapes, input_shape, op = OPS[case]
    parameters = [nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(shapes, 1)]
    x = normal(*input_shape, requires_grad=True)
    if {torch.Size(input_shape).numel()} & {p.numel() for p in parameters if p.dim() > 1}:
        pytest.fail("the input can't be told from a parameter")

    def run() -> Tensor:
        return op(x, *parameters)

    inputs = [x, *parameters]
    with converted(True, low_precision_type=dtype, bf16_file_path=low):
        expected = gradients(run, inputs)
        kept = low_matrices(run, set(shapes))
    with converted(False, low_precision_type=dtype, bf16_file_path=low):
        same(gradients(run, inputs), expected)
        left = low_matrices(run, set(shapes))
    assert kept > 0
    assert left == 0


class Network(nn.Module):
    """Attention, tied weights, a convolution, a recurrent use of one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        for _ in range(3):
            x = F.gelu(self.layer(x))
        return self.head(x)  # type: ignore[no-any-return]


TOKENS = torch.arange(24).reshape(3, 8)


def network_gradients(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    return gradients(run, list(model.parameters()))


def test_a_model_with_attention_and_tied_weights() -> None:
    """No low-precision copy of any of its matrices is saved."""
    model = Network()
    shapes = {tuple(p.shape) for p in model.parameters()}
    with converted(True):
        expected = network_gradients(model, lambda: model(TOKENS))
        assert low_matrices(lambda: model(TOKENS), shapes) >= 6
    with converted(False):
        same(network_gradients(model, lambda: model(TOKENS)), expected)
        assert low_matrices(lambda: model(TOKENS), shapes) == 0


def test_frozen_weights_beside_trained_ones() -> None:
    """As with LoRA: the gradient of the input needs the frozen weight."""
    frozen = nn.Parameter(normal(8, 6, seed=1), requires_grad=False)
    x = normal(5, 6, requires_grad=True)

    def run() -> Tensor:
        return F.linear(x, frozen)

    with converted(True):
        expected = gradients(run, [x])
        assert low_matrices(run, {(8, 6)}) == 1
    with converted(False):
        same(gradients(run, [x]), expected)
        assert low_matrices(run, {(8, 6)}) == 0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant: bool) -> None:
    """The recomputation keeps none either."""
    model = Network()

    def run() -> Tensor:
        x = model.embedding(TOKENS)
        block = nn.Sequential(model.layer, nn.GELU(), model.layer)
        x = checkpoint(block, x, use_reentrant=use_reentrant)
        return model.head(checkpoint(block, x, use_reentrant=use_reentrant))  # type: ignore[no-any-return]

    used = [*model.layer.parameters(), model.head.weight]
    with converted(True):
        expected = gradients(run, used)
    with converted(False):
        same(gradients(run, used), expected)


def test_double_backward() -> None:
    """Gradients of gradients reach the parameter, too."""
    weight = nn.Parameter(normal(8, 6, seed=1))
    x = normal(5, 6, requires_grad=True)

    def penalty() -> list[Tensor]:
        y = F.linear(x, weight).float().sin().sum()
        (inner,) = torch.autograd.grad(y, x, create_graph=True)
        return [inner, *torch.autograd.grad((inner * inner).sum(), [x, weight])]

    with converted(True):
        expected = penalty()
    with converted(False):
        same(penalty(), expected)


def test_transforms() -> None:
    """torch.func has no hooks on saved tensors; it computes what it computes."""
    layer = nn.Linear(6, 8)
    parameters = dict(layer.named_parameters())
    x = normal(5, 6)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).float().sin().sum()

    def both() -> Any:
        by_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        return torch.func.grad(loss)(parameters, x), by_sample

    with converted(True):
        expected = both()
    with converted(False):
        same(both(), expected)


def test_a_parameter_that_was_written_to_is_autograds_error() -> None:
    """As in float32: the backward would see other values than the forward."""
    layer = nn.Linear(6, 8)
    x = normal(5, 6, requires_grad=True)
    with converted(False):
        result = layer(x)
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_memory_that_is_given_back_in_between() -> None:
    """What shards parameters empties them after the forward and fills them before the backward."""
    layer = nn.Linear(6, 8)
    x = normal(5, 6, requires_grad=True)
    with converted(False):
        _, expected = gradients(lambda: layer(x), [x])
        result = layer(x)
        values = layer.weight.data.clone()
        layer.weight.data = torch.empty(0)
        layer.weight.data = values
        same(torch.autograd.grad(result.float().sin().sum(), x), (expected,))


def test_outer_hooks_are_given_the_parameter() -> None:
    """Such as those that move what is saved to the host."""
    layer = nn.Linear(6, 8)
    x = normal(5, 6, requires_grad=True)
    with converted(False):
        expected = gradients(lambda: layer(x), [x, *layer.parameters()])
        with torch.autograd.graph.save_on_cpu():
            same(gradients(lambda: layer(x), [x, *layer.parameters()]), expected)


def test_nothing_is_held_once_the_graph_is_gone() -> None:
    """Neither casts nor parameters, over many steps."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with converted(False):
        counts = []
        for step in range(30):
            model(TOKENS).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 9:
                counts.append(
                    sum(type(each) in {Tensor, nn.Parameter} for each in gc.get_objects())
                )
        graph = model(TOKENS)
        reference = weakref.ref(model.layer.weight)
        del model, optimizer, graph
        gc.collect()
    assert counts[0] == counts[-1]
    assert reference() is None


@pytest.mark.parametrize("tokens", [16, 1024])
def test_auto_casts_again_where_a_weight_is_used_often(tokens: int) -> None:
    """With few rows, casting would take too much of the product's time."""
    layer = nn.Linear(256, 256)
    x = normal(tokens, 256, requires_grad=True)
    with converted("auto"):
        kept = low_matrices(lambda: layer(x), {(256, 256)})
    assert kept == (1 if tokens == 16 else 0)


def test_auto_keeps_casts_that_are_small_beside_the_other_input() -> None:
    """They save less than a 32nd of what is kept anyway."""
    layer = nn.Linear(128, 128)
    x = normal(8192, 128, requires_grad=True)
    with converted("auto"):
        assert low_matrices(lambda: layer(x), {(128, 128)}) == 1


def test_attention_to_another_sequence(tmp_path: Path) -> None:
    """Its projections take parts of one cast, which begin where that does not."""
    low = tmp_path / "bf16.txt"
    low.write_text("@hmpx\nmulti_head_attention_forward\n", encoding="utf-8")
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    x, y = normal(2, 5, 16, requires_grad=True), normal(2, 7, 16, seed=1, requires_grad=True)

    def run() -> Tensor:
        return attention(x, y, y, need_weights=False)[0]  # type: ignore[no-any-return]

    inputs = [x, y, *attention.parameters()]
    with converted(True, bf16_file_path=low):
        expected = gradients(run, inputs)
    with converted(False, bf16_file_path=low):
        same(gradients(run, inputs), expected)
        assert low_matrices(run, {(48, 16)}) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    """The partitioner recomputes the casts; gradients are those of a graph that keeps them."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    x = normal(5, 16, requires_grad=True)
    shapes = {tuple(p.shape) for p in model.parameters()}
    found = {}
    for keep in (True, False):
        torch.compiler.reset()
        with converted(keep):
            compiled = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True)
            inputs = [x, *compiled.parameters()]
            values = gradients(lambda: compiled(x), inputs)  # noqa: B023  # called here
            kept = low_matrices(lambda: compiled(x), shapes)  # noqa: B023
        found[keep] = values, kept
    same(found[False][0], found[True][0])
    assert found[True][1] > 0
    assert found[False][1] == 0


def test_exported_programs_hold_for_all_sizes() -> None:
    """What is kept depends on them; no guard may come of it."""
    layer, x = nn.Linear(128, 192), normal(300, 128)
    shapes = ({0: torch.export.Dim("rows")},)
    with converted("auto"):
        program = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=True)
    assert program.module()(normal(5, 128)).shape == (5, 192)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_trained", [True, False])
def test_compiled_graphs_that_write_to_a_weight(is_trained: bool) -> None:
    """The backward would cast what was written: these casts are kept."""

    def run() -> Tensor:
        result = x @ weight + x @ weight.t()
        with torch.no_grad():
            weight.mul_(2)
        return result

    x, found = normal(5, 6, requires_grad=True), []
    for keep in (True, False):
        torch.compiler.reset()
        weight = nn.Parameter(normal(6, 6), requires_grad=is_trained)
        with converted(keep):
            found.append(gradients(torch.compile(run, backend="aot_eager"), [x, weight]))
    same(found[1], found[0])


@pytest.mark.parametrize("value", ["no", None, 2, 0.5])
def test_other_values_are_refused(value: object) -> None:
    """Before anything is patched."""
    with pytest.raises(OptionError, match="keep_weight_casts must be 'auto', True or False, not"):
        hmpx.convert(keep_weight_casts=value)  # type: ignore[arg-type]
    assert not hmpx.is_converted()


@pytest.mark.parametrize(("value", "kept"), [("auto", BF16), (True, BF16), (False, torch.float32)])
@pytest.mark.parametrize("device_types", [{"meta"}, {"meta", "cpu"}])
def test_auto_keeps_casts_on_accelerators(
    value: bool | str, kept: torch.dtype, device_types: set[str]
) -> None:
    """There casting again costs the host's time, however many rows use a weight."""
    weight = nn.Parameter(torch.empty(256, 256, device="meta"))
    x = torch.empty(1 << 14, 256, device="meta", requires_grad=True)
    saved: set[torch.dtype] = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == weight.numel():
            saved.add(tensor.dtype)
        return tensor

    with (
        converted(value, device_types=device_types),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        nn.functional.linear(x, weight)
    assert saved == {kept}
