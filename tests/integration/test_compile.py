"""torch.compile: no graph break, the dtypes of eager mode, and nothing stale."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.codegen.cpp
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx import Policy
from hmpx.torch_internals import CAN_KEEP_CASTS
from tests import forks
from tests.values import uniform

FP32, BF16 = torch.float32, torch.bfloat16

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

POLICY = Policy.from_ops(
    low=["matmul", "linear", "layer_norm", "add", "scaled_dot_product_attention", "cat", "einsum"],
    fp32=["softmax", "truediv"],
    first=["addmm"],
    widest=["cross"],
)


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "function": lambda a, b: torch.matmul(a, b),
    "method": lambda a, b: a.matmul(b),
    "operator": lambda a, b: a @ b,
    "x += y": lambda a, b: a.clone().__iadd__(b.bfloat16()),
    "add": lambda a, b: a + b,
    "cat": lambda a, b: torch.cat([a, b]),
    "softmax": lambda a, b: F.softmax((a @ b), -1),
    "division": lambda a, b: (a @ b) / 3,
    "linear": lambda a, b: F.linear(a, b),
    "layer_norm": lambda a, b: F.layer_norm(a, (4,), b[0], b[1]),
    "sdpa": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None]),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "addmm": lambda a, b: torch.addmm(a, b.bfloat16(), b),
    "addmm_": lambda a, b: a.clone().addmm_(b.bfloat16(), b.bfloat16()),
    "cross": lambda a, b: torch.cross(a[:, :3], b[:, :3].bfloat16(), dim=1),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_compiles_whole_and_equals_eager(form: str, backend: str) -> None:
    """``fullgraph=True``: functions, methods, operators, in-place forms."""
    function = FORMS[form]
    with hmpx.convert(policy=POLICY):
        expected = function(uniform(4, 4), uniform(4, 4))
        actual = torch.compile(function, backend=backend, fullgraph=True)(
            uniform(4, 4), uniform(4, 4)
        )
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_every_form_under_inductor_has_the_dtypes_of_eager() -> None:
    """All in one graph, which keeps intermediate results in fp32 where it fuses (pytorch #194329)."""

    def every_form(a: Tensor, b: Tensor) -> list[Tensor]:
        return [function(a, b) for function in FORMS.values()]

    with hmpx.convert(policy=POLICY):
        expected = every_form(uniform(4, 4), uniform(4, 4))
        actual = torch.compile(every_form, backend="inductor", fullgraph=True)(
            uniform(4, 4), uniform(4, 4)
        )
    assert [a.dtype for a in actual] == [e.dtype for e in expected]
    # bfloat16's relative spacing is 2^-8; some forms round two or three times.
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2**-8)


@pytest.mark.skipif(
    not CAN_KEEP_CASTS, reason="before torch 2.13 the setting has no effect on CPUs"
)
def test_rounding_survives_inductor_where_it_is_asked_to() -> None:
    """It elides rounding to bf16 and back unless told otherwise (pytorch #179804, #183761)."""

    def chain(a: Tensor, b: Tensor) -> Tensor:
        return torch.log(torch.mul(a, b) * a)

    a, b = torch.rand(64, 64) + 1, torch.rand(64, 64) + 1
    setting = torch._inductor.config.patch(emulate_precision_casts=True)
    with setting, hmpx.convert(policy=Policy.from_ops(low=["mul"], fp32=["log"])):
        expected = chain(a, b)
        actual = torch.compile(chain, backend="inductor", fullgraph=True)(a, b)
    torch.testing.assert_close(actual, expected, rtol=2**-22, atol=0)  # the log's own last digits


