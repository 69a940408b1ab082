"""A checkpointed model computes what it computes without checkpoints, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hmpx
from hmpx.torch_state import is_training
from tests.speeds import Capability, known_as
from tests.values import same_or_nan

FP32 = torch.float32

#: What a device may be: slow in low precision in neither, one or both of inference and training.
SPEEDS = {
    "native": Capability(None, 1.0, 1.0),
    "slow": Capability(None, 9.0, 9.0),
    "slow in training": Capability(None, 1.0, 9.0),
    "slow in inference": Capability(None, 9.0, 1.0),
}
SLOW = pytest.mark.slow
MODES = [
    ("auto", "slow in training"),
    ("fast", "slow in inference"),
    *[
        pytest.param(each, marks=SLOW)
        for each in (
            ("auto", "native"),
            ("auto", "slow"),
            ("auto", "slow in inference"),
            ("fast", "slow"),
            ("fast", "slow in training"),
            ("always", "native"),
            ("never", "slow"),
        )
    ],
]


class Block(nn.Module):
    """Attention, a frozen layer, normalisation, dropout, and a branch that needs no gradients."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.out = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("bias", torch.randn(24, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        bias = self.frozen(self.bias)
        mixed = F.dropout(F.gelu(self.out(mixed)) + bias, 0.1)
        return x + self.norm(mixed.transpose(1, 2)).transpose(1, 2).softmax(-1)


Run = Callable[[nn.Module, Tensor], Tensor]


def kept_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    policy = torch.utils.checkpoint.CheckpointPolicy
    is_product = op in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    return policy.MUST_SAVE if is_product else policy.PREFER_RECOMPUTE


def nested(block: nn.Module, x: Tensor, use_reentrant: bool) -> Tensor:
    def inner(t: Tensor) -> Tensor:
        return checkpoint(block, t, use_reentrant=use_reentrant)

    return checkpoint(inner, x, use_reentrant=use_reentrant)


