"""What training and inference ask of a GPU, counted without one, beside torch.autocast and fp32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from hmpx import compute
from tests import fake_cuda
from tests.fake_cuda import candidates, models

#: Inside of torch.autocast, cross_entropy computes log_softmax in the low type, below the dispatcher's
#: casts; the lists name cross_entropy itself.
LOSS = {"_log_softmax", "_log_softmax_backward_data"}

#: Model -> its masks of floats, of 4 heads and 128 x 128 tokens: T5 makes one for each attention. A kernel clamps each,
#: and a sum casts it, so that it stays finite; torch.autocast makes it infinite.
MASKS = {"t5": 6}

#: Of each element: clamp reads and writes 4; the sum reads 8, and writes 2 that count twice. A cast takes 6.
BYTES_OF_A_MASK = (8 + 12 - 6) * 4 * 128 * 128

#: The kernels that replace the cast of a mask.
CLAMPED = ("clamp float32 -> float32", "add float32,float32 -> bfloat16")

#: Model -> the largest share of torch.autocast's kernels in a step of training. Compiled nodes cast a call's inputs,
#: and their gradients, by one. Llama and T5 compute norms and rotations by many kernels of torch, which cast nothing.
LARGEST_SHARES = {
    "gpt2": 0.87,
    "llama": 0.93,
    "bert": 0.76,
    "vit": 0.75,
    "resnet": 1.0,
    "t5": 0.93,
    "lstm": 0.75,
}


@pytest.mark.models
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", models.NAMES)
def test_no_more_than_autocast(name: str, on_fake_cuda: Callable[..., Any]) -> None:
    """Kernels, bytes and waits for the device, op by op."""
    found = on_fake_cuda(candidates.report, name)
    fp32, autocast, converted = found["fp32"], found["autocast"], found["hmpx"]

    # The default lists.
    masks = MASKS.get(name, 0)
    share = LARGEST_SHARES[name] if compute.nodes_in_use().module is not None else 1.0
    assert converted["kernels"] <= share * autocast["kernels"] + masks
    inference = found["inference, hmpx"]["kernels"]
    assert inference <= found["inference, autocast"]["kernels"] + masks
    more = masks * BYTES_OF_A_MASK
    assert bytes_without_loss(converted) <= bytes_without_loss(autocast) + more

    # Nothing waits or moves that wouldn't in fp32.
    for candidate, figures in found.items():
        alike = found["inference, fp32"] if "inference" in candidate else fp32
        assert figures["waits"] == alike["waits"] == 0, candidate
        assert figures["moves"] == alike["moves"], candidate

    # Casts written by hand are the same calls, each cast by itself.
    assert Counter(found["hmpx products"]["apart"]) == Counter(found["casts by hand"]["apart"])

    # The lists of autocast are autocast.
    if name != "lstm":  # without cuDNN, torch takes it apart, and autocast casts the parts
        clamped = Counter(dict.fromkeys(CLAMPED, masks)) - Counter()
        cast = Counter({"copy_ float32 -> bfloat16": masks})
        assert without_loss(found["hmpx autocast-cuda"]) == without_loss(autocast) - cast + clamped

    # Frozen weights are not cast.
    frozen = found["inference, hmpx frozen"]
    assert frozen["casts_of_parameters"] == 0
    assert frozen["kernels"] <= found["inference, autocast"]["kernels"]
    assert frozen["bytes"] < found["inference, autocast"]["bytes"]


def bytes_without_loss(figures: dict[str, Any]) -> int:
    """Returns a step's bytes, less those of the loss, whose logarithms the default keeps in fp32."""
    by_op = zip(figures["ops"], figures["bytes_by_op"], strict=True)
    return sum(n for op, n in by_op if op.partition(" ")[0] not in LOSS)


def without_loss(figures: dict[str, Any]) -> Counter[str]:
    """Returns the ops of a step, each cast by itself, less those of the loss; a backward's order is autograd's."""
    return Counter(op for op in figures["apart"] if op.partition(" ")[0] not in LOSS)


@pytest.mark.models
@pytest.mark.slow
def test_xpu_is_asked_for_what_cuda_is_asked_for(
    on_fake_cuda: Callable[..., Any], tmp_path: Path
) -> None:
    """Op by op, also where convolutions and norms with running statistics are low."""
    guard = fake_cuda.build(tmp_path, "xpu")
    on_xpu = fake_cuda.call(guard, candidates.ops, "resnet", "hmpx", "xpu")
    assert on_xpu == on_fake_cuda(candidates.ops, "resnet", "hmpx", "cuda")
