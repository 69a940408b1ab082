"""`record(memory=True)`: figures that follow from shapes, and against what benchmarks measure another way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hmpx


def test_each_storage_counts_once() -> None:
    """Whatever views there are, and however often it is saved."""
    x = torch.randn(16, 16, requires_grad=True)
    with hmpx.record(memory=True) as rec:
        y = x.exp()  # saves its result
        z = (y * y.t()).sum()  # saves it twice again
        z.backward()
    assert dict(rec.memory.saved) == {"float32": 16 * 16 * 4}
    assert rec.memory.weight_cast_bytes == 0


def test_casts_of_parameters_are_told_from_other_casts() -> None:
    """By what they are casts of."""
    model, x = nn.Linear(64, 32), torch.randn(8, 64, requires_grad=True)
    options = {"device_types": {"cpu"}, "legalize": "never"}
    with hmpx.convert(**options, keep_weight_casts=True), hmpx.record(memory=True) as kept:
        model(x).sum().backward()
    with hmpx.convert(**options, keep_weight_casts=False), hmpx.record(memory=True) as not_kept:
        model(x).sum().backward()
    assert kept.memory.parameter_bytes == 4 * (64 * 32 + 32)
    assert kept.memory.gradient_bytes == 4 * (64 * 32 + 32)
    assert dict(kept.memory.saved) == {"bfloat16": 2 * 8 * 64}
    assert kept.memory.weight_cast_bytes == 2 * 64 * 32
    assert dict(not_kept.memory.saved) == dict(kept.memory.saved)
    assert not_kept.memory.weight_cast_bytes == 0


def test_the_peak_is_that_of_live_tensors() -> None:
    """The largest sum at any time, of what was there at that time."""
    with hmpx.record(memory=True) as rec:
        a = torch.ones(1000)
        b = torch.ones(2000)
        del a
        c = torch.ones(500)
        del b, c
        torch.ones(100)
    assert rec.memory.peak_bytes == 4 * 3000
    assert dict(rec.memory.peak.kinds) == {"other": 12_000}
    assert rec.memory.peak.phase == "forward"


def test_what_an_optimizer_keeps_counts_from_the_start() -> None:
    """As it does in every step but the first, so that one step has the peak of many."""
    model, x = nn.Linear(256, 256, bias=False), torch.ones(1, 256)
    optimizer = torch.optim.Adam(model.parameters())
    peaks = []
    for _ in range(2):
        with hmpx.record(memory=True) as rec:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(rec.memory.peak_bytes)
        assert rec.memory.optimizer_bytes >= 2 * 4 * 256 * 256
        assert {moment.phase for moment in rec.memory.phases} == {
            "forward",
            "backward",
            "optimizer",
        }
    assert abs(peaks[0] - peaks[1]) <= 16


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_keep_less(use_reentrant: bool) -> None:
    """Of both kinds: what they save while they recompute counts then."""
    block = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
    x = torch.randn(32, 64, requires_grad=True)
    saved = []
    for recomputes in (False, True):
        with hmpx.record(memory=True) as rec:
            y = x
            for layer in block:
                y = checkpoint(layer, y, use_reentrant=use_reentrant) if recomputes else layer(y)
            y.sum().backward()
        saved.append(rec.memory.saved_bytes)
    one = 4 * 32 * 64
    assert saved[0] == 16 * one
    assert saved[1] <= 11 * one


def test_it_agrees_with_hooks_of_its_own() -> None:
    """Those that the benchmark of memory has: distinct storages, but those of parameters."""
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(4, 32)
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    with hmpx.convert(device_types={"cpu"}):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(x).float().sum()
        expected = sum(storage.nbytes() for storage in found.values())
        del loss
        with hmpx.record(memory=True) as rec:
            model(x).float().sum().backward()
    assert rec.memory.saved_bytes + rec.memory.weight_cast_bytes == expected > 0


def test_its_lines_say_what_there_is() -> None:
    """What is nothing is left out."""
    model = nn.Linear(64, 32)
    with hmpx.record(memory=True) as rec:
        model(torch.ones(8, 64)).sum().backward()
    lines = str(rec.memory).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "parameters", "gradients", "saved for the backward", "peak of tensors",
    ]  # fmt: skip
    assert lines[2].split() == ["saved", "for", "the", "backward", "2.0", "kB", "fp32", "2.0", "kB"]
