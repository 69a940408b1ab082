"""A training step under checkpoints keeps no more memory than under torch.autocast."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import hmpx

aten = torch.ops.aten


class Peak(TorchDispatchMode):
    """Counts the bytes that operators allocate, and the most that are alive at once.

    Views of ``known`` tensors, such as parameters, allocate nothing.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.alive = dict.fromkeys((each.untyped_storage()._cdata for each in known), 0)
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in [each for each in tree_leaves(result) if isinstance(each, Tensor)]:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata).atexit = False
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return result

    def _free(self, key: int) -> None:
        self.now -= self.alive.pop(key)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(128, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(128, 128, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]  # type: ignore[no-any-return]


#: Name -> a block, and the shape of its input and output. The weights are large enough for `"auto"` to cast again.
BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)),
        (256, 128),
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.Conv2d(64, 32, 3, padding=1)),
        (2, 32, 16, 16),
    ),
    "attention": (Attention, (8, 32, 128)),
    "lstm": (Recurrent, (8, 32, 128)),
}

again = functools.partial(checkpoint, use_reentrant=False)
reentrant = functools.partial(checkpoint, use_reentrant=True)
kept = [aten.mm.default, aten.addmm.default, aten.convolution.default]
selective = functools.partial(create_selective_checkpoint_contexts, kept)


def each(run: Callable[..., Tensor]) -> Callable[[list[nn.Module], Tensor], Tensor]:
    """Returns what runs the blocks one after the other, each by ``run``."""

    def run_all(blocks: list[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            x = x + run(block, x)
        return x

    return run_all


WAYS: dict[str, Callable[[list[nn.Module], Tensor], Tensor]] = {
    "no checkpoint": each(lambda block, x: block(x)),
    "not reentrant": each(again),
    "reentrant": each(reentrant),
    "selective": each(lambda block, x: again(block, x, context_fn=selective)),
    "nested": each(lambda block, x: again(again, block, x)),
    "nested in a reentrant one": each(lambda block, x: reentrant(again, block, x)),
    "sequential": lambda blocks, x: checkpoint_sequential(blocks, 2, x, use_reentrant=False),
    "sequential, reentrant": lambda blocks, x: checkpoint_sequential(
        blocks, 2, x, use_reentrant=True
    ),
}


def peak(block: str, way: str, region: contextlib.AbstractContextManager[object]) -> int:
    """Returns the most bytes that are alive in a training step."""
    torch.manual_seed(0)
    make, shape = BLOCKS[block]
    blocks = nn.ModuleList([make() for _ in range(4)])
    x = torch.randn(shape, requires_grad=True)
    with region, Peak([*blocks.parameters(), x]) as counted:
        WAYS[way]([*blocks], x).float().square().mean().backward()  # type: ignore[no-untyped-call]
    return counted.most


@functools.cache
def peak_under_autocast(block: str, way: str) -> int:
    """Returns `peak`; on some CPUs oneDNN has no bf16 kernel for an LSTM, which then stops: that of fp32."""
    try:
        return peak(block, way, torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
    except RuntimeError as error:
        if "could not create a primitive descriptor" not in str(error):
            raise
        return peak(block, way, contextlib.nullcontext())


@functools.cache
def stops_in_bf16(block: str, way: str) -> bool:
    """Whether torch itself can't train such blocks in bf16: its LSTM writes to what a selective checkpoint has kept."""
    make, shape = BLOCKS[block]
    blocks = [make().bfloat16() for _ in range(4)]
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    try:
        WAYS[way](blocks, x).float().square().mean().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        return True
    return False


@pytest.mark.sampled(4)
@pytest.mark.parametrize("keep_weight_casts", ["auto", True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_step_keeps_no_more_than_under_torch_autocast(
    block: str, way: str, keep_weight_casts: bool | str
) -> None:
    region = hmpx.convert(
        legalize="never", device_types={"cpu"}, keep_weight_casts=keep_weight_casts
    )
    if stops_in_bf16(block, way):
        with pytest.raises(RuntimeError, match="has been mutated"):
            peak(block, way, region)
        return
    most = peak(block, way, region)
    assert most <= peak_under_autocast(block, way)
    # Recurrent layers keep their casts, and the peak under a checkpoint may be where there are none.
    if keep_weight_casts is False and block != "lstm" and way == "no checkpoint":
        assert most < peak_under_autocast(block, way)
