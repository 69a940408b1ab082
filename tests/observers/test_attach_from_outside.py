"""What observers must leave as it was: each program runs with an observer and without, and is compared."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hmpx

CPU = {"cpu"}
Program = Callable[[], Any]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields all tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def described(value: Any) -> list[Any]:
    """Returns what a program can see of its tensors: values, metadata, and which share a storage."""
    storages: dict[int, int] = {}
    seen: list[Any] = []
    for tensor in tensors_in(value):
        plain = tensor.detach()
        strided = tensor.layout is torch.strided
        storage = tensor.untyped_storage().data_ptr() if strided else None
        dense = plain if strided else plain.to_dense()
        seen.append(
            (
                type(tensor),
                tensor.dtype,
                tensor.shape,
                tensor.requires_grad,
                type(tensor.grad_fn),
                None if tensor.is_inference() else tensor._version,
                storages.setdefault(storage, len(storages)) if storage is not None else None,
                None if tensor.device.type == "meta" else repr(dense.tolist()),
            )
        )
    return seen


def outcome(program: Program) -> list[Any]:
    """Returns what comes of a program: tensors, or the error, and the state of random numbers."""
    torch.manual_seed(0)
    try:
        seen = described(program())
    except (RuntimeError, hmpx.HmpxError) as error:
        seen = [type(error), str(error)]
    return [*seen, torch.get_rng_state().tolist()]


def look(call: hmpx.OpCall, tensors: hmpx.CallTensors) -> None:
    """Computes on all that an observer is given, and keeps nothing."""
    for tensor in tensors_in([tensors.given, tensors.cast, tensors.result]):
        if tensor.layout is torch.strided and not tensor.is_quantized:
            tensor.detach().ne(0).sum()
    product = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert product.dtype == torch.float32 or torch.is_autocast_enabled("cpu")


def run_again(call: hmpx.OpCall, tensors: hmpx.CallTensors) -> None:
    """Runs the call again as it was cast, with the random numbers put back."""
    state = torch.get_rng_state()
    with suppress(RuntimeError):
        tensors.run(*tensors.cast, **tensors.cast_kwargs)
    torch.set_rng_state(state)


def in_place() -> Any:
    """Writes in place, also through views."""
    x = torch.randn(3, 3)
    view = x[0]
    x.add_(torch.randn(3, 3).bfloat16())
    x.addmm_(torch.randn(3, 3), torch.randn(3, 3))
    x[x > 0] = torch.randn(1).half()
    view.mul_(2)
    return x, view, F.relu(x, inplace=True)


def out_arguments() -> Any:
    """Writes to out=."""
    product, total = torch.empty(3, 3), torch.empty(0)
    values, indices = torch.empty(0), torch.empty(0, dtype=torch.long)
    x = torch.randn(3, 3)
    torch.add(x, x.half(), out=total)
    torch.max(x, 0, out=(values, indices))
    return torch.mm(x, x, out=product), product, total, values, indices


def batch_norms() -> Any:
    """Updates running statistics, in fp32 and bf16."""
    kept = []
    for dtype in (torch.float32, torch.bfloat16):
        norm = nn.BatchNorm1d(3).to(dtype)
        x = torch.randn(8, 3, requires_grad=True)
        norm(x).float().sum().backward()
        kept += [norm.running_mean, norm.running_var, norm.num_batches_tracked, x.grad]
    return kept


def recurrent() -> Any:
    """Recurrent modules, with dropout and packed sequences."""
    x = torch.randn(5, 2, 3, requires_grad=True)
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    y, _ = nn.LSTM(3, 4, 2, dropout=0.5, bidirectional=True)(x)
    y.float().sum().backward()
    return y, x.grad, nn.GRU(3, 4)(packed)[0].data, nn.GRUCell(3, 4)(torch.randn(2, 3))


def attention() -> Any:
    """A transformer's layer, in training and evaluation."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    x = torch.randn(3, 2, 4, requires_grad=True)
    y = layer(x)
    y.float().sum().backward()
    with torch.no_grad():
        return y, x.grad, layer.eval()(x)


def lists_of_tensors() -> Any:
    """Ops that take lists."""
    pair = [torch.randn(2, 2, requires_grad=True), torch.randn(2, 2).half()]
    y = torch.cat(pair)
    y.float().sum().backward()
    product = torch.linalg.multi_dot(
        [torch.randn(2, 2), torch.randn(2, 3).half(), torch.randn(3, 2)]
    )
    return y, torch.stack(pair), torch.einsum("ij,jk->ik", pair), pair[0].grad, product