def image(*size: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of an image, of a kernel of as many dimensions, and of a bias."""
    return (2, 6, *size), (6, 6, *(3 for _ in size)), (6,)


def cell(gates: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a recurrent cell's input, state, weights and biases."""
    return (4, 6), (4, 8), (gates * 8, 6), (gates * 8, 8), (gates * 8,), (gates * 8,)


def normed(name: str) -> Callable[..., Tensor]:
    """Returns the norm in `torch.nn.functional`, with running statistics."""
    return lambda a, w, b: getattr(F, name)(a, torch.zeros(6), torch.ones(6), w, b, True)


def followed(**options: object) -> Callable[..., Tensor]:
    """Returns attention to low inputs, which it follows into low precision."""

    def attention(*inputs: Tensor) -> Tensor:
        low = [t.bfloat16() for t in inputs]
        return F.scaled_dot_product_attention(*low, **options)  # type: ignore[arg-type]

    return attention


QKV = ((2, 4, 40, 16),) * 3

#: Every op of the default low list, and what follows its inputs there: call, shapes of the inputs.
#: A power of two for dropout: eager torch rounds the factor to low precision, its graphs do not.
DEFAULT_LOW: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "addbmm": (lambda c, a, b: torch.addbmm(c, a, b), ((40, 40), (4, 40, 64), (4, 64, 40))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b), ((40,), (40, 64), (64, 40))),
    "addmv": (lambda c, a, b: torch.addmv(c, a, b), ((40,), (40, 64), (64,))),
    "addr": (lambda c, a, b: torch.addr(c, a, b), ((40, 64), (40,), (64,))),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b), ((40, 40), (4, 40, 64), (4, 64, 40))),
    "batch_norm": (normed("batch_norm"), ((4, 6, 9), (6,), (6,))),
    "bmm": (lambda a, b: torch.bmm(a, b), ((4, 40, 64), (4, 64, 40))),
    "conv1d": (lambda a, w, b: F.conv1d(a, w, b), image(30)),
    "conv2d": (lambda a, w, b: F.conv2d(a, w, b), image(9, 9)),
    "conv3d": (lambda a, w, b: F.conv3d(a, w, b), image(6, 6, 6)),
    "conv_transpose1d": (lambda a, w, b: F.conv_transpose1d(a, w, b), image(30)),
    "conv_transpose2d": (lambda a, w, b: F.conv_transpose2d(a, w, b), image(9, 9)),
    "conv_transpose3d": (lambda a, w, b: F.conv_transpose3d(a, w, b), image(6, 6, 6)),
    "conv_tbc": (lambda a, w, b: torch.conv_tbc(a, w, b), ((30, 2, 6), (3, 6, 6), (6,))),
    "dot": (lambda a, b: torch.dot(a, b), ((64,), (64,))),
    "dropout": (lambda a: F.dropout(a, 0.5), ((40, 64),)),
    "dropout1d": (lambda a: F.dropout1d(a, 0.5), ((4, 6, 9),)),
    "dropout2d": (lambda a: F.dropout2d(a, 0.5), ((4, 6, 9, 9),)),
    "dropout3d": (lambda a: F.dropout3d(a, 0.5), ((4, 6, 5, 5, 5),)),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), ((4, 40, 64), (4, 40, 64))),
    "gru_cell": (lambda *t: torch.gru_cell(*t), cell(3)),
    "group_norm": (lambda a, w, b: F.group_norm(a, 2, w, b), ((4, 6, 9), (6,), (6,))),
    "instance_norm": (normed("instance_norm"), ((4, 6, 9), (6,), (6,))),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (64,), w, b), ((40, 64), (64,), (64,))),
    "leaky_relu": (lambda a: F.leaky_relu(a), ((40, 64),)),
    "linalg_multi_dot": (lambda *t: torch.linalg.multi_dot(t), ((40, 64), (64, 40), (40, 8))),
    "lstm_cell": (lambda a, h, *t: torch.lstm_cell(a, (h, h), *t)[1], cell(4)),
    "linear": (lambda a, w, b: F.linear(a, w, b), ((4, 40, 64), (32, 64), (32,))),
    "matmul": (lambda a, b: a @ b.mT, ((2, 4, 40, 16), (2, 4, 40, 16))),
    "mm": (lambda a, b: torch.mm(a, b), ((40, 64), (64, 40))),
    "mv": (lambda a, b: torch.mv(a, b), ((40, 64), (64,))),
    "relu": (lambda a: F.relu(a), ((40, 64),)),
    "rnn_relu_cell": (lambda *t: torch.rnn_relu_cell(*t), cell(1)),
    "rnn_tanh_cell": (lambda *t: torch.rnn_tanh_cell(*t), cell(1)),
    "scaled_dot_product_attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k.bfloat16(), v),
        QKV,
    ),
    "attention": (followed(), QKV),
    "attention, causal": (followed(is_causal=True), QKV),
    "attention, mask": (followed(), (*QKV, (1, 1, 40, 40))),
    "attention, grouped keys": (followed(enable_gqa=True), ((2, 8, 40, 16), *QKV[1:])),
    "transformer": (
        lambda a, w, v: (
            F.softmax(followed()(*F.linear(a, w).view(2, 40, 3, 4, 16).unbind(2)), -1)
            * F.leaky_relu(F.linear(a, v)).view(2, 40, 4, 16)
        ),
        ((2, 40, 64), (192, 64), (64, 64)),
    ),
}


