"""`freeze(store="bfloat16", compute="float32")`: 16-bit weights, and the results of fp32 on their values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hmpx
from tests.tracing.test_invariance import GPT


class Tied(nn.Module):
    """A model that reads another module's parameter, an LSTM's list of parameters, and attention's."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16, padding_idx=0)
        self.states = nn.LSTM(16, 16, batch_first=True)
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.norm, self.scales = nn.BatchNorm1d(16), nn.ParameterList([torch.full((16,), 1.01)])
        self.head = nn.Linear(16, 32)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """Takes [batch, time]."""
        x, _ = self.states(self.words(words))
        x = self.norm(self.mix(x).transpose(1, 2)).transpose(1, 2) * self.scales[0]
        scores: Tensor = self.head(x) + x @ self.words.weight.T
        return scores


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied().eval()


WORDS = torch.arange(12).view(3, 4)


def rounded(model: nn.Module) -> nn.Module:
    """Returns a copy in float32 with the values of bfloat16."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(parameter.bfloat16())
    return found


@torch.no_grad()
def test_results_are_those_of_float32_on_the_stored_values(model: Tied) -> None:
    """Bit for bit, also of a copy; `undo` gives the weights back."""
    before = {name: each.clone() for name, each in model.state_dict().items()}
    expected = rounded(model)(WORDS)
    frozen = hmpx.freeze(model, store="bfloat16", compute="float32")
    assert torch.equal(model(WORDS), expected)
    assert torch.equal(copy.deepcopy(model)(WORDS), expected)
    stored = dict(nn.Module.named_parameters(model)).values()
    assert {each.dtype for each in stored} == {torch.bfloat16}
    assert model.head.weight.dtype is torch.float32
    assert isinstance(model.head, nn.Linear)
    assert torch.compile(model.mix, backend="eager")(model.words(WORDS)).dtype is torch.float32
    low = sum(each.stored_bytes for each in frozen.weights if each.kind == "parameter")
    assert low == sum(each.nbytes for each in stored)
    assert "head.weight                    parameter  fp32   bf16        0  is words.weight" in (
        frozen.summary()
    )
    frozen.undo()
    assert type(model.head) is nn.Linear
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_state_dicts_are_plain(model: Tied) -> None:
    """They have the model's names and 16 bits, and can be loaded elsewhere."""
    original = copy.deepcopy(model).state_dict()
    frozen = hmpx.freeze(model, store="bfloat16", compute="float32")
    state = model.state_dict()
    assert state.keys() == original.keys()
    assert state["words.weight"].dtype is torch.bfloat16
    other = Tied().eval()
    other.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(model(WORDS), other(WORDS))
    frozen.undo()