def other_kinds() -> Any:
    """Sparse, complex, 0-dim and nested tensors, and a fake quantizer."""
    sparse = torch.randn(3, 3).relu().to_sparse()
    complexes = torch.randn(3, 3, dtype=torch.cfloat)
    zero = torch.tensor(2.0, requires_grad=True)
    ((zero * 3).exp() + torch.tensor(1.0).half()).backward()
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    quantized = torch.fake_quantize_per_tensor_affine(torch.randn(3), 0.1, 0, -128, 127)
    linear = F.linear(nested, torch.randn(5, 3)).values()
    return torch.mm(sparse, torch.randn(3, 3)), complexes @ complexes, zero.grad, linear, quantized


def transforms() -> Any:
    """torch.func's transforms of a function that writes in place."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.addmm_(x, x)
        return torch.mm(y, x).float().sin().sum()

    x = torch.randn(3, 3)
    batch = torch.randn(2, 3, 3)
    return vmap(f)(batch), vmap(grad(f))(batch), grad(f)(x), jacrev(f)(x), jvp(f, (x,), (x,))


def modes() -> Any:
    """Autocast, inference mode and a default device."""
    x = torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.softmax(torch.mm(x, x), -1)
    with torch.inference_mode():
        z = torch.mm(x, x).relu_()
    with torch.device("meta"):
        meta = nn.Linear(3, 4)(torch.empty(2, 3))
    y.sum().backward()
    return y, z, meta, x.grad


def gradients() -> Any:
    """A second derivative, and a hook that computes."""
    x = torch.randn(3, 3, requires_grad=True)
    (first,) = torch.autograd.grad(torch.mm(x, x).float().pow(2).sum(), x, create_graph=True)
    first.float().sum().backward()
    hooked: list[torch.Tensor] = []
    w = torch.randn(3, 3, requires_grad=True)
    w.register_hook(lambda g: hooked.append(torch.mm(g, g)))
    torch.mm(w, w).float().sum().backward()
    return first, x.grad, w.grad, hooked


def recomputed() -> Any:
    """Both kinds of checkpoints, around a dropout."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3))
    x = torch.randn(2, 3, requires_grad=True)
    for reentrant in (False, True):
        checkpoint(layers, x, use_reentrant=reentrant).float().sum().backward()
    return x.grad, [p.grad for p in layers.parameters()]


def optimizers() -> Any:
    """Steps of an optimizer."""
    weight = nn.Parameter(torch.randn(3, 3))
    for foreach in (False, True):
        optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=foreach)
        for _ in range(2):
            optimizer.zero_grad()
            torch.mm(weight, weight).float().sum().backward()
            optimizer.step()
    return weight


def leaf_error() -> Any:
    """Writes to a leaf."""
    return torch.randn(3, 3, requires_grad=True).addmm_(torch.ones(3, 3), torch.ones(3, 3))


def shape_error() -> Any:
    """Shapes that don't fit."""
    return torch.mm(torch.ones(2, 3), torch.ones(2, 3))


def inference_error() -> Any:
    """Writes to an inference tensor."""
    with torch.inference_mode():
        x = torch.randn(3, 3)
    return x.add_(1)


def overlap_error() -> Any:
    """Writes to a tensor that overlaps itself."""
    return torch.zeros(1).expand(3).add_(1)


