"""Modules that slip past patches: fused and Python paths, other layouts, other dispatch."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils import rnn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

import hmpx
from hmpx import Policy
from tests.values import normal, same

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def low(*names: str) -> hmpx.Session:
    return hmpx.convert(policy=Policy.from_ops(low=names))


def to(dtype: torch.dtype, value: Any) -> Any:
    """Returns ``value``, a tensor, a tuple of them or None, in ``dtype``."""
    if isinstance(value, tuple):
        return tuple(to(dtype, item) for item in value)
    return None if value is None else value.to(dtype)


def made(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return factory()


# --- recurrent ----------------------------------------------------------------------------------

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 3),
    "LSTM batch_first": lambda: nn.LSTM(4, 3, batch_first=True),
    "LSTM bidirectional": lambda: nn.LSTM(4, 3, bidirectional=True),
    "LSTM proj_size": lambda: nn.LSTM(4, 3, num_layers=2, proj_size=2),
    "LSTM no bias": lambda: nn.LSTM(4, 3, bias=False),
    "GRU": lambda: nn.GRU(4, 3),
    "GRU batch_first, bidirectional": lambda: nn.GRU(4, 3, batch_first=True, bidirectional=True),
    "RNN tanh": lambda: nn.RNN(4, 3, num_layers=2),
    "RNN relu": lambda: nn.RNN(4, 3, nonlinearity="relu"),
}
CELLS: dict[str, Callable[[], nn.Module]] = {
    "LSTMCell": lambda: nn.LSTMCell(4, 3),
    "GRUCell": lambda: nn.GRUCell(4, 3),
    "RNNCell tanh": lambda: nn.RNNCell(4, 3),
    "RNNCell relu": lambda: nn.RNNCell(4, 3, nonlinearity="relu"),
}
RNN_OPS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CELL_OPS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


def first(output: Any) -> Tensor:
    """Returns the first tensor of a recurrent module's output, packed or not."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output


@pytest.mark.sampled(4)
@pytest.mark.native
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("hx_dtype", [None, FP32, BF16, FP16])
@pytest.mark.parametrize("name", [*RECURRENT, *CELLS])
def test_recurrent_modules_run_in_low_precision(name: str, hx_dtype: torch.dtype | None) -> None:
    """Listed, they give what their bfloat16 copy gives, in output, state and weight gradients."""
    module, data = (
        made((RECURRENT | CELLS)[name]),
        normal(*((5, 2, 4) if name in RECURRENT else (2, 4))),
    )
    reference = copy.deepcopy(module).bfloat16()
    state = module(data)[1] if name in RECURRENT else module(data)
    hx = None if hx_dtype is None else to(hx_dtype, to(FP32, state))
    hx = hx if hx is None or isinstance(hx, tuple) else hx.detach()
    hx = tuple(h.detach() for h in hx) if isinstance(hx, tuple) else hx
    expected = reference(data.bfloat16(), to(BF16, hx))
    with low(*RNN_OPS, *CELL_OPS):
        actual = module(data, hx)
        first(actual).sum().backward()
    first(expected).sum().backward()
    same(actual, expected)
    for a, b in zip(module.parameters(), reference.parameters(), strict=True):
        same(a.grad, b.grad.float())


@pytest.mark.native
@pytest.mark.parametrize("name", RECURRENT)
def test_packed_sequences_run_in_low_precision(name: str) -> None:
    """A packed sequence goes the same way, its lengths and order untouched."""
    module = made(RECURRENT[name])
    batch_first = bool(module.batch_first)
    data = normal(2, 5, 4) if batch_first else normal(5, 2, 4)
    packed = rnn.pack_padded_sequence(data, [3, 5], batch_first, enforce_sorted=False)
    reference = copy.deepcopy(module).bfloat16()
    expected, expected_state = reference(packed.to(BF16))
    with low(*RNN_OPS):
        actual, state = module(packed)
        padded, lengths = rnn.pad_packed_sequence(actual, batch_first)
    same(state, expected_state)
    same(padded, rnn.pad_packed_sequence(expected, batch_first)[0])
    assert lengths.tolist() == [3, 5]


@pytest.mark.parametrize("lists", ["hmp", "autocast-cpu"])
@pytest.mark.parametrize("name", [*RECURRENT, *CELLS])
def test_recurrent_modules_take_the_output_of_a_low_precision_layer(name: str, lists: str) -> None:
    """A bf16 input beside fp32 weights is nobody's mistake while torch is converted."""
    module, layer = made((RECURRENT | CELLS)[name]), made(lambda: nn.Linear(4, 4))
    data = normal(*((5, 2, 4) if name in RECURRENT else (2, 4)))
    with hmpx.convert(lists=lists):
        hidden = layer(data)
        assert hidden.dtype is BF16
        output = first(module(hidden))
        assert output.isfinite().all()
        output.sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {FP32}


