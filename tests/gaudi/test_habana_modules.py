"""Modules of the stand-in for habana_frameworks against what torch computes; see also its optimizers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from hmpx.errors import HmpxError
from hmpx.gaudi import shim as habana_shim
from hmpx.gaudi.habana_frameworks.torch import _hpex_C, hpu
from hmpx.gaudi.habana_frameworks.torch.hpex.kernels import (
    CTCLoss,
    CustomSoftmax,
    FusedSDPA,
    RotaryPosEmbeddingHelperV1,
    RotaryPosEmbeddingHelperV2,
    RotaryPosEmbeddingHelperV3,
    RotaryPosEmbeddingMode,
    apply_rotary_pos_emb,
)
from hmpx.gaudi.habana_frameworks.torch.hpex.movingavrg import FusedEMA
from hmpx.gaudi.habana_frameworks.torch.hpex.normalization import FusedClipNorm, FusedRMSNorm

BF16 = torch.bfloat16


@pytest.fixture(params=[False, True], ids=["fp32", "converted"])
def conversion(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Runs the test in fp32 and under HMP's lists, which know nothing of Habana's kernels."""
    if not request.param:
        yield False
        return
    with hmpx.convert(lists="hmp", legalize="never", device_types={"cpu"}):
        yield True


# --- gradients and averages ---------------------------------------------------------------------


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("how", ["given", "kept", "one"])
def test_clipping_is_torchs(max_norm: float, how: str) -> None:
    """By the parameters given to clip_norm, by those kept from a generator, and of one tensor."""
    parameters = [nn.Parameter(torch.randn(s)) for s in ((3, 4), (5,))]
    parameters = parameters[:1] if how == "one" else parameters
    for p in parameters:
        p.grad = torch.randn_like(p)
    same = copy.deepcopy(parameters)
    for p, q in zip(parameters, same, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    clip = FusedClipNorm((p for p in parameters), max_norm)
    given = {"given": (parameters,), "kept": (), "one": (parameters[0],)}[how]
    norm = clip.clip_norm(*given)
    with hmpx.disable_casts():
        assert torch.equal(norm, nn.utils.clip_grad_norm_(same, max_norm))
    for p, q in zip(parameters, same, strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


@pytest.mark.usefixtures("conversion")
def test_the_moving_average_is_that_of_its_definition() -> None:
    """Of parameters and floating buffers, by a decay that grows; others stay as they were copied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    average = FusedEMA(nn.DataParallel(model), decay=0.99, updates=3)
    assert not average.ema.training
    assert not any(p.requires_grad for p in average.ema.parameters())
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    for updates in (4, 5):
        with torch.no_grad(), hmpx.disable_casts():
            for value in model.state_dict().values():
                value.add_(1)
            decay = 0.99 * (1 - math.exp(-updates / 2000))
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    expected[name] = expected[name] * decay + value * (1 - decay)
        average.update(model)
    for name, value in average.ema.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
    model.names = ["a"]  # type: ignore[assignment]
    average.update_attr(model, include=("names",))
    assert average.ema.names == ["a"]


def test_the_divisor_of_fused_lamb_norm() -> None:
    """What buckets of gradients are divided by."""
    gradients = [torch.full((4,), 3.0), torch.full((4,), 4.0)]  # norms 6 and 8
    assert _hpex_C.fused_lamb_norm(gradients, 2.0).tolist() == [5.0]
    assert _hpex_C.fused_lamb_norm(gradients, 100.0).tolist() == [1.0]


# --- kernels ------------------------------------------------------------------------------------


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Returns what attention is by definition; ``mask`` is additive."""
    with hmpx.disable_casts():
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * scale
        return (scores if mask is None else scores + mask).softmax(-1) @ v


CAUSAL = torch.full((5, 5), float("-inf")).triu(1)
ADDITIVE = torch.tensor([0.0, 0.5, 0.0, -1.0, 0.0]).expand(2, 1, 5, 5)
RIGHT = torch.tensor([[[[0.0, 0, 0, -math.inf, -math.inf]]], [[[0.0] * 5]]])


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("arguments", "mask", "scale"),
    [
        ((), None, 8**-0.5),
        ((None, 0.0, False, 0.3, "fast", True), None, 0.3),
        ((None, 0.0, True), CAUSAL, 8**-0.5),
        ((ADDITIVE,), ADDITIVE, 8**-0.5),
        ((ADDITIVE, 0.0, True), ADDITIVE + CAUSAL, 8**-0.5),
        ((ADDITIVE[0, 0] >= 0,), torch.where(ADDITIVE[0, 0] >= 0, 0, -math.inf), 8**-0.5),
        (
            (None, 0.0, True, None, "fast", True, torch.tensor([3, 5]), "right"),
            CAUSAL + RIGHT,
            8**-0.5,
        ),
        (
            (None, 0.0, False, None, "None", None, torch.tensor([3, 5]), "left"),
            RIGHT.flip(-1),
            8**-0.5,
        ),
    ],
)
def test_attention_is_its_definition(
    kv_heads: int, arguments: tuple[object, ...], mask: torch.Tensor | None, scale: float
) -> None:
    """With masks, valid lengths and grouped heads; gradients flow."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 5, 8, requires_grad=True)
    k, v = torch.randn(2, kv_heads, 5, 8), torch.randn(2, kv_heads, 5, 8)
    actual = FusedSDPA.apply(q, k, v, *arguments)  # type: ignore[arg-type]
    torch.testing.assert_close(actual, attention(q, k, v, mask, scale), rtol=1e-4, atol=1e-5)
    actual.sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize(
    "arguments",
    [
        {"return_attn_probs": True},
        {"return_dropout_mask": True},
        {"window_size": (2, 0)},
        {"sink": torch.ones(1)},
    ],
)
def test_attention_says_what_it_does_not_return(arguments: dict[str, object]) -> None:
    """In an error with the remedy."""
    q = torch.ones(1, 1, 2, 2)
    with pytest.raises(HmpxError, match=next(iter(arguments))):
        FusedSDPA.apply(q, q, q, **arguments)  # type: ignore[arg-type]


def rotated(x: list[float], angle: float) -> list[float]:
    """Returns a pair of numbers turned by an angle."""
    c, s = math.cos(angle), math.sin(angle)
    return [x[0] * c - x[1] * s, x[0] * s + x[1] * c]


def table(angles: torch.Tensor, *, is_pairwise: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cosines and sines [s, d] of angles [s, d/2]."""
    wide = angles.repeat_interleave(2, -1) if is_pairwise else torch.cat([angles, angles], -1)
    return wide.cos(), wide.sin()


@pytest.mark.usefixtures("conversion")
def test_rotary_embeddings_turn_pairs_by_their_angles() -> None:
    """Halves or neighbours; by offset, by positions, by ChatGLM's cache; batch or sequence first."""
    torch.manual_seed(0)
    angles = torch.rand(7, 2)
    p = torch.randn(1, 1, 3, 4)  # [b, h, s, d]

    def expected(positions: list[int], pairs: list[tuple[int, int]]) -> torch.Tensor:
        made = p.clone()
        for s, position in enumerate(positions):
            for number, (i, j) in enumerate(pairs):
                both = [float(p[0, 0, s, i]), float(p[0, 0, s, j])]
                turned = rotated(both, float(angles[position, number]))
                made[0, 0, s, i], made[0, 0, s, j] = turned
        return made

    halves, neighbours = [(0, 2), (1, 3)], [(0, 1), (2, 3)]
    with hmpx.disable_casts():
        cos, sin = (t[None, None] for t in table(angles))
        pair_cos, pair_sin = (t[None, None, :3] for t in table(angles, is_pairwise=True))
    found = {
        "offset": (RotaryPosEmbeddingHelperV1.apply(p, cos, sin, 2), expected([2, 3, 4], halves)),
        "start": (apply_rotary_pos_emb(p, cos, sin), expected([0, 1, 2], halves)),
        "positions": (
            RotaryPosEmbeddingHelperV2.apply(p, cos, sin, torch.tensor([[4, 0, 6]])),
            expected([4, 0, 6], halves),
        ),
        "pairs": (
            apply_rotary_pos_emb(p, pair_cos, pair_sin, None, 0, RotaryPosEmbeddingMode.PAIRWISE),
            expected([0, 1, 2], neighbours),
        ),
    }
    first = p.permute(2, 0, 1, 3)  # [s, b, h, d]
    by_sequence = [t[0, 0][:, None, None] for t in (cos, sin)]
    found["sequence first"] = (
        RotaryPosEmbeddingHelperV1.apply(first, by_sequence[0], by_sequence[1], 2),
        expected([2, 3, 4], halves).permute(2, 0, 1, 3),
    )
    with hmpx.disable_casts():
        cache = torch.stack([angles.cos(), angles.sin()], -1)[:, None]  # [s, 1, d/2, 2]
        wider = torch.cat([first, torch.ones(3, 1, 1, 2)], -1)
    rest = RotaryPosEmbeddingHelperV3.apply(wider, cache)
    found["cache"] = rest[..., :4], expected([0, 1, 2], neighbours).permute(2, 0, 1, 3)
    assert torch.equal(rest[..., 4:], wider[..., 4:])
    for name, (actual, wanted) in found.items():
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6, msg=name)


