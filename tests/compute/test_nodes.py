"""`linear` and casts by compiled nodes: the bits of torch's nodes; torch's way for the unusual."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import OptionError, compute
from hmpx.casting import legalized, retiring
from hmpx.compute import nodes
from hmpx.session import switching
from tests import forks
from tests.conftest import forget_regions_in_graphs

ROOT = Path(__file__).resolve().parents[2]
BF16, FP16 = torch.bfloat16, torch.float16
CPU = frozenset({"cpu"})
Case = Callable[[], list[Any]]


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """Returns `hatch_build.py` as a module."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(hook: ModuleType) -> nodes.Nodes:
    """Returns the nodes of this process; compiles those that the installation lacks, or skips with the reason."""
    if nodes.nodes_in_use().module is None:
        try:
            hook.compile_nodes()
        except RuntimeError as error:
            pytest.skip(f"the nodes can't be compiled here: {error}")
        nodes.nodes_in_use.cache_clear()
    found = nodes.nodes_in_use()
    assert found.module is not None, found.fault
    return found


#: With compiled nodes or not, and how fast devices are -> the wrappers of such conversions.
_WRAPPERS: dict[tuple[bool, object], dict[object, object]] = {}


@contextlib.contextmanager
def converted(*, with_nodes: bool = True, **options: Any) -> Iterator[None]:
    """Converts for the CPU with these options, as in a process with compiled nodes or without."""
    options = {"legalize": "never", "keep_weight_casts": True} | options
    with pytest.MonkeyPatch.context() as patch:
        key = with_nodes, legalized.known_capability
        patch.setattr(retiring, "_shared", _WRAPPERS.setdefault(key, {}))
        forget_regions_in_graphs(patch)
        if not with_nodes:
            patch.setattr(nodes, "nodes_in_use", nodes.Nodes)
        switching.forget_left()  # it would be restored with its wrappers
        with hmpx.convert(device_types={"cpu"}, **options):
            yield
        switching.forget_left()


def are_together(result: Tensor) -> bool:
    """Whether one compiled node made all casts in the graph of ``result``."""
    found, left = set(), [result.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [each for each, _ in node.next_functions]
    names = [type(node).__name__ for node in found]
    return names.count("CppFunction") == 1 and "ToCopyBackward0" not in names


def is_fused(result: Tensor) -> bool:
    """Whether the compiled nodes made ``result``."""
    return result.grad_fn is not None and type(result.grad_fn).__name__ == "CppFunction"


def assert_equal_bits(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) is (other is None)
        if one is not None:
            assert one.dtype is other.dtype
            assert torch.equal(one, other)


# --- the same bits -------------------------------------------------------------------------------

X = torch.linspace(-2, 2, 256).view(2, 8, 16)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.Linear(32, 16, bias=False)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), middle, nn.Tanh(), nn.Linear(16, 4))


class Upcast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float().tanh()


