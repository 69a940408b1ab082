"""Ops in number formats: what is rounded, forward and backward, and where formats may be named."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx import formats
from hmpx.formats import quantize
from tests.values import normal, same_or_nan

FORMATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "posit8_1", "mxfp8_e4m3")
WIDE = ("fp24", "posit16_1", "posit16_2")
BF16 = formats.get("bfloat16")


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    """Registers formats for one test."""
    names: list[str] = []

    def register(format: formats.Format, code: int | None = None) -> None:
        formats.register(format, code)
        names.append(format.name)

    yield register
    for name in names:
        formats.unregister(name)


OPS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear": (
        lambda a, w, b: F.linear(a, w, b),
        (normal(4, 8), normal(3, 8, seed=1), normal(3, seed=2)),
    ),
    "matmul": (lambda a, b: a @ b, (normal(2, 3, 4), normal(2, 4, 5, seed=1))),
    "conv2d": (lambda a, w: F.conv2d(a, w), (normal(2, 3, 6, 6), normal(4, 3, 3, 3, seed=1))),
    "softmax": (lambda t: torch.softmax(t, -1), (normal(3, 5),)),
    "gelu": (lambda t: F.gelu(t), (normal(3, 5),)),
    "add": (lambda a, b: a + b, (normal(3, 5), normal(3, 5, seed=1))),
    "cat": (lambda a, b: torch.cat([a, b]), (normal(3, 5), normal(3, 5, seed=1))),
    "sum": (lambda t: t.sum(-1), (normal(3, 33),)),
    "embedding": (lambda w: F.embedding(torch.tensor([1, 0]), w), (normal(3, 5),)),
}


#: Op -> the dimension of each factor that it sums over, along which blocks lie.
SUMMED = {"linear": (-1, -1), "matmul": (-1, -2), "conv2d": (1, 1)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("format", FORMATS)
def test_inputs_and_outputs_are_rounded_and_gradients_pass(format: str, name: str) -> None:
    """Bit for bit the composition by hand; gradients are straight-through."""
    function, inputs = OPS[name]
    leaves = [t.clone().requires_grad_() for t in inputs]
    kind = formats.get(format)
    axes = SUMMED.get(name, ()) if kind.block_axis is not None else ()
    low = [quantize(t, kind.along(axis)) for t, axis in zip(leaves, axes, strict=False)]
    low += [quantize(t, kind) for t in leaves[len(low) :]]
    expected = quantize(function(*low), format)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    policy = hmpx.Policy.from_ops(low=[name], low_precision_type=format)
    with hmpx.convert(policy=policy):
        actual = function(*leaves)
    assert actual.dtype is torch.float32
    same_or_nan(actual, expected)
    same_or_nan(torch.autograd.grad(actual.square().sum(), leaves), gradients)


def test_gradients_are_rounded_on_request() -> None:
    """The gradient that comes in, and each that goes out."""
    a, b = normal(4, 8, requires_grad=True), normal(8, 3, seed=1, requires_grad=True)
    low_a, low_b = quantize(a.detach(), "float8_e5m2"), quantize(b.detach(), "float8_e5m2")
    incoming = normal(4, 3, seed=2)
    rounded = quantize(incoming, "float8_e5m2")
    expected = (
        quantize(rounded @ low_b.T, "float8_e5m2"),
        quantize(low_a.T @ rounded, "float8_e5m2"),
    )
    with hmpx.convert(low_precision_type="float8_e5m2", round_gradients=True):
        result = a @ b
    same_or_nan(torch.autograd.grad(result, (a, b), incoming), expected)


def test_float32_as_a_format_changes_no_bit() -> None:
    """The identity: results and gradients are those of the program as it is."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    leaves = [*model.parameters()]
    expected = model(normal(5, 8))
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    with hmpx.convert(low_precision_type="float32", round_gradients=True):
        actual = model(normal(5, 8))
    same_or_nan(actual, expected)
    same_or_nan(torch.autograd.grad(actual.square().sum(), leaves), gradients)


