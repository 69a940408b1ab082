"""`hmpx.plan`: devices that are not there, figures by arithmetic, and programs that resist."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import OptionError, PlanError

from .models import MODELS


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def batch() -> Tensor:
    return torch.randn(2, 4)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64))


# --- figures that follow from the shapes -----------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda", "hpu", "xpu"])
def test_figures_of_a_perceptron_are_those_of_arithmetic(device: str) -> None:
    """Whatever the device, here or not."""
    plan = hmpx.plan(
        mlp,
        lambda: torch.randn(8, 256),
        device=device,
        legalize="never",
        optimizer="Adam",
        keep_weight_casts=True,
    )
    weights = 256 * 512 + 512 + 512 * 64 + 64
    assert plan.parameters == weights
    assert plan.parameter_bytes == plan.gradient_bytes == 4 * weights
    assert plan.optimizer_bytes == 2 * 4 * weights + 4 * 4  # two moments, and the steps' numbers
    assert plan.run("float32").memory.saved == {"float32": 4 * 8 * (256 + 512)}
    assert plan.memory.saved == {"bfloat16": 2 * 8 * (256 + 512)}
    assert plan.weight_cast_bytes == 2 * 512 * 64  # the first layer's input gets no gradient
    assert plan.report.totals.flops == 2 * 8 * (2 * 256 * 512 + 3 * 512 * 64)
    assert plan.low_precision_flops_share == 1.0
    assert {row.device_type for row in plan.report.rows} == {device}


@pytest.mark.parametrize(("mask", "dropout"), [(False, 0.0), (False, 0.1), (True, 0.1)])
def test_attention_is_fused_on_accelerators(mask: bool, dropout: float) -> None:
    """So no scores are kept, with dropout neither: inputs, output, a sum for each row, and seeds."""
    tokens, heads, width = 64, 4, 16

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            bias = torch.zeros(tokens, tokens, device=x.device) if mask else None
            return F.scaled_dot_product_attention(x, x, x, bias, dropout)

    x = torch.randn(1, heads, tokens, width, requires_grad=True)
    plan = hmpx.plan(Attention, x, device="cuda", training=True, lists="hmp")
    kept = plan.memory.saved
    one = 4 * heads * tokens * width
    scores = 4 * heads * tokens * tokens
    sums = 4 * heads * tokens
    assert kept["float32"] == 2 * one + sums + (4 * tokens * tokens if mask else 0)
    assert kept["float32"] < scores
    real = hmpx.plan(Attention, x, device="cpu", training=True, lists="hmp").memory.saved["float32"]
    assert (real >= scores) is (dropout > 0)  # torch's CPU has no fused one with dropout


def test_checkpoints_keep_no_activations() -> None:
    """But the inputs of blocks; and the step computes more."""
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
    )

    class Model(nn.Module):
        def __init__(self, recomputes: bool) -> None:
            super().__init__()
            self.blocks, self.recomputes = blocks, recomputes

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
            return x

    x = torch.randn(8, 64)
    plain = hmpx.plan(Model(False), x, device="hpu")
    recomputed = hmpx.plan(Model(True), x, device="hpu")
    assert recomputed.saved_bytes + recomputed.weight_cast_bytes < plain.saved_bytes
    assert recomputed.report.totals.flops > plain.report.totals.flops
    assert recomputed.weight_cast_bytes < plain.weight_cast_bytes / 3


@pytest.mark.sampled(3)
def test_layers_add_equally() -> None:
    """A deep stack takes what the figures of two depths say."""

    def stack(layers: int) -> nn.Module:
        return nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16) for _ in range(layers)])

    x = torch.randn(2, 4, 8)
    found = [hmpx.plan(lambda n=n: stack(n), x, device="hpu") for n in (1, 2, 3)]
    for name in (
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        "saved_bytes",
        "weight_cast_bytes",
    ):
        one, two, three = (getattr(plan, name) for plan in found)
        assert three - one == 2 * (two - one) > 0


def test_freeze_stores_what_it_stores() -> None:
    """In a real model."""
    plan = hmpx.plan(mlp, torch.randn(8, 256), device="cpu", legalize="never")
    model = mlp().eval()
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        frozen = hmpx.freeze(model, torch.randn(8, 256))
    assert plan.frozen_bytes == sum(each.stored_bytes for each in frozen.weights)
    assert plan.frozen_bytes == plan.parameter_bytes // 2


# --- what resists --------------------------------------------------------------------------------


class Stopping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise hmpx.OptionError("of the model")


class NeedsValues(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > -1e9:
            return super().forward(x)
        return x


class NeedsIndices(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[x[:, 0].nonzero()[:, 0]]


@pytest.mark.parametrize("kind", [NeedsValues, NeedsIndices])
def test_what_depends_on_values_is_named_with_its_line(kind: type[nn.Linear]) -> None:
    """And the remedy works."""
    line = kind.forward.__code__.co_firstlineno + 1
    with pytest.raises(PlanError, match=rf"test_plan\.py:{line}: .*small=True"):
        hmpx.plan(lambda: kind(4, 4), batch, device="hpu")
    plan = hmpx.plan(lambda: kind(4, 4), batch, device="hpu", small=True)
    assert plan.parameter_bytes == 80
    assert plan.weight_cast_bytes + plan.saved_bytes > 0
    assert "real tensors" in str(plan)


@functools.cache
def models_of_others() -> dict[str, tuple[Any, Any]]:
    """Returns how to build an encoder and decoder, speech, a classifier of images; and inputs."""
    ids = torch.randint(0, 9, (1, 16))
    t5 = transformers.T5Config(d_model=64, d_ff=128, num_layers=1, decoder_start_token_id=0)
    whisper = transformers.WhisperConfig(
        encoder_layers=1, decoder_layers=1, d_model=60, vocab_size=100, pad_token_id=1,
        bos_token_id=1, eos_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    return {
        "T5": (
            lambda: transformers.T5ForConditionalGeneration(t5),
            {"input_ids": ids, "labels": ids},
        ),
        "Whisper": (
            lambda: transformers.WhisperForConditionalGeneration(whisper),
            {"input_features": torch.randn(1, 80, 3000), "labels": ids},
        ),
        "ResNet-18": MODELS["ResNet-18"],
    }


@pytest.mark.sampled(6)
@pytest.mark.parametrize("device", ["cuda", "hpu"])
@pytest.mark.parametrize("name", ["T5", "Whisper", "ResNet-18"])
def test_models_of_others_are_planned(name: str, device: str) -> None:
    """Their training is, with most of the arithmetic in low precision, which saves memory."""
    build, inputs = models_of_others()[name]
    plan = hmpx.plan(build, inputs, device=device)
    assert plan.is_training
    assert plan.low_precision_flops_share > 0.5
    assert plan.saved_bytes < plan.run("float32").memory.saved_bytes


def test_a_model_with_weights_stays_as_it_is() -> None:
    """It is copied without them; its mode, gradients and random numbers stay, and the conversion."""
    model = nn.Sequential(linear(), nn.BatchNorm1d(4)).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.random.get_rng_state()
    with hmpx.convert(device_types={"cpu"}, lists="hmp"):
        planned = hmpx.plan(model, batch, device="hpu")
        assert F.linear(torch.ones(1, 2), torch.ones(3, 2)).dtype is torch.bfloat16
    assert planned.parameter_bytes == 112
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not model.training
    for name, value in model.state_dict().items():
        assert type(value) is Tensor
        assert torch.equal(value, state[name])
    assert all(each.grad is None for each in model.parameters())
    assert hmpx.plan(lambda: model, batch, device="hpu").parameter_bytes == 112


def test_shared_weights_count_once() -> None:
    """In a copy, and in modules that are cast."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids))  # type: ignore[no-any-return]

    ids = torch.randint(0, 10, (2, 3))
    assert hmpx.plan(Tied(), ids, device="hpu").parameter_bytes == 160
    assert (
        hmpx.plan(lambda: Tied().to("hpu", torch.bfloat16), ids, device="hpu").parameter_bytes == 80
    )