class Recomputing(torch.autograd.Function):
    """What other libraries have for checkpoints: a function that runs a block again in its backward."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.block, ctx.state = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        weights = [p for p in ctx.block.parameters() if p.requires_grad]
        with torch.enable_grad(), torch.random.fork_rng():
            torch.set_rng_state(ctx.state)
            result = ctx.block(x)
        found = iter(torch.autograd.grad(result, [x, *weights], gradient))
        first = next(found)
        return None, first, *found


def by_function(block: nn.Module, x: Tensor) -> Tensor:
    weights = [p for p in block.parameters() if p.requires_grad]
    return Recomputing.apply(block, x, *weights)


def wrapped(block: nn.Module, x: Tensor, implementation: CheckpointImpl) -> Tensor:
    return checkpoint_wrapper(block, checkpoint_impl=implementation)(x)


def selective(block: nn.Module, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, kept_products)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


WAYS: dict[str, Run] = {
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "not reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "nested, reentrant": lambda block, x: nested(block, x, True),
    "nested, not reentrant": lambda block, x: nested(block, x, False),
    "wrapper, reentrant": lambda block, x: wrapped(block, x, CheckpointImpl.REENTRANT),
    "wrapper": lambda block, x: wrapped(block, x, CheckpointImpl.NO_REENTRANT),
    "selective": selective,
    "autograd.Function": by_function,
}


def step(run: Run) -> list[Tensor]:
    """Returns the output, the gradients and the buffers of a training step through ``run``."""
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(), Block()])
    for block in blocks:
        block.norm.momentum = 0.0  # in fp32, too, a recomputation updates the statistics once more
    x = torch.randn(2, 24, 32, requires_grad=True)
    result = x
    for block in blocks:
        result = run(block, result)
    result.float().pow(2).mean().backward()
    gradients = [p.grad for p in (x, *blocks.parameters()) if p.grad is not None]
    buffers = [
        b for b in blocks.buffers() if b.is_floating_point()
    ]  # counters count recomputations
    return [result.detach(), *gradients, *buffers]


@pytest.fixture(params=MODES, ids=str)
def mode(
    request: pytest.FixtureRequest, fresh_wrappers: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """One mode of legalization on one kind of device."""
    name, speed = request.param
    known_as(monkeypatch, lambda *question: SPEEDS[speed])
    yield name


def test_every_way_computes_what_the_model_does_without(mode: str) -> None:
    """Outputs, gradients and buffers, whatever the device is slow in."""
    with hmpx.convert(legalize=mode, device_types={"cpu"}):
        expected = step(lambda block, x: block(x))
        for way, run in WAYS.items():
            try:
                same_or_nan(step(run), expected)
            except AssertionError as error:
                raise AssertionError(f"{way}: {error}") from None


def test_a_forward_that_fails_leaves_the_thread_as_it_was() -> None:
    """And no other thread ever counts as training by it."""
    seen: list[bool] = []

    def fail(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: seen.append(_without_gradients()))
        thread.start()
        thread.join()
        seen.append(is_training())
        raise ZeroDivisionError

    def _without_gradients() -> bool:
        with torch.no_grad():
            return is_training()

    with hmpx.convert(device_types={"cpu"}):
        with pytest.raises(ZeroDivisionError):
            checkpoint(fail, torch.ones(2, requires_grad=True), use_reentrant=True)
        seen.append(_without_gradients())
    assert seen == [False, True, False]
    assert not torch.is_autocast_enabled("ipu")


def double(x: Tensor) -> Tensor:
    return F.linear(x, x).float() * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_backward_after_revert_says_that_it_comes_too_late(
    use_reentrant: bool, replaced: bool
) -> None:
    """It would recompute in other dtypes: silently, by a reentrant checkpoint."""
    x = torch.ones(3, 3, requires_grad=True)
    with hmpx.convert(device_types={"cpu"}):
        result = checkpoint(double, x, use_reentrant=use_reentrant)
    message = r"checkpoint of double can't be recomputed.*Call backward\(\) before hmpx.revert\(\)"
    with pytest.raises(hmpx.CheckpointError, match=message):
        if replaced:
            with hmpx.convert(opt_level="O2", device_types={"cpu"}):
                result.sum().backward()
        else:
            result.sum().backward()


def deny(call: hmpx.Call) -> hmpx.Decision | hmpx.CastPolicy:
    return hmpx.DENY


@contextlib.contextmanager
def rule() -> Iterator[None]:
    hmpx.register_rule("linear")(deny)
    try:
        yield
    finally:
        hmpx.unregister_rule("linear", deny)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("change", ["lists", "legalize", "rule"])
def test_a_backward_amid_another_conversion_says_so(use_reentrant: bool, change: str) -> None:
    """One that takes the place of the forward's, or has other rules; not once that is back."""
    x = torch.randn(3, 3, requires_grad=True)
    changes: dict[str, Callable[[], Any]] = {
        "lists": lambda: hmpx.convert(opt_level="O2", device_types={"cpu"}),
        "legalize": lambda: hmpx.convert(legalize="always", device_types={"cpu"}),
        "rule": rule,
    }
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        (expected,) = torch.autograd.grad(double(x).sum(), x)
        results = [checkpoint(double, x, use_reentrant=use_reentrant).sum() for _ in range(3)]
        with changes[change](), pytest.raises(hmpx.CheckpointError, match=r"another hmpx\.convert"):
            results[0].backward()
        x.grad = None
        results[1].backward()
        assert torch.equal(value_of(x.grad), expected)
        hmpx.convert(device_types={"cpu"}, legalize="never", isVerbose=True)
        x.grad = None
        results[2].backward()
        assert torch.equal(value_of(x.grad), expected)


def value_of(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def test_a_reentrant_checkpoint_from_before_convert_recomputes_uncast() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(double(x).sum(), x)
    result = checkpoint(double, x, use_reentrant=True)
    with hmpx.convert(device_types={"cpu"}):
        result.sum().backward()
    assert torch.equal(value_of(x.grad), expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_backward_after_revert_of_what_was_not_cast(use_reentrant: bool) -> None:
    """Casts were off in its forward, as they are without a conversion."""
    x = torch.ones(3, 3, requires_grad=True)
    with hmpx.convert(device_types={"cpu"}), hmpx.disable_casts():
        result = checkpoint(double, x, use_reentrant=use_reentrant)
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is FP32


@pytest.mark.usefixtures("fresh_wrappers")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_block_in_a_reentrant_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward's graph and the recomputation's are two: both have what training has."""
    known_as(monkeypatch, lambda *question: SPEEDS["slow in training"])
    torch._dynamo.reset()
    block = torch.compile(double, backend="aot_eager", fullgraph=True)
    results = []
    with hmpx.convert(device_types={"cpu"}):
        for run in (block, lambda x: checkpoint(block, x, use_reentrant=True)):
            torch.manual_seed(0)
            x = torch.randn(64, 64, requires_grad=True)
            with torch.no_grad():
                block(x)
            result = run(x)
            result.pow(2).sum().backward()
            results.append([result.detach(), x.grad])
    same_or_nan(results[1], results[0])
