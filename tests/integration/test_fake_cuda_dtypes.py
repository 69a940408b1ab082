"""The dtypes that CUDA's kernels get, call by call, on a fake device: see `tests.fake_cuda`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import hmpx
from hmpx.compute import accumulation, composition
from tests.fake_cuda import steps

BF16 = torch.bfloat16


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Has fake tensors be computed as others are, not as those of a graph."""
    plain = composition.PLAIN_TENSORS | {FakeTensor}
    with (
        mock.patch.object(composition, "PLAIN_TENSORS", plain),
        mock.patch.object(accumulation, "is_traced", bool),
    ):
        yield


def kernels(
    call: Callable[..., Tensor], *inputs: Any, region: Any = contextlib.nullcontext
) -> list[str]:
    """Returns the kernels of a call and its backward, with their dtypes."""
    with steps.Kernels("cuda") as found:
        with region():
            result = call(*inputs)
        if result.requires_grad:
            result.backward(torch.ones_like(result))
    return [str(kernel) for kernel in found.list if kernel.name != "ones_like"]


def low(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=BF16)


# --- what is run in the other process ------------------------------------------------------------

#: Calls on low-precision tensors that CUDA has no kernel for.
LACKING: dict[str, Callable[[], Any]] = {
    "angle": lambda: low(4).angle(),
    "cdist": lambda: torch.cdist(low(4, 3), low(5, 3)),
    "complex": lambda: torch.complex(low(4), low(4)),
    "fft": lambda: torch.fft.rfft(low(8)),
    "histc": lambda: torch.histc(low(8), 4),
    # These have kernels whose sums stop growing, as seen on an H200.
    "index_add": lambda: low(2, 3).index_add(0, torch.zeros(4, dtype=torch.long), low(4, 3)),
    "put": lambda: low(4).put(torch.zeros(4, dtype=torch.long), low(4), accumulate=True),
    "scatter_add": lambda: low(4).scatter_add(0, torch.zeros(4, dtype=torch.long), low(4)),
    "scatter_reduce": lambda: low(4).scatter_reduce(
        0, torch.zeros(4, dtype=torch.long), low(4), "sum"
    ),
    "igamma": lambda: torch.igamma(low(4), low(4)),
    "igamma mixed": lambda: torch.igamma(low(4), low(4).float()),
    "igamma_": lambda: low(4).igamma_(low(4)),
    "igammac": lambda: torch.special.gammaincc(low(4), low(4)),
    "inv": lambda: torch.linalg.inv(low(4, 4)),
    "polar": lambda: torch.polar(low(4), low(4)),
    "zeta": lambda: torch.special.zeta(low(4), low(4)),
}

NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: nn.BatchNorm1d(8),
    "group_norm": lambda: nn.GroupNorm(2, 8),
    "group_norm without weights": lambda: nn.GroupNorm(2, 8, affine=False),
    "group_norm, low weights": lambda: nn.GroupNorm(2, 8, dtype=BF16),
    "instance_norm": lambda: nn.InstanceNorm1d(8, affine=True),
    "layer_norm": lambda: nn.LayerNorm(6),
}

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "weighted": lambda x, y: F.cross_entropy(x, y, torch.ones(10)),
    "smoothed": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "of probabilities": lambda x, y: F.cross_entropy(x, torch.ones(8, 10)),
    "nll_loss": lambda x, y: F.nll_loss(F.log_softmax(x, -1), y),
    "nll_loss2d": lambda x, y: F.nll_loss(F.log_softmax(x[..., None, None], 1), y.view(8, 1, 1)),
}


def report() -> dict[str, Any]:
    """Returns what every test here looks at."""
    with steps.fake("cuda"):
        return {
            "lacking": _lacking(),
            "norms": _norms({"lists": "lean"}),
            "norms of rules": _norms({"lists": "none", "low": list(_NORM_OPS)}),
            "followers": _norms({"lists": "lean", "low": {"remove": list(_NORM_OPS)}}),
            "products": _products(),
            "losses": _losses(),
            "kept": _kept(),
        }


_NORM_OPS = ("batch_norm", "group_norm", "instance_norm", "layer_norm")


def _lacking() -> dict[str, list[str]]:
    found = {}
    with hmpx.convert(lists="lean", device_types={"cuda"}):
        for name, call in LACKING.items():
            with steps.Kernels("cuda") as each:
                call()
            kinds = [kernel for kernel in each.list if not kernel.casts and kernel.given]
            found[name] = [str(kernel) for kernel in kinds if kernel.name not in ("copy_", "rand")]
    return found


def _norms(policy: dict[str, Any] | None = None) -> dict[str, list[str]]:
    found = {}
    with hmpx.convert(policy=policy, device_types={"cuda"}), eager():
        for name, make in NORMS.items():
            found[name] = kernels(make(), low(4, 8, 6).requires_grad_())
    return found


def _products() -> dict[str, list[str]]:
    x, weight, bias = torch.rand(4, 5, 7), torch.rand(3, 7), torch.rand(3)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    found = {}
    for ending in ("", " output=float32"):
        policy = {"lists": "none", "low": [f"linear accumulate=float32{ending}"]}
        with hmpx.convert(policy=policy, device_types={"cuda"}), eager():
            found[ending] = kernels(lambda *t: F.linear(*t), *inputs)
    policy = {"lists": "none", "low": ["linear accumulate=float32"]}
    flag = "allow_bf16_reduced_precision_reduction"
    with (
        mock.patch.object(torch.backends.cuda.matmul.__class__, flag, False, create=True),
        hmpx.convert(policy=policy, device_types={"cuda"}),
        eager(),
    ):
        found["without reduced precision"] = kernels(lambda *t: F.linear(*t), *inputs)
    return found