PROGRAMS: tuple[Program, ...] = (
    in_place,
    out_arguments,
    batch_norms,
    recurrent,
    attention,
    lists_of_tensors,
    other_kinds,
    transforms,
    modes,
    gradients,
    recomputed,
    optimizers,
    leaf_error,
    shape_error,
    inference_error,
    overlap_error,
)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "float8": {"low_precision_type": "float8_e4m3fn", "round_gradients": True},
    "native": {"legalize": "never"},
    "two device types": {"device_types": {"cpu", "meta"}, "reuse_casts": True},
    "O2": {"opt_level": "O2", "legalize": "fast"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_programs_give_the_same(options: dict[str, Any]) -> None:
    """Values, gradients, dtypes, aliasing, versions, errors and random numbers are the same."""
    with hmpx.convert(**{"device_types": CPU, **options}):
        expected = [outcome(program) for program in PROGRAMS]
        with hmpx.attach(lambda call: None):
            plain = [outcome(program) for program in PROGRAMS]
        with hmpx.attach(look, tensors=True), hmpx.attach(run_again, tensors=True):
            with_tensors = [outcome(program) for program in PROGRAMS]
    for program, *outcomes in zip(PROGRAMS, expected, plain, with_tensors, strict=True):
        assert outcomes[0] == outcomes[1] == outcomes[2], program.__name__


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration, ValueError])
def test_after_an_exception_of_an_observer_all_is_as_before(error: type[BaseException]) -> None:
    """The write has landed, casts are on, and the next call is observed, at the right module."""

    def interrupt(call: hmpx.OpCall) -> None:
        raise error

    told: list[hmpx.OpCall] = []
    x = torch.zeros(2, 2)
    with hmpx.convert(device_types=CPU):
        with hmpx.attach(interrupt):
            with pytest.raises(error):
                x.add_(torch.ones(2, 2).half())
            with pytest.raises(error):
                nn.Sequential(nn.Linear(2, 2))(x)
        with hmpx.attach(told.append):
            assert torch.mm(x, x).dtype == torch.bfloat16
    assert x.sum() == 4
    assert [call.module for call in told] == [""]


def test_an_observer_reverts_and_converts() -> None:
    """The call that is told of ends as it began; later ones follow what the observer did."""
    original = torch.mm
    x = torch.ones(2, 2)
    for end, dtype in (
        (hmpx.revert, torch.float32),
        (lambda: hmpx.convert(device_types=CPU, low_precision_type=torch.float16), torch.float16),
    ):
        hmpx.convert(device_types=CPU)
        with hmpx.attach(lambda call, end=end: end()):  # type: ignore[misc]
            assert [torch.mm(x, x).dtype, torch.mm(x, x).dtype] == [torch.bfloat16, dtype]
        hmpx.revert()
    assert torch.mm is original


def test_an_observer_attaches_and_detaches() -> None:
    """One that is attached within a call is told from the next call on; detached, no more."""
    told: list[str] = []
    x = torch.ones(2, 2)

    def first(call: hmpx.OpCall) -> None:
        told.append("first")
        outer.detach()
        inner.append(hmpx.attach(lambda call: told.append("second")))

    inner: list[hmpx.Attached] = []
    with hmpx.convert(device_types=CPU):
        outer = hmpx.attach(first)
        torch.mm(x, x)
        torch.mm(x, x)
        inner[0].detach()
        torch.mm(x, x)
    assert told == ["first", "second"]


def test_wrappers_kept_from_any_time() -> None:
    """Functions kept from before, during and after an observer tell it if and only if it is attached."""
    told: list[hmpx.OpCall] = []
    x = torch.ones(2, 2)
    with hmpx.convert(device_types=CPU):
        before = torch.mm
        with hmpx.attach(told.append):
            during = torch.mm
            before(x, x)
            copy.deepcopy(during)(x, x)
        assert len(told) == 2
        assert before(x, x).dtype == during(x, x).dtype == torch.bfloat16
        with hmpx.attach(told.append):
            during(x, x)
    assert before(x, x).dtype == during(x, x).dtype == torch.float32
    assert len(told) == 3


def test_each_attachment_is_its_own() -> None:
    """The same observer, unhashable and unequal to itself, is told as often as it is attached."""

    class Odd:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, call: hmpx.OpCall) -> None:
            told.append(call)

        def __eq__(self, other: object) -> bool:
            raise AssertionError

        def __bool__(self) -> bool:
            raise AssertionError

    told: list[hmpx.OpCall] = []
    odd = Odd()
    with hmpx.convert(device_types=CPU), hmpx.attach(odd):
        with hmpx.attach(odd) as second:
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        second.detach()
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert len(told) == 3


def test_threads_and_tasks() -> None:
    """Each call of each thread and task is told once, whoever attaches and detaches meanwhile."""
    told: list[hmpx.OpCall] = []
    dtypes: list[torch.dtype] = []
    x = torch.ones(2, 2)

    def work() -> None:
        dtypes.extend(torch.mm(x, x).dtype for _ in range(50))

    async def task() -> None:
        for _ in range(5):
            dtypes.append(torch.mm(x, x).dtype)
            await asyncio.sleep(0)

    async def gather() -> None:
        await asyncio.gather(*(task() for _ in range(4)))

    with hmpx.convert(device_types=CPU), hmpx.attach(told.append):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            hmpx.attach(lambda call: torch.mm(x, x)).detach()
        for thread in threads:
            thread.join()
        asyncio.run(gather())
    assert len(told) == len(dtypes) == 170
    assert set(dtypes) == {torch.bfloat16}


