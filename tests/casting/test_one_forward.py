"""A forward has the same bits whether or not gradients are recorded, a checkpoint recomputes it, or a mode looks on."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import ops
from hmpx.compute import capabilities as capability
from tests.samples import sample_inputs, spread
from tests.speeds import Capability, known_as
from tests.values import mapped, normal, same_or_nan, tensors

pytestmark = [
    pytest.mark.usefixtures("fresh_wrappers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

#: An op or a model, and its tensors: inputs, then parameters.
Program = tuple[Callable[..., Any], list[Tensor]]


# --- ways to run a forward -----------------------------------------------------------------------


class LookingOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Recomputing(torch.autograd.Function):
    """As other libraries' checkpoints."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *given: Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(*given)
        return run(*given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        with torch.enable_grad():
            ctx.run(*[learning(each.detach()) for each in ctx.saved_tensors])
        return (None,) * (len(ctx.saved_tensors) + 1)


def learning(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_(tensor.is_floating_point())


def with_backward(run: Callable[..., Any], given: list[Tensor]) -> None:
    results = [each for each in tensors(run(*given)) if each.requires_grad]
    if results:
        torch.autograd.backward([each.float().sum() for each in results])


def under(region: Callable[[], Any], run: Callable[..., Any], given: list[Tensor]) -> None:
    with region():
        run(*given)


#: How a forward is run; the first is what the others are compared with. All tensors require gradients.
WAYS: dict[str, Callable[[Callable[..., Any], list[Tensor]], None]] = {
    "recording": with_backward,
    "no_grad": functools.partial(under, torch.no_grad),
    "inference_mode": functools.partial(under, torch.inference_mode),
    "nothing learns": lambda run, given: run(*[each.detach() for each in given]),
    "inputs learn": lambda run, given: with_backward(
        run, [given[0], *[each.detach() for each in given[1:]]]
    ),
    "parameters learn": lambda run, given: with_backward(run, [given[0].detach(), *given[1:]]),
    "checkpoint": lambda run, given: with_backward(
        lambda *given: checkpoint(run, *given, use_reentrant=False), given
    ),
    "reentrant checkpoint": lambda run, given: with_backward(
        lambda *given: checkpoint(run, *given, use_reentrant=True), given
    ),
    "a function that recomputes": lambda run, given: with_backward(
        lambda *given: Recomputing.apply(run, *given), given
    ),
    "mode": functools.partial(under, LookingOn),
    "mode, no_grad": lambda run, given: under(LookingOn, torch.no_grad()(run), given),
}

#: Mode of ``legalize``, and the native kernels' time in inference and in training, beside that of fp32; None: this machine's.
SPEEDS: list[tuple[str, tuple[float, float] | None]] = [
    ("auto", None),
    ("auto", (1.0, 9.0)),
    ("auto", (9.0, 1.0)),
    ("fast", (9.0, 9.0)),
    ("fast", (1.0, 9.0)),
    ("always", (1.0, 1.0)),
    ("never", None),
]


@pytest.fixture(params=SPEEDS, ids=str)
def converted(
    request: pytest.FixtureRequest, fresh_wrappers: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    legalize, times = request.param
    if times is not None:
        known = {
            kind: Capability(None, *((0.2, 1.0) if kind == "gemv" else times))
            for kind in capability.KINDS
        }
        known_as(monkeypatch, lambda kind, *others: known[kind])
    with hmpx.convert(legalize=legalize, device_types={"cpu"}):
        yield


def check(program: Program) -> None:
    """Fails unless all ways have the bits of the first."""
    function, given = program
    expected: list[Tensor] = []
    for way, run in WAYS.items():
        seen: list[list[Tensor]] = []

        def forward(*given: Tensor, seen: list[list[Tensor]] = seen) -> Any:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                result = function(*given)
            seen.append([each.detach().clone() for each in tensors(result)])
            return result

        copies = [each.detach().clone(memory_format=torch.preserve_format) for each in given]
        run(forward, [learning(each) for each in copies])
        expected = expected or seen[0]
        for found in seen:
            try:
                same_or_nan(found, expected)
            except AssertionError as error:
                raise AssertionError(f"{way}: {error}") from None


def is_torchs(program: Program) -> bool:
    """Whether a program's forward depends on gradients in float32, too, as attention on those of its mask."""
    try:
        with hmpx.disable_casts():
            check(program)
    except AssertionError:
        return True
    return False


# --- ops of the low-precision list ---------------------------------------------------------------

LOW = {
    name
    for name, decision in hmpx.load_policy().decisions.items()
    if decision.cast_policy is hmpx.CastPolicy.LOW
}
INFOS = {
    f"{info.name}{info.variant_test_name and '.' + info.variant_test_name}": info
    for info in op_db
    if ops.resolve(info.name) in LOW
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", INFOS)
@pytest.mark.usefixtures("converted")
def test_ops(name: str) -> None:
    info = INFOS[name]
    for sample in spread(list(sample_inputs(info)), 3):
        call = (sample.input, *sample.args), sample.kwargs
        given = list(tensors(list(call)))
        if not all(each.numel() for each in given) or not given[0].is_floating_point():
            continue

        def run(*given: Tensor, call: Any = call) -> Any:
            left = iter(given)
            args, kwargs = mapped(call, lambda _: next(left))
            return info.op(*args, **kwargs)

        if not is_torchs((run, given)):
            check((run, given))


# --- layers: small and large, of few rows and many, in other layouts ------------------------------


def layer(module: nn.Module, *inputs: Tensor, is_training: bool = True) -> Program:
    """Returns a module's call as a function of its inputs and its parameters."""
    module.train(is_training)
    names = [name for name, _ in module.named_parameters()]

    def run(*given: Tensor) -> Any:
        called, own = given[: len(inputs)], given[len(inputs) :]
        parameters = {name: nn.Parameter(each) for name, each in zip(names, own, strict=True)}
        if torch.is_grad_enabled():  # new parameters are no part of a graph
            parameters = dict(zip(names, own, strict=True))
        return torch.func.functional_call(module, parameters, called)

    return run, [*inputs, *[each.detach() for each in module.parameters()]]


def product(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Program:
    return function, [normal(*shape, seed=seed) / 8 for seed, shape in enumerate(shapes)]


def attention(*inputs: Tensor) -> Program:
    module = nn.MultiheadAttention(64, 4, batch_first=True)
    return layer(module, *inputs)


#: Name -> the program. Weights of 131,072 elements or more are large, see `layers.LEAST`.
PROGRAMS: dict[str, Callable[[], Program]] = {
    **{
        f"linear {tuple(shape)} to {n}": functools.partial(
            lambda shape, n: layer(nn.Linear(shape[-1], n), normal(*shape)), shape, n
        )
        for shape, n in (
            ((1, 512), 512), ((2, 512), 512), ((3, 512), 300), ((2, 1, 512), 512), ((40, 64), 64),
            ((512, 512), 512), ((2, 3, 4, 512), 512), ((512,), 512), ((600, 64), 300),
        )
    },
    "linear, transposed input": lambda: layer(nn.Linear(512, 512), normal(512, 4).t()),
    "linear, expanded input": lambda: (F.linear, [normal(1, 512).expand(5, 512), normal(512, 512)]),
    "linear without bias": lambda: layer(nn.Linear(512, 512, bias=False), normal(7, 512)),
    "bilinear": lambda: layer(nn.Bilinear(20, 30, 16), normal(9, 20), normal(9, 30)),
    "matmul, a row": lambda: product(torch.matmul, (1, 512), (512, 512)),
    "matmul, rows": lambda: product(torch.matmul, (9, 512), (512, 512)),
    "matmul, a transposed weight": lambda: product(lambda a, b: a @ b.t(), (2, 512), (512, 512)),
    "matmul, 4 dimensions": lambda: product(torch.matmul, (2, 4, 33, 64), (2, 4, 64, 129)),
    "matmul, transposed heads": lambda: product(
        lambda a, b: a.transpose(1, 2) @ b.transpose(1, 2).mT, (2, 65, 4, 64), (2, 67, 4, 64)
    ),
    "matmul, a matrix and a batch": lambda: product(torch.matmul, (65, 512), (9, 512, 33)),
    "matmul, a vector and a batch": lambda: product(torch.matmul, (512,), (9, 512, 33)),
    "matmul, a transposed batch": lambda: product(lambda a, b: a.mT @ b, (9, 512, 33), (512, 65)),
    "matmul, a batch and a vector": lambda: product(lambda a, b: a.mT @ b, (9, 512, 33), (512,)),
    "addmm": lambda: product(torch.addmm, (512,), (7, 512), (512, 512)),
    "bmm": lambda: product(torch.bmm, (8, 65, 64), (8, 64, 257)),
    "baddbmm": lambda: product(torch.baddbmm, (8, 65, 257), (8, 65, 64), (8, 64, 257)),
    "addbmm": lambda: product(torch.addbmm, (65, 257), (8, 65, 64), (8, 64, 257)),
    "chain_matmul": lambda: product(torch.chain_matmul, (9, 512), (512, 512), (512, 65)),
    "multi_dot": lambda: product(
        lambda *all: torch.linalg.multi_dot(all), (9, 512), (512, 512), (512, 65)
    ),
    "einsum": lambda: product(
        lambda a, b: torch.einsum("bthd,hdm->btm", a, b), (2, 33, 4, 64), (4, 64, 512)
    ),
    "tensordot": lambda: product(lambda a, b: torch.tensordot(a, b, 1), (2, 33, 512), (512, 512)),
    "conv_tbc": lambda: product(torch.conv_tbc, (33, 4, 64), (3, 64, 128), (128,)),
    **{
        f"{kind.__name__}{tuple(size)}": functools.partial(
            lambda kind, size, groups: layer(
                kind(16, 32, 3, padding=1, groups=groups), normal(2, 16, *size)
            ),
            kind, size, groups,
        )
        for kind, size, groups in (
            (nn.Conv1d, (50,), 1), (nn.Conv1d, (5000,), 1),
            (nn.Conv2d, (9, 9), 1), (nn.Conv2d, (70, 70), 2),
            (nn.Conv3d, (5, 6, 7), 1), (nn.Conv3d, (17, 17, 17), 1),
            (nn.ConvTranspose1d, (50,), 1), (nn.ConvTranspose2d, (70, 70), 1),
            (nn.ConvTranspose3d, (5, 6, 7), 2),
        )
    },
    "Conv2d, large weight": lambda: layer(nn.Conv2d(128, 128, 3), normal(1, 128, 5, 5)),
    "Conv2d, padding by name": lambda: layer(nn.Conv2d(16, 16, 3, padding="same"), normal(2, 16, 70, 70)),
    "Conv2d, channels last": lambda: layer(
        nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last),
        normal(2, 16, 70, 70).contiguous(memory_format=torch.channels_last),
    ),
    "MultiheadAttention": lambda: attention(*[normal(2, 33, 64)] * 3),
    "attention": lambda: product(F.scaled_dot_product_attention, *[(2, 4, 129, 32)] * 3),
    "causal attention": lambda: product(
        functools.partial(F.scaled_dot_product_attention, is_causal=True), *[(2, 4, 65, 16)] * 3
    ),
    "masked attention": lambda: product(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, normal(65, 65)), *[(2, 4, 65, 16)] * 3
    ),
    "TransformerEncoderLayer": lambda: layer(
        nn.TransformerEncoderLayer(64, 4, 512, dropout=0.0, batch_first=True), normal(2, 33, 64)
    ),
    "TransformerEncoderLayer, eval": lambda: layer(
        nn.TransformerEncoderLayer(64, 4, 512, batch_first=True), normal(2, 33, 64), is_training=False
    ),
    "LSTM": lambda: layer(nn.LSTM(32, 64, 2, batch_first=True), normal(4, 9, 32)),
    "LSTM, both directions": lambda: layer(nn.LSTM(32, 64, bidirectional=True), normal(9, 4, 32)),
    "GRU": lambda: layer(nn.GRU(32, 64), normal(9, 4, 32)),
    "RNN": lambda: layer(nn.RNN(32, 64), normal(9, 4, 32)),
    "RNN, relu": lambda: layer(nn.RNN(32, 64, nonlinearity="relu"), normal(9, 4, 32)),
    "LSTMCell": lambda: layer(nn.LSTMCell(32, 64), normal(4, 32)),
}  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("converted")
def test_layers(name: str) -> None:
    torch.manual_seed(0)
    check(PROGRAMS[name]())


def test_every_op_of_the_low_list_is_run() -> None:
    called: set[str] = set()
    with hmpx.convert(device_types={"cpu"}), torch.no_grad():
        attached = hmpx.attach(lambda call: called.add(call.op))
        try:
            for make in PROGRAMS.values():
                function, given = make()
                function(*given)
        finally:
            attached.detach()
    sampled = {ops.resolve(info.name) for info in INFOS.values()}
    without_gradients_on_cpus = {"torch.nn.attention.flex_attention.flex_attention"}
    assert LOW - sampled - called == without_gradients_on_cpus


@pytest.mark.slow
def test_on_a_cpu_without_bf16_instructions() -> None:
    """All of the above, in a process whose kernels don't use them."""
    settings = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--whole", "-p", "no:cacheprovider", __file__],
        cwd=Path(__file__).parent.parent.parent,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
