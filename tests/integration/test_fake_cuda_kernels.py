"""What training and inference ask of a GPU, counted without one, beside torch.autocast and fp32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests import fake_cuda
from tests.fake_cuda import candidates, models

#: Inside of torch.autocast, cross_entropy computes log_softmax in the low type, below the dispatcher's
#: casts; the lists name cross_entropy itself.
LOSS = {"_log_softmax", "_log_softmax_backward_data"}

#: By which T5's masks, which it adds in place, stay finite, and their gradients; torch.autocast makes them infinite.
MASKS = {"clamp", "neg", "sub_"}


@pytest.mark.models
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", models.NAMES)
def test_no_more_than_autocast(name: str, on_fake_cuda: Callable[..., Any]) -> None:
    """Kernels, bytes and waits for the device, op by op."""
    found = on_fake_cuda(candidates.report, name)
    fp32, autocast, converted = found["fp32"], found["autocast"], found["hmpx"]

    # The default lists.
    assert converted["kernels"] - of_masks(converted) <= autocast["kernels"] - of_masks(autocast)
    assert bytes_without_loss(converted) <= bytes_without_loss(autocast)

    # Nothing waits or moves that wouldn't in fp32.
    for candidate, figures in found.items():
        alike = found["inference, fp32"] if "inference" in candidate else fp32
        assert figures["waits"] == alike["waits"] == 0, candidate
        assert figures["moves"] == alike["moves"], candidate

    # Casts written by hand are the same calls.
    assert found["hmpx products"]["ops"] == found["casts by hand"]["ops"]

    # The lists of autocast are autocast.
    if name != "lstm":  # without cuDNN, torch takes it apart, and autocast casts the parts
        assert without_loss(found["hmpx autocast-cuda"]) == without_loss(autocast)

    # Frozen weights are not cast.
    frozen = found["inference, hmpx frozen"]
    assert frozen["casts_of_parameters"] == 0
    inference = found["inference, autocast"]
    assert frozen["kernels"] - of_masks(frozen) <= inference["kernels"] - of_masks(inference)
    assert frozen["bytes"] < found["inference, autocast"]["bytes"]


def of_masks(figures: dict[str, Any]) -> int:
    """Returns how many of a step's kernels keep masks finite."""
    return sum(op.partition(" ")[0] in MASKS for op in figures["ops"])


def bytes_without_loss(figures: dict[str, Any]) -> int:
    """Returns a step's bytes, less those of the loss, whose logarithms the default keeps in fp32."""
    by_op = zip(figures["ops"], figures["bytes_by_op"], strict=True)
    return sum(n for op, n in by_op if op.partition(" ")[0] not in LOSS | MASKS)


def without_loss(figures: dict[str, Any]) -> Counter[str]:
    """Returns the ops of a step, less those of the loss; the backward's order is autograd's own."""
    return Counter(op for op in figures["ops"] if op.partition(" ")[0] not in LOSS | MASKS)


@pytest.mark.models
@pytest.mark.slow
def test_xpu_is_asked_for_what_cuda_is_asked_for(
    on_fake_cuda: Callable[..., Any], tmp_path: Path
) -> None:
    """Op by op, also where convolutions and norms with running statistics are low."""
    guard = fake_cuda.build(tmp_path, "xpu")
    on_xpu = fake_cuda.call(guard, candidates.ops, "resnet", "hmpx", "xpu")
    assert on_xpu == on_fake_cuda(candidates.ops, "resnet", "hmpx", "cuda")
