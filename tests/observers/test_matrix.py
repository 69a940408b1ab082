"""Every observer on every op and on tensors of all kinds: results, gradients and random numbers stay the same."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hmpx
from hmpx.torch_internals import torch_version

from ..samples import sample_inputs, spread

CONTRACT = {
    "expect": [{"module": "*", "saved": "float32"}, {"compute": "float32"}, {"contents": "float32"}]
}


def repeat(call: hmpx.OpCall, tensors: hmpx.CallTensors | None) -> None:
    """Runs a call again; an error of it is the observer's own."""
    if tensors is not None:
        with contextlib.suppress(Exception):
            tensors.in_fp32()


OBSERVERS: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {
    "attach": lambda path: hmpx.attach(repeat, tensors=True, every_op=True),
    "contract": lambda path: hmpx.expect(CONTRACT, mode="collect"),
    "lint": lambda path: hmpx.lint(),
    "record": lambda path: hmpx.record(memory=True),
    "trace": lambda path: hmpx.trace(path / "a.hmpx"),
    "watch": lambda path: hmpx.watch(mode="collect", underflow=True),
}

PROGRAMS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "fp32": nullcontext,
    "converted": lambda: hmpx.convert(device_types={"cpu"}),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def described(value: Any) -> Any:
    """Returns a value as equal objects are: tensors by dtype, layout, version and bits."""
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    if not isinstance(value, Tensor):
        return repr(value)
    about = [
        type(value).__name__,
        value.dtype,
        value.layout,
        value.device.type,
        value.requires_grad,
    ]
    about += [value.is_conj(), value.is_neg(), None if value.is_inference() else value._version]
    if value.is_nested:
        return [*about, *map(described, value.unbind())]
    about.append(tuple(value.shape))
    value = value.detach()
    if value.layout is torch.sparse_coo:
        return [*about, value._indices().tolist(), _bits(value._values())]
    if value.layout in (torch.sparse_csr, torch.sparse_csc):
        return [*about, _bits(value.to_dense())]
    if value.layout is not torch.strided or value.is_meta:
        return about
    return [*about, value.stride(), _bits(value.int_repr() if value.is_quantized else value)]