def _losses() -> dict[str, list[list[str]]]:
    def run(region: Any = contextlib.nullcontext) -> list[list[str]]:
        target = torch.zeros(8, dtype=torch.long)
        return [
            kernels(call, low(8, 10).requires_grad_(), target, region=region)
            for call in LOSSES.values()
        ]

    autocast = run(steps.autocast)
    with hmpx.convert(lists="autocast-cuda", device_types={"cuda"}):
        converted = run()
    return {n: [a, c] for n, a, c in zip(LOSSES, autocast, converted, strict=True)}


def _kept() -> list[list[str]]:
    """Returns dtypes of the floating tensors that autograd keeps of a cross entropy."""

    def run(region: Any = contextlib.nullcontext) -> list[str]:
        kept: dict[int, str] = {}

        def keep(each: Tensor) -> Tensor:
            if each.is_floating_point() and each.dim():
                kept[each.untyped_storage()._cdata] = str(each.dtype).removeprefix("torch.")
            return each

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each)
        target = torch.zeros(8, dtype=torch.long)
        with region(), hooks:
            loss = F.cross_entropy(low(8, 10).requires_grad_(), target)
        return sorted(kept.values()) if loss.requires_grad else []

    autocast = run(steps.autocast)
    with hmpx.convert(lists="autocast-cuda", device_types={"cuda"}):
        return [autocast, run()]


# --- tests ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(on_fake_cuda: Callable[..., Any]) -> Any:
    """Returns the `report`."""
    return on_fake_cuda(report)


def test_ops_without_a_low_kernel_get_fp32(found: Any) -> None:
    """No kernel of theirs gets bfloat16."""
    assert found["lacking"].keys() == LACKING.keys()
    for name, listed in found["lacking"].items():
        assert any("float32" in kernel for kernel in listed), (name, listed)
        is_mixed = name == "igamma mixed"  # which the kernel promotes, and gives in float32
        faults = [kernel for kernel in listed if "bfloat16" in kernel]
        assert faults == ["igamma bfloat16,float32 -> float32"] * is_mixed, (name, listed)


@pytest.mark.parametrize("policy", ["norms", "norms of rules", "followers"])
def test_statistics_of_norms_are_fp32(found: Any, policy: str) -> None:
    """Whichever list has made the input low; what group norms keep has the dtype of their input."""
    for name, listed in found[policy].items():
        op = name.split()[0].strip(",")
        (forward,) = [k for k in listed if k.startswith((f"native_{op} ", "native_batch_norm "))]
        *_, deviation = forward.partition(" -> ")[2].split(",")
        assert deviation == "float32", (name, forward)


def test_which_norms_have_their_weights_cast(found: Any) -> None:
    """Those of layer norms: CUDA's kernel takes no others beside the input."""
    casts = {
        name: sum(kernel.startswith("_to_copy float32 -> bfloat16") for kernel in listed)
        for name, listed in found["norms"].items()
    }
    results = {name: int(name.startswith("group_norm")) for name in casts}
    of_weights = {name: casts[name] - results[name] for name in casts}
    # The gradient of a group norm's input, too, is rounded.
    assert of_weights == {name: 2 * (name == "layer_norm") + results[name] for name in casts} | {
        "group_norm, low weights": 3  # and those of weight and bias
    }


def test_accumulating_products_run_in_low_precision(found: Any) -> None:
    """Forward and backward; behind an output in fp32 the backward multiplies fp32."""
    multiplied = {
        name: [k for k in listed if k.startswith(("mm", "addmm", "bmm"))]
        for name, listed in found["products"].items()
    }
    gives_fp32 = "mm bfloat16,bfloat16 -> float32"
    in_fp32 = "mm float32,float32 -> float32"
    native = "mm bfloat16,bfloat16 -> bfloat16"
    assert multiplied == {
        "": [gives_fp32] * 3,
        " output=float32": [gives_fp32, in_fp32, in_fp32],
        "without reduced precision": [
            "addmm bfloat16,bfloat16,bfloat16 -> bfloat16",
            native,
            native,
        ],
    }
    # Seven casts are those of the inputs and of parameters' gradients, which native kernels have, too.
    assert len(found["products"][""]) == 15


def test_losses_are_those_of_autocast_but_for_one_rounding(found: Any) -> None:
    """Inside of cross_entropy autocast rounds the logarithms of probabilities to the low type."""
    for name, (autocast, converted) in found["losses"].items():
        if name.startswith("nll_loss"):
            assert converted == autocast, name
            continue
        low_type = "_log_softmax bfloat16 -> bfloat16"
        assert low_type in autocast and low_type not in converted, name
        assert "_log_softmax float32 -> float32" in converted, name
        names = [sorted(k.split()[0] for k in each) for each in (autocast, converted)]
        extra = [kernel for kernel in names[1] if kernel not in names[0]]
        assert not extra and len(names[1]) <= len(names[0]) + 2, (name, names)
    assert len(found["losses"]["cross_entropy"][0]) == len(found["losses"]["cross_entropy"][1])
    assert found["kept"] == [["bfloat16", "float32"], ["float32"]]