def test_rotary_embeddings_keep_the_wider_type() -> None:
    """Float32 if any input is; else that of the queries."""
    p, (cos, sin) = torch.ones(1, 1, 3, 4), table(torch.rand(3, 2))
    assert apply_rotary_pos_emb(p.to(BF16), cos, sin).dtype is torch.float32
    assert apply_rotary_pos_emb(p.to(BF16), cos.to(BF16), sin.to(BF16)).dtype is BF16


@pytest.mark.usefixtures("conversion")
def test_other_kernels_are_torchs() -> None:
    """CTC loss, softmax in the type that it is given, RMS norm."""
    torch.manual_seed(0)
    logits = torch.randn(6, 2, 5).log_softmax(-1).float()
    arguments = (torch.tensor([[1, 2], [3, 4]]), torch.tensor([6, 5]), torch.tensor([2, 1]))
    assert torch.equal(
        CTCLoss.apply(logits, *arguments, 0, "sum"),
        F.ctc_loss(logits, *arguments, reduction="sum"),
    )
    x = torch.randn(3, 4).to(BF16)
    assert CustomSoftmax.apply(x, 2).dtype is BF16
    norm = FusedRMSNorm.apply(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    expected = torch.tensor([[3.0, 8.0]]) / math.sqrt(12.5)
    torch.testing.assert_close(norm.float(), expected, rtol=1e-6, atol=1e-6)


# --- the device ---------------------------------------------------------------------------------


def test_memory_is_told_in_habanas_words() -> None:
    """By the names that its statistics have; none is zero that scripts divide by."""
    found = hpu.memory_stats()
    assert found["Limit"] > found["InUse"] > 0 and found["MaxInUse"] >= found["InUse"]
    names = "NumAllocs NumFrees ActiveAllocs MaxAllocSize TotalSystemAllocs TotalActiveAllocs"
    assert set(names.split()) < found.keys()
    free, total = hpu.mem_get_info()
    assert 0 < free < total == hpu.memory_reserved()
    assert "MaxInUse" in hpu.memory_summary()
    hpu.reset_peak_memory_stats()
    hpu.empty_cache()


def test_streams_and_events() -> None:
    """Work is ordered, and time between events is measured."""
    stream = hpu.Stream()
    first, second = hpu.Event(enable_timing=True), hpu.Event(enable_timing=True)
    with hpu.stream(stream), hpu.stream(None):
        first.record()
        x = torch.ones(8).sum()
        stream.record_event(second)
    stream.wait_stream(hpu.current_stream())
    stream.wait_event(second)
    stream.synchronize()
    hpu.synchronize()
    assert second.query() and stream.query() and first.elapsed_time(second) >= 0
    assert x == 8
    with pytest.raises(RuntimeError, match="record"):
        hpu.Event().elapsed_time(second)


def test_states_of_random_numbers() -> None:
    """Of one device, and of all."""
    hpu.random.manual_seed_all(5)
    state, states = hpu.random.get_rng_state(), hpu.random.get_rng_state_all()
    first = torch.rand(2)
    hpu.random.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
    hpu.random.set_rng_state_all(states)
    assert torch.equal(torch.rand(2), first)
    assert hpu.random.initial_seed() == 5


def test_wrapped_models_are_called_as_they_are() -> None:
    """By each of Habana's wrappers for graphs."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    assert hpu.wrap_in_hpu_graph(model, disable_tensor_cache=True) is model
    assert hpu.ModuleCacher(max_graphs=10)(model=model, inplace=True) is model
    assert hpu.make_graphed_callables(model, (x,)) is model
    assert torch.equal(hpu.CachedModule(model)(x), model(x))


@pytest.mark.skipif(habana_shim.device_type() == "cuda", reason="CUDA's own graphs are used there")
def test_a_captured_step_is_replayed() -> None:
    """Each replay is a training step on what the inputs hold by then; the capture itself is none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    same = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, same)]
    batches = [torch.randn(5, 3) for _ in range(4)]

    def step(m: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = m(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    held = batches[0].clone()
    step(model, optimizers[0], held)
    step(same, optimizers[1], batches[0])
    graph = hpu.HPUGraph()
    before = [p.detach().clone() for p in model.parameters()]
    with hpu.graph(graph):
        loss = step(model, optimizers[0], held)
    assert all(map(torch.equal, before, model.parameters()))
    for batch in batches[1:]:
        held.copy_(batch)
        graph.replay()
        expected = step(same, optimizers[1], batch)
        assert torch.equal(loss, expected)
    assert all(map(torch.equal, model.parameters(), same.parameters()))
    graph.reset()
    with pytest.raises(RuntimeError, match="capture_begin"):
        graph.replay()