@pytest.mark.parametrize("format", WIDE)
def test_formats_of_more_than_11_bits_are_rounded_once(format: str) -> None:
    """Products of fp32 rounded again would differ; computed in fp64 they don't."""
    a, b = quantize(normal(20_000) * 3, format), quantize(normal(20_000, seed=1), format)
    expected = quantize(a.double() * b.double(), format).float()
    assert not torch.equal(quantize(a * b, format), expected) or format == "posit16_2"
    with hmpx.convert(policy=hmpx.Policy.from_ops(low=["mul"], low_precision_type=format)):
        same_or_nan(a * b, expected)


class Network(nn.Module):
    """Convolutions, norms, attention and dropout-free perceptrons."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.convolution(images)))
        return self.head(self.encoder(hidden.flatten(2).transpose(1, 2)).mean(1))


def losses(steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        loss = F.cross_entropy(model(normal(8, 1, 5, 5, seed=step)), torch.arange(8) % 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_emulated_bfloat16_trains_as_the_native_one() -> None:
    """Where each op of the low list gives fp32: the same losses, bit for bit."""
    low = [name for name, d in hmpx.load_policy().decisions.items() if d.cast_policy is hmpx.ALLOW]
    fp32 = [name for name, d in hmpx.load_policy().decisions.items() if d.cast_policy is hmpx.DENY]
    lines = [f"{name} output=float32" for name in low]
    with hmpx.convert(policy=hmpx.Policy.from_ops(low=lines, fp32=fp32), legalize="always"):
        expected = losses()
    emulated = hmpx.Policy.from_ops(low=low, fp32=fp32, low_precision_type=BF16)
    with hmpx.convert(policy=emulated, round_gradients=True):
        actual = losses()
    assert actual == expected
    assert actual != losses()


def test_norm_weights_stay_as_they_are_and_buffers_are_not_rounded() -> None:
    """As with a low-precision dtype: weight and bias stay fp32 beside the input."""
    norm = nn.BatchNorm1d(4)
    nn.init.normal_(norm.weight)
    norm.running_mean.fill_(1 / 3)
    plain = copy.deepcopy(norm)
    expected = quantize(plain(quantize(normal(6, 4), "float8_e4m3fn")), "float8_e4m3fn")
    with hmpx.convert(lists="lean", low_precision_type="float8_e4m3fn"):
        same_or_nan(norm(normal(6, 4)), expected)
    same_or_nan(norm.running_mean, plain.running_mean)


def test_tensors_written_to_and_float64_are_left_alone() -> None:
    """In place, out= and fp64 inputs compute as they do without hmpx."""
    target, out = normal(3, 3), torch.empty(3, 3)
    with hmpx.convert(
        policy=hmpx.Policy.from_ops(low=["mul", "relu"], low_precision_type="posit8_0")
    ):
        target.mul_(normal(3, 3, seed=1))
        torch.mul(normal(3, 3), normal(3, 3, seed=1), out=out)
        double = normal(3).double() * normal(3).double()
        inplace = F.relu(normal(3, 3), inplace=True)
    same_or_nan(target, normal(3, 3) * normal(3, 3, seed=1))
    same_or_nan(out, normal(3, 3) * normal(3, 3, seed=1))
    same_or_nan(double, normal(3).double() * normal(3).double())
    same_or_nan(inplace, F.relu(normal(3, 3)))


@pytest.mark.parametrize("options", ["", " output=bfloat16", " accumulate=float64"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "posit16_1"])
def test_a_call_that_names_its_own_dtype_gets_that(name: str, options: str) -> None:
    """What comes out is not rounded to the format, and of no other dtype, whatever the op computes in."""
    calls: dict[str, Callable[..., Tensor]] = {
        "sum": lambda x, **dtype: x.sum(1, **dtype),
        "softmax": lambda x, **dtype: F.softmax(x, -1, **dtype),
        "linalg_vector_norm": lambda x, **dtype: torch.linalg.vector_norm(x, dim=1, **dtype),
    }
    x = normal(4, 50)
    dtypes = (torch.float32, torch.float64)
    expected = [call(quantize(x, name), dtype=d) for call in calls.values() for d in dtypes]
    policy = {"lists": "none", "low": [f"{op} {name}{options}" for op in calls]}
    with hmpx.convert(policy=policy):
        actual = [call(x, dtype=d) for call in calls.values() for d in dtypes]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_list_line_a_file_and_a_rule_may_name_formats(tmp_path: Path) -> None:
    """One op in one format, another in another, beside a dtype."""
    a = normal(4, 4)
    products = {f: quantize(quantize(a, f) @ quantize(a, f), f) for f in FORMATS}
    listed = hmpx.Policy.from_ops(low=["matmul float8_e5m2", "tanh posit8_1", "relu"])
    with hmpx.convert(policy=listed):
        same_or_nan(a @ a, products["float8_e5m2"])
        same_or_nan(torch.tanh(a), quantize(torch.tanh(quantize(a, "posit8_1")), "posit8_1"))
        assert F.relu(a).dtype is torch.bfloat16
    path = tmp_path / "p.yaml"
    path.write_text(
        "low_precision_type: posit8_1\nlists: none\nlow: [matmul]\n"
        "sections:\n- max_numel: 4\n  low: [matmul float4_e2m1fn]\n"
    )
    policy = hmpx.load_policy(path)
    (tmp_path / "again.yaml").write_text(policy.to_yaml())
    assert hmpx.load_policy(tmp_path / "again.yaml") == policy
    small, format = a[:2, :2], "float4_e2m1fn"
    with hmpx.convert(policy=policy):
        same_or_nan(a @ a, products["posit8_1"])
        same_or_nan(
            small @ small, quantize(quantize(small, format) @ quantize(small, format), format)
        )
    hmpx.register_rule("matmul", lambda call: hmpx.Decision(hmpx.ALLOW, formats.get("mxfp8_e4m3")))
    try:
        with hmpx.convert():
            same_or_nan(a @ a, products["mxfp8_e4m3"])
    finally:
        hmpx.unregister_rule("matmul")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("matmul posit16_3", "unknown"),
        ("matmul float8_e4m3fm", "did you mean 'float8_e4m3fn'?"),
    ],
)
def test_an_unknown_format_in_a_list_is_an_error(tmp_path: Path, line: str, message: str) -> None:
    """With the file's line; nothing is patched."""
    path = tmp_path / "low.txt"
    path.write_text(f"linear\n{line}\n")
    with pytest.raises(hmpx.OpListError) as error:
        hmpx.convert(path)
    assert str(error.value).startswith(f"{path}:2: low_precision_type must be torch.bfloat16 or ")
    assert message in str(error.value) or message == "unknown"
    assert not hmpx.is_converted()


