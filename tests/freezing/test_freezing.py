"""Freezing: which weights are stored low and why, that results stay equal, and the way back."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

import hmpx
from hmpx import FreezeError, Frozen, Policy
from tests import forks
from tests.speeds import Capability, known_as

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    # torch.compile asks its inputs for .grad; a filter that raises is faster than the one it sets
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


def convert(low_precision_type: torch.dtype = BF16) -> hmpx.Session:
    """Converts torch under a policy that has both lists, recurrent modules in the low one."""
    policy = Policy.from_ops(
        low=[
            "linear",
            "matmul",
            "bmm",
            "baddbmm",
            "conv2d",
            "scaled_dot_product_attention",
            "lstm",
            "gru",
        ],
        fp32=["softmax", "embedding", "layer_norm", "batch_norm"],
        widest=["add", "mul", "cat"],
        low_precision_type=low_precision_type,
    )
    return hmpx.convert(policy=policy, device_types={"cpu"})


def stored(frozen: Frozen) -> dict[str, torch.dtype]:
    """Returns the name and dtype of each weight that is stored low."""
    return {weight.name: weight.stored_dtype for weight in frozen.weights if weight.is_low}


def reasons(frozen: Frozen) -> dict[str, str]:
    return {weight.name: weight.reason for weight in frozen.weights}


def contents(model: nn.Module) -> dict[str, tuple[int, int, tuple[int, ...], Tensor, bool]]:
    """Returns of each weight: object, storage, strides, a copy of its values, requires_grad."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {
        name: (
            id(tensor),
            tensor.untyped_storage()._cdata,
            tensor.stride(),
            tensor.detach().clone(),
            tensor.requires_grad,
        )
        for name, tensor in named
    }


def assert_same_contents(model: nn.Module, before: dict[str, Any]) -> None:
    """Compares what `contents` returned with what it returns now."""
    now = contents(model)
    assert now.keys() == before.keys()
    for name, (*facts, values, requires_grad) in now.items():
        assert (*facts, requires_grad) == (*before[name][:-2], before[name][-1]), name
        assert values.dtype is before[name][-2].dtype, name
        torch.testing.assert_close(values, before[name][-2], rtol=0, atol=0, equal_nan=True)


def assert_equal_but_for_casts(actual: Any, expected: Any) -> None:
    """Compares two nested results exactly; low precision is widened first."""
    actual_leaves, expected_leaves = tree_leaves(actual), tree_leaves(expected)
    assert len(actual_leaves) == len(expected_leaves) > 0
    for a, e in zip(actual_leaves, expected_leaves, strict=True):
        if isinstance(e, Tensor) and e.is_floating_point():
            torch.testing.assert_close(a.float(), e.float(), rtol=0, atol=0, equal_nan=True)


def attached(model: nn.Module) -> list[tuple[int, ...]]:
    """Returns how many hooks of each kind every module has, and whether ``train`` is its own."""
    return [
        (
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._state_dict_hooks),
            len(module._load_state_dict_pre_hooks),
            int("train" in vars(module)),
            *(len(p._backward_hooks or ()) for p in module.parameters()),
        )
        for module in model.modules()
    ]


class Perceptron(nn.Module):
    """Two linear layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, 8]
        return self.last(F.relu(self.norm(self.first(x))))


PERCEPTRON_LOW = ["first.weight", "first.bias", "last.weight", "last.bias"]


class Product(nn.Module):
    """One product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Convolutions(nn.Module):
    """A small image classifier with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 3, stride=2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, 3, height, width]
        hidden = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.last(self.second(hidden).mean((2, 3)))


class SelfAttention(nn.Module):
    """nn.MultiheadAttention on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # x: [batch, tokens, 8]
        return self.attention(x, x, x)


#: Name -> (builder, shape of the input, some weights that are stored low, some that are not).
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str], set[str]]] = {
    "perceptron": (Perceptron, (3, 8), {"first.weight", "first.bias"}, {"norm.weight"}),
    "convolutions": (
        Convolutions,
        (2, 3, 8, 8),
        {"first.weight", "second.bias", "last.weight"},
        {"norm.weight", "norm.running_mean", "norm.num_batches_tracked"},
    ),
    "lstm": (
        lambda: nn.LSTM(8, 8, 2, bidirectional=True, proj_size=4),
        (5, 2, 8),
        {"weight_ih_l0", "bias_hh_l1_reverse"},
        set(),
    ),
    "gru": (lambda: nn.GRU(8, 8, batch_first=True), (5, 2, 8), {"weight_hh_l0"}, set()),
    "attention": (SelfAttention, (2, 5, 8), {"attention.in_proj_weight"}, set()),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        (2, 5, 8),
        {"layers.1.linear2.weight"},
        {"layers.0.norm1.bias"},
    ),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Returns a model in evaluation mode and an input."""
    torch.manual_seed(0)
    builder, shape, _, _ = MODELS[name]
    return builder().eval(), torch.randn(shape)


# --- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_results_are_those_of_the_converted_model(name: str, dtype: torch.dtype) -> None:
    """With and without gradients, in inference mode, at another batch size; and after undo."""
    model, x = build(name)
    other = torch.cat([x, x + 1])
    convert(dtype)
    contexts = [torch.enable_grad, torch.no_grad, torch.inference_mode]

    def results() -> list[Any]:
        found = []
        for context in contexts:
            with context():
                found += [model(x), model(other)]
        return found

    expected, before = results(), contents(model)
    frozen = hmpx.freeze(model, x)
    low = stored(frozen)
    assert MODELS[name][2] <= low.keys()
    assert not MODELS[name][3] & low.keys()
    assert {dict(contents(model))[key][3].dtype for key in low} == {dtype}
    assert [p.requires_grad for p in model.parameters()] == [True] * len(list(model.parameters()))
    actual = results()
    assert {leaf.dtype for leaf in tree_leaves(actual)} == {FP32}
    assert_equal_but_for_casts(actual, expected)
    frozen.undo()
    assert_same_contents(model, before)
    again = results()
    assert [leaf.dtype for leaf in tree_leaves(again)] == [
        leaf.dtype for leaf in tree_leaves(expected)
    ]
    assert_equal_but_for_casts(again, expected)


def transformer(name: str) -> nn.Module:
    """Returns a tiny Hugging Face model with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=32,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config).eval()
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32,
            bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


#: Model -> a weight that is stored low, and one that is not, with the reason.
TRANSFORMERS = {
    "bert": (
        "bert.encoder.layer.0.attention.self.query.weight",
        ("bert.embeddings.word_embeddings.weight", "used in bf16, in fp32 by aten.embedding"),
    ),
    "gpt2": (
        "transformer.h.1.mlp.c_fc.weight",
        ("transformer.wte.weight", "used in bf16, in fp32 by aten.embedding"),
    ),
    "llama": (
        "lm_head.weight",
        ("model.embed_tokens.weight", "used in fp32 by aten.embedding"),
    ),
}