def _bits(value: Tensor) -> bytes:
    value = value.as_subclass(Tensor).resolve_conj().resolve_neg().contiguous()
    return bytes(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(run: Callable[[], Any]) -> Any:
    """Returns what a run gives, or its error, and the state of random numbers after it."""
    torch.manual_seed(3)
    with quiet():
        try:
            found = described(run())
        except Exception as error:
            found = type(error).__name__, str(error)[:60]
    return found, bytes(torch.get_rng_state().numpy())


def assert_same(run: Callable[[], Any], program: str, observer: str, path: Path) -> Any:
    """Asserts that a run's outcome is the same with the observer as without it, and returns it."""
    with PROGRAMS[program]():
        expected = outcome(run)
        with OBSERVERS[observer](path):
            found = outcome(run)
    assert found == expected
    return expected


# --- every op of OpInfo --------------------------------------------------------------------------

#: Ops for GPUs, whose results depend on memory that nobody wrote, or that take too long.
_LEFT_OUT = ("jiterator", "empty", "new_empty", "svd_lowrank", "pca_lowrank")
#: In which torch itself takes other steps under any dispatch mode: in new memory instead of in place, in other strides,
#: and for `linalg.eig` without a check of its gradient; and `pinverse`, which hmpx can't tell from `linalg.pinv` there.
_FOLLOW_MODES = (
    "nn.functional.linear_cross_entropy", "ormqr", "linalg.eig", "linalg.matrix_rank", "pinverse",
    *["cumprod", "masked.cumprod"] * (torch_version() < (2, 12)),
)  # fmt: skip
#: How many ops run without ``--whole``; always the same ones.
_MOST = 60


def runs(*, whole: bool) -> dict[str, Callable[[], Any]]:
    """Returns the name of an op and its sample -> a function that runs it, and its backward."""
    infos = [info for info in op_db if torch.float32 in info.dtypes]
    infos = [info for info in infos if not info.name.startswith((*_LEFT_OUT, *_FOLLOW_MODES))]
    found = {}
    for info in infos if whole else spread(infos, _MOST):
        with quiet():
            samples = list(sample_inputs(info, requires_grad=info.supports_autograd))
        for number, sample in enumerate(spread(samples, 2)):
            found[f"{info.formatted_name} {number}"] = functools.partial(called, info, sample)
    return found


def called(info: OpInfo, sample: SampleInput) -> tuple[Any, list[Any]]:
    """Returns an op's result, and the gradients of copies of its arguments."""

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        return type(value)(map(copy, value)) if type(value) in (list, tuple) else value

    args = [copy(each) for each in (sample.input, *sample.args)]
    kwargs = {name: copy(value) for name, value in sample.kwargs.items()}
    result = info.op(*args, **kwargs)
    made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
    made = [each for each in made if each.requires_grad and each.layout is torch.strided]
    given = [each for each in tree_leaves([args, kwargs]) if isinstance(each, Tensor)]
    given = [each for each in given if each.requires_grad and each.is_leaf]
    if not made or not given:
        return result, []
    ones = [torch.ones_like(each) for each in made]
    gradients = torch.autograd.grad(made, given, ones, allow_unused=True)
    # In a mode, torch adds up gradients in new memory: they have other versions.
    return result, [each if each is None else each.clone() for each in gradients]


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_op(
    program: str, observer: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """On two samples each."""
    found = runs(whole=request.config.getoption("whole"))
    with PROGRAMS[program]():
        expected = {name: outcome(run) for name, run in found.items()}
        with OBSERVERS[observer](tmp_path):
            seen = {name: outcome(run) for name, run in found.items()}
    assert len(expected) > _MOST
    assert [name for name in expected if seen[name] != expected[name]] == []


# --- tools that run the program themselves ---------------------------------------------------------


class Model(nn.Module):
    """Runs an op."""

    def __init__(self, info: OpInfo, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.run = functools.partial(info.op, **kwargs)

    def forward(self, *args: Any) -> Any:
        return self.run(*args)


TOOLS: dict[str, Callable[[nn.Module, tuple[Any, ...]], object]] = {
    "bench": lambda model, args: hmpx.bench(
        lambda: model, args, runs=1, warmup=1, run_s=0.0, variants=["auto"], device="cpu"
    ),
    "compare": lambda model, args: hmpx.compare(model, args, device_types={"cpu"}),
    "draw": lambda model, args: hmpx.draw(model, args),
    "expect.of": lambda model, args: hmpx.expect.of(model, args),
    "invariance": lambda model, args: hmpx.invariance(model, args),
    "plan": lambda model, args: hmpx.plan(model, args, "cpu"),
    "tune": lambda model, args: hmpx.tune(
        model, [args], tolerance=0.5, budget=2, device_types={"cpu"}, progress=False
    ),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_op_in_tools(tool: str, request: pytest.FixtureRequest) -> None:
    """Arguments, their gradients, random numbers and torch's state are as before, also where a tool refuses."""
    infos = [info for info in op_db if torch.float32 in info.dtypes]
    infos = [info for info in infos if not info.name.startswith(_LEFT_OUT)]
    is_whole = request.config.getoption("whole")
    changed, refused, ran = [], [], 0
    most = {"bench": _MOST // 10, "invariance": _MOST // 3}.get(tool, 2 * _MOST // 3)
    for info in infos if is_whole else spread(infos, most):
        with quiet():
            sample = next(iter(sample_inputs(info, requires_grad=info.supports_autograd)), None)
        if sample is None or not isinstance(sample.input, Tensor):
            continue
        args = sample.input, *sample.args
        for each in tree_leaves(args):
            if isinstance(each, Tensor) and each.is_leaf and each.requires_grad:
                each.grad = torch.ones_like(each)

        def state(args: tuple[Any, ...] = args) -> Any:
            given = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            gradients = [each.grad for each in given if each.is_leaf]
            modes = torch.is_grad_enabled(), torch.get_default_dtype(), hmpx.is_converted()
            return described(given), described(gradients), modes, torch.get_rng_state().tolist()

        before = state()
        try:
            with quiet():
                TOOLS[tool](Model(info, sample.kwargs), args)
            ran += 1
        except Exception as error:  # some take no such arguments or results
            refused.append(str(error)[:80])
        if state() != before:
            changed.append(info.formatted_name)
    assert not changed
    assert ran >= 4, refused


# --- kinds of tensors ----------------------------------------------------------------------------


class Logged(Tensor):
    """Counts the calls of functions of torch that it gets."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Logged.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def of_subclass() -> Any:
    Logged.calls = 0
    x = torch.randn(4, 4).as_subclass(Logged)
    y = (x @ x).softmax(-1)
    return y, Logged.calls


def of_nested() -> Any:
    x = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    y = F.linear(x, weight)
    y.unbind()[0].sum().backward()
    return y, weight.grad


def of_sparse() -> Any:
    sparse, dense = torch.eye(4).to_sparse().requires_grad_(), torch.randn(4, 4, requires_grad=True)
    y = torch.sparse.mm(sparse, dense)
    y.float().sum().backward()
    return y, torch.sparse.softmax(sparse, 1), sparse.grad, dense.grad


def of_sparse_csr() -> Any:
    return torch.eye(4).to_sparse_csr() @ torch.randn(4, 4)


def of_quantized() -> Any:
    x = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)
    return x, F.relu(x), x.dequantize() @ x.dequantize()


def of_meta() -> Any:
    x = torch.randn(4, 4, device="meta", requires_grad=True)
    y = F.layer_norm(x @ x, (4,))
    y.sum().backward()
    return y, x.grad


def of_complex() -> Any:
    x = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
    y = x.conj() @ x
    y.abs().sum().backward()
    return y, x.grad.clone(), y.imag  # in a mode, torch adds up gradients in new memory


def of_inference() -> Any:
    with torch.inference_mode():
        x = torch.randn(4, 4)
        return x @ x, x.softmax(-1)


def of_vmap() -> Any:
    x = torch.randn(3, 4, 4)
    return torch.func.vmap(lambda each: (each @ each).softmax(-1))(x)


def of_grad() -> Any:
    x = torch.randn(4, 4)
    return torch.func.grad(lambda each: (each @ each).float().exp().sum())(x)


def of_jvp() -> Any:
    x = torch.randn(4, 4)
    return torch.func.jvp(lambda each: (each @ each).softmax(-1), (x,), (torch.ones(4, 4),))


def of_jacrev() -> Any:
    return torch.func.jacrev(lambda each: (each @ each).softmax(-1))(torch.randn(2, 2))


def of_views() -> Any:
    x = torch.randn(4, 4, requires_grad=True)
    y = (x * 2)[1:]
    y[0] = 5
    y.mul_(2).t().exp().sum().backward()
    return y, x.grad


def of_generators() -> Any:
    generator = Generator().manual_seed(3)
    x = torch.normal(torch.ones(4), torch.ones(4), generator=generator)
    return x, F.gumbel_softmax(x), torch.rand(2, generator=generator)


def of_twice_differentiated() -> Any:
    x = torch.randn(4, 4, requires_grad=True)
    (first,) = torch.autograd.grad((x @ x).float().exp().sum(), x, create_graph=True)
    first.square().sum().backward()
    return first, x.grad.clone()


def of_optimizer() -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4)).float().square().sum().backward()
    optimizer.step()
    return [*model.parameters()], [each.grad for each in model.parameters()]


def of_lazy_modules() -> Any:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    y = model(torch.randn(4, 2))
    y.sum().backward()
    return y, [each.grad for each in model.parameters()]


def of_higher_order_operators() -> Any:
    torch._dynamo.reset()  # graphs and tables of torch's functions, as other tests left them
    q = torch.randn(1, 1, 16, 8)
    chosen = torch.cond(q.sum() > 0, lambda x: x + 1, lambda x: x - 1, (q,))
    return chosen, flex_attention(q, q, q)


def of_checkpoints() -> Any:
    """Both kinds, and one that keeps the results of some ops, which a mode finds in order."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(3, 4, requires_grad=True)
    keeping = functools.partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
    )
    for options in ({"use_reentrant": True}, {}, {"context_fn": keeping}):
        y = checkpoint(model, x, **{"use_reentrant": False, **options})
        y.float().exp().sum().backward()
    # In a mode, torch adds up gradients in new memory.
    return x.grad.clone(), [each.grad.clone() for each in model.parameters()]


def of_dispatch_modes() -> Any:
    """All calls that a mode of the program sees, in the backward too."""
    seen: list[str] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with Seeing():
        for _ in range(2):
            model(torch.randn(3, 4)).float().softmax(-1).square().sum().backward()
            optimizer.step()
    return seen


def of_function_modes() -> Any:
    seen: list[str] = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    with Seeing():
        model(torch.randn(3, 4)).float().softmax(-1).square().sum().backward()
    return seen


KINDS = [
    of_checkpoints, of_complex, of_dispatch_modes, of_function_modes, of_generators, of_grad,
    of_higher_order_operators, of_inference, of_jacrev, of_jvp, of_lazy_modules, of_meta, of_nested,
    of_optimizer, of_quantized, of_sparse, of_sparse_csr, of_subclass, of_twice_differentiated, of_views, of_vmap,
]  # fmt: skip


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_all_kinds(
    kind: Callable[[], Any], program: str, observer: str, tmp_path: Path
) -> None:
    assert_same(kind, program, observer, tmp_path)
