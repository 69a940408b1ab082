"""Programs without faults, with everything that looks like one: none is reported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import Offence

INFINITY = float("inf")

CLEAN: list[Callable[[torch.dtype], Any]] = []


def clean(program: Callable[[torch.dtype], Any]) -> Callable[[torch.dtype], Any]:
    """Adds a program, which is given the low-precision dtype."""
    CLEAN.append(program)
    return program


def x(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


@clean
def causal_attention_by_hand(low: torch.dtype) -> None:
    q = x(2, 2, 5, 4).requires_grad_()
    scores = (q @ q.transpose(-1, -2)).masked_fill(causal(5), -INFINITY)
    (torch.softmax(scores, -1) @ q).sum().backward()


@clean
def mask_of_the_least_number_overflows(low: torch.dtype) -> None:
    scores = x(2, 5, 5, scale=50.0).to(low).requires_grad_()
    mask = causal(5).to(low) * torch.finfo(low).min
    torch.softmax(scores * 1 + mask + mask, -1).float().square().sum().backward()


@clean
def least_number_of_fp32_in_low(low: torch.dtype) -> Tensor:
    mask = (causal(5).float() * torch.finfo(torch.float32).min).to(low)
    return torch.softmax(x(5, 5).to(low) + mask, -1).sum()


@clean
def rows_without_keys(low: torch.dtype) -> None:
    """A softmax's NaN, which is cleared, as are its gradients by the mask's backward."""
    q, k = x(2, 3, 4).requires_grad_(), x(2, 3, 4, seed=1).requires_grad_()
    scores = (q @ k.mT).masked_fill(torch.tensor([True, False, False])[:, None], -INFINITY)
    (torch.softmax(scores, -1).nan_to_num(0.0) @ k).square().sum().backward()
    assert q.grad is not None and bool(q.grad.isfinite().all())


@clean
def borders_of_infinity(low: torch.dtype) -> Tensor:
    costs = torch.full((4, 4), INFINITY)
    costs[0, 0] = 0.0
    for i in range(3):
        for j in range(3):
            before = torch.stack([costs[i, j], costs[i, j + 1], costs[i + 1, j]])
            costs[i + 1, j + 1] = before.amin() + 1.0
    return costs


@clean
def padded_rows(low: torch.dtype) -> Tensor:
    scores = x(2, 4, 4).masked_fill(torch.tensor([[[True]], [[False]]]), -INFINITY)
    return torch.softmax(scores, -1).nan_to_num(0.0).sum()


@clean
def nan_that_is_replaced_in_inference_mode(low: torch.dtype) -> Tensor:
    with torch.inference_mode():
        kept = [padded_rows(low), torch.softmax(torch.full((2, 3), -INFINITY), -1).nan_to_num()]
        return torch.stack([each.sum() for each in kept])


@clean
def fused_attention_with_masks(low: torch.dtype) -> None:
    q = x(1, 2, 5, 4).requires_grad_()
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    F.scaled_dot_product_attention(q, q, q, attn_mask=~causal(5)).sum().backward()
    mask = torch.zeros(5, 5).masked_fill(causal(5), -INFINITY)
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()


@clean
def transformer_encoder_with_padding(low: torch.dtype) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.tensor([[False, False, True], [False, True, True]])
    model(x(2, 3, 8), src_key_padding_mask=padding).sum().backward()


@clean
def training_with_dropout_and_norms(low: torch.dtype) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 3)
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    for seed in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x(4, 1, 6, 6, seed=seed)), torch.tensor([0, 1, 2, 0])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@clean
def checkpoints_of_both_kinds(low: torch.dtype) -> None:
    layer = nn.Linear(4, 4)
    h = x(2, 4).requires_grad_()
    for use_reentrant in (False, True):
        block = functools.partial(checkpoint, use_reentrant=use_reentrant)
        h = block(lambda a: torch.relu(layer(a)).exp(), h)
    h.sum().backward()


@clean
def recurrent(low: torch.dtype) -> None:
    model = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
    out, (h, _) = model(x(5, 2, 3))
    (out.sum() + h.sum()).backward()


@clean
def best_so_far_starts_at_infinity(low: torch.dtype) -> Tensor:
    best = torch.full((), INFINITY)
    for seed in range(3):
        best = torch.minimum(best, x(4, seed=seed).square().mean())
    return best + 1


@clean
def topk_filter_of_logits(low: torch.dtype) -> Tensor:
    logits = x(2, 8)
    least = torch.topk(logits, 3).values[:, -1:]
    return torch.softmax(torch.where(logits < least, -INFINITY, logits), -1).sum()


@clean
def subgradients_at_zero(low: torch.dtype) -> None:
    h = torch.zeros(3, requires_grad=True)
    g = h * 1
    (g.norm() + g.abs().sum() + torch.atan2(g, g).sum() + F.relu(g).sum()).backward()


@clean
def where_before_the_logarithm(low: torch.dtype) -> None:
    h = torch.tensor([0.0, 1.0], requires_grad=True)
    y = h * 1
    torch.log(torch.where(y > 0, y, torch.ones(2))).sum().backward()


@clean
def data_with_missing_values(low: torch.dtype) -> Tensor:
    data = torch.tensor([1.0, float("nan"), 3.0])
    filled = torch.where(torch.isnan(data), torch.zeros(3), data)
    return filled.sum() + torch.nansum(data) + torch.nan_to_num(data - 1).sum()


@clean
def memory_that_is_used_again(low: torch.dtype) -> None:
    for _ in range(20):
        masked = x(64, 64).masked_fill(torch.ones(64, 64, dtype=torch.bool), -INFINITY)
        del masked
        (x(64, 64) * 2).relu()


@clean
def reciprocals_of_zero_that_are_left_out(low: torch.dtype) -> Tensor:
    counts = torch.tensor([3.0, 0.0, 2.0])
    weights = torch.where(counts > 0, 1.0 / counts, torch.zeros(3))
    errors = (x(3) - 1.0).abs() / counts
    return weights.sum() + errors[errors.isfinite()].mean()


@clean
def complex_numbers(low: torch.dtype) -> None:
    h = x(8).requires_grad_()
    torch.fft.irfft(torch.fft.rfft(h) * 2).sum().backward()


@clean
def inference(low: torch.dtype) -> Tensor:
    layer = nn.Linear(3, 3)
    with torch.inference_mode():
        h = layer(x(2, 3))
        h[0] = 1.0
        return layer(h).relu_()


@functools.cache
def found(low: torch.dtype) -> dict[str, list[Offence]]:
    """Returns name of a program -> what is reported; each is a step of one watched run."""
    steps: dict[str, list[Offence]] = {}
    convert = hmpx.convert(device_types={"cpu"}, low_precision_type=low, legalize="never")
    with convert, hmpx.watch("collect") as w:
        for program in CLEAN:
            before = len(w.offences)
            torch.manual_seed(0)
            program(low)
            w.step()
            steps[program.__name__] = w.offences[before:]
    return steps


@pytest.mark.usefixtures("no_search_for_early_names")
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", [program.__name__ for program in CLEAN])
@pytest.mark.sampled(2)
def test_nothing_is_reported(name: str, low: torch.dtype) -> None:
    assert not found(low)[name], str(found(low)[name][0])


# --- transformers ------------------------------------------------------------------------------


def small(name: str, attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a model with random weights, and a batch with padding."""
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 50, "attn_implementation": attention}
    configs = {
        "Bert": {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
        "Llama": {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
        "T5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    }
    more = {"T5": {"decoder_start_token_id": 0}, "GPT2": {}}.get(name, {"hidden_size": 16})
    head = {"Bert": "MaskedLM", "GPT2": "LMHeadModel", "Llama": "CausalLM"}
    config = getattr(transformers, f"{name}Config")(**common, **configs[name], **more)
    separator = "" if name == "GPT2" else "For"
    made = getattr(transformers, f"{name}{separator}{head.get(name, 'ConditionalGeneration')}")
    ids = torch.randint(2, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 4:], mask[1, :3] = 0, 0  # on the right and on the left
    return made(config), {"input_ids": ids, "attention_mask": mask, "labels": ids}


@pytest.mark.models
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_search_for_early_names")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "name",
    [
        "Llama",
        pytest.param("Bert", marks=pytest.mark.slow),
        pytest.param("GPT2", marks=pytest.mark.slow),
        pytest.param("T5", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_reported_of_transformers(name: str, low: torch.dtype, attention: str) -> None:
    torch.manual_seed(0)
    model, batch = small(name, attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    convert = hmpx.convert(device_types={"cpu"}, low_precision_type=low)
    with convert, hmpx.watch("collect") as w:
        for _ in range(2):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        with torch.no_grad():  # weights, too, in low precision
            model.to(low)(**batch)
    assert w.first is None, str(w.first)


def test_a_loss_scale_of_the_programs_own() -> None:
    """It looks at the gradients itself, and leaves out steps; a step in spite of them is reported."""
    layer = nn.Linear(4, 1).half()
    given = x(8, 4).half()

    def gradients(scale: float) -> list[Tensor]:
        layer.zero_grad()
        ((layer(given).float() - 1).pow(2).mean() * scale).backward()
        return [p.grad.float() / scale for p in layer.parameters() if p.grad is not None]

    def run(*, ignores: bool) -> hmpx.Watch:
        scale = 2.0**18
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        with hmpx.watch("collect") as w:
            for _ in range(6):
                is_good = all(torch.isfinite(each).all() for each in gradients(scale))
                if ignores:
                    optimizer.step()
                elif not is_good:
                    scale /= 16
        return w

    assert run(ignores=False).first is None
    found = run(ignores=True).first
    assert found is not None and (found.phase, found.kind) == ("backward", "overflow")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.usefixtures("no_search_for_early_names")
def test_nested_tensors_are_passed_over() -> None:
    layer = nn.Linear(6, 3)
    given = torch.nested.nested_tensor([x(2, 6), x(3, 6)])
    with hmpx.convert(device_types={"cpu"}), hmpx.watch(underflow=True) as w:
        padded = layer(given).to_padded_tensor(0.0)
        assert (padded.float() + 1).isfinite().all()
    assert w.first is None