def test_without_gradients_it_is_a_forward() -> None:
    """By the argument, for a model that learns nothing, and for one that records no gradients."""

    class Unrecorded(nn.Linear):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    plans = [
        hmpx.plan(linear, batch, device="hpu", training=False),
        hmpx.plan(lambda: linear().requires_grad_(False), batch, device="hpu"),
        hmpx.plan(lambda: Unrecorded(4, 4), batch, device="hpu"),
    ]
    for plan in plans:
        assert not plan.is_training
        assert "a forward on hpu" in str(plan)
        assert plan.gradient_bytes == plan.optimizer_bytes == plan.saved_bytes == 0
        assert plan.low_precision_flops_share == 1.0
    assert "no gradient" in str(plans[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": lambda: None}, r"model\(\) must return a model"),
        ({"model": 3}, "model must be a function"),
        ({"loss_fn": lambda y: y}, r"one of shape \[2, 4\] and torch.float32"),
        ({"loss_fn": lambda y: 1.0}, r"of one element, not 1.0"),
        ({"loss_fn": lambda y: y.detach().sum()}, "training=False"),
        ({"device": "hpuu"}, "did you mean 'hpu'"),
        ({"device": 3}, "device"),
        ({"optimizer": "Adamm"}, "did you mean 'adam'"),
        ({"optimizer": "SGD momentum"}, "SGD momentum=0.9"),
        ({"optimizer": 3}, "optimizer must be a name"),
        ({"training": "yes"}, "training"),
        ({"small": 3}, "small"),
        ({"device_types": {"cpu"}}, "pass device"),
        ({"lists": "nonsense"}, "nonsense"),
    ],
    ids=lambda each: each if isinstance(each, str) else next(iter(each)),
)  # fmt: skip
def test_wrong_arguments_are_errors(arguments: dict[str, Any], message: str) -> None:
    """That name the argument, before anything stays patched."""
    given: dict[str, Any] = {"model": linear, "inputs": batch, "device": "hpu", **arguments}
    with pytest.raises(OptionError, match=message):
        hmpx.plan(**given)
    assert not hmpx.is_converted()