# --- attention and its fast paths ---------------------------------------------------------------

ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "kdim, vdim": {"kdim": 6, "vdim": 5},
    "bias_kv": {"add_bias_kv": True, "add_zero_attn": True},
    "no bias": {"bias": False},
}
MASKS: dict[str, Tensor | None] = {
    "none": None,
    "bool": torch.ones(3, 3).triu(1).bool(),
    "fp32": torch.full((3, 3), float("-inf")).triu(1),
    "bf16": torch.full((3, 3), -2.0).triu(1).bfloat16(),
    "fp16": torch.full((3, 3), -2.0).triu(1).half(),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ATTENTION)
def test_multihead_attention_takes_any_mix(kind: str, need_weights: bool) -> None:
    """Trained with bool and float masks of every dtype beside fp32 and bf16 inputs."""
    options = ATTENTION[kind]
    module = made(lambda: nn.MultiheadAttention(8, 2, batch_first=True, **options))
    k, v = normal(2, 3, options.get("kdim", 8)), normal(2, 3, options.get("vdim", 8))
    with hmpx.convert():
        for mask, dtype in itertools.product(MASKS.values(), (FP32, BF16)):
            q, mixed = normal(2, 3, 8, dtype=dtype), k.to(dtype)
            output, weights = module(q, mixed, v, attn_mask=mask, need_weights=need_weights)
            output.sum().backward()
            assert output.dtype is BF16
            assert output.isfinite().all()
            assert (weights is not None) is need_weights
    assert {p.grad.dtype for p in module.parameters()} == {FP32}


@pytest.mark.native
@pytest.mark.parametrize("lists", ["hmp", "o2", "autocast-cuda", "autocast-cpu"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attentions_fast_path_does_not_bypass_the_lists(need_weights: bool, lists: str) -> None:
    """In eval without gradients torch runs one fused kernel, which no list reaches: same result."""
    module = made(lambda: nn.MultiheadAttention(8, 2, batch_first=True)).eval()
    data = normal(2, 3, 8)
    with hmpx.convert(lists=lists):
        expected = module(data, data, data, need_weights=need_weights)
        for no_gradients in (torch.no_grad, torch.inference_mode):
            with no_gradients():
                actual = module(data, data, data, need_weights=need_weights)
            same(actual[0], expected[0].detach())
            if need_weights:
                same(actual[1], expected[1].detach())


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.native
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("lists", ["hmp", "o2", "autocast-cuda", "autocast-cpu"])
@pytest.mark.parametrize("mask", ["none", "padding", "causal"])
def test_the_encoders_fast_path_does_not_bypass_the_lists(mask: str, lists: str) -> None:
    """Nor does its detour over nested tensors: eval gives what it gives while training."""
    module, data = made(encoder).eval(), normal(2, 3, 8)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    arguments: dict[str, dict[str, Any]] = {
        "none": {},
        "padding": {"src_key_padding_mask": padding},
        "causal": {"mask": nn.Transformer.generate_square_subsequent_mask(3), "is_causal": True},
    }
    with hmpx.convert(lists=lists):
        expected = module(data, **arguments[mask])
        with torch.no_grad():
            actual = module(data, **arguments[mask])
    same(actual, expected.detach())
    if lists == "hmp":
        assert actual.dtype is BF16


SDPA: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "no mask": lambda _: {},
    "is_causal": lambda _: {"is_causal": True},
    "bool mask": lambda _: {"attn_mask": torch.ones(5, 5).tril().bool()},
    "fp32 mask": lambda _: {"attn_mask": normal(5, 5)},
    "bf16 mask": lambda _: {"attn_mask": normal(5, 5).bfloat16()},
    "fp16 mask": lambda _: {"attn_mask": normal(5, 5).half()},
    "mask over heads": lambda _: {"attn_mask": normal(2, 1, 5, 5), "scale": 0.5},
    "enable_gqa": lambda _: {"enable_gqa": True},
}


@pytest.mark.sampled(6)
@pytest.mark.native
@pytest.mark.parametrize("query_dtype", [FP32, BF16])
@pytest.mark.parametrize("positional", [True, False])
@pytest.mark.parametrize("policy", ["low", "fp32", "first"])
@pytest.mark.parametrize("form", SDPA)
def test_scaled_dot_product_attention_casts_its_mask_too(
    form: str, policy: str, positional: bool, query_dtype: torch.dtype
) -> None:
    """A float mask of another dtype follows q, k and v; fp32 and bool masks stay (pytorch #187265)."""
    options = SDPA[form](normal(4, 4))
    q, k = normal(2, 4, 5, 8, dtype=query_dtype), normal(2, 2 if form == "enable_gqa" else 4, 5, 8)
    v = k.half()
    want = {"low": BF16, "fp32": FP32, "first": query_dtype}[policy]
    mask = options.get("attn_mask")
    by_hand = {**options, "attn_mask": mask} if mask is not None else options
    if mask is not None and mask.is_floating_point() and mask.dtype is not FP32:
        by_hand = {**options, "attn_mask": mask.to(want)}
    expected = F.scaled_dot_product_attention(q.to(want), k.to(want), v.to(want), **by_hand)
    arguments = (mask,) if positional and mask is not None else ()
    keywords = {n: o for n, o in options.items() if n != "attn_mask" or not arguments}
    with hmpx.convert(policy=Policy.from_ops(**{policy: ["scaled_dot_product_attention"]})):
        actual = F.scaled_dot_product_attention(q, k, v, *arguments, **keywords)
    same(actual, expected)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("lists", ["hmp", "o2", "autocast-cuda"])
def test_a_causal_bias_is_no_tensor_to_cast(lists: str, dtype: torch.dtype) -> None:
    """Mask classes of torch itself hold no values: attention takes them in any policy."""
    q, k, bias = normal(1, 2, 4, 8, dtype=dtype), normal(1, 2, 4, 8), causal_lower_right(4, 4)
    with hmpx.convert(lists=lists):
        mask = torch.ones(4, 4).tril().bool()
        expected = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
        actual = F.scaled_dot_product_attention(q, k, k, attn_mask=bias)
        assert actual.dtype is expected.dtype
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k, bias), expected)


