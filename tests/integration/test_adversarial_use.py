"""Unusual but legal uses: sessions left in any order, tasks that outlive a block, `*` lists, stdout that moves."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def casts() -> bool:
    """Whether torch really casts here and now."""
    return torch.mm(X, X).dtype is torch.bfloat16


def star(tmp_path: Path) -> tuple[str, str]:
    """Returns a low list that holds every op, and an empty fp32 list."""
    (tmp_path / "star.txt").write_text("*\n")
    (tmp_path / "none.txt").write_text("")
    return str(tmp_path / "star.txt"), str(tmp_path / "none.txt")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_sessions_left_in_any_order_leave_torch_unpatched(order: tuple[int, ...]) -> None:
    sessions = [
        hmpx.convert().__enter__(),
        hmpx.convert(opt_level="O2").__enter__(),
        hmpx.convert(low_precision_type=torch.float16).__enter__(),
    ]
    for index in order:
        sessions[index].__exit__(None, None, None)
    assert not hmpx.is_converted()


def test_a_task_that_outlives_the_block_it_was_made_in_agrees_with_torch() -> None:
    hmpx.convert()

    async def child(over: asyncio.Event) -> tuple[bool, bool]:
        await over.wait()
        return casts(), hmpx.casts_enabled()

    async def main() -> tuple[bool, bool]:
        over = asyncio.Event()
        with hmpx.disable_casts():
            task = asyncio.create_task(child(over))
            await asyncio.sleep(0)
        over.set()
        return await task

    really, said = asyncio.run(main())
    assert really == said


def test_everything_low_leaves_the_weights_of_a_deep_copy_as_they_are(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with hmpx.convert(*star(tmp_path)):
        copied = copy.deepcopy(model)
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
        averaged = torch.optim.swa_utils.AveragedModel(model)
    assert copied.weight.dtype is torch.float32
    assert torch.equal(copied.weight, model.weight)
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}
    assert {p.dtype for p in averaged.parameters()} == {torch.float32}


def test_everything_low_leaves_the_state_of_an_optimizer_in_fp32(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(4))
    with hmpx.convert(*star(tmp_path)):
        optimizer = torch.optim.Adagrad([weight])
    assert optimizer.state[weight]["sum"].dtype is torch.float32


def test_the_log_follows_stdout() -> None:
    logger = logging.getLogger("hmpx")
    before, root = list(logger.handlers), logging.getLogger()
    kept, root.handlers, logger.handlers = root.handlers, [], []
    try:
        first, second, errors = io.StringIO(), io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(first):
            hmpx.convert(isVerbose=True)
        first.close()  # as a notebook's cell, or a test's capture, ends
        with contextlib.redirect_stdout(second), contextlib.redirect_stderr(errors):
            torch.mm(X, X)
    finally:
        root.handlers, logger.handlers = kept, before
    assert "Logging error" not in errors.getvalue()
    assert "casting" in second.getvalue()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["always", "fast"])
@pytest.mark.parametrize("name", ["norm", "cdist", "pow", "sdpa", "log_softmax"])
def test_gradients_at_the_edges_are_finite_where_those_of_torch_are(
    name: str, mode: str, tmp_path: Path
) -> None:
    zeros = torch.cat([torch.zeros(2, 5), torch.ones(1, 5)])
    masked = torch.tensor([[False] * 5] + [[True] * 5] * 4)
    call: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
        "norm": (lambda t: torch.linalg.vector_norm(t, dim=1), zeros),
        "cdist": (lambda t: torch.cdist(t, t), torch.ones(3, 5)),
        "pow": (lambda t: t**0.5, torch.tensor([0.0, 1e-38, 1.0])),
        "sdpa": (
            lambda t: F.scaled_dot_product_attention(t, t, t, attn_mask=masked),
            torch.ones(1, 1, 5, 8),
        ),
        "log_softmax": (lambda t: F.log_softmax(t, 1), torch.tensor([[-torch.inf, 0.0, 1.0]])),
    }
    function, value = call[name]

    def gradient(legalize: str) -> torch.Tensor:
        x = value.clone().requires_grad_()
        with hmpx.convert(*star(tmp_path), legalize=legalize):
            y = function(x)
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    native = gradient("never")
    assert not (~gradient(mode).isfinite() & native.isfinite()).any()