@pytest.mark.parametrize("legalize", ["never", "always"])
def test_compiled_gradients_of_the_default_low_ops_equal_those_of_eager(legalize: str) -> None:
    """Bit for bit, outputs too: what a backward formula reads is as exact in both."""
    policy = hmpx.load_policy()
    listed = {n for n, d in policy.decisions.items() if d.cast_policy is hmpx.CastPolicy.LOW}
    # On the CPU FlexAttention has no gradient, and torch.compile leaves recurrent layers out of its graphs.
    untested = {"rmatmul", "torch.nn.attention.flex_attention.flex_attention"}
    untested |= {"gru", "lstm", "rnn_relu", "rnn_tanh"}
    untested.add("chain_matmul")  # deprecated, and multi_dot by another name
    assert listed - untested <= DEFAULT_LOW.keys()
    functions, shapes = zip(*DEFAULT_LOW.values(), strict=True)
    torch.manual_seed(0)
    inputs = [[torch.randn(shape) for shape in each] for each in shapes]

    def calls(inputs: list[list[Tensor]]) -> list[Tensor]:
        return [function(*given) for function, given in zip(functions, inputs, strict=True)]

    def results(function: Callable[[list[list[Tensor]]], list[Tensor]]) -> list[list[Tensor]]:
        leaves = [[each.clone().requires_grad_() for each in given] for given in inputs]
        torch.manual_seed(1)
        outputs = function(leaves)
        incoming = [torch.randn(output.shape).to(output.dtype) for output in outputs]
        torch.autograd.backward(outputs, incoming)
        found = zip(outputs, leaves, strict=True)
        return [[output, *(each.grad for each in given)] for output, given in found]

    with hmpx.convert(legalize=legalize):
        expected = results(calls)
        actual = results(torch.compile(calls, backend="aot_eager", fullgraph=True))
    for name, mine, eagers in zip(DEFAULT_LOW, actual, expected, strict=True):
        assert [torch.equal(a, e) for a, e in zip(mine, eagers, strict=True)] == [True] * len(
            mine
        ), name


class Small(nn.Module):
    """Linear, norm, attention scores, softmax: with and without a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:
        hidden = self.norm(self.linear(value))
        with hmpx.disable_casts():
            function = self.linear(value)
            operator = value @ value
        return hidden, function, operator, value @ value, self.linear(value)


DTYPES_ON = [BF16, FP32, FP32, BF16, BF16]
DTYPES_OFF = [FP32] * 5


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_disable_casts_inside_and_outside_a_compiled_function(backend: str) -> None:
    """Inside it holds for its block; toggled outside it recompiles, with the right dtypes."""
    model = Small()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with hmpx.convert(policy=POLICY):
        for _ in range(2):
            assert [t.dtype for t in compiled(uniform(4, 4))] == DTYPES_ON
            with hmpx.disable_casts():
                assert [t.dtype for t in compiled(uniform(4, 4))] == DTYPES_OFF
            assert [t.dtype for t in model(uniform(4, 4))] == DTYPES_ON


@pytest.mark.parametrize("form", ["function", "operator", "linear", "softmax"])
def test_convert_before_and_after_compile(form: str) -> None:
    """A function compiled before convert casts after it, and no longer after revert."""
    function = FORMS[form]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert compiled(uniform(4, 4), uniform(4, 4)).dtype is FP32
        with hmpx.convert(policy=Policy.from_ops(low=["matmul", "linear", "softmax"])):
            assert compiled(uniform(4, 4), uniform(4, 4)).dtype is BF16
        with hmpx.convert(policy=Policy.from_ops(fp32=["matmul", "linear", "softmax"])):
            assert compiled(uniform(4, 4), uniform(4, 4)).dtype is FP32


def test_toggling_does_not_recompile_without_end() -> None:
    """One graph for each state, however deep the regions and however often."""
    compiles = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiles.append(graph)
        return graph.forward

    compiled = torch.compile(lambda a: F.linear(a, a) @ a, backend=backend, fullgraph=True)
    with hmpx.convert(policy=POLICY):
        for _ in range(4):
            compiled(uniform(4, 4))
            with hmpx.disable_casts():
                compiled(uniform(4, 4))
                with hmpx.disable_casts():
                    compiled(uniform(4, 4))
    assert len(compiles) == 2


@pytest.mark.parametrize("mode", [True, "once"])
def test_logging_does_not_break_the_graph(
    mode: bool | str, caplog: pytest.LogCaptureFixture
) -> None:
    """Decisions are logged at trace time."""
    caplog.set_level("INFO", "hmpx")
    with hmpx.convert(policy=POLICY, isVerbose=mode):
        compiled = torch.compile(
            lambda a: F.softmax(F.linear(a, a), -1), backend="aot_eager", fullgraph=True
        )
        compiled(uniform(4, 4))
        traced = [r.getMessage() for r in caplog.records if r.name == "hmpx"]
        compiled(uniform(4, 4))
        assert [r.getMessage() for r in caplog.records if r.name == "hmpx"] == traced
    assert any("to_bf16" in line for line in traced)
    assert any("to_fp32" in line for line in traced)


def test_a_training_step_compiles_whole() -> None:
    """Forward and backward under inductor: fp32 gradients, close to eager."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    target = torch.tensor([0, 1, 1, 0])

    def loss(value: Tensor) -> Tensor:
        return F.cross_entropy(model(value), target)

    with hmpx.convert():
        expected = loss(uniform(4, 4))
        expected.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        actual = torch.compile(loss, fullgraph=True)(uniform(4, 4))
        actual.backward()
    # Inductor keeps bf16 intermediates in fp32 registers: 2^-8 is bf16's relative spacing.
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype is FP32
        torch.testing.assert_close(parameter.grad, grad, rtol=0.1, atol=2**-7)