# --- parametrizations, lazy modules, tied weights ------------------------------------------------

PARAMETRIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    **{
        f"orthogonal {name}": lambda module, name=name: nn.utils.parametrizations.orthogonal(
            module, orthogonal_map=name
        )
        for name in ("matrix_exp", "cayley", "householder")
    },
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("lists", "converted_first"),  # under torch.autocast's lists orthogonal() raises, as with it
    [("hmp", True), ("hmp", False), ("o2", True), ("autocast-cuda", False)],
)
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_layers_train(name: str, converted_first: bool, lists: str) -> None:
    """Made before or under convert: output as listed, parameters, buffers and gradients in fp32."""
    make: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: PARAMETRIZED[name](nn.Linear(4, 4)),
        "conv2d": lambda: PARAMETRIZED[name](nn.Conv2d(3, 4, 2)),
    }
    data = {"linear": normal(2, 4), "conv2d": normal(2, 3, 3, 3)}
    for layer, factory in make.items():
        before = None if converted_first else made(factory)
        with hmpx.convert(lists=lists):
            module = before or made(factory)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(2):
                output = module(data[layer])
                assert output.dtype is BF16
                optimizer.zero_grad()
                output.float().square().mean().backward()
                optimizer.step()
            assert module(data[layer]).isfinite().all()
        held = [*module.parameters(), *module.buffers()]
        assert {t.dtype for t in held} == {FP32}
        assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {FP32}


def test_lazy_modules_materialize_in_fp32() -> None:
    """Their parameters take no dtype from the low-precision input that shapes them."""
    model = nn.Sequential(
        nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)
    )
    with hmpx.convert():
        output = model(normal(2, 3, 4, 4))
        output.sum().backward()
    assert output.dtype is BF16
    assert {p.dtype for p in model.parameters()} == {FP32}
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {FP32}