def test_a_thread_started_by_an_observer_is_the_programs() -> None:
    """Only what the observer itself computes is left out."""
    told: list[hmpx.OpCall] = []
    x = torch.ones(2, 2)

    def observer(call: hmpx.OpCall) -> None:
        told.append(call)
        if len(told) == 1:
            thread = threading.Thread(target=torch.mm, args=(x, x))
            thread.start()
            thread.join()

    with hmpx.convert(device_types=CPU), hmpx.attach(observer):
        torch.mm(x, x)
    assert len(told) == 2


def test_backward_within_an_observer() -> None:
    """A gradient that an observer computes is in fp32, and not told of."""
    grads: list[torch.Tensor] = []

    def observer(call: hmpx.OpCall) -> None:
        x = torch.full((2, 2), 1 / 3, requires_grad=True)
        with torch.enable_grad():
            torch.mm(x, x).sum().backward()
        assert x.grad is not None
        grads.append(x.grad)

    with hmpx.convert(device_types=CPU), hmpx.attach(observer):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert [g.flatten().tolist() for g in grads] == [[torch.tensor(1 / 3).item() * 4] * 4]


def test_modes_see_the_same_ops() -> None:
    """A dispatch mode and a tensor subclass see the same calls with an observer as without."""

    class Log(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            log.append(str(func))
            return func(*args, **(kwargs or {}))

    class Sub(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            log.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    logs = []
    with hmpx.convert(device_types=CPU):
        for attached in (None, hmpx.attach(lambda call: None)):
            log: list[str] = []
            x = torch.ones(2, 2).as_subclass(Sub)
            F.linear(x, x).add_(x)
            with Log():
                F.softmax(torch.mm(torch.ones(2, 2), torch.ones(2, 2)), -1)
            logs.append(log)
            if attached is not None:
                attached.detach()
    assert logs[0] == logs[1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls(backend: str) -> None:
    """A compiled function gives the same with an observer, in one graph, and is told of while traced."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(torch.mm(x, x), -1).add_(torch.ones(2, 2).half())

    told: list[hmpx.OpCall] = []
    results = []
    with hmpx.convert(device_types=CPU):
        for observed in (False, True):
            torch._dynamo.reset()
            with hmpx.attach(told.append) if observed else nullcontext():
                results.append(torch.compile(f, backend=backend, fullgraph=True)(torch.ones(2, 2)))
        torch._dynamo.reset()
    assert described(results[0]) == described(results[1])
    assert {call.op for call in told} >= {"mm", "softmax"}


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_traced_and_exported_graphs_are_the_same() -> None:
    """An observer without tensors adds nothing to the graphs of jit.trace and export."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, x).relu().add_(1)

    graphs = []
    x = torch.ones(2, 2)
    with hmpx.convert(device_types=CPU):
        for observed in (False, True):
            with hmpx.attach(lambda call: None) if observed else nullcontext():
                exported = torch.export.export(Model(), (x,))
                traced = torch.jit.trace(Model(), x)
            kinds = [node.kind() for node in traced.graph.nodes()]
            graphs.append([[str(node.target) for node in exported.graph.nodes], kinds])
    assert graphs[0] == graphs[1]


def test_a_rule_that_changes_is_told() -> None:
    """What an observer is told follows rules that come and go."""
    told: list[hmpx.OpCall] = []

    def deny(call: hmpx.Call) -> hmpx.CastPolicy:
        return hmpx.DENY

    x = torch.ones(2, 2)
    with hmpx.convert(device_types=CPU), hmpx.attach(told.append):
        hmpx.register_rule("mm", deny)
        try:
            torch.mm(x, x)
        finally:
            hmpx.unregister_rule("mm", deny)
        torch.mm(x, x)
    assert [call.output_dtypes for call in told] == [(torch.float32,), (torch.bfloat16,)]


@pytest.mark.parametrize("arguments", [(None,), (3,), ("x",), (print, None), (print, "yes")])
def test_wrong_arguments(arguments: tuple[Any, ...]) -> None:
    """Nothing is attached, and the error is hmpx's own."""
    with pytest.raises(hmpx.OptionError):
        hmpx.attach(*arguments)