CACHED = """
import sys, threading, torch
from torch._dynamo.utils import counters

if sys.argv[1] != "none":
    import hmpx.patches.compiled
    hmpx.patches.compiled.__version__ += sys.argv[2]
    hmpx.convert(policy=hmpx.Policy.from_ops(**{sys.argv[1]: ["matmul"]}))

def compile():
    out = torch.compile(lambda a: a @ a + 1)(torch.ones(4, 4))
    print(out.dtype, counters["aot_autograd"]["autograd_cache_hit"])

if sys.argv[3] == "thread":
    thread = threading.Thread(target=compile)
    thread.start()
    thread.join()
else:
    compile()
"""


#: A process that compiles (policy, version, thread) -> the dtype it gives, and the kernels it finds.
STEPS = {
    "none  main": ["torch.float32", "0"],
    "low  thread": ["torch.bfloat16", "0"],
    "fp32  main": ["torch.float32", "0"],  # its wrappers cast nothing, yet its key is its own
    "low  main": ["torch.bfloat16", "1"],
    "low .dev1 thread": ["torch.bfloat16", "0"],
}


@pytest.mark.parametrize(
    "steps",
    [
        ("low  thread", "fp32  main", "low  main"),
        pytest.param(tuple(STEPS), marks=pytest.mark.slow),
    ],
    ids=["few", "all"],
)
def test_the_disk_cache_keeps_policies_apart(steps: tuple[str, ...], tmp_path: Path) -> None:
    """An artefact compiled under one policy, or none, or version, is never served under another.

    In no thread: settings of torch are each thread's own.
    """
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for step in steps:
        run = forks.run("-c", CACHED, *step.split(" "), env=environment)
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == STEPS[step], step


IMPORTS = """
import sys, torch
torch.cuda.is_available = lambda: True
import torch._dynamo
import hmpx
hmpx.convert(device_types={"cpu"})
assert "torch._inductor.compile_fx" not in sys.modules
"""


def test_a_conversion_imports_no_inductor() -> None:
    """Which `torch._dynamo.reset` does on a machine with CUDA, though nothing was compiled."""
    done = forks.run("-c", IMPORTS, imported=forks.TORCH)
    assert done.returncode == 0, done.stderr


class Breaking(nn.Module):
    """Calls a block that breaks the graph, then a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def block(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.first(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.softmax(self.block(x), -1))  # type: ignore[no-any-return]


def test_after_a_graph_break_no_wrapper_is_compiled_by_itself(fresh_dynamo: None) -> None:
    """torch.compile warned of torch's functions in them; in torch they are builtins, and not compiled."""
    from torch._dynamo.utils import counters

    model, x = nn.Sequential(Breaking(), nn.Linear(8, 8)), torch.randn(4, 8)

    def frames() -> int:
        counters.clear()
        torch._dynamo.reset()
        with torch.no_grad():  # else torch itself warns, of gradients of results
            torch.compile(model, backend="eager")(x)
        return int(counters["frames"]["total"])

    plain = frames()
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        expected = model(x)
        assert frames() == plain
        with torch.no_grad():
            assert torch.equal(torch.compile(model, backend="eager")(x), expected)