class ReadsParameters(nn.Module):
    """Casts its input to the dtype of its parameters, and computes with what `parameters()` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """Takes [batch, 8]."""
        dtype = next(self.blocks.parameters()).dtype
        for block in self.blocks:
            x = nn.functional.linear(block(x.to(dtype)), *block.parameters())
        return x * dict(self.named_parameters())["blocks.1.bias"]


@torch.no_grad()
@pytest.mark.parametrize("is_compiled", [False, True])
def test_parameters_are_what_reading_them_gives(is_compiled: bool) -> None:
    torch.manual_seed(0)
    model, x = ReadsParameters().eval(), torch.randn(4, 8)
    expected = rounded(model)(x)
    stored = dict(model.named_parameters())
    frozen = hmpx.freeze(model, store="bfloat16", compute="float32")
    called = torch.compile(model, backend="eager") if is_compiled else model
    assert torch.equal(called(x), expected)
    assert [each.dtype for each in model.parameters()] == [torch.float32] * 3
    tied = dict(model.named_parameters(remove_duplicate=False))
    assert tied["blocks.0.weight"] is tied["blocks.1.weight"] is stored["blocks.0.weight"]
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), expected)
    assert {each.dtype for each in program.state_dict.values()} == {torch.bfloat16}
    assert "largest effect" in str(hmpx.compare(model, x))
    assert all(each.requires_grad for each in stored.values())
    assert (
        torch.func.functional_call(model, {"blocks.0.weight": torch.zeros(8, 8)}, x)
        .isfinite()
        .all()
    )
    model.requires_grad_(False)
    assert not any(each.requires_grad for each in stored.values())
    model.zero_grad()
    model.to(torch.float64)
    frozen.undo()
    assert dict(model.named_parameters()).keys() == stored.keys()
    assert all(each.dtype is torch.float32 for each in model.parameters())
    assert type(model.blocks) is nn.ModuleList


@torch.no_grad()
@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_models_can_be_copied_and_moved(kind: type[nn.RNNBase], is_called: bool) -> None:
    model, x = kind(8, 8).eval(), torch.randn(3, 2, 8)
    original, expected = copy.deepcopy(model)(x)[0], rounded(model)(x)[0]
    frozen = hmpx.freeze(model, store="bfloat16", compute="float32")
    if is_called:
        model(x)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x)[0], expected)
    model.to("cpu")
    assert torch.equal(model(x)[0], expected)
    frozen.undo()
    assert torch.equal(model(x)[0], original)
    assert all(each.is_leaf for each in model._flat_weights if isinstance(each, Tensor))


def test_training_and_loading_are_errors() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(2, 4)
    state = copy.deepcopy(model.state_dict())
    frozen = hmpx.freeze(model, store="bfloat16", compute="float32")
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(hmpx.FreezeError, match="a gradient reached '0"):
            each(x).sum().backward()
        with pytest.raises(hmpx.FreezeError, match="Sequential is frozen and can't load weights"):
            each.load_state_dict(state)
        with pytest.raises(hmpx.FreezeError, match="'0', a Linear, is frozen and can't load"):
            nn.Sequential(each[0]).load_state_dict(state, strict=False)
        each[0].train()
        with pytest.raises(hmpx.FreezeError, match="'0' is in training mode"):
            each(x)
        with torch.no_grad():
            each(x)
    inputs = torch.randn(2, 4, requires_grad=True)
    model.eval()
    torch.autograd.grad(model(inputs).sum(), inputs)
    frozen.undo()
    model.train()
    model(x).sum().backward()
    model.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torchscript_is_refused() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4)).eval()
    for model in (scripted, nn.Sequential(scripted).eval()):
        with pytest.raises(hmpx.FreezeError, match="freeze the module from which it was"):
            hmpx.freeze(model, store="bfloat16", compute="float32")


def test_a_model_that_was_low_computes_in_float32() -> None:
    model = nn.Linear(8, 8).bfloat16().eval()
    frozen = hmpx.freeze(model, store="bfloat16", compute="float32")
    assert model(torch.ones(1, 8)).dtype is torch.float32
    assert [each.reason for each in frozen.weights] == ["is bf16", "is bf16"]


def test_an_error_in_the_forward_leaves_the_model_usable(model: Tied) -> None:
    with hmpx.freeze(model, store="bfloat16", compute="float32"), torch.no_grad():
        expected = model(WORDS)
        with pytest.raises(IndexError):
            model(WORDS + 99)
        assert torch.equal(model(WORDS), expected)


def test_mistakes(model: Tied) -> None:
    with pytest.raises(hmpx.OptionError, match='go with compute="float32"'):
        hmpx.freeze(model, store="bfloat16")
    with pytest.raises(hmpx.OptionError, match='go with compute="float32"'):
        hmpx.freeze(model, WORDS, compute="float32")
    with pytest.raises(hmpx.OptionError, match="takes no example"):
        hmpx.freeze(model, WORDS, store="bfloat16", compute="float32")
    with hmpx.convert(device_types={"cpu"}), pytest.raises(hmpx.FreezeError, match="is converted"):
        hmpx.freeze(model, store="bfloat16", compute="float32")
    with pytest.raises(hmpx.FreezeError, match="in training mode"):
        hmpx.freeze(model.train(), store="bfloat16", compute="float32")
    large = nn.Linear(2, 2).eval()
    large.weight.data.fill_(1e6)
    with pytest.raises(hmpx.FreezeError, match="'weight' has values beyond fp16's largest"):
        hmpx.freeze(large, store="float16", compute="float32")
    hmpx.freeze(large, store="bfloat16", compute="float32", keep_fp32=False)
    with pytest.raises(hmpx.FreezeError, match="is frozen already"):
        hmpx.freeze(large, store="bfloat16", compute="float32")


@torch.no_grad()
def test_greedy_texts_are_those_of_each_text_alone() -> None:
    torch.manual_seed(0)
    model, words = GPT().eval(), torch.randint(0, 97, (16, 6))
    with hmpx.freeze(model, store="bfloat16", compute="float32"):
        texts = model.written(words, 6)
        for row in range(16):
            assert torch.equal(model.written(words[row : row + 1], 6)[0], texts[row])
