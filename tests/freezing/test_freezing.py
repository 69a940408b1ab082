"""Freezing: which weights are stored low and why, that results stay equal, and the way back."""

from __future__ import annotations

import copy
import gc
import io
import re
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

import hmpx
from hmpx import FreezeError, Frozen, OptionError, Policy
from hmpx.compute.legalize import legalization
from hmpx.compute.legalize.capability import Capability
from hmpx.freezing import originals
from hmpx.number_formats.rounding import Rounding
from tests import forks

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
    with hmpx.freeze(model, **inputs) as frozen:
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
    "operator": (lambda x, w: x @ w, BF16, "used in bf16 only"),
    "transposed": (lambda x, w: x @ w.t(), BF16, "used in bf16 only"),
    "half of it": (lambda x, w: x @ w[:, :2], BF16, "used in bf16 only"),
    "chunks": (lambda x, w: [x @ part for part in w.chunk(2, 1)], BF16, "used in bf16 only"),
    "view cast by hand": (lambda x, w: F.linear(x, w.t().bfloat16()), BF16, "used in bf16 only"),
    "fp16 by hand": (lambda x, w: w.half() * 2, FP16, "used in fp16 only"),
    "rounded": (lambda x, w: x + w.bfloat16().float(), BF16, "used in bf16 only"),
    "checkpointed": (checkpointed, BF16, "used in bf16 only"),
    "inference mode": (in_inference_mode, BF16, "used in bf16 only"),
    "compiled": (torch.compile(linear, backend="eager"), BF16, "used in bf16 only"),
    "vmap": (
        lambda x, w: torch.vmap(lambda row: F.linear(row, w))(x),
        BF16,
        "used in bf16 only",
    ),
    "both low types": (
        lambda x, w: F.linear(x, w).float() + w.half(),
        FP32,
        "used in bf16, in fp16",
    ),
    "both": (lambda x, w: F.linear(x, w) + w, FP32, "used in bf16, in fp32 by aten.add"),
    "region": (uncast, FP32, "used in fp32 by aten.mm"),
    "widest": (lambda x, w: x.bfloat16() + w, FP32, "used in fp32 by aten.add"),
    "cloned": (lambda x, w: F.linear(x, w.clone()), FP32, "used in fp32 by aten.clone"),
    "list": (lambda x, w: F.linear(x, torch.cat([w, w])), FP32, "used in fp32 by aten.cat"),
    "out=": (
        lambda x, w: torch.mul(x, 2, out=w),
        FP32,
        "written by aten.mul",
    ),
    "no value": (
        lambda x, w: F.linear(x, w) + torch.zeros_like(w),
        FP32,
        "used in bf16, in fp32 by aten.zeros_like",
    ),
    "bits": (
        lambda x, w: w.view(BF16) + w.view(torch.int32).float().repeat(1, 2),
        FP32,
        "used in int32 by aten._to_copy, in bf16 by aten.add",
    ),
    "widened": (lambda x, w: x + w.double(), FP32, "used in fp32 by aten._to_copy"),
    "inside a subclass": (nested, FP32, "used in bf16, in fp32 by aten.sin"),
    "unused": (lambda x, w: x @ x, FP32, "not used by the example"),
    "dtype only": (lambda x, w: x.to(w.dtype), FP32, "not used by the example"),
    "four ops": (
        lambda x, w: w.sin() + w.cos() + w.tan() + w.exp(),
        FP32,
        "used in fp32 by aten.sin, aten.cos, aten.tan and 1 more",
    ),
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


def test_a_higher_order_op_reads_its_operands() -> None:
    """What torch.cond does with a weight is not seen: it is kept."""

    def use(x: Tensor, w: Tensor) -> Tensor:
        branches = (linear, lambda x, w: x * w)
        return torch.cond(x.sum() > 0, *branches, (x, w))

    model, x = OneWeight(use).eval(), torch.randn(4, 4)
    with convert():
        frozen = hmpx.freeze(model, x)
    assert model.weight.dtype is FP32
    assert reasons(frozen)["weight"].startswith("used in fp32 by ")


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