def test_tied_weights_sum_their_gradients() -> None:
    """One parameter, used fp32 by an embedding and bf16 by a linear layer: one fp32 gradient."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    tokens = torch.tensor([0, 1, 2, 5])
    hidden = F.embedding(tokens, embedding.weight)
    logits = F.linear(hidden.bfloat16(), embedding.weight.bfloat16())
    F.cross_entropy(logits.float(), tokens).backward()
    expected = embedding.weight.grad
    embedding.weight.grad = None
    with hmpx.convert():
        loss = F.cross_entropy(head(embedding(tokens)), tokens)
        loss.backward()
    assert loss.dtype is FP32
    assert head.weight is embedding.weight
    same(embedding.weight.grad, expected)


@pytest.mark.parametrize("sample_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("weight_dtype", [FP32, BF16])
@pytest.mark.parametrize("policy", ["low", "fp32", "first"])
def test_embedding_bags_per_sample_weights_follow_the_table(
    policy: str, weight_dtype: torch.dtype, sample_dtype: torch.dtype
) -> None:
    """Function and module, by keyword, with the table and its weights of different dtypes."""
    table, weights = normal(4, 3, dtype=weight_dtype), normal(2, 2, dtype=sample_dtype)
    bags = torch.tensor([[0, 1], [2, 3]])
    want = {"low": BF16, "fp32": FP32, "first": weight_dtype}[policy]
    expected = F.embedding_bag(
        bags, table.to(want), mode="sum", per_sample_weights=weights.to(want)
    )
    module = nn.EmbeddingBag.from_pretrained(table, mode="sum")
    with hmpx.convert(policy=Policy.from_ops(**{policy: ["embedding_bag"]})):
        same(F.embedding_bag(bags, table, mode="sum", per_sample_weights=weights), expected)
        same(module(bags, per_sample_weights=weights), expected)


# --- other layouts and types --------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coordinates": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda t: t.to_sparse_bsr((2, 2)),
}
SPARSE_CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "s @ d": lambda s, d: s @ d,
    "d @ s": lambda s, d: d @ s,
    "s * 2": lambda s, d: s * 2,
    "linear": lambda s, d: F.linear(d, s),
    "relu": lambda s, d: torch.relu(s),
    "mv": lambda s, d: s.mv(d[0]),
    "addmm": lambda s, d: torch.addmm(d, s, d),
    "sparse.mm": lambda s, d: torch.sparse.mm(s, d),
    "s + s": lambda s, d: s + s,
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("call", SPARSE_CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_tensors_are_left_alone(layout: str, call: str) -> None:
    """A call with a sparse operand does what torch does with it, an error included."""
    run, sparse = SPARSE_CALLS[call], LAYOUTS[layout](normal(4, 4))
    try:
        expected: Any = run(sparse, normal(4, 4))
    except RuntimeError as error:
        expected = error
    with hmpx.convert():
        if isinstance(expected, Exception):
            with pytest.raises(type(expected)):
                run(sparse, normal(4, 4))
            return
        actual = run(sparse, normal(4, 4))
    same(actual.to_dense(), expected.to_dense())
    assert actual.layout is expected.layout


@pytest.mark.filterwarnings("ignore:.*quantize.*deprecated:UserWarning")
def test_quantized_tensors_are_left_alone() -> None:
    """Listed ops take and give quantized tensors as ever; dequantized ones are plain again."""
    quantized = torch.quantize_per_tensor(normal(3, 4), 0.1, 0, torch.quint8)
    calls: list[Callable[[], Tensor]] = [
        lambda: torch.relu(quantized),
        lambda: F.leaky_relu(quantized, 0.5),
        lambda: torch.cat([quantized, quantized]),
        lambda: F.max_pool1d(quantized[None], 2),
        lambda: quantized.t(),
        lambda: quantized.dequantize(),
    ]
    expected = [call() for call in calls]
    with hmpx.convert():
        actual = [call() for call in calls]
    assert [t.dtype for t in actual] == [t.dtype for t in expected]
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


NESTED_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda n: F.linear(n, normal(5, 4), normal(5)),
    "relu": lambda n: torch.relu(n),
    "mul": lambda n: n * 0.3,
    "layer_norm": lambda n: F.layer_norm(n, (4,), normal(4), normal(4)),
    "softmax": lambda n: torch.softmax(n, -1),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("call", NESTED_CALLS)
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_cast(layout: torch.layout, call: str) -> None:
    """Each part gives what a plain tensor of its values gives, and gradients come back."""
    parts = [normal(2, 4), normal(3, 4, seed=1)]
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    with low("linear", "matmul", "relu", "mul", "layer_norm", "softmax"):
        expected = [NESTED_CALLS[call](part) for part in parts]
        actual = NESTED_CALLS[call](nested)
        padded = torch.nested.to_padded_tensor(actual, 0.0)
        padded.float().sum().backward()
    assert actual.dtype is BF16
    for a, b in zip(actual.unbind(), expected, strict=True):
        torch.testing.assert_close(a, b)  # one product for all parts: other order of summation
    assert nested.grad is not None
    assert nested.grad.dtype is FP32


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("lists", ["hmp", "autocast-cuda"])
def test_jagged_attention_runs(lists: str) -> None:
    """Attention on jagged tensors is recognized by the function's identity."""
    parts = [normal(2, 8), normal(3, 8)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    nested = nested.unflatten(-1, [2, 4]).transpose(1, 2)
    with hmpx.convert(lists=lists):
        actual = F.scaled_dot_product_attention(nested, nested, nested)
        one = parts[0].unflatten(-1, [2, 4]).transpose(0, 1)[None]
        expected = F.scaled_dot_product_attention(one, one, one)
    assert actual.dtype is expected.dtype
    torch.testing.assert_close(actual.unbind()[0], expected[0])


# --- where and assignment -----------------------------------------------------------------------

ANY_OF = [FP32, BF16, FP16]


@pytest.mark.parametrize("b", [*ANY_OF, FP64])
@pytest.mark.parametrize("a", ANY_OF)
def test_where_gives_the_result_type(a: torch.dtype, b: torch.dtype) -> None:
    """Function, method and numbers: what `torch.result_type` says, as unconverted."""
    mask, left, right = normal(4) > 0, normal(4, dtype=a), normal(4, dtype=b)
    want = torch.promote_types(a, b)
    with hmpx.convert():
        same(torch.where(mask, left, right), torch.where(mask, left.to(want), right.to(want)))
        assert left.where(mask, right).dtype is want
        assert torch.where(mask, 1.0, right).dtype is b
        assert torch.where(mask, left, 0).dtype is a
        assert torch.where(mask, left, right[0]).dtype is a


ASSIGNMENTS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "x[mask] = y": lambda t, y: t.__setitem__(t[:, 0] < 100, y),
    "x[indices] = y": lambda t, y: t.__setitem__(torch.tensor([2, 0, 1, 3]), y),
    "x[slice] = y": lambda t, y: t.__setitem__(slice(0, 2), y[:2]),
    "x[i, mask] = y": lambda t, y: t.__setitem__((0, t[0] < 100), y[0]),
    "x[mask] = 0-dim y": lambda t, y: t.__setitem__(t < 100, y[0, 0]),
    "x[mask] = 0.5": lambda t, y: t.__setitem__(t < 100, 0.5),
    "masked_scatter_": lambda t, y: t.masked_scatter_(t < 100, y),
    "masked_fill_": lambda t, y: t.masked_fill_(t < 100, y[0, 0]),
    "index_add_": lambda t, y: t.index_add_(0, torch.tensor([0, 1, 2, 3]), y),
    "index_copy_": lambda t, y: t.index_copy_(0, torch.tensor([0, 1, 2, 3]), y),
    "scatter_": lambda t, y: t.scatter_(0, torch.zeros(1, 4, dtype=torch.int64), y),
    "copy_": lambda t, y: t.copy_(y),
}