class Weighted(nn.Module):
    """One call of an op other than `linear`, with fp32 inputs: [..., n, k] -> [..., n, k]."""

    def __init__(self, op: str, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.op = op
        self.weight, *others = [nn.Parameter(torch.randn(shape) / 4) for shape in shapes]
        self.others = nn.ParameterList(others)

    def forward(self, x: Tensor) -> Tensor:
        if self.op == "addmm":
            return torch.addmm(self.others[0], x.reshape(-1, 16), self.weight).view(x.shape)
        if self.op == "attention":
            return F.scaled_dot_product_attention(x * self.weight, x * self.others[0], x)
        if self.op == "bmm":
            return torch.bmm(
                x.reshape(-1, 8, 16), self.weight.expand(x.numel() // 128, 16, 16).clone()
            )
        if self.op == "of itself":
            return x @ (x * self.weight).mT @ x
        return x @ self.weight


def make_other_net() -> nn.Sequential:
    """Returns a network of other ops than `linear`."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        *(
            nn.Conv1d(8, 8, 3, padding=1),
            Weighted("addmm", (16, 16), (16,)),
            Weighted("matmul", (16, 16)),
        ),
        *(
            Weighted("attention", (16,), (16,)),
            Weighted("bmm", (16, 16)),
            Weighted("of itself", (1,)),
        ),
    ]
    return nn.Sequential(*[each for layer in layers for each in (layer, Upcast())])


def loss_of(net: nn.Module, x: Tensor = X) -> Tensor:
    return net(x).float().pow(2).sum()


def learning_x() -> Tensor:
    return X.clone().requires_grad_()


def gradients(net: nn.Module) -> list[Any]:
    return [each.grad for each in net.parameters()]


def plain() -> list[Any]:
    loss_of(net := make_net()).backward()
    return gradients(net)


def through_x() -> list[Any]:
    loss_of(net := make_net(), x := learning_x()).backward()
    return [x.grad, *gradients(net)]


def of_x_alone() -> list[Any]:
    return [*torch.autograd.grad(loss_of(make_net(), x := learning_x()), x)]


def doubly() -> list[Any]:
    net, x = make_net(), learning_x()
    (first,) = torch.autograd.grad(loss_of(net, x), x, create_graph=True)
    (first.pow(2).sum() + net(x).float().sum()).backward()
    return [x.grad, *gradients(net)]


def doubly_through_weights() -> list[Any]:
    net = make_net()
    first = torch.autograd.grad(loss_of(net), [*net.parameters()], create_graph=True)
    torch.stack([each.pow(2).sum() for each in first]).sum().backward()
    return gradients(net)


def doubly_in_two_backwards() -> list[Any]:
    """The second one needs what the first one saved, since the first one leads to casts alone."""
    net, x = make_net()[0], learning_x()
    loss = net(x).float().sum()
    first = torch.autograd.grad(loss, x, create_graph=True)
    torch.stack([each.pow(2).sum() for each in first]).sum().backward()
    loss.backward()
    return [x.grad, *gradients(net)]


def doubly_of_low_inputs() -> list[Any]:
    net, x = make_net(), X.to(BF16).requires_grad_()
    w = net[0].weight.detach().to(BF16).requires_grad_()
    found: list[Any] = []
    for each in (x, x[0]):
        loss = F.linear(F.linear(each, w, net[0].bias).tanh(), net[2].weight).float().pow(2).sum()
        first = torch.autograd.grad(loss, [x, w, net[0].bias], create_graph=True)
        penalty = torch.stack([each.float().pow(2).sum() for each in first]).sum()
        found += torch.autograd.grad(penalty + loss, [x, w, net[0].bias, net[2].weight])
    return found


def triply() -> list[Any]:
    x = learning_x()
    found = loss_of(net := make_net(), x)
    for _ in range(2):
        (first,) = torch.autograd.grad(found, x, create_graph=True)
        found = first.pow(2).sum()
    found.backward()
    return [x.grad, *gradients(net)]


def twice() -> list[Any]:
    loss = loss_of(net := make_net())
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(net)


def frozen() -> list[Any]:
    net, x = make_net(), learning_x()
    net[0].weight.requires_grad_(False)
    net[4].bias.requires_grad_(False)
    loss_of(net, x).backward()
    return [x.grad, *gradients(net)]


def in_inference() -> list[Any]:
    with torch.inference_mode():
        inferred = make_net()(X)
    with torch.no_grad():
        return [inferred, make_net()(X)]


def after_writes() -> list[Any]:
    net = make_net()
    for _ in range(2):
        loss_of(net).backward()
        with torch.no_grad():
            for each in net.parameters():
                each.mul_(1.5)
        for each in net.parameters():
            each.data.mul_(0.9)
    return gradients(net)


def checkpointed(*, use_reentrant: bool) -> list[Any]:
    net, x = make_net(), learning_x()
    checkpoint(net, x, use_reentrant=use_reentrant).float().pow(2).sum().backward()  # type: ignore[no-untyped-call]
    return [x.grad, *gradients(net)]


def called_functionally() -> list[Any]:
    net = make_net()
    given = {k: (v.detach() * 1.2).requires_grad_() for k, v in net.named_parameters()}
    loss = functional_call(net, given, (X,)).float().pow(2).sum()
    return [*torch.autograd.grad(loss, [*given.values()])]


def transformed(*, is_mapped: bool) -> list[Any]:
    net = make_net()
    given = {k: v.detach() for k, v in net.named_parameters()}
    gradient = torch.func.grad(lambda p, x: functional_call(net, p, (x,)).float().pow(2).sum())
    if is_mapped:
        gradient = torch.func.vmap(gradient, (None, 0))
    return [*gradient(given, X).values()]


def with_hooks() -> list[Any]:
    """Those of the weight run before those of the bias."""
    net, of_weight, of_bias, of_module = make_net(), [], [], []
    net[0].weight.register_hook(lambda gradient: of_weight.append(gradient.clone()))
    net[0].bias.register_post_accumulate_grad_hook(lambda p: of_bias.append(p.grad.clone()))
    net[2].register_full_backward_hook(lambda m, i, o: of_module.extend([*i, *o]))
    loss_of(net).backward()
    assert len(of_weight) == len(of_bias) == 1
    return [*gradients(net), *of_weight, *of_bias, *of_module]


def with_saved_tensor_hooks() -> list[Any]:
    net, sizes = make_net(), []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(torch.tensor(tensor.nbytes))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(net)
    with torch.autograd.graph.save_on_cpu():
        loss = loss + loss_of(net)
    loss.backward()
    return [*gradients(net), *sizes]


def in_threads() -> list[Any]:
    net, found = make_net(), {}

    def run(count: int) -> None:
        found[count] = torch.autograd.grad(loss_of(net, X * count), [*net.parameters()])

    threads = [threading.Thread(target=run, args=(count,)) for count in range(1, 4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [gradient for count in sorted(found) for gradient in found[count]]


def tied() -> list[Any]:
    weight = make_net()[2].weight
    F.linear(F.linear(X.new_ones(3, 32), weight), weight.t().contiguous()).float().sum().backward()
    return [weight.grad]


def low_inputs() -> list[Any]:
    net, x = make_net(), X.to(BF16).requires_grad_()
    w = net[0].weight.detach().to(BF16).requires_grad_()
    F.linear(F.linear(x, w, net[0].bias), net[2].weight).float().pow(2).sum().backward()
    return [x.grad, w.grad, *gradients(net)]


def of_odd_shapes() -> list[Any]:
    first = make_net()[0]
    w, b, x = first.weight, first.bias, learning_x()
    found = [
        *(F.linear(X[0, 0], w, b), F.linear(X, w[1]), F.linear(X[:0], w, b)),
        *(F.linear(x.transpose(0, 1), w, b), F.linear(X[..., ::2], w[:, :8], b)),
        *(F.linear(X, w, b[:1]), F.linear(X.new_ones(1, 1, 1, 16), w, b)),
    ]
    torch.stack([each.float().pow(2).sum() for each in found]).sum().backward()
    return [*found, w.grad, b.grad, x.grad]


def by_keywords() -> list[Any]:
    first = make_net()[0]
    w, b = first.weight, first.bias
    found = [F.linear(X, w, bias=b), F.linear(X, weight=w, bias=b), F.linear(input=X, weight=w)]
    torch.stack(found).float().pow(2).sum().backward()
    return [*found, w.grad, b.grad]


def forward_mode() -> list[Any]:
    return [*torch.func.jvp(make_net(), (X,), (torch.ones_like(X),))]


def with_anomaly_detection() -> list[Any]:
    with torch.autograd.set_detect_anomaly(True):
        return plain()


def compiled() -> list[Any]:
    torch._dynamo.reset()
    net = make_net()
    loss_of(torch.compile(net, backend="aot_eager", fullgraph=True)).backward()
    return gradients(net)


def in_compiled_autograd(*, is_compiled: bool = True) -> list[Any]:
    def compiling() -> contextlib.AbstractContextManager[Any]:
        enable = torch._dynamo.compiled_autograd._enable
        return enable(torch.compile(backend="eager")) if is_compiled else contextlib.nullcontext()

    torch._dynamo.reset()
    net, x = make_net(), learning_x()
    for _ in range(2):  # with a graph that is there
        with compiling():
            loss_of(net, x).backward()
    with compiling():
        net[0].weight.requires_grad_(False)  # another one
        loss_of(net).backward()
    return [x.grad, *gradients(net)]


CASES: dict[str, Case] = {
    "plain": plain,
    "gradient of x": through_x,
    "gradient of x alone": of_x_alone,
    "double backward of x": doubly,
    "double backward of weights": doubly_through_weights,
    "double backward in two backwards": doubly_in_two_backwards,
    "double backward of low inputs": doubly_of_low_inputs,
    "two backwards": twice,
    "frozen parameters": frozen,
    "inference": in_inference,
    "writes between calls": after_writes,
    "reentrant checkpoint": lambda: checkpointed(use_reentrant=True),
    "checkpoint": lambda: checkpointed(use_reentrant=False),
    "functional_call": called_functionally,
    "func.grad": lambda: transformed(is_mapped=False),
    "vmap of func.grad": lambda: transformed(is_mapped=True),
    "hooks": with_hooks,
    "hooks of saved tensors": with_saved_tensor_hooks,
    "threads": in_threads,
    "a tied weight": tied,
    "low inputs": low_inputs,
    "odd shapes": of_odd_shapes,
    "keywords": by_keywords,
    "jvp": forward_mode,
    "anomaly detection": with_anomaly_detection,
    "torch.compile": compiled,
    "compiled autograd": in_compiled_autograd,
}

#: Where torch's bits come from, if not from the case: compiled autograd's are those of autograd.
OF_TORCH: dict[str, Case] = {
    **CASES,
    "compiled autograd": functools.partial(in_compiled_autograd, is_compiled=False),
}


@pytest.mark.usefixtures("built")
@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")  # by torch.func.jvp
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # by compiled autograd
@pytest.mark.parametrize(
    ("name", "low"), [*((name, "bfloat16") for name in CASES), ("gradient of x", "float16")]
)
def test_bits_are_those_of_torch(name: str, low: str) -> None:
    with converted(with_nodes=False, low_precision_type=low):
        expected = OF_TORCH[name]()
    with converted(low_precision_type=low):
        actual = CASES[name]()
    assert_equal_bits(actual, expected)


@pytest.mark.usefixtures("built")
def test_sums_of_three_terms_may_have_another_order() -> None:
    """In gradients of gradients of gradients: each sum rounds to bfloat16."""
    with converted(with_nodes=False):
        expected = triply()
    with converted():
        actual = triply()
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype is other.dtype
        assert (one - other).abs().max() <= 2**-6 * other.abs().max()


#: Cases that know nothing of a network.
OF_ANY_NET = (
    *("plain", "gradient of x", "gradient of x alone", "double backward of x", "two backwards"),
    *("double backward of weights", "inference", "writes between calls", "reentrant checkpoint"),
    *("checkpoint", "functional_call", "func.grad", "vmap of func.grad", "threads", "jvp"),
    *("anomaly detection", "torch.compile", "compiled autograd"),
)


@pytest.mark.usefixtures("built")
@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")  # by torch.func.jvp
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # by compiled autograd
@pytest.mark.parametrize("name", OF_ANY_NET)
def test_bits_of_other_ops_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "make_net", make_other_net)
    # Only this kernel of attention always has tangents and second derivatives.
    needs_math = name == "jvp" or name.startswith("double")
    with sdpa_kernel(SDPBackend.MATH) if needs_math else contextlib.nullcontext():
        with converted(with_nodes=False):
            expected = OF_TORCH[name]()
        with converted():
            actual = CASES[name]()
    assert_equal_bits(actual, expected)


@pytest.mark.usefixtures("built")
def test_a_write_between_forward_and_backward_is_an_error() -> None:
    """As for torch's nodes."""
    with converted():
        x = torch.ones(3, 4, dtype=BF16)
        y = F.linear(x, torch.ones(2, 4, requires_grad=True))
        assert is_fused(y)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.float().sum().backward()


@pytest.mark.usefixtures("built")
def test_errors_are_those_of_torch() -> None:
    found = []
    for with_nodes in (False, True):
        with converted(with_nodes=with_nodes), pytest.raises(RuntimeError) as raised:
            F.linear(X, torch.ones(3, 15))
        found.append(str(raised.value))
    assert found[0] == found[1]


#: Prints gradients under DDP and FSDP2, and which nodes made the result.
DISTRIBUTED = """
import sys, torch, hmpx, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
with hmpx.convert(device_types={"cpu"}, legalize="never", keep_weight_casts=True):
    for wrap in (nn.parallel.DistributedDataParallel, fully_shard):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        if wrap is fully_shard:
            fully_shard(net[0], mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
            fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        else:
            net = wrap(net)
        for _ in range(2):
            y = net(torch.ones(2, 8, 16))
            y.float().pow(2).sum().backward()
        for each in net.parameters():
            gradient = each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad
            print(gradient.flatten().tolist())
        print(type(y.grad_fn).__name__, file=sys.stderr)
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("built")
def test_bits_in_distributed_programs(tmp_path: Path) -> None:
    found = []
    for setting in ("off", "on"):
        program = "-W", "ignore", "-c", DISTRIBUTED, str(tmp_path / setting)
        environment = {**os.environ, "HMPX_NODES": setting, "OMP_NUM_THREADS": "1"}
        done = forks.run(*program, env=environment, imported=forks.TORCH)
        assert done.returncode == 0, done.stderr
        lines = [each for each in done.stdout.splitlines() if not each.startswith("[Gloo]")]
        found.append((lines, done.stderr.split()))
    assert found[0][0] == found[1][0]
    assert len(found[0][0]) == 8
    assert "CppFunction" not in found[0][1]
    assert found[1][1][0] == "CppFunction"


# --- where they are used ----------------------------------------------------------------------


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_they_are_used(low: str) -> None:
    net = make_net()
    weight, bias = net[0].weight, net[0].bias
    with converted(low_precision_type=low):
        result = net(X)
        assert result.dtype is getattr(torch, low)
        assert is_fused(result)
        assert is_fused(F.linear(X[0], weight, bias))
        assert is_fused(F.linear(X[0], weight))
        assert is_fused(F.linear(X, weight, bias=bias))
        assert is_fused(F.linear(input=X, weight=weight))
        for wrong in (torch.Tensor, nn.Parameter, int):
            with pytest.raises(TypeError):
                F.linear(X, weight, wrong)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                F.linear(X, wrong, weight=weight)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="weight"):
            F.linear(X, weight, weight=weight)
        assert is_fused(F.linear(learning_x(), weight.detach().to(getattr(torch, low)), None))
        assert isinstance(result.grad_fn, torch.autograd.graph.Node)
    with hmpx.convert(device_types={"cpu"}, policy=hmpx.Policy.from_ops(fp32=["linear"])):
        assert not is_fused(net(X))
    assert not is_fused(net(X))


@pytest.mark.usefixtures("built")
def test_casts_of_other_ops_are_made_together() -> None:
    net = make_other_net()
    x, y = learning_x(), X.clone().requires_grad_()
    with converted():
        assert are_together(net[0](x[0]))
        assert are_together(torch.addmm(net[2].others[0], x[0], net[2].weight))
        assert are_together(x.transpose(0, 1) @ net[4].weight)
        assert are_together(torch.bmm(x, y.mT))
        assert are_together(F.scaled_dot_product_attention(x[None], y[None], x[None] * 2))
        assert are_together(F.scaled_dot_product_attention(x[None], y[None], X[None].to(BF16)))
        for result in (
            x @ torch.ones(16, 16, dtype=BF16),  # one cast
            x.detach().to(BF16) @ y.detach().to(BF16).mT,
            F.scaled_dot_product_attention(x, x, x),  # their gradients are summed in torch's order
            x @ y.mT[..., ::2],  # a copy that changes its layout
            torch.addmm(x[0, :, :8] * 1.0, x[0], y[1].mT),  # may be a mask
            x.to(FP16) @ y.mT,
        ):
            assert not are_together(result)
    with converted(legalize="always"):
        assert not are_together(torch.bmm(x, y.mT))
    with converted(), hmpx.record():
        assert not are_together(torch.bmm(x, y.mT))


class Subclass(Tensor):
    pass


class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def called(*args: Any, within: Any = None) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with within() if within is not None else contextlib.nullcontext():
            return F.linear(*args)

    return call


W, B = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_(), torch.ones(4, requires_grad=True)


def of_tangents() -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        return F.linear(torch.autograd.forward_ad.make_dual(X, X), W, B)


def nested() -> Tensor:
    return F.linear(torch.nested.nested_tensor([X[0], X[1, :3]]), W, B)


def nothing(tensor: Tensor) -> Tensor:
    return tensor


UNUSUAL: dict[str, Callable[[], Tensor]] = {
    "a subclass": called(X.as_subclass(Subclass), W, B),
    "a dispatch mode": called(X, W, B, within=Dispatch),
    "hooks of saved tensors": called(
        *(X, W, B), within=lambda: torch.autograd.graph.saved_tensors_hooks(nothing, nothing)
    ),
    "casts off": called(X, W, B, within=hmpx.disable_casts),
    "autocast": called(X, W, B, within=lambda: torch.autocast("cpu", FP16)),
    "tangents": of_tangents,
    "func.grad": lambda: torch.func.vjp(lambda x: F.linear(x, W, B), X)[0],
    "vmap": lambda: torch.func.vmap(lambda x: F.linear(x, W, B))(X),
    "another layout": called(X.transpose(0, 1), W, B),
    "a slice": called(X[..., ::2], W[:, ::2], B),
    "a conjugate": called(X, torch._neg_view(W), B),
    "nothing in it": called(X[:0], W, B),
    "a row": called(X[0, 0], W, B),
    "a vector as weight": called(X, W[0]),
    "float64": called(X.double(), W.double(), B.double()),
    "the other low type": called(X.to(FP16), W, B),
    "meta tensors": called(X.to("meta"), W.to("meta"), B.to("meta")),
    "nested tensors": nested,
}


@pytest.mark.usefixtures("built")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")  # by forward-mode gradients
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_calls_take_torchs_way(name: str) -> None:
    call = UNUSUAL[name]
    with converted():
        actual = call()
    assert not is_fused(actual)
    with converted(with_nodes=False):
        expected = call()
    assert actual.dtype is expected.dtype
    assert type(actual) is type(expected)
    if not (actual.is_nested or actual.is_meta):
        assert torch.equal(actual.as_subclass(Tensor), expected.as_subclass(Tensor))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    "options",
    [
        {"low_precision_type": "float8_e4m3fn"},
        {"policy": hmpx.Policy.from_ops(fp32=["linear"])},
    ],
    ids=str,
)
def test_options_that_keep_torchs_nodes(options: dict[str, Any]) -> None:
    with converted(**options):
        assert not is_fused(F.linear(X, W, B))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("keep", [True, False])
def test_parameters_made_in_inference_mode(keep: bool) -> None:
    """Autograd can't keep them, but it keeps their casts."""
    with torch.inference_mode():
        weight = nn.Parameter(W.detach() + 0)
    found = []
    for with_nodes in (False, True):
        x = learning_x()
        with converted(with_nodes=with_nodes, keep_weight_casts=keep):
            y = F.linear(x, weight)
        assert is_fused(y) is (with_nodes and keep)
        found.append(torch.autograd.grad(y.float().square().sum(), x))
    assert torch.equal(*found[0], *found[1])


@pytest.mark.usefixtures("built")
def test_observed_calls_have_torchs_nodes() -> None:
    with converted(), hmpx.record() as report:
        assert not is_fused(F.linear(X, W, B))
    assert [row.op for row in report.rows] == ["linear"]


@pytest.mark.usefixtures("built")
def test_a_function_of_another_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_own, calls = F.linear, []

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append(input.dtype)
        return torch_own(input, weight, bias)

    monkeypatch.setattr(F, "linear", linear)
    with converted():
        F.linear(X, W, B)
    assert len(calls) == 1


@pytest.mark.usefixtures("built")
@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
def test_tracing_records_torchs_ops() -> None:
    with converted():
        weight = W.detach()
        traced = torch.jit.trace(lambda x: F.linear(x, weight), X)
        assert "aten::to" in str(traced.graph)
        graph = torch.export.export(nn.Linear(16, 4), (X,)).graph
    assert "linear" in str(graph)


@pytest.mark.usefixtures("built")
def test_devices_without_casts() -> None:
    """Those of the CPU, where only CUDA's tensors are cast."""
    for op in ("linear", "addmm"):
        function = compute.fused(op, BF16, frozenset({"cuda"}), [0])
        assert function is not None
        assert function(X, W, B) is None


@pytest.mark.usefixtures("built")
def test_drawn_results() -> None:
    """The casts of all inputs are drawn as one node, although they are part of that of `linear`."""
    with converted():
        drawing = hmpx.draw(F.linear(X, W, B))
    found = [(each.kind, each.label) for each in drawing.nodes]
    assert sorted(found) == [
        *(("cast", "fp32 -> bf16"), ("input", "input"), ("input", "input")),
        *(("op", "linear"), ("output", "output")),
    ]


# --- the library -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Has the nodes looked up in an empty folder."""
    monkeypatch.setattr(nodes, "compiled", lambda: sorted(tmp_path.glob("*.so")))
    monkeypatch.setattr(
        nodes, "path_for", lambda version: tmp_path / f"nodes.torch-{version}.py.0.so"
    )
    nodes.nodes_in_use.cache_clear()
    yield tmp_path
    nodes.nodes_in_use.cache_clear()


def test_without_compiled_nodes_torchs_are_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hmpx")
    assert nodes.nodes_in_use() == nodes.Nodes(fault="none were compiled when hmpx was installed")
    assert compute.fused("linear", BF16, CPU, []) is None
    assert not caplog.records


def test_nodes_for_another_torch_are_refused_in_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hmpx")
    (folder / "nodes.torch-2.0.1.py.0.so").touch()
    for _ in range(2):
        assert compute.fused("linear", BF16, CPU, []) is None
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "linear runs without compiled nodes, which takes the host longer: "
        f"nodes.torch-{torch.__version__}.py.0.so is needed for this torch, Python and hmpx, and there is "
        "nodes.torch-2.0.1.py.0.so"
    )


def test_a_damaged_library_is_refused(folder: Path) -> None:
    nodes.path_for(torch.__version__).write_bytes(b"no library")
    found = nodes.nodes_in_use()
    assert found.module is None
    assert "nodes.torch" in found.fault


def test_a_wrong_setting_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HMPX_NODES", "onn")
    with pytest.raises(OptionError, match="HMPX_NODES=onn: it can be on or off; did you mean 'on'"):
        nodes.nodes_in_use()
    monkeypatch.setenv("HMPX_NODES", "Off")
    assert nodes.nodes_in_use() == nodes.Nodes()


# --- compiling -----------------------------------------------------------------------------------


def test_without_a_compiler(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        RuntimeError, match="compiler no-such-compiler not found; set CXX to name one"
    ):
        hook.compile_nodes()


def test_a_compiler_that_fails(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = nodes.compiled()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="false fails with status 1"):
        hook.compile_nodes()
    assert nodes.compiled() == before


def test_without_headers(hook: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(RuntimeError, match=r"Python\.h is missing; install the headers of Python"):
        hook.compile_nodes()


def test_without_torch(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="use pip install --no-build-isolation"):
        hook.compile_nodes()


class App:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, message: str) -> None:
        self.warnings.append(message)


def test_a_wheel_without_nodes_says_why_in_one_line(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hook._nodes, "compiled", list)
    monkeypatch.setattr(hook, "are_compiled", lambda: True)
    monkeypatch.setattr(hook, "path_of_nodes", lambda: Path("/nowhere.torch.0.so"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    app = App()
    data: dict[str, Any] = {"artifacts": []}
    made = hook.CompiledHook(str(ROOT), {}, None, None, "", "wheel", app)
    made.initialize("standard", data)
    assert app.warnings == [
        "hmpx has no compiled nodes, so linear takes the host longer: compiler no-such-compiler not "
        "found; set CXX to name one"
    ]
    assert data["artifacts"] == ["hmpx/number_formats/kernels/*.so"]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("observe", [hmpx.record, hmpx.lint, hmpx.watch])
def test_an_observer_in_a_hook_of_the_backward_leaves_them_in_use(
    observe: Callable[[], contextlib.AbstractContextManager[object]],
) -> None:
    """There hmpx's own marks are among the bits of torch.autocast."""

    def hook(gradient: Tensor) -> None:
        with observe():
            gradient.mul(2)

    net = make_net()
    with converted():
        result = net(X)
        result.register_hook(hook)
        result.float().sum().backward()
        assert is_fused(F.linear(X, net[0].weight, net[0].bias))


def gelu_bits(x: Tensor, approximate: str) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = F.gelu(x, approximate=approximate)
    y.backward(x.detach().roll(12345))
    assert x.grad is not None
    return [each.view(torch.int16) for each in (y.detach(), x.grad)]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("size", [1, 4096, 65535, 65536, 3 * 65536 + 64])
def test_gelu_has_torchs_bits(approximate: str, size: int) -> None:
    """For all values of bfloat16, NaN included; torch's again after the conversion."""
    values = torch.arange(size).to(torch.int16).view(BF16)
    expected = gelu_bits(values, approximate)
    module = nodes.nodes_in_use().module
    with converted():
        assert module.looks_up[0]
        found = [gelu_bits(values, approximate), gelu_bits(values[:, None].mT, approximate)]
        gapped = torch.stack([values, values], dim=1)[:, 0]
        found.append(gelu_bits(gapped, approximate))
    assert not module.looks_up[0]
    assert len(found) == 3
    assert torch.equal(torch.stack(found[0]), torch.stack(expected))
    assert torch.equal(torch.stack(found[1])[:, 0], torch.stack(expected))
    assert torch.equal(torch.stack(gelu_bits(gapped, approximate)), torch.stack(found[2]))


@pytest.mark.usefixtures("built")
@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_has_torchs_bits_under_its_settings(approximate: str) -> None:
    values = torch.arange(65536).to(torch.int16).view(BF16)
    for is_enabled in (True, False, True):
        with torch.backends.mkldnn.flags(enabled=is_enabled):
            expected = gelu_bits(values, approximate)
            with converted():
                found = gelu_bits(values, approximate)
        assert torch.equal(torch.stack(found), torch.stack(expected))


FLUSHED = """\
import torch
import torch.nn.functional as F

import hmpx

values = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
for flushes in (True, False, True):
    torch.set_flush_denormal(flushes)
    expected = F.gelu(values, approximate="tanh").view(torch.int16)
    with hmpx.convert(device_types={"cpu"}):
        assert torch.equal(F.gelu(values, approximate="tanh").view(torch.int16), expected)
"""


@pytest.mark.usefixtures("built")
def test_gelu_has_torchs_subnormal_numbers() -> None:
    done = forks.run("-W", "ignore", "-c", FLUSHED, imported=forks.TORCH)
    assert done.returncode == 0, done.stderr


OTHERS_GELU = """\
import torch
import torch.nn.functional as F

library = torch.library.Library("aten", "IMPL")
library.impl("gelu", lambda x, approximate="none": torch.zeros_like(x), "CPU")

import hmpx

x = torch.ones(8192, dtype=torch.bfloat16)
for _ in range(2):
    with hmpx.convert(device_types={"cpu"}):
        assert not F.gelu(x).any()
    assert not F.gelu(x).any()
"""


@pytest.mark.usefixtures("built")
def test_gelu_of_another_library_stays() -> None:
    done = forks.run("-W", "ignore", "-c", OTHERS_GELU, imported=forks.TORCH)
    assert done.returncode == 0, done.stderr