@pytest.mark.models
@pytest.mark.filterwarnings("ignore", "error::hmpx.HmpxWarning")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_give_the_same_results_and_texts(name: str) -> None:
    """Under HMP's lists: each field of the output, generated tokens, and the scores of each."""
    model = transformer(name)
    ids = torch.randint(2, 50, (2, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    hmpx.convert(device_types={"cpu"})

    @torch.no_grad()
    def results() -> list[Any]:
        output = model(**inputs, output_hidden_states=True)
        found = [output.logits, output.hidden_states]
        if name != "bert":
            text = model.generate(
                **inputs, max_new_tokens=8, do_sample=False, num_beams=2, output_scores=True,
                return_dict_in_generate=True, pad_token_id=0,
            )  # fmt: skip
            found += [text.sequences, text.scores]
        return found

    expected, before = results(), contents(model)
    low, (kept, reason) = TRANSFORMERS[name]
    with hmpx.freeze(model, inputs) as frozen:
        assert stored(frozen)[low] is BF16
        assert reasons(frozen)[kept] == reason
        output = model(**inputs)
        assert type(output).__name__.endswith(("LMOutput", "Attentions", "Past"))
        assert output.logits.dtype is output["logits"].dtype is output[0].dtype is FP32
        actual = results()
        assert_equal_but_for_casts(actual, expected)
        if name != "bert":
            assert torch.equal(actual[2], expected[2])
    assert_same_contents(model, before)


@pytest.mark.models
@pytest.mark.filterwarnings("ignore", "error::hmpx.HmpxWarning")
def test_tied_embeddings_used_low_only_stay_one_tensor() -> None:
    """Where embedding is in the low list as well, GPT-2 stores its table once, for both uses."""
    model = transformer("gpt2")
    ids = torch.randint(2, 50, (2, 6))
    policy = Policy.from_ops(low=["linear", "addmm", "embedding"])
    with hmpx.convert(policy=policy, device_types={"cpu"}), torch.no_grad():
        expected = model(ids).logits
        frozen = hmpx.freeze(model, ids)
        assert model.lm_head.weight is model.transformer.wte.weight
        assert model.lm_head.weight.dtype is BF16
        assert reasons(frozen)["lm_head.weight"] == "is transformer.wte.weight"
        assert_equal_but_for_casts(model(ids).logits, expected)


# --- which weights, and why --------------------------------------------------------------------


class OneWeight(nn.Module):
    """A weight [4, 4], and what is done with it."""

    def __init__(self, use: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.use = use

    def forward(self, x: Tensor) -> Any:
        return self.use(x, self.weight)


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def uncast(x: Tensor, w: Tensor) -> Tensor:
    with hmpx.disable_casts():
        return F.linear(x, w)


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(linear, x, w, use_reentrant=False)


def in_inference_mode(x: Tensor, w: Tensor) -> Tensor:
    with torch.inference_mode():
        return F.linear(x, w.view(2, 8).view(4, 4).to(FP32))


def nested(x: Tensor, w: Tensor) -> Tensor:
    parts = torch.nested.nested_tensor_from_jagged(w, torch.tensor([0, 1, 4]))
    return F.linear(x, w) + parts.sin().values()


#: Name -> (use, dtype that the weight is stored in, why).
USES: dict[str, tuple[Callable[[Tensor, Tensor], Any], torch.dtype, str]] = {
    "linear": (linear, BF16, "used in bf16 only"),
    "transposed": (lambda x, w: x @ w.t(), BF16, "used in bf16 only"),
    "fp16 by hand": (lambda x, w: w.half() * 2, FP16, "used in fp16 only"),
    "checkpointed": (checkpointed, BF16, "used in bf16 only"),
    "inference mode": (in_inference_mode, BF16, "used in bf16 only"),
    "compiled": (torch.compile(linear, backend="eager"), BF16, "used in bf16 only"),
    "vmap": (
        lambda x, w: torch.vmap(lambda row: F.linear(row, w))(x),
        BF16,
        "used in bf16 only",
    ),
    "both": (lambda x, w: F.linear(x, w) + w, FP32, "used in bf16, in fp32 by aten.add"),
    "region": (uncast, FP32, "used in fp32 by aten.mm"),
    "widest": (lambda x, w: x.bfloat16() + w, FP32, "used in fp32 by aten.add"),
    "list": (lambda x, w: F.linear(x, torch.cat([w, w])), FP32, "used in fp32 by aten.cat"),
    "out=": (
        lambda x, w: torch.mul(x, 2, out=w),
        FP32,
        "written by aten.mul",
    ),
    "inside a subclass": (nested, FP32, "used in bf16, in fp32 by aten.sin"),
    "unused": (lambda x, w: x @ x, FP32, "not used by the example"),
    "dtype only": (lambda x, w: x.to(w.dtype), FP32, "not used by the example"),
}


@pytest.mark.parametrize("name", USES)
def test_a_weight_is_stored_in_the_one_type_it_is_used_in(name: str) -> None:
    """Views, casts by hand, regions and transforms; what is not sure to be low is kept."""
    use, dtype, reason = USES[name]
    model = OneWeight(use).eval()
    x = torch.randn(4, 4)
    convert()
    with torch.no_grad():
        values = model.weight.clone()
        expected = model(x)
        model.weight.copy_(values)
        frozen = hmpx.freeze(model, x)
        assert model.weight.dtype is dtype
        assert reasons(frozen) == {"weight": reason}
        torch.testing.assert_close(model.weight, values.to(dtype), rtol=0, atol=0)
        assert_equal_but_for_casts(model(x), expected)


class Assorted(nn.Module):
    """Weights that can't be stored low, and one that can."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(4, 4, dtype=BF16))
        self.nothing = nn.Parameter(torch.ones(0, 4))
        self.pair = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
        self.register_buffer("index", torch.arange(4))
        self.register_buffer("table", torch.ones(4, 4))
        self.register_buffer("diagonal", torch.eye(4).to_sparse())
        self.register_buffer("passing", torch.ones(4, 4), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Any:
        results = [F.linear(x, w) for w in (self.narrow, self.nothing, self.table, self.passing)]
        return results, F.linear(x, self.pair), self.index + 1


def test_what_can_not_be_stored_low_is_kept_and_says_why() -> None:
    """Other dtypes, no elements, tensor subclasses, sparse layouts; buffers are as parameters."""
    model = Assorted().eval()
    x = torch.ones(2, 4)
    with convert():
        expected = model(x)
        frozen = hmpx.freeze(model, x)
        assert reasons(frozen) == {
            "wide": "is fp64",
            "narrow": "is bf16",
            "nothing": "is empty",
            "pair": "is of class TwoTensor",
            "index": "is int64",
            "table": "used in bf16 only",
            "diagonal": "is sparse_coo",
            "passing": "used in bf16 only",
        }
        assert stored(frozen) == {"table": BF16, "passing": BF16}
        assert model.table.dtype is model.passing.dtype is BF16
        assert_equal_but_for_casts(model(x)[0], expected[0])


def test_lazy_weights_are_kept() -> None:
    """They have no storage to watch until the example has run."""
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)).eval()
    with convert():
        frozen = hmpx.freeze(model, torch.ones(2, 3))
        assert reasons(frozen)["0.weight"] == "was not initialized before the example ran"
        assert set(stored(frozen)) == {"1.weight", "1.bias"}


def test_buffers_written_by_the_example_are_kept_and_get_their_values_back() -> None:
    """Running statistics of a norm in training mode inside a model in evaluation mode; counters."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last[:1].copy_(x[:1])
            return F.linear(self.norm(x), self.last)

    model = Counter().eval()
    model.norm.train()
    before = contents(model)
    with convert():
        frozen = hmpx.freeze(model, torch.randn(2, 4))
    assert_same_contents(model, before)
    why = reasons(frozen)
    assert why["norm.running_mean"] == "changed while the example ran"
    assert why["calls"] == "written by aten.add_"
    assert why["last"] == "written by aten.copy_"
    assert why["norm.num_batches_tracked"] == "is int64"


def test_compiled_submodules_are_watched_op_by_op() -> None:
    """A graph that was compiled before hides what it casts; the compiled model works frozen."""
    model = nn.Sequential(
        torch.compile(Perceptron(), backend="aot_eager", fullgraph=True), nn.ReLU(), Product()
    ).eval()
    model[2].compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 8)
    with convert(), torch.no_grad():
        expected = model(x)
        frozen = hmpx.freeze(model, x)
        assert set(stored(frozen)) == {
            *(f"0._orig_mod.{name}" for name in PERCEPTRON_LOW), "2.weight",
        }  # fmt: skip
        assert_equal_but_for_casts(model(x), expected)
        frozen.undo()
        assert_equal_but_for_casts(model(x), expected)


# --- legalize="fast" ---------------------------------------------------------------------------

SLOW, QUICK = 50.0, 0.5

#: What a device's kernels are in low precision: times over those by way of fp32, by kind of op.
DEVICES: dict[str, Callable[[str], Capability]] = {
    "slow": lambda kind: Capability(False, SLOW, SLOW),
    "slow in training": lambda kind: Capability(True, QUICK, SLOW),
    "slow in inference": lambda kind: Capability(True, SLOW, QUICK),
    "slow but for a row or two": lambda kind: Capability(
        False, QUICK if kind == "gemv" else SLOW, SLOW
    ),
    "quick": lambda kind: Capability(True, QUICK, QUICK),
}


class Wide(nn.Module):
    """Products and convolutions on either side of the size up to which native kernels are used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv1d(8, 64, 3, padding=1)
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 4)
        self.table = nn.Parameter(torch.randn(4, 64))

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, tokens, 8]
        hidden = self.embed(x.transpose(1, 2)).transpose(1, 2)
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        return self.last(F.relu(self.first(hidden))) + hidden @ self.table.t()


@pytest.mark.usefixtures("fresh_wrappers")
@pytest.mark.parametrize("example_tokens", [1, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_results_are_equal_under_fast_whatever_the_size_of_a_call(
    device: str, example_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever calls leave weights unrounded there; those weights stay fp32, and say why."""
    known_as(monkeypatch, lambda kind, device_type, dtype: DEVICES[device](kind))
    torch.manual_seed(0)
    model = Wide().eval()
    sizes = [(1, 1), (1, 2), (1, 16), (8, 16)]
    inputs = [torch.randn(*size, 8) for size in sizes]
    inputs += [x.clone().requires_grad_() for x in inputs]

    def results() -> list[Tensor]:
        found = []
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context():
                found += [model(x) for x in inputs]
        return found

    hmpx.convert(legalize="fast", device_types={"cpu"})
    expected, before = results(), contents(model)
    frozen = hmpx.freeze(model, torch.randn(1, example_tokens, 8))
    assert_equal_but_for_casts(results(), expected)
    why = reasons(frozen)
    if device == "quick":
        assert why["first.weight"] == why["embed.weight"] == "used in bf16 only"
    else:
        assert why["first.weight"] == 'used in fp32 by linear under legalize="fast"'
        assert why["embed.weight"] == 'used in fp32 by conv1d under legalize="fast"'
        assert model.first.weight.dtype is model.embed.bias.dtype is FP32
    frozen.undo()
    assert_same_contents(model, before)


# --- weights whose dtype decides ---------------------------------------------------------------


class Weighted(nn.Module):
    """Some op of an input in low precision and a weight, and what shows the type of its result."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.op, self.weight = op, nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:  # x: [6, 6]
        return torch.exp(self.op(F.relu(x), self.weight) / 4)


def weight_last(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight)


def weight_first(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(weight, x)


#: Name -> policy, op, and whether the weight may be stored low.
DECIDING: dict[str, tuple[dict[str, Any], Callable[..., Tensor], bool]] = {
    "follow": ({"low": ["relu"], "follow": ["matmul accumulate=bfloat16"]}, weight_last, False),
    "first, first": (
        {"low": ["relu"], "first": ["matmul accumulate=float16"]},
        weight_first,
        False,
    ),
    "named output": (
        {"low": ["relu"], "follow": ["matmul accumulate=bfloat16 output=float16"]},
        weight_last,
        True,
    ),
    "output=input, first": ({"low": ["relu", "matmul output=input"]}, weight_first, False),
    "section, first": (
        {"low": ["matmul"], "sections": [{"dtype": "bfloat16", "fp32": ["matmul"]}]},
        weight_first,
        False,
    ),
    "section, last": (
        {"low": ["matmul"], "sections": [{"dtype": "bfloat16", "fp32": ["matmul"]}]},
        weight_last,
        True,
    ),
}


@pytest.mark.parametrize("name", DECIDING)
def test_a_weight_whose_dtype_decides_is_kept(name: str) -> None:
    """Stored low, it would change the type of a result, or which section holds."""
    policy, op, is_low = DECIDING[name]
    torch.manual_seed(0)
    model, x = Weighted(op).eval(), torch.randn(6, 6)
    with hmpx.convert(policy={"lists": "none", **policy}, device_types={"cpu"}):
        expected = model(x)
        frozen = hmpx.freeze(model, x)
        assert_equal_but_for_casts(model(x), expected)
        assert (reasons(frozen)["weight"].startswith("used in")) is is_low
        assert bool(stored(frozen)) is is_low
    if not is_low:
        assert reasons(frozen)["weight"] == "its type decides how matmul is computed"


#: Rule of `F.linear(x, weight, bias)`, all fp32 -> the weights that may be stored low.
DECIDING_RULES: dict[str, tuple[Callable[[hmpx.Call], Any], set[str]]] = {
    "input": (lambda call: hmpx.DENY if call.dtypes[0] is BF16 else hmpx.ALLOW, {"weight", "bias"}),
    "weight": (lambda call: hmpx.DENY if call.dtypes[1] is BF16 else hmpx.ALLOW, {"bias"}),
    "both": (
        lambda call: hmpx.DENY if call.dtypes[1] is call.dtypes[2] is BF16 else hmpx.ALLOW,
        set(),
    ),
    "shapes": (lambda call: hmpx.ALLOW if call.shapes else None, {"weight", "bias"}),
}


@pytest.mark.parametrize("name", DECIDING_RULES)
def test_weights_whose_dtype_decides_a_rule_are_kept(name: str) -> None:
    """Alone or together; each weight is asked about, also where the verdict is known already."""
    rule, low = DECIDING_RULES[name]
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).eval(), torch.randn(6, 6)
    hmpx.register_rule("linear", rule)
    try:
        with hmpx.convert(policy={"lists": "none", "fp32": ["add"]}, device_types={"cpu"}):
            model[1].register_forward_pre_hook(lambda module, args: args[0].float())
            expected = model(x)
            frozen = hmpx.freeze(model, x)
            assert stored(frozen).keys() == {f"{layer}.{name}" for layer in (0, 1) for name in low}
            assert_equal_but_for_casts(model(x), expected)
    finally:
        hmpx.unregister_rule("linear")


# --- sharing -----------------------------------------------------------------------------------


class Two(nn.Module):
    """Two weights, and what is done with each."""

    def __init__(self, first: Tensor, second: Tensor, *uses: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.uses = nn.Parameter(first), nn.Parameter(second), uses

    def forward(self, x: Tensor) -> list[Tensor]:
        weights = (self.first, self.second)
        return [use(x, w) for use, w in zip(self.uses, weights, strict=True)]


def test_two_parameters_of_one_memory_get_one_copy() -> None:
    """And one memory again on undo; the bytes count once."""
    memory = torch.randn(4, 4)
    model = Two(memory, memory, linear, linear).eval()
    assert model.first is not model.second
    before = contents(model)
    with convert():
        frozen = hmpx.freeze(model, torch.ones(2, 4))
        assert model.first.dtype is BF16
        assert model.first.data_ptr() == model.second.data_ptr()
        assert reasons(frozen) == {
            "first": "used in bf16 only",
            "second": "shares its memory with first",
        }
        assert sum(weight.stored_bytes for weight in frozen.weights) == 32
        frozen.undo()
    assert_same_contents(model, before)
    assert model.first.untyped_storage()._cdata == memory.untyped_storage()._cdata


def test_overlapping_views_are_kept_and_say_with_what_they_share() -> None:
    """Two copies of one memory would no longer be one."""
    memory = torch.randn(8, 4)
    model = Two(memory[:5], memory[4:], linear, linear).eval()
    with convert():
        frozen = hmpx.freeze(model, torch.ones(2, 4))
    assert reasons(frozen) == {
        "first": "shares its storage with second",
        "second": "shares its storage with first",
    }


def test_shared_modules_are_listed_under_each_name() -> None:
    """One module in two places: one copy."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, shared).eval()
    with convert():
        frozen = hmpx.freeze(model, torch.ones(2, 4))
    assert reasons(frozen) == {
        "0.weight": "used in bf16 only",
        "0.bias": "used in bf16 only",
        "1.weight": "is 0.weight",
        "1.bias": "is 0.bias",
    }
    assert set(stored(frozen)) == {"0.weight", "0.bias", "1.weight", "1.bias"}


# --- outputs -----------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["a", "b"])


@dataclass
class Open:
    a: Any
    rest: dict[str, Any]


class Returns(nn.Module):
    """Returns what ``wrap`` makes of a low-precision tensor and an fp32 one."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(4, 4), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.linear(x), x)


NESTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda low, x: low,
    "tuple": lambda low, x: (low, x, 1, None),
    "list in dict": lambda low, x: {"a": [low, x], "b": "text"},
    "named tuple": Pair,
    "dataclass in dataclass": lambda low, x: Open([low], {"x": Open(low, {"y": x})}),
    "packed": lambda low, x: torch.nn.utils.rnn.pack_sequence([low]),
}


@pytest.mark.parametrize("name", NESTS)
def test_low_outputs_come_back_in_fp32_wherever_they_are(name: str) -> None:
    """In results of the same classes; what needs no cast is the same object."""
    model = Returns(NESTS[name]).eval()
    x = torch.ones(2, 4)

    def dtypes(value: Any) -> list[torch.dtype]:
        return [tensor.dtype for tensor in tensors_in(value)]

    with convert():
        kept = model(x)
        with hmpx.freeze(model, x):
            widened = model(x)
        with hmpx.freeze(model, x, outputs="keep"):
            assert dtypes(model(x)) == dtypes(kept)
    assert type(widened) is type(kept)
    assert BF16 in dtypes(kept)
    assert dtypes(widened) == [FP32 if dtype is BF16 else dtype for dtype in dtypes(kept)]
    assert_equal_but_for_casts(tensors_in(widened), tensors_in(kept))


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in a nested value, dataclasses included."""
    if isinstance(value, Open):
        value = [value.a, *value.rest.values()]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in tensors_in(item)]
    return [value] if isinstance(value, Tensor) else []


# --- the way back ------------------------------------------------------------------------------


def test_dynamo_is_not_imported() -> None:
    """Its 70 MB would be more than most models save."""
    code = (
        "import sys, torch, hmpx\n"
        "hmpx.convert(device_types={'cpu'})\n"
        "model = torch.nn.Linear(64, 64).eval()\n"
        "hmpx.freeze(model, torch.randn(2, 64), keep_fp32=False)\n"
        "model(torch.randn(64, 64))\n"
        "assert model.weight.dtype is torch.bfloat16\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = forks.run("-c", code, imported=forks.TORCH)
    assert done.returncode == 0, done.stderr


def test_undo_leaves_no_trace() -> None:
    """Same storages, values with NaN and infinity, requires_grad, hooks, ``train``; twice."""
    model = Perceptron().eval()
    with torch.no_grad():
        model.first.weight[0, :3] = torch.tensor([float("nan"), float("inf"), 1e-42])
    model.last.weight.requires_grad_(False)
    before, hooks = contents(model), attached(model)
    x = torch.ones(2, 8)
    with convert():
        frozen = hmpx.freeze(model, x)
        assert attached(model) != hooks
        assert not model.last.weight.requires_grad
        frozen.undo()
        frozen.undo()
        assert attached(model) == hooks
        assert_same_contents(model, before)
        assert "train" not in vars(model)
        model.train()
        model(x).sum().backward()
        model.eval()
        hmpx.freeze(model, x).undo()


def test_a_with_block_undoes_also_when_it_raises() -> None:
    """The exception passes."""
    model = Perceptron().eval()
    before, x = contents(model), torch.ones(2, 8)
    with convert():
        with pytest.raises(ZeroDivisionError), hmpx.freeze(model, x) as frozen:
            assert isinstance(frozen, Frozen)
            assert model.first.weight.dtype is BF16
            raise ZeroDivisionError
        assert_same_contents(model, before)
        with hmpx.freeze(model, x) as frozen:
            frozen.undo()
        assert_same_contents(model, before)


class Buffered(Perceptron):
    """A perceptron with a table that is a buffer, and a view of one in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 4))
        self.register_buffer("scratch", torch.randn(4, 4), persistent=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.register_buffer("table", self.table)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tied(super().forward(x))
        return hidden @ self.table @ self.scratch + F.linear(hidden, self.tied.table)


def frozen_and_before() -> tuple[nn.Module, Frozen, dict[str, Any]]:
    """Returns a frozen model, what freezing returned, and its contents before."""
    torch.manual_seed(0)
    model = Buffered().eval()
    before = contents(model)
    return model, hmpx.freeze(model, torch.ones(2, 8)), before


def write(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.dtype is BF16:
                tensor.mul_(3)


def load_refused(model: nn.Module) -> None:
    for assign in (False, True):
        with pytest.raises(FreezeError):
            model.load_state_dict(Buffered().state_dict(), assign=assign)


#: What users do to a frozen model, after which `undo` restores every bit.
HARMLESS: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda model: None,
    "written to": write,
    "copied": copy.deepcopy,
    "called": lambda model: [model(torch.ones(3, 8)).sum(), model.state_dict()],
    "load_state_dict": load_refused,
    "functional_call": lambda model: functional_call(
        model, {k: v.detach() for k, v in model.named_parameters()}, (torch.ones(2, 8),)
    ),
    "to the CPU": lambda model: model.to("cpu"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_undo_restores_every_bit_whatever_was_done(name: str) -> None:
    """Values, storages, strides, objects."""
    with convert():
        model, frozen, before = frozen_and_before()
        assert {"table", "scratch", "tied.table", "first.weight"} <= stored(frozen).keys()
        HARMLESS[name](model)
        frozen.undo()
    assert_same_contents(model, before)
    assert model.tied.table is model.table
    frozen.undo()


def to_meta(model: nn.Module) -> None:
    model.to("meta")


def delete(model: nn.Module) -> None:
    del model.first.weight
    del model.table


def replace(model: nn.Module) -> None:
    model.first.weight = nn.Parameter(torch.zeros(16, 8))
    model.scratch = None


#: What users do -> (what undo says, and which weights strict=False restores none the less).
HARMFUL: dict[str, tuple[Callable[[nn.Module], Any], str, set[str]]] = {
    "to meta": (
        to_meta,
        r"'first\.weight', .*, 'tied\.weight', .* are on the meta device, which",
        set(),
    ),
    "deleted": (
        delete,
        r"'first\.weight', 'table' are no longer a parameter or buffer of its module; put",
        {"last.weight", "scratch"},
    ),
    "replaced": (
        replace,
        r"'first\.weight' is replaced by another tensor; 'scratch' is no longer a .*; put",
        {"last.weight", "table"},
    ),
    "weight_norm": (
        lambda model: parametrizations.weight_norm(model.first),
        r"'first\.weight' is computed by a parametrization; put back",
        {"last.weight", "first.bias", "table"},
    ),
    "pruned": (
        hmpx.disable_casts()(lambda model: prune.l1_unstructured(model.first, "weight", 0.5)),
        r"'first\.weight' is no longer a parameter or buffer of its module; put",
        {"last.weight", "table"},
    ),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_undo_says_what_it_can_not_restore_and_changes_nothing(name: str) -> None:
    """Nothing is half-done: weights, hooks; with strict=False the others are restored."""
    act, text, others = HARMFUL[name]
    with convert():
        model, frozen, before = frozen_and_before()
        act(model)
        changed, hooks = contents(model), attached(model)
        with pytest.raises(FreezeError, match=text) as caught:
            frozen.undo()
        assert str(caught.value).startswith(
            "Buffered can't be given its fp32 weights back, and nothing was changed: "
        )
        assert str(caught.value).endswith("or call undo(strict=False) to restore the others")
        assert contents(model).keys() == changed.keys()
        for key, (*facts, values, requires_grad) in contents(model).items():
            assert facts == list(changed[key][:-2])
            assert requires_grad == changed[key][-1]
            if values.device.type != "meta":
                assert torch.equal(values, changed[key][-2])
        assert attached(model) == hooks
        assert "undone" not in repr(frozen)
        frozen.undo(strict=False)
        now = contents(model)
        for key in others:
            assert now[key][0] == before[key][0]
            torch.testing.assert_close(now[key][-2], before[key][-2], rtol=0, atol=0)
        assert "train" not in vars(model)
        if name not in {"to meta", "swapped to meta", "deleted", "replaced", "module copied"}:
            model(torch.ones(2, 8))
            model.train()


def test_without_the_fp32_weights_there_is_no_way_back() -> None:
    """They are freed at once, undo says so, and a with block refuses to begin."""
    model = Perceptron().eval()
    x = torch.ones(2, 8)
    storage = StorageWeakRef(model.first.weight.untyped_storage())
    kept = StorageWeakRef(model.norm.weight.untyped_storage())
    with convert():
        expected = model(x)
        frozen = hmpx.freeze(model, x, keep_fp32=False)
        assert storage.expired()
        assert not kept.expired()
        for use in (frozen.undo, frozen.__enter__):
            with pytest.raises(FreezeError, match="Perceptron was frozen with keep_fp32=False"):
                use()
        assert_equal_but_for_casts(model(x), expected)


def test_a_dropped_result_gives_the_weights_back() -> None:
    """At once, and with a warning: nobody could undo it otherwise."""
    model, x = Perceptron().eval(), torch.ones(2, 8)
    before = contents(model)
    with convert():
        with pytest.warns(
            hmpx.HmpxWarning, match=r"returned for Perceptron is gone.*keep_fp32=False"
        ):
            hmpx.freeze(model, x)
        assert_same_contents(model, before)
        assert attached(model) == attached(Perceptron())
        outer = nn.Sequential(model).eval()
        frozen = hmpx.freeze(outer, x)
        del outer
        assert model.first.weight.dtype is BF16
        with pytest.warns(hmpx.HmpxWarning, match="returned for Sequential is gone"):
            del frozen
        assert_same_contents(model, before)


def test_the_end_of_a_frozen_model_is_not_noted() -> None:
    """It needs neither a warning nor garbage collection."""
    gc.disable()
    try:
        with convert():
            model: nn.Module | None = Perceptron().eval()
            frozen = hmpx.freeze(model, torch.ones(2, 8))
            end = weakref.ref(model)
            del model
            assert end() is None
            del frozen
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_results_are_equal_and_the_weights_come_back() -> None:
    """The fp32 weights leave the device's memory; they come back to where the model is then."""
    for name in MODELS:
        model, x = build(name)
        model, x = model.cuda(), x.cuda()
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        with hmpx.convert(lists="autocast-cuda", device_types={"cuda"}), torch.no_grad():
            expected = model(x)
            frozen = hmpx.freeze(model, x)
            assert stored(frozen)
            assert_equal_but_for_casts(model(x), expected)
            frozen.undo()
            assert_equal_but_for_casts(model(x), expected)
        for key, parameter in model.named_parameters():
            assert torch.equal(parameter, values[key]), (name, key)


def test_freezing_in_inference_mode() -> None:
    """There, and of a model that was made there."""
    x = torch.ones(2, 8)
    with convert(), torch.inference_mode():
        made_here = Perceptron().eval()
        expected = made_here(x)
        with hmpx.freeze(made_here, x) as frozen:
            assert len(stored(frozen)) == 4
            assert_equal_but_for_casts(made_here(x), expected)
        assert_equal_but_for_casts(made_here(x), expected)
    model = Perceptron().eval()
    before = contents(model)
    with convert(), torch.inference_mode():
        expected = model(x)
        frozen = hmpx.freeze(model, x)
        assert_equal_but_for_casts(model(x), expected)
        assert not model.first.weight.is_inference()
        frozen.undo()
    assert_same_contents(model, before)


def test_the_summary_is_a_table() -> None:
    """Bytes before and after, and for each weight its dtypes and the reason."""
    model = Perceptron().eval()
    with convert():
        frozen = hmpx.freeze(model, torch.ones(2, 8))
    expected = """\
Perceptron: 4 of 6 weights stored in low precision, 976 -> 552 bytes
name          kind       dtype  stored  bytes  why
first.weight  parameter  fp32   bf16      256  used in bf16 only
first.bias    parameter  fp32   bf16       32  used in bf16 only
norm.weight   parameter  fp32   fp32       64  used in fp32 by aten.native_layer_norm
norm.bias     parameter  fp32   fp32       64  used in fp32 by aten.native_layer_norm
last.weight   parameter  fp32   bf16      128  used in bf16 only
last.bias     parameter  fp32   bf16        8  used in bf16 only"""
    assert frozen.summary() == expected
    assert repr(frozen) == "<hmpx.Frozen Perceptron: 4 of 6 weights low>"
    frozen.undo()
    assert frozen.summary().splitlines()[0].endswith("bytes (undone)")
    assert repr(frozen) == "<hmpx.Frozen Perceptron: undone>"


@pytest.mark.parametrize("keep_fp32", [True, False])
def test_a_model_with_nothing_low_stays_as_it_is(keep_fp32: bool) -> None:
    """No error: it can be called, trained and loaded into; so can one without weights."""
    model, x = nn.LayerNorm(4).eval(), torch.ones(2, 4)
    before = contents(model)
    with convert():
        frozen = hmpx.freeze(model, x, keep_fp32=keep_fp32)
        assert frozen.summary().startswith("LayerNorm: 0 of 2 weights stored in low precision")
        assert_same_contents(model, before)
    assert model(x).dtype is FP32
    model.train()
    model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    assert not hasattr(model.state_dict()._metadata[""], "hmpx")
    frozen.undo()
    with convert():
        assert hmpx.freeze(nn.Identity().eval(), x).summary().count("\n") == 1


# --- errors ------------------------------------------------------------------------------------


class Failing(Perceptron):
    """Counts its calls, then raises."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        super().forward(x)
        raise ValueError("no such token")


def test_freeze_says_what_it_lacks() -> None:
    """What is wrong, where, and the remedy; the model stays as it was."""
    model, x = Perceptron().eval(), torch.ones(2, 8)
    before, hooks = contents(model), attached(model)

    def assert_refused(text: str, *args: Any) -> None:
        with pytest.raises(FreezeError) as caught:
            hmpx.freeze(*args)
        assert str(caught.value) == text

    assert_refused(
        "torch is not converted, so Perceptron uses no weight in low precision; call "
        "hmpx.convert() before hmpx.freeze",
        model, x,
    )  # fmt: skip
    with convert():
        assert_refused(
            "hmpx.freeze takes a torch.nn.Module, not function; pass the model itself, then its "
            "example inputs",
            assert_refused, x,
        )  # fmt: skip
        assert_refused(
            "hmpx.freeze has no example to run Perceptron on; pass its inputs: "
            "hmpx.freeze(model, x)",
            model,
        )
        with hmpx.disable_casts():
            assert_refused(
                "casts are off here, so Perceptron uses no weight in low precision; call "
                "hmpx.freeze outside of the hmpx.disable_casts block, or of the region in which torch.autocast is off",
                model, x,
            )  # fmt: skip
        model.train()
        assert_refused(
            "Perceptron is in training mode, and frozen weights can't be trained; call "
            "model.eval() first",
            model, x,
        )  # fmt: skip
        model.eval()
    assert_same_contents(model, before)
    assert attached(model) == hooks


def test_an_error_of_the_forward_passes_and_the_model_is_untouched() -> None:
    """The buffers that it wrote to included; the error with a note, and the line that raised it last."""
    model = Failing().eval()
    before, hooks = contents(model), attached(model)
    with convert(), pytest.raises(ValueError, match="no such token") as caught:
        hmpx.freeze(model, torch.ones(2, 8))
    assert str(caught.value) == "no such token"
    assert caught.value.__cause__ is None
    assert caught.traceback[-1].path == Path(__file__)
    note = "hmpx.freeze: the forward of Failing raised it, so nothing was frozen; pass an example"
    assert caught.value.__notes__[0].startswith(note)
    assert_same_contents(model, before)
    assert attached(model) == hooks


def test_frozen_models_can_not_be_frozen_again() -> None:
    """Nor what holds one, nor a part of one; after undo they can."""
    model, x = Perceptron().eval(), torch.ones(2, 8)
    with convert():
        frozen = hmpx.freeze(model, x)
        with pytest.raises(FreezeError, match=r"^Perceptron is frozen already; call undo\(\) on"):
            hmpx.freeze(model, x)
        with pytest.raises(FreezeError, match=r"^'0' in Sequential is frozen already; call"):
            hmpx.freeze(nn.Sequential(model).eval(), x)
        with pytest.raises(FreezeError, match=r"^Linear is frozen already"):
            hmpx.freeze(model.first, x)
        with pytest.raises(FreezeError, match=r"^Perceptron is frozen already"):
            hmpx.freeze(copy.deepcopy(model), x)
        frozen.undo()
        hmpx.freeze(nn.Sequential(model).eval(), x).undo()


@pytest.mark.filterwarnings("ignore:nothing will be cast")
def test_a_frozen_model_is_called_under_its_conversion_only() -> None:
    """Not without one, nor where casts are off, nor under another; an equal one will do."""
    model, x = Perceptron().eval(), torch.ones(2, 8)
    with convert():
        expected = model(x)
        frozen = hmpx.freeze(model, x)
        with (
            hmpx.disable_casts(),
            pytest.raises(
                FreezeError,
                match=r"weights in bf16, but casts are off here; call it outside of the",
            ),
        ):
            model(x)
    with pytest.raises(
        FreezeError,
        match=r"^Perceptron is frozen, with weights in bf16, but torch is not converted; call "
        r"hmpx.convert\(\) as it was when the model was frozen, or call undo\(\) on",
    ):
        model(x)
    others: list[dict[str, Any]] = [
        {"low_precision_type": FP16, "device_types": {"cpu"}},
        {"lists": "autocast-cpu", "device_types": {"cpu"}},
        {"policy": hmpx.load_policy(), "device_types": {"cuda"}},
    ]
    for options in others:
        with (
            hmpx.convert(**options),
            pytest.raises(
                FreezeError, match=r"^Perceptron was frozen under another policy than that in force"
            ),
        ):
            model(x)
    with convert():
        assert_equal_but_for_casts(model(x), expected)
    frozen.undo()
    assert model(x).dtype is FP32


FORMAT = {"low_precision_type": "float8_e4m3fn"}

#: Name -> `freeze`'s store, two conversions, and what an error calls their difference.
OTHER_OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "to fast": ("dtype", {}, {"legalize": "fast"}, "legalize="),
    "auto to never": ("dtype", {}, {"legalize": "never"}, ""),
    "casts kept": ("dtype", {}, {"keep_weight_casts": True}, ""),
    "rounding": ("codes", FORMAT, {**FORMAT, "rounding": "toward_zero"}, "rounding= or overflow="),
    "overflow": ("codes", FORMAT, {**FORMAT, "overflow": "saturate"}, "rounding= or overflow="),
    "gradients": ("codes", FORMAT, {**FORMAT, "round_gradients": True}, ""),
}


@pytest.mark.parametrize("make", [lambda model: model, copy.deepcopy], ids=["itself", "its copy"])
@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_options_that_would_store_other_values_are_refused(
    name: str, make: Callable[[nn.Module], nn.Module]
) -> None:
    """Options that don't round weights otherwise give the results of the unfrozen model."""
    store, before, after, difference = OTHER_OPTIONS[name]
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64).eval(), torch.randn(64, 64)
    with torch.no_grad():
        with hmpx.convert(**after, device_types={"cpu"}):
            expected = model(x)
        with hmpx.convert(**before, device_types={"cpu"}):
            frozen = hmpx.freeze(model, x, store=store)
            model(x)
        twin = make(model)
        with hmpx.convert(**after, device_types={"cpu"}):
            if difference:
                with pytest.raises(FreezeError, match=f"frozen under another {difference} than"):
                    twin(x)
            else:
                assert_equal_but_for_casts(twin(x), expected)
    frozen.undo()


def test_training_a_frozen_model_is_refused() -> None:
    """Calls in training mode, and gradients of its weights."""
    model, x = Perceptron().eval(), torch.ones(2, 8, requires_grad=True)
    with convert():
        (expected,) = torch.autograd.grad(model(x).sum(), x)
        frozen = hmpx.freeze(model, x)
        with pytest.raises(FreezeError, match=r"^Perceptron is frozen, but it is in training mode"):
            model.train()(x)
        model.eval()
        with pytest.raises(FreezeError, match=r"^a gradient reached '(first|last)\.(weight|bias)"):
            model(x).sum().backward()
        (actual,) = torch.autograd.grad(model(x).sum(), x)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        (norm,) = torch.autograd.grad(model(x).sum(), model.norm.weight)
        assert norm.dtype is FP32
        frozen.undo()
        model.zero_grad()
        model.train()(x).sum().backward()
        assert model.first.weight.grad is not None


class Nest(nn.Module):
    """Low-precision weights of its own and further in, dropout, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4))
        self.inner = nn.Sequential(Perceptron(), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x) @ self.table)


def losses(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda weights, x: functional_call(model, weights, (x,)).float().sum()


def low_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def call_in_training_mode(path: str) -> Callable[[nn.Module, Tensor], Any]:
    def train(model: nn.Module, x: Tensor) -> None:
        model.get_submodule(path).training = True
        model(x)

    return train


def stacked(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.stack([w, w]) for name, w in low_parameters(model).items()}


#: How one might train a frozen model.
TRAININGS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "train": lambda model, x: model.train()(x),
    "train of what holds it": lambda model, x: nn.Sequential(model).train()(x),
    "training set inside": call_in_training_mode("inner.0"),
    "backward": lambda model, x: model(x).sum().backward(),
    "compiled backward": lambda model, x: (
        torch.compile(model, backend="aot_eager")(x).sum().backward()
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("makes", ["itself", "a copy"])
@pytest.mark.parametrize("name", TRAININGS)
def test_every_way_of_training_a_frozen_model_is_refused(name: str, makes: str) -> None:
    """Undo restores every bit, and the model can be trained."""
    torch.manual_seed(0)
    model, x = Nest().eval(), torch.randn(3, 8)
    before, hooks = contents(model), attached(model)
    with convert():
        frozen = hmpx.freeze(model, x)
        trained = model if makes == "itself" else copy.deepcopy(model)
        values = {key: p.detach().clone() for key, p in trained.named_parameters()}
        with pytest.raises(FreezeError, match=r"can't be trained.* call undo\(\) on"):
            TRAININGS[name](trained, x)
        for key, p in trained.named_parameters():
            if key in values:
                assert torch.equal(p.float(), values[key].float()), key
        del trained
        frozen.undo()
        model.eval()
        assert_same_contents(model, before)
        assert attached(model) == hooks
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.train()(x).float().square().sum().backward()
        optimizer.step()
        assert not torch.equal(model.table, before["table"][-2])


def gradients_of_inputs(model: nn.Module, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).float().sum(), x)


#: What is no training, and gives what the converted model gives.
INFERENCES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "gradients of inputs": gradients_of_inputs,
    "func.grad of inputs, weights given": lambda model, x: grad(losses(model), argnums=1)(
        low_parameters(model), x
    ),
    "ensemble": lambda model, x: vmap(losses(model), (0, None))(stacked(model), x),
    "vmap": lambda model, x: vmap(model)(x[:, None]),
    "norm's gradient": lambda model, x: torch.autograd.grad(
        model(x).float().square().sum(), model.norm.weight
    ),
}


@pytest.mark.parametrize("name", INFERENCES)
def test_what_is_no_training_goes_on_working(name: str) -> None:
    """Gradients of inputs and of weights in fp32, ensembles, calls by functional_call."""
    torch.manual_seed(0)
    model, x = Nest().eval(), torch.randn(3, 8)
    with convert():
        expected = INFERENCES[name](model, x)
        hmpx.freeze(model, x, keep_fp32=False)
        found = INFERENCES[name](model, x)
    if name in {"ensemble", "vmap"}:  # vmap adds biases in the dtype in which they are stored
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=0.02, atol=0.02)
    else:
        assert_equal_but_for_casts(found, expected)


def test_monte_carlo_dropout_and_adapters_work_in_a_frozen_model() -> None:
    """Modules without low-precision weights train, and optimizers step on theirs."""
    model, x = Nest().eval(), torch.randn(16, 8)
    with convert():
        hmpx.freeze(model, x, keep_fp32=False)
        model.inner[1].train()
        assert not torch.equal(model(x), model(x))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.norm.weight.grad = torch.ones(4)
        optimizer.step()
        assert model.norm.weight.eq(0.9).all()


def test_loading_into_a_frozen_model_is_refused() -> None:
    """As a whole, as a part of another, and into its parts."""
    model = Perceptron().eval()
    weights = model.state_dict()
    with convert():
        frozen = hmpx.freeze(model, torch.ones(2, 8))
    with pytest.raises(FreezeError, match=r"^Perceptron is frozen and can't load .*undo\(\) first"):
        model.load_state_dict(weights)
    with pytest.raises(FreezeError, match=r"^'0', a Perceptron, is frozen and can't load weights"):
        nn.Sequential(model).load_state_dict({f"0.{k}": v for k, v in weights.items()})
    with pytest.raises(FreezeError, match=r"^Linear is frozen and can't load weights"):
        model.first.load_state_dict(model.first.state_dict())
    frozen.undo()
    model.load_state_dict(weights)


# --- state dicts and copies --------------------------------------------------------------------


def test_state_dicts_say_what_they_hold(tmp_path: Path) -> None:
    """In metadata that torch.save keeps; an fp32 model loads the values, widened."""
    model, x = Perceptron().eval(), torch.ones(2, 8)
    with convert():
        frozen = hmpx.freeze(model, x)
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        expected = model(x)
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True)
    names = PERCEPTRON_LOW
    assert loaded._metadata[""]["hmpx"] == {
        "frozen": True,
        "low_precision_type": "bfloat16",
        "dtypes": dict.fromkeys(names, "bfloat16"),
    }
    assert {name: value.dtype for name, value in loaded.items() if name in names} == (
        dict.fromkeys(names, BF16)
    )
    fresh = Perceptron().eval()
    fresh.load_state_dict(loaded)
    assert {p.dtype for p in fresh.parameters()} == {FP32}
    with convert():
        assert_equal_but_for_casts(fresh(x), expected)
    inside = nn.Sequential(model).state_dict()
    assert inside._metadata["0"]["hmpx"]["frozen"]
    frozen.undo()
    assert "hmpx" not in model.state_dict()._metadata[""]


@pytest.mark.parametrize("keep_vars", [False, True])
def test_state_dicts_hold_the_values_of_codes(keep_vars: bool, tmp_path: Path) -> None:
    """Of the model, what holds it, and a part of it: a model that is not frozen computes the same with them."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval(), torch.randn(2, 8)
    model[1].bias = model[0].bias
    with hmpx.convert(low_precision_type="float8_e4m3fn", device_types={"cpu"}):
        expected, part = model(x), model[0](x)
        frozen = hmpx.freeze(model, x, store="codes")
        assert len(stored(frozen)) == 4
        assert model[0].weight.dtype is torch.uint8
        torch.save(model.state_dict(keep_vars=keep_vars), tmp_path / "weights.pt")
        loaded = torch.load(tmp_path / "weights.pt", weights_only=True)
        assert loaded._metadata[""]["hmpx"]["dtypes"] == dict.fromkeys(loaded, "float8_e4m3fn")
        assert {value.dtype for value in loaded.values()} == {FP32}
        fresh = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
        fresh.load_state_dict(loaded)
        assert torch.equal(fresh(x), expected)
        held = dict(model.state_dict(keep_vars=True))
        assert held["0.bias"] is held["1.bias"]
        assert torch.equal(functional_call(model, held, (x,)), expected)
        outer = nn.ModuleList([fresh])
        outer.load_state_dict(nn.ModuleList([model]).state_dict(keep_vars=keep_vars))
        assert torch.equal(fresh(x), expected)
        linear = nn.Linear(8, 8)
        linear.load_state_dict(model[0].state_dict(keep_vars=keep_vars))
        assert torch.equal(linear(x), part)
        assert torch.equal(saved(model)(x), expected)
        assert model[0].weight.dtype is saved(model)[0].weight.dtype is torch.uint8
        frozen.undo()
        assert torch.equal(model.state_dict()["0.weight"], model[0].weight)


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def saved(model: nn.Module) -> nn.Module:
    with io.BytesIO() as file:
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [copied, saved])
def test_copies_of_a_frozen_model_are_frozen(make: Callable[[nn.Module], nn.Module]) -> None:
    """With all that this means, and nothing of the fp32 weights; undo is the original's only."""
    model, x = Perceptron().eval(), torch.ones(2, 8)
    model.first.weight = nn.Parameter(torch.randn(16, 8))
    session = convert()
    expected = model(x)
    frozen = hmpx.freeze(model, x)
    twin = make(model)
    frozen.undo()
    assert twin.first.weight.dtype is BF16
    result = twin(x)
    assert result.dtype is FP32
    assert_equal_but_for_casts(result, expected)
    with pytest.raises(FreezeError, match="is frozen, but it is in training mode"):
        twin.train()(x)
    twin.eval()
    with pytest.raises(FreezeError, match="a gradient reached"):
        twin(x).sum().backward()
    with pytest.raises(FreezeError, match="can't load weights"):
        twin.load_state_dict(model.state_dict())
    assert twin.state_dict()._metadata[""]["hmpx"]["frozen"]
    assert attached(make(twin)) == attached(twin)
    session.revert()
    with pytest.raises(FreezeError, match="torch is not converted"):
        twin(x)