def test_stochastic_rounding_follows_torchs_seed() -> None:
    """The same seed, the same results; another, others; between the neighbours."""

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        with hmpx.convert(low_precision_type="float8_e4m3fn", rounding="stochastic"):
            return F.linear(normal(4, 8), normal(3, 8, seed=1))

    same_or_nan(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    same_or_nan(quantize(run(1), "float8_e4m3fn"), run(1))


def test_a_function_of_ones_own_is_not_cast_itself(registered: Callable[..., None]) -> None:
    """It may use the ops that it rounds for."""
    registered(formats.Custom("halves", lambda t: torch.round(t * 2) / 2))
    with hmpx.convert(policy=hmpx.Policy.from_ops(low=["mul", "div"], low_precision_type="halves")):
        same_or_nan(normal(5) * 3, torch.round(torch.round(normal(5) * 2) / 2 * 3 * 2) / 2)


@pytest.mark.parametrize(
    ("format", "backend"),
    [
        ("float8_e4m3fn", "aot_eager"),
        ("posit16_1", "aot_eager"),
        ("mxfp8_e4m3", "aot_eager"),
        ("float8_e4m3fn", "inductor"),
        (BF16, "inductor"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_code_rounds_too(format: Any, backend: str) -> None:
    """One graph, and the rounding is still in it."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with hmpx.convert(low_precision_type=format):
        expected = model(normal(5, 8))
        gradients = torch.autograd.grad(expected.sum(), [*model.parameters()])
        compiled = torch.compile(model, fullgraph=True, backend=backend)(normal(5, 8))
        same_or_nan(compiled, expected)
        same_or_nan(torch.autograd.grad(compiled.sum(), [*model.parameters()]), gradients)
        same_or_nan(quantize(compiled, format), compiled)


def test_vmap_and_grad_and_checkpoints_round_the_same() -> None:
    """torch.func and recomputation."""
    w = normal(4, 4, seed=1)

    def loss(a: Tensor) -> Tensor:
        return (a @ w).square().sum()

    with hmpx.convert(low_precision_type="float8_e4m3fn"):
        rows = normal(3, 2, 4)
        same_or_nan(torch.vmap(lambda a: a @ w)(rows), torch.stack([row @ w for row in rows]))
        leaf = normal(2, 4, requires_grad=True)
        (expected,) = torch.autograd.grad(loss(leaf), leaf)
        same_or_nan(torch.func.grad(loss)(leaf.detach()), expected)
        again = torch.utils.checkpoint.checkpoint(loss, leaf, use_reentrant=False)
        same_or_nan(torch.autograd.grad(again, leaf)[0], expected)


def test_the_log_names_the_format(caplog: pytest.LogCaptureFixture) -> None:
    """Where a dtype would stand."""
    with (
        caplog.at_level(logging.INFO, "hmpx"),
        hmpx.convert(low_precision_type="posit16_1", isVerbose=True),
    ):
        F.linear(normal(2, 2), normal(2, 2))
    assert caplog.messages == ["casting  <built-in function linear>  to_posit16_1"]


# --- functions of one's own --------------------------------------------------------------------


@pytest.fixture
def lowered() -> Iterator[None]:
    """Forgets what was registered for posit16_1."""
    yield
    from hmpx.compute import LOWERINGS

    LOWERINGS.change({})


POSITS = hmpx.Policy.from_ops(low=["add", "mul"], low_precision_type="posit16_1")


def test_a_registered_function_computes_the_op(lowered: None) -> None:
    """It gets rounded values, what it gives is rounded, and gradients are those of torch's op."""
    seen = []

    def add(a: Tensor, b: Tensor) -> Tensor:
        seen.append((a, b))
        return a + b + 0.3

    a, b = normal(5, requires_grad=True), normal(5, seed=1, requires_grad=True)
    with hmpx.convert(policy=POSITS):
        formats.register_op(add, "add", "posit16_1")
        actual = a + b
        same_or_nan(
            a * b,
            quantize(
                (quantize(a, "posit16_1").double() * quantize(b, "posit16_1")), "posit16_1"
            ).float(),
        )
    low = [quantize(t.detach(), "posit16_1") for t in (a, b)]
    same_or_nan(seen, [tuple(low)])
    same_or_nan(actual.detach(), quantize(low[0] + low[1] + 0.3, "posit16_1"))
    same_or_nan(torch.autograd.grad(actual.sum(), (a, b)), (torch.ones(5), torch.ones(5)))


def test_a_function_of_codes_gets_and_gives_integers(lowered: None) -> None:
    """uint16 for 16-bit formats; here it negates, by two's complement."""
    seen = []

    def negated(a: Tensor, b: Tensor) -> Tensor:
        seen.append((a.dtype, b.dtype))
        return (-a.to(torch.int32)).to(torch.uint16)

    formats.register_op(formats.create_lower_func(negated), op="add", format="posit16_1")
    with hmpx.convert(policy=POSITS):
        same_or_nan(normal(5) + normal(5, seed=1), -quantize(normal(5), "posit16_1"))
    assert seen == [(torch.uint16, torch.uint16)]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: x + 1, (1.0, False)),
        (lambda x: 1 + x, (1.0, True)),
        (lambda x: x + 0.3, (0.3, False)),
        (lambda x: torch.add(x, 2), (2.0, False)),
        (lambda x: torch.add(x, other=2), (2.0, False)),
        (lambda x: x * 3, (3.0, False)),
    ],
)
def test_functions_of_codes_get_codes_of_numbers(
    lowered: None, call: Callable[[Tensor], Tensor], expected: tuple[float, bool]
) -> None:
    """`x + 1` passes the code of 1.0, not that of the integer; in a tensor of no dimension."""
    seen: list[tuple[Tensor, Tensor]] = []

    def first(a: Tensor, b: Tensor = None, *, other: Tensor = None) -> Tensor:  # type: ignore[assignment]
        seen.append((a, other if b is None else b))
        return seen[-1][0].expand(5).clone()

    for op in ("add", "mul"):
        formats.register_op(formats.create_lower_func(first), op, "posit16_1")
    with hmpx.convert(policy=POSITS):
        call(normal(5))
    number, is_first = expected
    code = formats.encode(torch.tensor(number), "posit16_1")
    found = seen[0][0] if is_first else seen[0][1]
    assert found.dtype is torch.uint16 and found.shape == ()
    assert found.item() == code.item()


class Library:
    """A function that no compiler can look into: it needs memory, and has a side effect."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        self.calls += 1
        return torch.from_numpy(np.asarray(a) + np.asarray(b) + np.float32(0.25))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_models_call_registered_functions(lowered: None) -> None:
    """One graph, in which the function is called each time it runs."""
    library = Library()
    formats.register_op(library, "add", "posit16_1")
    with hmpx.convert(policy=POSITS):
        expected = normal(5) + normal(5, seed=1)
        compiled = torch.compile(lambda a, b: a + b, fullgraph=True, backend="aot_eager")
        a = normal(5, requires_grad=True)
        result = compiled(a, normal(5, seed=1))
        calls = library.calls
        same_or_nan(result.detach(), expected)
        same_or_nan(torch.autograd.grad(result.sum(), a)[0], torch.ones(5))
        compiled(a, normal(5, seed=1))
        assert library.calls == calls + 1
        same_or_nan(
            torch.compile(lambda a: 1 + a, fullgraph=True, backend="aot_eager")(a.detach()),
            1 + a.detach(),
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((print, "ad", "posit16_1"), "unknown op 'ad'; did you mean 'add'?"),
        ((print, "add", "posit16_9"), "no format 'posit16_9' is known; did you mean 'posit16_2'?"),
        ((3, "add", "posit16_1"), "register_op takes a function, not 3"),
        ((print, "add", "posit16_1", "llvm"), "device_type: torch has no device type 'llvm' "),
    ],
)
def test_wrong_registrations_are_errors(arguments: tuple[Any, ...], message: str) -> None:
    """What is wrong, and the nearest name."""
    with pytest.raises(hmpx.OptionError) as error:
        formats.register_op(*arguments)
    assert str(error.value).startswith(message.partition(";")[0])


# --- freezing to codes -------------------------------------------------------------------------


class Tied(nn.Module):
    """Products with a weight used twice, one with a norm's, and one that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(8)
        self.viewed = nn.Parameter(normal(4, 8))

    def forward(self, value: Tensor) -> Tensor:
        return self.norm(self.second(F.relu(self.first(value)))) @ self.viewed.t()


@pytest.mark.parametrize(
    ("format", "dtype"), [("float8_e4m3fn", torch.uint8), ("posit16_1", torch.uint16)]
)
def test_weights_are_frozen_to_codes(format: str, dtype: torch.dtype) -> None:
    """One byte or two each, the same results; undo brings the fp32 weights back."""
    torch.manual_seed(0)
    model = Tied().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with hmpx.convert(low_precision_type=format):
        expected = model(normal(5, 8))
        frozen = hmpx.freeze(model, normal(5, 8), store="codes")
        coded = {w.name for w in frozen.weights if w.is_low}
        assert coded == {"first.weight", "first.bias", "second.weight", "second.bias"}
        held = dict(model.named_parameters(remove_duplicate=False))
        assert {held[name].dtype for name in coded} == {dtype}
        assert {model.state_dict()[name].dtype for name in coded} == {torch.float32}  # the values
        assert model.first.weight is model.second.weight
        by_name = {weight.name: weight for weight in frozen.weights}
        assert by_name["first.weight"].stored_bytes == 64 * dtype.itemsize
        same_or_nan(model(normal(5, 8)), expected)
        same_or_nan(copy.deepcopy(model)(normal(5, 8)), expected)
        same_or_nan(torch.export.export(model, (normal(5, 8),)).module()(normal(5, 8)), expected)
        with pytest.raises(hmpx.FreezeError, match="can't be trained"):
            model.train()(normal(5, 8))
        frozen.undo()
    same_or_nan(dict(model.state_dict()), before)
    assert model.first.weight.requires_grad


def test_compiled_models_read_codes() -> None:
    """One graph, in which the weights are decoded."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with hmpx.convert(low_precision_type="float8_e5m2"), torch.no_grad():
        expected = model(normal(5, 8))
        with hmpx.freeze(model, normal(5, 8), store="codes"):
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            same_or_nan(compiled(normal(5, 8)), expected)


#: Format -> bytes of a weight of 64 x 48.
SHARED = {
    "mxfp8_e4m3": 3072 + 128,
    "mxfp4_e2m1": 1536 + 128,
    "mxint8": 3072 + 128,
    "nvfp4": 1536 + 192 + 4,
    "int8": 3072 + 4,
    "int8_row": 3072 + 4 * 64,
    "int4_block128": 1536 + 4 * 64,
    "float8_e4m3fn_tensor": 3072 + 4,
    "float8_e4m3fn_row": 3072 + 4 * 64,
    "float8_e4m3fn_block128x128": 3072 + 4,
    "nf4": 1536 + 4 * 64,
}


class Shared(nn.Module):
    """A weight that two layers share, one whose rows are not reduced, and one that is read in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 64), nn.Linear(48, 64, bias=False)
        self.second.weight = self.first.weight
        self.across = nn.Parameter(normal(64, 48))

    def forward(self, value: Tensor) -> Tensor:
        assert self.first.weight.shape == (64, 48) and self.first.weight.dtype is torch.float32
        result: Tensor = self.second(torch.relu(self.first(value)) @ self.across)
        return result