def test_dtensors_are_kept() -> None:
    """They are told by their class."""
    distributed = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed import tensor

    torch.distributed.init_process_group(
        "fake", store=distributed.FakeStore(), rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = Product().eval()
        spread = tensor.distribute_tensor(model.weight.detach(), mesh, [tensor.Replicate()])
        model.weight = nn.Parameter(spread)
        x = tensor.distribute_tensor(torch.ones(2, 4), mesh, [tensor.Replicate()])
        with convert():
            frozen = hmpx.freeze(model, x)
        assert reasons(frozen) == {"weight": "is of class DTensor"}
    finally:
        torch.distributed.destroy_process_group()


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


def test_a_weight_that_the_forward_replaces_is_kept() -> None:
    """As code does that fetches weights from elsewhere for each call."""

    def use(x: Tensor, w: Tensor) -> Tensor:
        w.data = w.detach().clone()
        return F.linear(x, w)

    model = OneWeight(use).eval()
    with convert():
        frozen = hmpx.freeze(model, torch.ones(2, 4))
    assert reasons(frozen) == {"weight": "was replaced while the example ran"}


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


def test_traced_submodules_are_watched_op_by_op() -> None:
    """Their graphs hold the casts; storing the weight makes those do nothing."""
    x = torch.randn(3, 8)
    with convert(), torch.no_grad():
        model = nn.Sequential(torch.jit.trace(nn.Linear(8, 4).eval(), x)).eval()
        expected = model(x)
        frozen = hmpx.freeze(model, x)
        assert set(stored(frozen)) == {"0.weight", "0.bias"}
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


@pytest.mark.parametrize("example_tokens", [1, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_results_are_equal_under_fast_whatever_the_size_of_a_call(
    device: str, example_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever calls leave weights unrounded there; those weights stay fp32, and say why."""
    monkeypatch.setattr(
        legalization, "known_capability", lambda kind, device_type, dtype: DEVICES[device](kind)
    )
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


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_other_modes_store_low_what_is_rounded_on_each_use(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed in fp32 or not."""
    monkeypatch.setattr(
        legalization, "known_capability", lambda *key: Capability(False, SLOW, SLOW)
    )
    torch.manual_seed(0)
    model, x = Wide().eval(), torch.randn(2, 16, 8)
    with hmpx.convert(legalize=mode, device_types={"cpu"}), torch.no_grad():
        expected = model(x)
        frozen = hmpx.freeze(model, x)
        assert {"first.weight", "embed.weight", "attention.in_proj_weight"} <= stored(frozen).keys()
        assert_equal_but_for_casts(model(x), expected)


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
    "widest": ({"low": ["relu"], "widest": ["matmul accumulate=bfloat16"]}, weight_last, False),
    "first, first": (
        {"low": ["relu"], "first": ["matmul accumulate=float16"]},
        weight_first,
        False,
    ),
    "first, last": ({"low": ["relu"], "first": ["matmul accumulate=bfloat16"]}, weight_last, True),
    "named output": (
        {"low": ["relu"], "follow": ["matmul accumulate=bfloat16 output=float16"]},
        weight_last,
        True,
    ),
    "output=input, first": ({"low": ["relu", "matmul output=input"]}, weight_first, False),
    "output=input, last": ({"low": ["relu", "matmul output=input"]}, weight_last, True),
    "accumulated output=input": (
        {"low": ["matmul accumulate=float32 output=input"]},
        weight_first,
        False,
    ),
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
    "section by type": (
        {"low": ["matmul"], "sections": [{"dtype": "bfloat16", "low": ["matmul float16"]}]},
        weight_first,
        False,
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


class FirstInputs(nn.Module):
    """Weights that are the first input of products, the bias of addmm among them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.weight = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(8, 4))
        self.left = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:  # x: [5, 8]
        return self.left @ torch.addmm(self.bias, x, self.weight)


def test_weights_that_are_first_inputs_are_not_stored_as_codes() -> None:
    """Integers there are data, which no op takes for codes."""
    model, x = FirstInputs().eval(), torch.randn(5, 8)
    with hmpx.convert(low_precision_type="float8_e4m3fn", device_types={"cpu"}):
        expected = model(x)
        frozen = hmpx.freeze(model, x, store="codes")
        assert stored(frozen).keys() == {"weight"}
        why = "used in float8_e4m3fn as a first input, but not stored as codes"
        assert reasons(frozen)["bias"] == reasons(frozen)["left"] == why
        assert torch.equal(model(x), expected)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize(
    "op",
    [
        lambda x, w: torch.einsum("ij,bj->bi", w, x),
        lambda x, w: torch.einsum("bj,ij->bi", [x, w]),
        lambda x, w: torch.linalg.multi_dot((x, w, w)),
        lambda x, w: torch.linalg.multi_dot(tensors=[x, w, w]),
    ],
    ids=["einsum", "einsum, list", "multi_dot", "multi_dot by name"],
)
def test_weights_in_lists_are_not_stored_as_codes(op: Callable[..., Tensor]) -> None:
    """Nothing looks for codes there."""
    model, x = Weighted(op).eval(), torch.randn(6, 6)
    policy = {
        "lists": "none",
        "low_precision_type": "float8_e4m3fn",
        "low": ["einsum", "linalg_multi_dot"],
    }
    with hmpx.convert(policy=policy, device_types={"cpu"}):
        expected = model(x)
        frozen = hmpx.freeze(model, x, store="codes")
        assert torch.equal(model(x), expected)
    assert reasons(frozen) == {"weight": "used in float8_e4m3fn in a list, but not stored as codes"}


def test_values_of_codes_are_not_rounded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are values of the format already; what else comes into an op is rounded."""
    model, x = nn.Linear(6, 7).eval(), torch.randn(5, 6)
    with hmpx.convert(low_precision_type="float8_e4m3fn", device_types={"cpu"}):
        expected = model(x)
        hmpx.freeze(model, x, store="codes")
        shapes = []
        original = Rounding.__call__

        def noted(self: Rounding, tensor: Tensor, *rest: Any) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return original(self, tensor, *rest)

        monkeypatch.setattr(Rounding, "__call__", noted)
        assert torch.equal(model(x), expected)
    assert shapes == [(5, 6), (5, 7)]


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


def test_two_parameters_of_one_memory_are_kept_if_one_use_is_not_low() -> None:
    """A use of one is a use of both."""
    memory = torch.randn(4, 4)
    model = Two(memory, memory, linear, lambda x, w: x[:, :1] + w[:2]).eval()
    with convert():
        frozen = hmpx.freeze(model, torch.ones(2, 4))
    assert not stored(frozen)
    assert reasons(frozen)["first"] == "used in bf16, in fp32 by aten.add"


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


def test_disjoint_views_of_one_storage_are_judged_apart() -> None:
    """As parts of one flat buffer; on undo they are such parts again."""
    memory = torch.randn(8, 4)
    model = Two(memory[:4], memory[4:], linear, lambda x, w: x[:, :1] + w[:2]).eval()
    before = contents(model)
    with convert():
        frozen = hmpx.freeze(model, torch.ones(2, 4))
        assert stored(frozen) == {"first": BF16}
        frozen.undo()
    assert_same_contents(model, before)


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


@dataclass(frozen=True)
class Fixed:
    a: Tensor
    n: int = 3
    late: Any = field(init=False)


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
    "ordered dict": lambda low, x: OrderedDict(b=low, a=x),
    "dataclass in dataclass": lambda low, x: Open([low], {"x": Open(low, {"y": x})}),
    "return type": lambda low, x: torch.return_types.sort((low, x.long())),
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


def test_outputs_are_not_changed_in_place() -> None:
    """A result that the model keeps stays as it was; a frozen dataclass is copied too."""
    kept: list[Any] = []

    def wrap(low: Tensor, x: Tensor) -> Any:
        kept.append({"a": Fixed(low), "same": Fixed(x)})
        return kept[-1]

    model = Returns(wrap).eval()
    with convert(), hmpx.freeze(model, torch.ones(2, 4)):
        result = model(torch.ones(2, 4))
    assert result is not kept[-1]
    assert (kept[-1]["a"].a.dtype, result["a"].a.dtype) == (BF16, FP32)
    assert result["same"] is kept[-1]["same"]


@pytest.mark.parametrize("outputs", ["low", "", None, torch.float32])
def test_outputs_has_two_values(outputs: Any) -> None:
    """Anything else is an error that names them."""
    with pytest.raises(OptionError, match=r"^outputs must be 'fp32' or 'keep', not .+$"):
        hmpx.freeze(nn.Linear(4, 4).eval(), torch.ones(4), outputs=outputs)


# --- the way back ------------------------------------------------------------------------------


def test_dynamo_is_not_imported() -> None:
    """Its 70 MB would be more than most models save."""
    code = (
        "import sys, torch, hmpx\n"
        "hmpx.convert(device_types={'cpu'})\n"
        "model = torch.nn.Linear(64, 64).eval()\n"
        "hmpx.freeze(model, torch.randn(2, 64))\n"
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


def test_undo_works_after_revert() -> None:
    """The weights do not depend on the conversion."""
    model = Perceptron().eval()
    before = contents(model)
    with convert():
        frozen = hmpx.freeze(model, torch.ones(2, 8))
    frozen.undo()
    assert_same_contents(model, before)


def test_undo_gives_back_what_the_model_had_under_train() -> None:
    """An attribute of the model's own, and one that somebody put there meanwhile."""
    model = Perceptron().eval()
    own = vars(model)["train"] = nn.Module.train.__get__(model)
    with convert():
        with hmpx.freeze(model, torch.ones(2, 8)):
            assert vars(model)["train"] is not own
        assert vars(model)["train"] is own
        with hmpx.freeze(model, torch.ones(2, 8)):
            refuses = vars(model)["train"]
            theirs = vars(model)["train"] = lambda mode=True: refuses(mode)
        assert vars(model)["train"] is theirs
        assert model.train().training


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


def set_data(model: nn.Module) -> None:
    model.first.weight.data = torch.zeros(3, 5)
    model.table.data = torch.zeros(4, 4, dtype=FP16)


def prune_for_good(model: nn.Module) -> None:
    prune.l1_unstructured(model.first, "weight", 0.5)
    prune.remove(model.first, "weight")


def swap_on_conversion(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.half()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def new_parameters_on_conversion(model: nn.Module) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        for module in (model.first, model.last, model.tied):
            module.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def replace_by_equal(model: nn.Module) -> None:
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())
    model.scratch = model.scratch.clone()


def spectral_and_back(model: nn.Module) -> None:
    parametrizations.spectral_norm(model.first)
    with torch.no_grad():
        model(torch.ones(2, 8))
    parametrize.remove_parametrizations(model.first, "weight")


def load_refused(model: nn.Module) -> None:
    for assign in (False, True):
        with pytest.raises(FreezeError):
            model.load_state_dict(Buffered().state_dict(), assign=assign)


#: What users do to a frozen model, after which `undo` restores every bit.
HARMLESS: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda model: None,
    "written to": write,
    "data set": set_data,
    "shared": lambda model: model.share_memory(),
    "copied": copy.deepcopy,
    "called": lambda model: [model(torch.ones(3, 8)).sum(), model.state_dict()],
    "requires_grad_": lambda model: model.first.requires_grad_(False),
    "pruned for good": prune_for_good,
    "parametrized and back": spectral_and_back,
    "load_state_dict": load_refused,
    "replaced by an equal tensor": replace_by_equal,
    "new parameters": new_parameters_on_conversion,
    "swapped tensors": swap_on_conversion,
    "functional_call": lambda model: functional_call(
        model, {k: v.detach() for k, v in model.named_parameters()}, (torch.ones(2, 8),)
    ),
    "to the CPU": lambda model: model.to("cpu"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_undo_restores_every_bit_whatever_was_done(name: str) -> None:
    """Values, storages, strides, objects; except what was never frozen, which `to` converted."""
    with convert():
        model, frozen, before = frozen_and_before()
        low = stored(frozen)
        assert {"table", "scratch", "tied.table", "first.weight"} <= low.keys()
        HARMLESS[name](model)
        frozen.undo()
    if name in {"new parameters", "swapped tensors"}:
        before = {key: before[key] for key in low}
        now = {key: contents(model)[key] for key in low}
        assert now.keys() == before.keys()
        for key, (*_, values, requires_grad) in now.items():
            assert torch.equal(values, before[key][-2]), key
            assert requires_grad == before[key][-1]
    else:
        assert_same_contents(model, before)
    assert model.tied.table is model.table
    frozen.undo()


@pytest.mark.parametrize("dtype", [torch.float64, FP32, FP16, BF16])
def test_undo_restores_what_a_conversion_of_the_whole_model_replaced(dtype: torch.dtype) -> None:
    """`to` gives buffers new tensors; those that were frozen are what they were, in fp32."""
    with convert():
        model, frozen, before = frozen_and_before()
        model.to(dtype)
        frozen.undo()
    now = contents(model)
    for name in stored(frozen):
        torch.testing.assert_close(now[name][3], before[name][3], rtol=0, atol=0)
        assert now[name][:3] == before[name][:3], name
    assert now["norm.weight"][3].dtype is dtype


def test_undo_gives_modules_that_left_the_model_their_weights_too() -> None:
    """One was taken out, one is inside of another module now, one is a new one."""
    with convert():
        model, frozen, before = frozen_and_before()
        first, last = model.first, model.last
        model.first = nn.Linear(8, 16)
        model.last = nn.Sequential(last)
        del model.tied
        frozen.undo()
    assert model.first.weight.dtype is FP32
    for module, name in ((first, "first"), (last, "last")):
        assert torch.equal(module.weight, before[f"{name}.weight"][3])
        assert module.train().training
    assert "train" not in vars(model)


def to_meta(model: nn.Module) -> None:
    model.to("meta")


def swap_to_meta(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.first.to("meta")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def delete(model: nn.Module) -> None:
    del model.first.weight
    del model.table


def replace(model: nn.Module) -> None:
    model.first.weight = nn.Parameter(torch.zeros(16, 8))
    model.scratch = None


def replace_module_by_copy(model: nn.Module) -> None:
    model.first = copy.deepcopy(model.first)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


#: What users do -> (what undo says, and which weights strict=False restores none the less).
HARMFUL: dict[str, tuple[Callable[[nn.Module], Any], str, set[str]]] = {
    "to meta": (
        to_meta,
        r"'table', 'tied\.table', .*, 'tied\.weight' are on the meta device, which",
        set(),
    ),
    "swapped to meta": (
        swap_to_meta,
        r"'first\.weight', 'first\.bias' are on the meta device, which holds no values; put back",
        {"last.weight", "table"},
    ),
    "deleted": (
        delete,
        r"'table', 'first\.weight' are no longer a parameter or buffer of its module; put",
        {"last.weight", "scratch"},
    ),
    "replaced": (
        replace,
        r"'scratch' is no longer a .*; 'first\.weight' is replaced by another tensor; put",
        {"last.weight", "table"},
    ),
    "weight_norm": (
        lambda model: parametrizations.weight_norm(model.first),
        r"'first\.weight' is computed by a parametrization; put back",
        {"last.weight", "first.bias", "table"},
    ),
    "old weight_norm": (
        lambda model: nn.utils.weight_norm(model.first),
        r"'first\.weight' is no longer a parameter or buffer of its module; put",
        {"last.weight", "first.bias", "table"},
    ),
    "spectral_norm": (
        hmpx.disable_casts()(lambda model: parametrizations.spectral_norm(model.first)),
        r"'first\.weight' is computed by a parametrization; put back",
        {"last.weight", "table"},
    ),
    "parametrized": (
        lambda model: parametrize.register_parametrization(model.last, "bias", Doubled()),
        r"'last\.bias' is computed by a parametrization; put back",
        {"first.weight", "table"},
    ),
    "pruned": (
        lambda model: prune.l1_unstructured(model.first, "weight", 0.5),
        r"'first\.weight' is no longer a parameter or buffer of its module; put",
        {"last.weight", "table"},
    ),
    "module copied": (
        replace_module_by_copy,
        r"'first' is a copy of a frozen module; put back",
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


def test_what_was_put_back_can_be_restored_later() -> None:
    """Before or after the others were; these are not restored twice."""
    with convert():
        model, frozen, before = frozen_and_before()
        weight, table = model.first.weight, model.table
        del model.first.weight
        with pytest.raises(FreezeError):
            frozen.undo()
        model.first.weight = weight
        del model.table
        frozen.undo(strict=False)
        assert model.first.weight.dtype is FP32
        assert "undone" not in repr(frozen)
        with torch.no_grad():
            model.first.weight.zero_()
        with pytest.raises(FreezeError, match=r"'table' is no longer"):
            frozen.undo()
        model.register_buffer("table", table)
        frozen.undo()
        assert not model.first.weight.any()
        assert model.table is model.tied.table
        assert torch.equal(model.table, before["table"][-2])
        assert "undone" in repr(frozen)


def test_undo_raises_in_a_with_block_too() -> None:
    """What the block did is not passed over."""
    model = Perceptron().eval()
    text = "on the meta device"
    with convert(), pytest.raises(FreezeError, match=text), hmpx.freeze(model, torch.ones(2, 8)):
        model.to("meta")


@pytest.mark.parametrize("value", ["yes", None, 2, torch.ones(1)])
def test_flags_are_true_or_false(value: Any) -> None:
    """Anything else is an error that names the argument."""
    model, x = Perceptron().eval(), torch.ones(2, 8)
    with pytest.raises(OptionError, match=r"^keep_fp32 must be True or False, not "):
        hmpx.freeze(model, x, keep_fp32=value)
    with convert():
        frozen = hmpx.freeze(model, x)
        with pytest.raises(OptionError, match=r"^strict must be True or False, not "):
            frozen.undo(strict=value)
        assert model.first.weight.dtype is BF16


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


def test_the_fp32_weights_live_as_long_as_what_freeze_returned() -> None:
    """The model does not keep them: no reference, no memory."""
    model = Perceptron().eval()
    storage = StorageWeakRef(model.first.weight.untyped_storage())
    gc.disable()
    try:
        with convert():
            frozen = hmpx.freeze(model, torch.ones(2, 8))
        assert not storage.expired()
        del frozen
        assert storage.expired()
    finally:
        gc.enable()


def test_a_frozen_model_is_freed_without_a_collection() -> None:
    """What hangs on it makes no cycle."""
    model = Perceptron().eval()
    seen = weakref.ref(model)
    gc.disable()
    try:
        with convert():
            hmpx.freeze(model, torch.ones(2, 8))
            gc.collect()
            del model
        assert seen() is None
    finally:
        gc.enable()


def test_on_an_accelerator_the_fp32_weights_wait_in_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Played on the CPU: storages are copied and freed, and come back with their aliases."""
    monkeypatch.setattr(originals, "_is_host", lambda device: False)
    shared = torch.ones(8, 4)

    class Parts(nn.Module):
        def __init__(self, memory: Tensor) -> None:
            super().__init__()
            self.views = Two(memory[:4], memory[4:], linear, linear)
            self.others = Two(torch.randn(4, 4).t(), shared[:4], linear, linear)
            self.register_buffer("rest", shared[4:])

        def forward(self, x: Tensor) -> list[Tensor]:
            return self.views(x) + self.others(x)

    memory = torch.randn(8, 4)
    model = Parts(memory).eval()
    values = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    strides = {name: tensor.stride() for name, tensor in model.named_parameters()}
    old = StorageWeakRef(memory.untyped_storage())
    del memory
    with convert():
        frozen = hmpx.freeze(model, torch.ones(2, 4))
        assert len(stored(frozen)) == 4
        assert old.expired()
        frozen.undo()
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor.detach(), values[name], rtol=0, atol=0)
        assert tensor.stride() == strides[name]
    first, second = model.views.first, model.views.second
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    # The rest of the storage was kept: it is still the one of the second half.
    assert model.others.second.untyped_storage()._cdata == shared.untyped_storage()._cdata


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
        hmpx.freeze(nn.Sequential(model).eval(), x)


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
    "from fast": ("dtype", {"legalize": "fast"}, {"legalize": "always"}, ""),
    "auto to never": ("dtype", {}, {"legalize": "never"}, ""),
    "casts kept": ("dtype", {}, {"keep_weight_casts": True, "reuse_casts": True}, ""),
    "rounding": ("codes", FORMAT, {**FORMAT, "rounding": "toward_zero"}, "rounding= or overflow="),
    "stochastic": ("codes", FORMAT, {**FORMAT, "rounding": "stochastic"}, "rounding= or overflow="),
    "overflow": ("codes", FORMAT, {**FORMAT, "overflow": "saturate"}, "rounding= or overflow="),
    "no codes": ("dtype", FORMAT, {**FORMAT, "rounding": "toward_zero"}, ""),
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


def rule_of(verdict: Any, unused: Any = None) -> Callable[[hmpx.Call], Any]:
    return lambda call: verdict


@pytest.mark.parametrize(
    ("rule", "is_alike"),
    [
        (rule_of(hmpx.ALLOW), True),
        (rule_of(hmpx.Decision(hmpx.ALLOW, torch.bfloat16)), False),
        (rule_of(hmpx.DENY), False),
        (rule_of(hmpx.ALLOW, torch.ones(2)), True),
    ],
    ids=["the same code", "another value", "another verdict", "another argument"],
)
def test_another_rule_of_the_same_name_is_another_policy(rule: Any, is_alike: bool) -> None:
    """As of functions that are made by a function, or defined again in a notebook."""
    model, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    hmpx.register_rule("linear", rule_of(hmpx.ALLOW))
    with hmpx.convert(device_types={"cpu"}):
        try:
            frozen = hmpx.freeze(model, x)
            expected = model(x)
            hmpx.unregister_rule("linear")
            hmpx.register_rule("linear", rule)
            if is_alike:
                assert torch.equal(model(x), expected)
            else:
                with pytest.raises(FreezeError, match="frozen under another policy"):
                    model(x)
            frozen.undo()
        finally:
            hmpx.unregister_rule("linear")


def test_training_a_frozen_model_is_refused() -> None:
    """Its ``train``, that of what holds it, and gradients of its weights; eval is not."""
    model, x = Perceptron().eval(), torch.ones(2, 8, requires_grad=True)
    with convert():
        (expected,) = torch.autograd.grad(model(x).sum(), x)
        frozen = hmpx.freeze(model, x)
        for train in (model.train, nn.Sequential(model).train):
            with pytest.raises(FreezeError, match=r"^Perceptron is frozen: its low-precision wei"):
                train()
        assert not model.training
        assert model.eval() is model
        assert model.train(False) is model
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


def with_gradients(step: Callable[[torch.optim.Optimizer], Any], **options: Any) -> Any:
    """Returns what sets gradients by hand, and steps."""

    def train(model: nn.Module, x: Tensor) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        step(optimizer)

    return train


def take_gradients(model: nn.Module, x: Tensor) -> Any:
    return torch.autograd.grad(model(x).sum(), model.table)


def losses(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda weights, x: functional_call(model, weights, (x,)).float().sum()


def low_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def call_in_training_mode(path: str) -> Callable[[nn.Module, Tensor], Any]:
    def train(model: nn.Module, x: Tensor) -> None:
        model.get_submodule(path).training = True
        model(x)

    return train


def backward_after_to(model: nn.Module, x: Tensor) -> None:
    model.inner[0].first.half().bfloat16()
    model.inner[0].first(x).sum().backward()


def dual(model: nn.Module, x: Tensor) -> None:
    with forward_ad.dual_level():
        weights = {k: forward_ad.make_dual(w, w) for k, w in low_parameters(model).items()}
        functional_call(model, weights, (x,))


def normalized(model: nn.Module, x: Tensor) -> None:
    parametrizations.weight_norm(model.inner[0].first)
    model(x).sum().backward()


def replaced_weight(model: nn.Module, x: Tensor) -> None:
    with hmpx.disable_casts():
        model.table = nn.Parameter(model.table.detach().clone())
    model(x).sum().backward()


def stacked(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.stack([w, w]) for name, w in low_parameters(model).items()}


#: How one might train a frozen model.
TRAININGS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "train": lambda model, x: model.train(),
    "train of a submodule": lambda model, x: model.inner.train(),
    "train of a leaf": lambda model, x: model.inner[0].first.train(),
    "train of what holds it": lambda model, x: nn.Sequential(model).train(),
    "train of the class": lambda model, x: nn.Module.train(model),
    "training set": call_in_training_mode(""),
    "training set inside": call_in_training_mode("inner.0"),
    "training set of a leaf": call_in_training_mode("inner.0.first"),
    "backward": lambda model, x: model(x).sum().backward(),
    "backward after requires_grad_": lambda model, x: (
        model.requires_grad_(False).requires_grad_(True)(x).sum().backward()
    ),
    "backward after to": backward_after_to,
    "backward through a submodule": lambda model, x: model.inner[0](x).sum().backward(),
    "autograd.grad": take_gradients,
    "compiled backward": lambda model, x: (
        torch.compile(model, backend="aot_eager")(x).sum().backward()
    ),
    "checkpointed": lambda model, x: (
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    ),
    "step": with_gradients(lambda optimizer: optimizer.step()),
    "step, foreach": with_gradients(lambda optimizer: optimizer.step(), foreach=True),
    "step, fused": with_gradients(lambda optimizer: optimizer.step(), fused=True),
    "step, casts off": with_gradients(hmpx.disable_casts()(lambda optimizer: optimizer.step())),
    "func.grad": lambda model, x: grad(losses(model))(low_parameters(model), x),
    "func.grad of parameters": lambda model, x: grad(losses(model))(
        dict(model.named_parameters()), x
    ),
    "func.grad in no_grad": torch.no_grad()(
        lambda model, x: grad(losses(model))(low_parameters(model), x)
    ),
    "per sample": lambda model, x: vmap(grad(losses(model)), (None, 0))(
        low_parameters(model), x[:, None]
    ),
    "ensemble": lambda model, x: grad(
        lambda weights: vmap(losses(model), (0, None))(weights, x).sum()
    )(stacked(model)),
    "func.vjp": lambda model, x: vjp(lambda w: losses(model)(w, x), low_parameters(model)),
    "func.jvp": lambda model, x: jvp(
        lambda w: losses(model)(w, x), (low_parameters(model),), (low_parameters(model),)
    ),
    "forward mode": dual,
    "functional_call": lambda model, x: functional_call(
        model, {k: w.requires_grad_() for k, w in low_parameters(model).items()}, (x,)
    ),
    "weight_norm": normalized,
    "replaced": replaced_weight,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("makes", ["itself", "a copy"])
@pytest.mark.parametrize("name", TRAININGS)
def test_every_way_of_training_a_frozen_model_is_refused(name: str, makes: str) -> None:
    """Before anything has changed; undo restores every bit, and the model can be trained."""
    torch.manual_seed(0)
    model, x = Nest().eval(), torch.randn(3, 8)
    before, hooks = contents(model), attached(model)
    others = set(_global_optimizer_pre_hooks)
    with convert():
        frozen = hmpx.freeze(model, x)
        own = _global_optimizer_pre_hooks.keys() - others
        assert own
        trained = model if makes == "itself" else copy.deepcopy(model)
        values = {key: p.detach().clone() for key, p in trained.named_parameters()}
        with pytest.raises(FreezeError, match=r"can't be trained.* call undo\(\) on"):
            TRAININGS[name](trained, x)
        for key, p in trained.named_parameters():
            if key in values:
                assert torch.equal(p.float(), values[key].float()), key
        del trained
        if name in {"weight_norm", "replaced"} and makes == "itself":
            return
        frozen.undo()
        model.eval()
        assert_same_contents(model, before)
        assert attached(model) == hooks
        assert not own & _global_optimizer_pre_hooks.keys()
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
    "func.grad of inputs": lambda model, x: grad(lambda x: model(x).float().sum())(x),
    "func.grad of inputs, weights given": lambda model, x: grad(losses(model), argnums=1)(
        low_parameters(model), x
    ),
    "jvp of inputs": lambda model, x: jvp(lambda x: model(x).float(), (x,), (x,)),
    "functional_call": lambda model, x: functional_call(model, low_parameters(model), (x,)),
    "ensemble": lambda model, x: vmap(losses(model), (0, None))(stacked(model), x),
    "vmap": lambda model, x: vmap(model)(x[:, None]),
    "eval": lambda model, x: nn.Sequential(model).eval()(x),
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
        hmpx.freeze(model, x)
        assert_equal_but_for_casts(INFERENCES[name](model, x), expected)


def test_monte_carlo_dropout_and_adapters_work_in_a_frozen_model() -> None:
    """Modules without low-precision weights train, and optimizers step on theirs."""
    model, x = Nest().eval(), torch.randn(16, 8)
    with convert():
        hmpx.freeze(model, x)
        model.inner[1].train()
        assert not torch.equal(model(x), model(x))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.norm.weight.grad = torch.ones(4)
        optimizer.step()
        assert model.norm.weight.eq(0.9).all()


def test_loading_into_a_part_of_a_frozen_model_changes_nothing() -> None:
    """Nor what lies before its first low-precision weight."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Normed().eval()
    weights = {name: torch.zeros_like(w) for name, w in model.inner.state_dict().items()}
    with convert():
        hmpx.freeze(model, torch.ones(2, 8))
        with pytest.raises(FreezeError, match=r"^Sequential is frozen and can't load weights"):
            model.inner.load_state_dict(weights)
    assert model.inner[0].weight.all()


def test_what_watches_optimizers_goes_with_the_model() -> None:
    """No hook of it is left."""
    gc.collect()
    before = len(_global_optimizer_pre_hooks)
    model = Perceptron().eval()
    gc.disable()
    try:
        with convert():
            hmpx.freeze(model, torch.ones(2, 8))
            gc.collect()
            twin = saved(model)
            assert len(_global_optimizer_pre_hooks) == before + 2
            del model, twin
            gc.collect()
        assert len(_global_optimizer_pre_hooks) == before
    finally:
        gc.enable()


def test_weights_that_begin_to_require_gradients_later_refuse_them() -> None:
    """Models are often frozen after requires_grad_(False)."""
    model = Perceptron().eval().requires_grad_(False)
    with convert():
        with hmpx.freeze(model, torch.ones(2, 8)):
            assert not any(p.requires_grad for p in model.parameters())
            model.requires_grad_(True)
            with pytest.raises(FreezeError, match="a gradient reached"):
                model(torch.ones(2, 8)).sum().backward()
        model(torch.ones(2, 8)).sum().backward()


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
    with pytest.raises(FreezeError, match="is frozen: its low-precision weights"):
        twin.train()
    assert twin.eval() is twin
    with pytest.raises(FreezeError, match="a gradient reached"):
        twin(x).sum().backward()
    with pytest.raises(FreezeError, match="can't load weights"):
        twin.load_state_dict(model.state_dict())
    assert twin.state_dict()._metadata[""]["hmpx"]["frozen"]
    assert attached(make(twin)) == attached(twin)
    session.revert()
    with pytest.raises(FreezeError, match="torch is not converted"):
        twin(x)


def test_a_saved_frozen_model_holds_no_fp32_copy() -> None:
    """The file is about half as large."""
    model = nn.Linear(512, 512).eval()
    with convert():
        hmpx.freeze(model, torch.ones(1, 512))
    file = io.BytesIO()
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
        hmpx.freeze(model, x)
        torch.save(model, tmp_path / "model.pt")
    torch.save(x, tmp_path / "x.pt")
    paths = [str(tmp_path / name) for name in ("model.pt", "x.pt", "out.pt")]
    done = forks.run("-W", "ignore", "-c", RUNNER, *paths)
    assert done.returncode == 0, done.stderr
    assert_equal_but_for_casts(torch.load(tmp_path / "out.pt"), expected)


def test_the_guide_shows_what_happens() -> None:
    """The example of docs/freeze.md, run as a script, prints the text beside it."""
    guide = (Path(__file__).parents[2] / "docs" / "freeze.md").read_text(encoding="utf-8")
    code, printed = (
        re.findall(rf"^```{language}\n(.*?)^```$", guide, flags=re.MULTILINE | re.DOTALL)[0]
        for language in ("python", "text")
    )
    run = forks.run("-W", "ignore", "-c", code)
    assert run.stdout == printed


# --- graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.filterwarnings("ignore:.*_pytree.*:UserWarning")
def test_exported_programs_hold_the_low_weights(strict: bool, tmp_path: Path) -> None:
    """They run after revert, and the file is loaded without freezing."""
    model, x = Perceptron().eval(), torch.randn(3, 8)
    with convert(), torch.no_grad():
        hmpx.freeze(model, x)
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
        hmpx.freeze(model, x)
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
        hmpx.freeze(model, x)
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


def undone_outside(device: str) -> list[list[str]]:
    """Returns dtypes and devices of a model without values that was frozen, and is no longer."""
    with FakeTensorMode():
        model = nn.Sequential(*[nn.Linear(8, 8, device=device) for _ in range(2)]).eval()
        model[1].weight = model[0].weight
        x = torch.ones(2, 8, device=device)
    with hmpx.convert(legalize="never", device_types={device}):
        frozen = hmpx.freeze(model, x)
        assert {p.dtype for p in model.parameters()} == {BF16}
        frozen.undo()
    assert model[1].weight is model[0].weight
    return [[str(p.dtype), p.device.type] for p in model.parameters()]


def test_weights_without_values_are_undone_outside_of_their_mode(
    on_fake_cuda: Callable[..., Any],
) -> None:
    """On devices that aren't there, too."""
    assert undone_outside("cpu") == [["torch.float32", "cpu"]] * 3
    assert on_fake_cuda(undone_outside, "cuda") == [["torch.float32", "cuda"]] * 3


@pytest.mark.parametrize("keep_fp32", [True, False])
def test_weights_with_values_keep_them_under_a_fake_mode(keep_fp32: bool) -> None:
    """There their low-precision copies would have none."""
    model = Perceptron().eval()
    before = [p.detach().clone() for p in model.parameters()]
    with (
        convert(),
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(
            FreezeError, match=r"'first\.weight' in Perceptron has values, .* FakeTensor"
        ),
    ):
        hmpx.freeze(model, torch.ones(2, 8), keep_fp32=keep_fp32)
    assert all(map(torch.equal, model.parameters(), before))


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


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_undo_that_is_interrupted_is_made_whole_or_not_at_all(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand the model stays frozen, and can be undone later; a block ends all the same."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]).eval()
    x, expected = torch.ones(2, 8), [p.detach().clone() for p in model.parameters()]
    write, count = originals._write, 0

    def interrupted(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt
        write(*args)

    with convert():
        with pytest.raises(KeyboardInterrupt), hmpx.freeze(model, x):
            monkeypatch.setattr(originals, "_write", interrupted)
        assert [*map(torch.equal, model.parameters(), expected)] == [True] * 6
        frozen = hmpx.freeze(model, x)
        count = 0
        with pytest.raises(KeyboardInterrupt):
            frozen.undo()
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        frozen.undo()
    assert [*map(torch.equal, model.parameters(), expected)] == [True] * 6