@pytest.mark.usefixtures("slow_machine")
def test_weights_that_a_kernel_rounds_while_it_reads_them_are_stored_low() -> None:
    """As linear layers of one or two rows do where the native kernel is slow."""
    model = nn.Linear(512, 512).eval()
    with convert(), hmpx.freeze(model, torch.ones(1, 512)) as frozen:
        assert {each.stored_dtype for each in frozen.weights} == {BF16}


def test_a_saved_frozen_model_holds_no_fp32_copy() -> None:
    """The file is about half as large."""
    model = nn.Linear(512, 512).eval()
    file = io.BytesIO()
    with convert(), hmpx.freeze(model, torch.ones(1, 512)):
        torch.save(model, file)
    assert 512 * 512 * 2 < file.tell() < 512 * 512 * 2.2


RUNNER = """
import sys, torch, hmpx
model, x, out = sys.argv[1:]
hmpx.convert(device_types={"cpu"})
model = torch.load(model, weights_only=False)
torch.save(model(torch.load(x)), out)
"""


def test_a_saved_frozen_model_runs_in_another_process(tmp_path: Path) -> None:
    """Under an equal conversion there, which it recognizes."""
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval(), torch.randn(2, 8)
    with hmpx.convert(device_types={"cpu"}), torch.no_grad():
        expected = model(x)
        hmpx.freeze(model, x, keep_fp32=False)
        torch.save(model, tmp_path / "model.pt")
    torch.save(x, tmp_path / "x.pt")
    paths = [str(tmp_path / name) for name in ("model.pt", "x.pt", "out.pt")]
    done = forks.run("-W", "ignore", "-c", RUNNER, *paths)
    assert done.returncode == 0, done.stderr
    assert_equal_but_for_casts(torch.load(tmp_path / "out.pt"), expected)