@pytest.mark.sampled(4)
@pytest.mark.parametrize("line", ["{} output=bfloat16", "bfloat16 weights={}"])
@pytest.mark.parametrize("format", SHARED)
def test_weights_with_shared_scales_are_frozen_to_codes(format: str, line: str) -> None:
    """The same bits, also of copies and of what state dicts hold; `undo` gives the weights back."""
    torch.manual_seed(0)
    model, x = Shared().eval(), normal(5, 48)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    low = [f"linear {line.format(format)}", f"matmul {line.format(format)}"]
    with torch.no_grad(), hmpx.convert(policy={"lists": "none", "low": low}):
        expected = model(x)
        frozen = hmpx.freeze(model, x, store="codes")
        sizes = {weight.name: weight.stored_bytes for weight in frozen.weights if weight.is_low}
        assert sizes.pop("across") < 0.6 * 4 * 64 * 48
        largest = sizes["first.weight"] - SHARED[format]  # values that give back the tensor's scale
        assert largest in ((8, 16, 24, 32) if format == "nvfp4" else (0,))
        assert sizes["second.weight"] == 0
        held = dict(model.named_parameters(remove_duplicate=False))
        assert held["first.weight"].nbytes == sizes["first.weight"]
        assert held["first.weight"] is held["second.weight"]
        with io.BytesIO() as file:
            torch.save(model, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
        fresh = Shared().eval()
        fresh.load_state_dict(model.state_dict())
        for each in (model, copy.deepcopy(model), loaded, fresh):
            assert torch.equal(each(x), expected)
        with pytest.raises(hmpx.FreezeError, match="can't load weights"):
            model.load_state_dict(before)
        frozen.undo()
    same_or_nan(dict(model.state_dict()), before)
    assert type(model.first) is nn.Linear and model.first.weight.requires_grad


@pytest.mark.parametrize("format", ["nvfp4", "float8_e4m3fn_row"])
def test_graphs_decode_weights_with_shared_scales(format: str) -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), normal(5, 8)
    policy = {"lists": "none", "low": [f"linear {format} output=bfloat16"]}
    with hmpx.convert(policy=policy), torch.no_grad():
        expected = model(x)
        with hmpx.freeze(model, x, store="codes") as frozen:
            assert frozen.weights[0].is_low
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x), expected)
            assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "float32"])