@pytest.mark.parametrize("form", ASSIGNMENTS)
def test_assignment_takes_mixed_types_under_the_default_lists(form: str) -> None:
    """The target keeps its dtype and storage, and holds the values rounded to that dtype."""
    with hmpx.convert():
        for target, source in itertools.product(ANY_OF, ANY_OF):
            actual, expected, y = (
                normal(4, 4, dtype=target),
                normal(4, 4, dtype=target),
                normal(4, 4, seed=1, dtype=source),
            )
            pointer = actual.data_ptr()
            ASSIGNMENTS[form](actual, y)
            with hmpx.disable_casts():
                ASSIGNMENTS[form](expected, y.to(target))
                same(actual, expected)
            assert actual.data_ptr() == pointer


# --- autograd -----------------------------------------------------------------------------------


def linear_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    a, w = ctx.saved_tensors
    return gradient @ w.t(), a.t() @ gradient


class Classic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(a, w)
        return a @ w

    backward = staticmethod(linear_backward)


class WithSetupContext(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, w: Tensor) -> Tensor:
        return a @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = staticmethod(linear_backward)


class WithCustomForward(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(a, w)
        return a @ w

    backward = staticmethod(custom_bwd(linear_backward, device_type="cpu"))


@pytest.mark.parametrize("region", [False, True])
@pytest.mark.parametrize("function", [Classic, WithSetupContext, WithCustomForward])
def test_custom_functions_are_cast_in_forward_and_backward(
    function: type[torch.autograd.Function], region: bool
) -> None:
    """Their products follow the lists, their gradients the inputs (pytorch #87979, #132388)."""
    a, w = normal(4, 4).requires_grad_(), normal(4, 4, seed=1).requires_grad_()
    expected = a.detach().bfloat16() @ w.detach().bfloat16()
    one = torch.ones_like(expected)
    autocast = torch.autocast("cpu", FP16) if region else contextlib.nullcontext()
    with low("matmul"), autocast:
        actual = function.apply(a, w)
        actual.sum().backward()
    same(actual.detach(), expected)
    assert a.grad is not None
    same(a.grad, (one @ w.detach().bfloat16().t()).float())
    same(w.grad, (a.detach().bfloat16().t() @ one).float())


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 2)
    )


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_a_pass_without_gradients_does_not_cost_the_next_one_its_own(
    without_gradients: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:
    """No cast outlives its call (pytorch #65766, #112583, #165068)."""
    module, data = made(small_network).eval(), normal(2, 3, 4, 4)
    with hmpx.convert():
        with without_gradients():
            first_pass = module(data)
        second_pass = module(data)
        second_pass.sum().backward()
        with without_gradients():
            same(module(data), first_pass)
    assert not first_pass.requires_grad
    same(second_pass.detach(), first_pass)
    assert all(p.grad is not None and p.grad.dtype is FP32 for p in module.parameters())


def test_grad_scaler_with_fp16_on_the_cpu() -> None:
    """Scaled fp16 training: a step, unscaling, clipping, and an overflow that is skipped."""
    module = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    start = copy.deepcopy(module.state_dict())

    def step(data: Tensor, weight: float) -> list[Tensor]:
        optimizer.zero_grad()
        output = module(data)
        assert output.dtype is FP16
        scaler.scale((output * weight).float().sum()).backward()
        scaler.unscale_(optimizer)
        gradients = [p.grad.clone() for p in module.parameters()]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return gradients

    with hmpx.convert(low_precision_type="fp16"):
        gradients = step(normal(5, 4), 0.01)
        assert all(g.dtype is FP32 and g.isfinite().all() for g in gradients)
        assert scaler.get_scale() == 2.0**10
        after = copy.deepcopy(module.state_dict())
        assert not torch.equal(after["0.weight"], start["0.weight"])
        gradients = step(1000 * normal(5, 4), 1e4)
        assert not all(g.isfinite().all() for g in gradients)
        assert scaler.get_scale() == 2.0**9
    same(module.state_dict(), after)
    assert {p.dtype for p in module.parameters()} == {FP32}


# --- torch.autocast regions ---------------------------------------------------------------------

REGION_CALLS: dict[str, tuple[dict[str, list[str]], Callable[[], Tensor]]] = {
    "LOW function": ({"low": ["linear"]}, lambda: F.linear(normal(4, 4), normal(4, 4))),
    "LOW method": ({"low": ["matmul"]}, lambda: normal(4, 4).matmul(normal(4, 4))),
    "LOW operator": ({"low": ["matmul"]}, lambda: normal(4, 4) @ normal(4, 4)),
    "LOW conv": ({"low": ["conv2d"]}, lambda: F.conv2d(normal(1, 1, 4, 4), normal(1, 1, 2, 2))),
    "FP32 function": (
        {"fp32": ["linear"]},
        lambda: F.linear(normal(4, 4, dtype=BF16), normal(4, 4)),
    ),
    "FP32 operator": ({"fp32": ["matmul"]}, lambda: normal(4, 4) @ normal(4, 4, dtype=BF16)),
    "FP32 list argument": (
        {"fp32": ["einsum"]},
        lambda: torch.einsum("ij,jk", normal(4, 4), normal(4, 4)),
    ),
    "FP32 by keywords": (
        {"fp32": ["bmm"]},
        lambda: torch.bmm(normal(1, 4, 4), mat2=normal(1, 4, 4)),
    ),
    "WIDEST": (
        {"widest": ["baddbmm"]},
        lambda: torch.baddbmm(normal(1, 4, 4), normal(1, 4, 4), normal(1, 4, 4, dtype=BF16)),
    ),
    "FIRST": ({"first": ["linear"]}, lambda: F.linear(normal(4, 4), normal(4, 4, dtype=BF16))),
    "FIRST, nothing to cast": ({"first": ["linear"]}, lambda: F.linear(normal(4, 4), normal(4, 4))),
    "LOW, nothing to cast": (
        {"low": ["mm"]},
        lambda: torch.mm(normal(4, 4, dtype=BF16), normal(4, 4, dtype=BF16)),
    ),
    "atomic Python op": (
        {"fp32": ["multi_head_attention_forward"]},
        lambda: made(lambda: nn.MultiheadAttention(4, 2))(
            normal(3, 1, 4), normal(3, 1, 4), normal(3, 1, 4)
        )[0],
    ),
    "in place": (
        {"first": ["addmm"]},
        lambda: normal(4, 4).addmm_(normal(4, 4, dtype=BF16), normal(4, 4, dtype=BF16)),
    ),
}


@pytest.mark.parametrize("region", [BF16, FP16])
@pytest.mark.parametrize("name", REGION_CALLS)
def test_the_lists_win_inside_an_autocast_region(name: str, region: torch.dtype) -> None:
    """A listed op gives inside an enabled region exactly what it gives outside of it."""
    ops, call = REGION_CALLS[name]
    with hmpx.convert(policy=Policy.from_ops(**ops)):
        expected = call()
        with torch.autocast("cpu", region):
            actual = call()
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is region
    same(actual.detach(), expected.detach())


# --- __torch_function__ and __torch_dispatch__ ----------------------------------------------------

a_matrix, b_matrix = normal(4, 4), normal(4, 4, seed=1)

#: Calls of every kind of callable, and the function that torch hands over for them.
OVERRIDABLE: dict[str, Callable[[Any], Any]] = {
    "torch.add": lambda t: torch.add(t, b_matrix),
    "torch.matmul": lambda t: torch.matmul(t, b_matrix),
    "torch.softmax": lambda t: torch.softmax(t, -1),
    "torch.conv2d": lambda t: torch.conv2d(t, t),
    "torch.cat": lambda t: torch.cat([t, t]),
    "torch.einsum": lambda t: torch.einsum("ij,jk", t, b_matrix),
    "F.linear": lambda t: F.linear(t, b_matrix),
    "F.linear, other argument": lambda t: F.linear(b_matrix, t),
    "F.gelu": lambda t: F.gelu(t),
    "F.scaled_dot_product_attention": lambda t: F.scaled_dot_product_attention(t, t, t),
    "F.softmax": lambda t: F.softmax(t, -1),
    "F.layer_norm": lambda t: F.layer_norm(t, (4,)),
    "F.relu": lambda t: F.relu(t),
    "F.normalize": lambda t: F.normalize(t),
    "F.dropout": lambda t: F.dropout(t, 0.0),
    "F.cross_entropy": lambda t: F.cross_entropy(t, torch.tensor([0, 1, 2, 3])),
    "F.multi_head_attention_forward": lambda t: F.multi_head_attention_forward(
        t, t, t, 4, 2, b_matrix, None, None, None, False, 0.0, b_matrix, None
    ),
    "b @ t": lambda t: b_matrix @ t,
    "Tensor.matmul": lambda t: Tensor.matmul(b_matrix, t),
    "b * t": lambda t: b_matrix * t,
    "b.bmm": lambda t: b_matrix[None].bmm(t),
}


class Duck:
    """No tensor; reports the function that it is called with."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> tuple[str, Any]:
        return "handled", func


def policies() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "hmp", {}
    yield "o2", {"opt_level": "O2"}
    yield "autocast-cuda", {"lists": "autocast-cuda"}
    python_ops = [
        "multi_head_attention_forward",
        "normalize",
        "gelu",
        "bmm",
        "add",
        "cat",
        "einsum",
    ]
    yield "Python ops", {"policy": Policy.from_ops(low=python_ops)}


POLICIES = dict(policies())


#: Calls whose function has a name to compare with, and that name.
NAMED: dict[str, Callable[[], Any]] = {
    "torch.add": lambda: torch.add,
    "torch.matmul": lambda: torch.matmul,
    "torch.softmax": lambda: torch.softmax,
    "torch.conv2d": lambda: torch.conv2d,
    "torch.cat": lambda: torch.cat,
    "F.linear": lambda: F.linear,
    "F.linear, other argument": lambda: F.linear,
    "F.gelu": lambda: F.gelu,
    "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention,
    "F.multi_head_attention_forward": lambda: F.multi_head_attention_forward,
    "b * t": lambda: Tensor.mul,
    "b.bmm": lambda: Tensor.bmm,
}


@pytest.mark.parametrize("policy", POLICIES)
def test_an_override_finds_the_function_under_its_name(policy: str) -> None:
    """Whether it compares with ``torch.matmul``, or has a table that was made before or meanwhile."""
    table = {function(): name for name, function in NAMED.items()}
    before = dict(table)
    module: Any = types.ModuleType("early_overrides")
    module.TABLE = table
    module.Handler = type("Handler", (), {"TABLES": {"of tables": dict(table)}})
    module.Handler.__torch_function__ = Duck.__torch_function__
    sys.modules["early_overrides"] = module
    try:
        with hmpx.convert(**POLICIES[policy]):
            late = {function(): name for name, function in NAMED.items()}
            for name, function in NAMED.items():
                word, handed = OVERRIDABLE[name](Duck())
                assert word == "handled"
                assert handed is function(), name
                for known in (table, module.Handler.TABLES["of tables"], late):
                    assert known[handed].partition(",")[0] == name.partition(",")[0]
                assert torch.overrides.resolve_name(handed) is not None
        assert table == module.Handler.TABLES["of tables"] == before
    finally:
        del sys.modules["early_overrides"]


@pytest.mark.parametrize(
    "name",
    ["torch.matmul", "torch.softmax", "torch.cat", "F.linear", "F.relu", "F.cross_entropy"],
)
def test_a_function_mode_sees_each_call_once(name: str) -> None:
    """And what it calls is cast."""
    seen: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        OVERRIDABLE[name](a_matrix)
    expected = list(seen)
    with hmpx.convert():
        plain = OVERRIDABLE[name](a_matrix)
        with Mode():
            same(OVERRIDABLE[name](a_matrix), plain)
    functions = [getattr(f, "__wrapped__", f) for f in seen[len(expected) :]]
    assert [functions.count(f) for f in expected] == [1] * len(expected)


@pytest.mark.parametrize("name", ["torch.matmul", "F.linear", "torch.softmax", "b @ t"])
def test_dispatch_subclasses_are_cast(name: str) -> None:
    """A wrapper subclass stays one; both tensors inside it are cast."""
    with low("matmul", "linear", "softmax"):
        expected = [OVERRIDABLE[name](normal(4, 4)), OVERRIDABLE[name](normal(4, 4, seed=2))]
        actual = OVERRIDABLE[name](TwoTensor(normal(4, 4), normal(4, 4, seed=2)))
    assert type(actual) is TwoTensor
    assert actual.dtype is BF16
    same([actual.a, actual.b], expected)


# --- torch.func ---------------------------------------------------------------------------------

weight, layer4 = normal(4, 4, seed=5), made(lambda: nn.Linear(4, 4))
norm_weight = normal(4, seed=6)
VMAPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda t: weight @ t,
    "mul": lambda t: t * t,
    "linear": lambda t: F.linear(t, weight),
    "module": lambda t: layer4(t),
    "functional_call": lambda t: functional_call(layer4, dict(layer4.named_parameters()), (t,)),
    "conv2d": lambda t: F.conv2d(t[None, None], weight[None, None]),
    "sdpa": lambda t: F.scaled_dot_product_attention(t[None], t[None], t[None]),
    "softmax": lambda t: torch.softmax(t, -1),
    "cross_entropy": lambda t: F.cross_entropy(t, torch.tensor([0, 1, 2, 3])),
    "layer_norm": lambda t: F.layer_norm(t, (4,), norm_weight, norm_weight),
    "layer_norm by keywords": lambda t: torch.layer_norm(t, (4,), weight=t[0], bias=t[0]),
    "group_norm by keywords": lambda t: torch.group_norm(
        t, 2, weight=norm_weight, bias=norm_weight
    ),
    "layer_norm, batched weight": lambda t: F.layer_norm(t, (4,), t[0], t[0]),
    "group_norm": lambda t: F.group_norm(t, 2, norm_weight, norm_weight),
    "batch_norm": lambda t: F.batch_norm(t, None, None, norm_weight, norm_weight, True),
    "index_put": lambda t: torch.index_put(t, (torch.tensor([0]),), norm_weight.bfloat16()),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet")
@pytest.mark.parametrize("name", VMAPPED)
def test_vmap_gives_what_a_loop_gives(name: str) -> None:
    """Same values up to the order of summation, and dtype unless a bias is added (pytorch #105442, #192617)."""
    data = normal(3, 4, 4)
    for lists in ("hmp", "o2", "autocast-cuda"):
        with hmpx.convert(lists=lists):
            expected = [VMAPPED[name](t) for t in data]
            actual = vmap(VMAPPED[name])(data)
        same = name not in {"module", "functional_call"}
        torch.testing.assert_close(
            actual, torch.stack(expected), rtol=0.02, atol=0.02, check_dtype=same
        )


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "norm",
    [lambda: nn.BatchNorm1d(4), lambda: nn.LayerNorm(4), lambda: nn.GroupNorm(2, 4)],
    ids=["batch_norm", "layer_norm", "group_norm"],
)
def test_vmap_over_the_backward_of_a_norm(norm: Callable[[], nn.Module], dtype: str) -> None:
    """It raises, as under torch.autocast: the formula takes no fp32 parameters (pytorch #184890).

    With the norms in the fp32 list it works.
    """
    model = made(lambda: nn.Sequential(nn.Linear(4, 4), norm(), nn.Linear(4, 1)))
    parameters = list(model.parameters())

    def jacobians(session: hmpx.Session) -> tuple[Any, Any]:
        with session:
            output = model(normal(8, 4)).squeeze()

            def pullback(v: Tensor) -> tuple[Tensor, ...]:
                return torch.autograd.grad(output, parameters, grad_outputs=v, retain_graph=True)

            basis = torch.eye(8).to(output.dtype)
            one_by_one = [torch.stack(c) for c in zip(*map(pullback, basis), strict=True)]
            return vmap(pullback)(basis), one_by_one

    with pytest.raises(RuntimeError, match=r"[Ee]xpected scalar type|mixed dtype"):
        jacobians(hmpx.convert(lists="lean", low_precision_type=dtype))
    norms_in_fp32 = Policy.from_ops(
        low=["linear"], fp32=["layer_norm", "batch_norm", "group_norm"], low_precision_type=dtype
    )
    actual, expected = jacobians(hmpx.convert(policy=norms_in_fp32))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0.05, atol=0.05)  # a few roundings to bfloat16


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_the_transforms_of_torch_func() -> None:
    """Derivatives come in the dtype of what they are taken of, tangents in the output's."""
    vector = normal(4)

    def scalar(v: Tensor) -> Tensor:
        return (weight @ v).float().square().sum()

    with low("matmul"):
        assert grad(scalar)(vector).dtype is FP32
        output, tangent = jvp(lambda v: weight @ v, (vector,), (vector,))
        assert (output.dtype, tangent.dtype) == (BF16, BF16)
        output, pullback = vjp(lambda v: weight @ v, vector)
        assert pullback(torch.ones_like(output))[0].dtype is FP32
        assert jacrev(lambda v: weight @ v)(vector).dtype is FP32
        assert jacfwd(scalar)(vector).dtype is FP32
        assert hessian(scalar)(vector).dtype is FP32
        with hmpx.disable_casts():
            assert jvp(lambda v: weight @ v, (vector,), (vector,))[0].dtype is FP32
    assert (weight @ vector).dtype is FP32


def test_per_sample_gradients_and_ensembles() -> None:
    """The two well-known uses of vmap with functional_call."""
    module, data = made(lambda: nn.Linear(4, 2)), normal(3, 4)
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(p: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(module, p, (sample,)).float().square().sum()

    stacked = {name: torch.stack([p, 2 * p]) for name, p in parameters.items()}
    with hmpx.convert():
        per_sample = vmap(grad(loss), (None, 0))(parameters, data)
        each = [grad(loss)(parameters, sample) for sample in data]
        ensemble = vmap(lambda p: functional_call(module, p, (data,)))(stacked)
        off = vmap(hmpx.disable_casts()(module))(data)
    for name in parameters:
        assert per_sample[name].dtype is FP32
        torch.testing.assert_close(
            per_sample[name], torch.stack([g[name] for g in each]), rtol=0.02, atol=0.02
        )
    assert ensemble.dtype is FP32  # of the sum of a product and a bias
    assert off.dtype is FP32