# --- graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.filterwarnings("ignore:.*_pytree.*:UserWarning")
def test_exported_programs_hold_the_low_weights(strict: bool, tmp_path: Path) -> None:
    """They run after revert, and the file is loaded without freezing."""
    model, x = Perceptron().eval(), torch.randn(3, 8)
    with convert(), torch.no_grad():
        hmpx.freeze(model, x, keep_fp32=False)
        expected = model(x)
        program = torch.export.export(model, (x,), strict=strict)
        torch.export.save(program, str(tmp_path / "model.pt2"))
    loaded = torch.export.load(str(tmp_path / "model.pt2"))
    for each in (program, loaded):
        assert each.state_dict["first.weight"].dtype is BF16
        assert each.state_dict["norm.weight"].dtype is FP32
        result = each.module()(x)
        assert result.dtype is FP32
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_traced_modules_hold_the_low_weights() -> None:
    """They run after revert."""
    model, x = Perceptron().eval(), torch.randn(3, 8)
    with convert(), torch.no_grad():
        hmpx.freeze(model, x, keep_fp32=False)
        expected = model(x)
        traced = torch.jit.trace(model, x)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert dict(loaded.named_parameters())["first.weight"].dtype is BF16
    torch.testing.assert_close(traced(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(loaded(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
def test_onnx_initializers_are_low(dtype: torch.dtype) -> None:
    """And ONNX's reference evaluator gives what eager mode gives, within one unit of the type."""
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model, x = Perceptron().eval(), torch.randn(3, 8)
    with convert(dtype), torch.no_grad():
        hmpx.freeze(model, x, keep_fp32=False)
        expected = model(x)
        proto = torch.onnx.export(model, (x,), dynamo=True, verbose=False).model_proto
    onnx.checker.check_model(proto, full_check=True)
    types_of = {
        t.name: onnx.TensorProto.DataType.Name(t.data_type) for t in proto.graph.initializer
    }
    low = {BF16: "BFLOAT16", FP16: "FLOAT16"}[dtype]
    assert {types_of[name] for name in ("first.weight", "first.bias", "last.weight")} == {low}
    (actual,) = reference.ReferenceEvaluator(proto).run(
        None, {proto.graph.input[0].name: x.numpy()}
    )
    # The results are below 2, where neighbours lie this far apart; sums are rounded elsewhere.
    atol = {BF16: 2**-7, FP16: 2**-10}[dtype]
    torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("is_frozen_first", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_compiled_models_equal_eager_ones(is_frozen_first: bool, grad: bool) -> None:
    """In one graph, compiled before freezing or after; also within a larger compiled module."""
    model, x = Perceptron().eval(), torch.randn(3, 8)
    outer = nn.Sequential(model, nn.Tanh()).eval()
    with convert(), torch.set_grad_enabled(grad):
        expected = outer(x)
        compiled = [torch.compile(m, backend="aot_eager", fullgraph=True) for m in (model, outer)]
        if not is_frozen_first:
            for function in compiled:
                function(x)
        frozen = hmpx.freeze(model, x)
        result = model(x)
        torch.testing.assert_close(compiled[0](x), result, rtol=0, atol=0)
        torch.testing.assert_close(compiled[1](x), result.tanh(), rtol=0, atol=0)
        frozen.undo()
        assert compiled[0](x).dtype is BF16
        assert_equal_but_for_casts(compiled[1](x), expected)


def test_a_compiled_model_is_frozen_and_returns_nested_outputs() -> None:
    """What torch.compile returned can be frozen itself; outputs are widened inside the graph."""
    wraps = (NESTS["list in dict"], NESTS["named tuple"], NESTS["dataclass in dataclass"])
    for wrap in wraps:
        model, x = Returns(wrap).eval(), torch.ones(2, 4)
        with convert(), torch.no_grad():
            expected = tensors_in(model(x))
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            with hmpx.freeze(compiled, x) as frozen:
                assert set(stored(frozen)) == {
                    "_orig_mod.linear.weight", "_orig_mod.linear.bias",
                }  # fmt: skip
                actual = tensors_in(compiled(x))
                assert {tensor.dtype for tensor in actual} == {FP32}
                assert_equal_but_for_casts(actual, expected)
            with hmpx.freeze(model, x):
                inside = torch.compile(lambda y, m=model: m(y), backend="eager", fullgraph=True)
                actual = tensors_in(inside(x))
                assert {tensor.dtype for tensor in actual} == {FP32}
                assert_equal_but_for_casts(actual, expected)


def test_inductor_runs_frozen_models() -> None:
    """Within what fused kernels keep in fp32; bf16 rounds to 8 bits."""
    model, x = Perceptron().eval(), torch.randn(3, 8)
    with convert(), torch.no_grad(), hmpx.freeze(model, x):
        expected = model(x)
        actual = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)


def test_weights_without_values_are_frozen_too() -> None:
    """So the bytes of a model are known that doesn't fit here; BatchNorm's buffers are read."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()

    with convert():
        frozen = hmpx.freeze(make(), torch.ones(2, 3, 8, 8), keep_fp32=False)
        expected, size = stored(frozen), frozen.summary().splitlines()[0]
        with FakeTensorMode():
            model = make()
            frozen = hmpx.freeze(model, torch.ones(2, 3, 8, 8))
            assert (stored(frozen), frozen.summary().splitlines()[0]) == (expected, size)
            frozen.undo()
            assert {p.dtype for p in model.parameters()} == {FP32}


def test_undo_needs_values() -> None:
    """The meta device has none; without undo() models are frozen there."""
    model = nn.Linear(8, 8, device="meta").eval()
    x = torch.ones(2, 8, device="meta")
    with hmpx.convert(legalize="never", device_types={"meta"}):
        with pytest.raises(
            FreezeError, match=r"'weight' in Linear is on the meta device, .*=False"
        ):
            hmpx.freeze(model, x)
        assert model.weight.dtype is FP32
        hmpx.freeze(model, x, keep_fp32=False)
        assert model.weight.dtype is BF16


def test_prepared_weights_are_gone() -> None:
    """For one version the option has a warning, and stores weights as by default."""
    model, x = nn.Linear(8, 4).eval(), torch.ones(2, 8)
    with hmpx.convert(device_types={"cpu"}), torch.no_grad():
        with pytest.warns(DeprecationWarning, match='it is store="dtype"'):
            frozen = hmpx.freeze(model, x, store="prepared")
        assert [each.stored_dtype for each in frozen.weights] == [torch.bfloat16] * 2
        frozen.undo()