def test_nothing_is_stored_as_codes_without_being_asked(format: str) -> None:
    options: dict[str, Any] = {"store": "codes"} if format == "float32" else {}  # that is exact
    model = nn.Linear(8, 8).eval()
    with hmpx.convert(low_precision_type=format):
        frozen = hmpx.freeze(model, normal(5, 8), **options)
        assert not any(weight.is_low for weight in frozen.weights)
        assert model.weight.dtype is torch.float32


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([normal(2, 8), normal(3, 8)], layout=layout)


#: Calls of which torch takes no dense inputs only.
APART: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "jagged": ("nested", lambda: F.linear(nested(torch.jagged), normal(4, 8, requires_grad=True))),
    "jagged matmul": ("nested", lambda: nested(torch.jagged) @ normal(8, 4)),
    "jagged norm": ("nested", lambda: F.layer_norm(nested(torch.jagged), (8,), normal(8))),
    "jagged relu": ("nested", lambda: torch.relu(nested(torch.jagged))),
    "nested": ("nested", lambda: F.linear(nested(torch.strided), normal(4, 8, requires_grad=True))),
    "two nested": ("nested", lambda: torch.bmm(nested(torch.strided), nested(torch.strided).mT)),
    "coo": ("sparse", lambda: normal(4, 8).to_sparse().requires_grad_() @ normal(8, 3)),
    "csr": ("sparse", lambda: normal(4, 8).to_sparse_csr() @ normal(8, 3, requires_grad=True)),
    "bsr": ("sparse", lambda: normal(4, 8).to_sparse_bsr((2, 2)) @ normal(8, 3)),
    "sparse addmm": (
        "sparse",
        lambda: torch.addmm(normal(4, 3), normal(4, 8).to_sparse(), normal(8, 3)),
    ),
    "sparse bmm": ("sparse", lambda: torch.bmm(normal(2, 4, 8).to_sparse(), normal(2, 8, 3))),
    "sparse relu": ("sparse", lambda: torch.relu(normal(4, 8).to_sparse())),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("format", ["float8_e4m3fn", "nvfp4", "int4_row", "posit16_1", "nf4"])