@pytest.mark.parametrize(
    ("model", "inputs", "kind", "message", "note"),
    [
        (lambda: 1 // 0, batch, ZeroDivisionError, "^integer division", "model() raised it"),
        (linear, lambda: 1 // 0, ZeroDivisionError, "^integer division", "inputs() raised it"),
        (linear, lambda: torch.randn(2, 5), RuntimeError, "same reduction dim", "the model raised"),
        (lambda: Stopping(4, 4), batch, hmpx.OptionError, "^of the model", "the model raised it"),
    ],
)
def test_what_models_raise_passes(
    model: Any, inputs: Any, kind: type[Exception], message: str, note: str
) -> None:
    """The same error, with a note; torch is as it was."""
    with pytest.raises(kind, match=message) as caught:
        hmpx.plan(model, inputs, device="hpu")
    assert caught.value.__cause__ is None
    assert caught.value.__notes__[0].startswith(f"hmpx.plan: {note}")
    assert vars(F)["scaled_dot_product_attention"] is torch._C._nn.scaled_dot_product_attention
    assert "dropout" not in vars(torch._VF)


# --- views ---------------------------------------------------------------------------------------


def test_a_plan_prints_in_80_columns() -> None:
    """The verdict, memory side by side, the remedy for kept casts, decisions by op."""
    plan = hmpx.plan(mlp, torch.randn(8, 256), device="hpu", keep_weight_casts=True)
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(str(plan).split())
    assert "164,416 parameters: a training step with AdamW on hpu" in text
    assert "100 % of FLOPs and" in text
    assert re.search(r"weight casts kept +- +66 kB +66 kB", str(plan))
    assert "keep_weight_casts=False" in text
    assert "hmpx.freeze(model, x) would store 329 kB" in text
    assert re.search(r"^linear +fp32 +bf16 +bf16", str(plan), flags=re.MULTILINE)


def test_a_plan_is_written(tmp_path: Any) -> None:
    """As JSON and as a page without a network, in which the model's name is text."""

    class Model(nn.Linear):
        pass

    Model.__name__ = "<script>alert(1)</script>"
    plan = hmpx.plan(lambda: Model(4, 4), batch, device="hpu")
    found = json.loads(plan.to_json(tmp_path / "plan.json"))
    assert json.loads((tmp_path / "plan.json").read_text()) == found
    assert found["runs"]["hmpx"]["saved"] == dict(plan.memory.saved)
    assert found["runs"]["float32"]["peak_bytes"] == plan.run("float32").memory.peak_bytes
    page = plan.to_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text() == page
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page
    assert "default-src 'none'" in page
    assert "<script" not in plan._repr_html_()
    with pytest.raises(OptionError, match="this plan has no 'bf16'"):
        plan.run("bf16")


def test_a_plan_says_on_which_cards_it_fits() -> None:
    """A small model fits anywhere, and that needs no word."""

    def stack(layers: int) -> nn.Module:
        return nn.Sequential(*[nn.Linear(1 << 14, 1 << 14, bias=False) for _ in range(layers)])

    def row(plan: Any, name: str) -> list[str]:
        return next(line.split() for line in str(plan).splitlines() if line.startswith(name))

    few, many = (
        hmpx.plan(lambda n=n: stack(n), torch.ones(1, 1 << 14), device="cuda") for n in (1, 5)
    )
    assert few.peak_bytes < 24e9 < many.peak_bytes < 40e9
    percent = round(100 * few.peak_bytes / 24e9)
    assert row(few, "fits on 24 GB")[4:7] == ["yes,", str(percent), "%"]
    assert row(many, "fits on 24 GB")[4:] == ["no"] * 4
    assert row(many, "fits on 40 GB")[4] == "yes,"
    of_two = next(line.split() for line in str(many).splitlines() if line.split()[:1] == ["2"])
    assert of_two[5:] == ["24", "GB", "40", "GB"]  # with FSDP2, with DDP
    assert many.per_rank(2).bytes < 24e9 < many.per_rank(2, "ddp").bytes < 40e9
    page = many.to_html()
    assert "Each of several processes" in page
    assert ">DDP fits on</th>" in page
    assert ">24 GB</text>" in page  # a line in the chart, within the bars
    assert ">80 GB</text>" not in page
    assert "fits on" not in str(hmpx.plan(lambda: nn.Linear(8, 8), torch.ones(1, 8), device="cuda"))