@pytest.mark.parametrize("name", APART)
def test_calls_with_tensors_that_are_not_dense_compute_in_fp32(name: str, format: str) -> None:
    """Whole calls, forward and backward, and the log says why."""
    kind, call = APART[name]
    calls: list[hmpx.OpCall] = []
    low = ["linear", "matmul", "addmm", "bmm", "layer_norm", "relu"]
    policy = hmpx.Policy.from_ops(low=low, low_precision_type=format)
    expected = call()
    with hmpx.convert(policy=policy, round_gradients=True):
        found = call()
        with hmpx.attach(calls.append):
            call()
        assert found.layout is expected.layout and found.is_nested is expected.is_nested
        if found.requires_grad:
            torch.stack([part.sum() for part in found.unbind()]).sum().backward()
    assert [(each.reason, each.dtype) for each in calls] == [(f"its {kind} input", torch.float32)]
    parts = zip(found.unbind(), expected.unbind(), strict=True)
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in parts)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_traces_are_refused() -> None:
    """torch.jit.trace knows no views of another dtype."""
    with hmpx.convert(low_precision_type="float8_e4m3fn"), pytest.raises(hmpx.OptionError) as error:
        torch.jit.trace(nn.Linear(8, 4), normal(5, 8))
    assert str(error.value) == (
        "float8_e4m3fn: torch.jit.trace can't hold a number format; use torch.export"
    )


@pytest.mark.parametrize("format", ["posit16_1", "float8_e4m3fn"])
def test_running_statistics_are_those_of_the_computation(format: str) -> None:
    """Also where that is in fp64, which the buffers are not."""
    norm, plain = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    with hmpx.convert(lists="lean", low_precision_type=format):
        norm(normal(16, 4) + 5)
    plain.double()(quantize(normal(16, 4) + 5, format).double())
    torch.testing.assert_close(norm.running_mean.double(), plain.running_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.running_var.double(), plain.running_var, rtol=1e-6, atol=0)
    assert norm.running_mean.dtype is torch.float32


@pytest.mark.parametrize(
    "policy",
    [
        {"sections": [{"min_numel": 100, "low": ["linear float8_e5m2"]}]},
        {"low": ["linear", "matmul float8_e5m2"]},
    ],
)
def test_nothing_is_stored_as_codes_where_calls_differ_in_their_format(
    policy: dict[str, Any],
) -> None:
    """A code of one format would be read as one of another."""
    model = nn.Linear(8, 8).eval()
    base = {"lists": "none", "low_precision_type": "float8_e4m3fn", "low": ["linear"]}
    with hmpx.convert(policy={**base, **policy}):
        expected = model(normal(50, 8))
        frozen = hmpx.freeze(model, normal(2, 8), store="codes")
        assert not any(weight.is_low for weight in frozen.weights)
        same_or_nan(model(normal(50, 8)), expected)
