"""What holds beside an accelerator, shown without one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx


@pytest.fixture
def has_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has torch be one for CUDA, on a machine with two devices, which nothing may initialize."""

    def initialize(*args: Any) -> Any:
        raise AssertionError("the driver is initialized: forked processes can't use it any more")

    answers: list[tuple[Any, str, Any]] = [
        (torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda")),
        (torch.cuda, "_is_compiled", lambda: True),
        (torch.cuda, "_device_count_nvml", lambda: 2),
        (torch.cuda, "_device_count_amdsmi", lambda: 2),
        (torch.cuda, "_lazy_init", initialize),
        (torch._C, "_cuda_getDeviceCount", initialize),
        (torch._C, "_cuda_init", initialize),
    ]
    for owner, name, answer in answers:
        monkeypatch.setattr(owner, name, answer, raising=owner is not torch._C)


#: Torch before 2.14 imports Inductor when Dynamo is reset beside a device.
IMPORTS = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")


@IMPORTS
@pytest.mark.usefixtures("has_cuda_devices")
def test_convert_initializes_no_device(caplog: pytest.LogCaptureFixture) -> None:
    """A DataLoader's forked workers can use the device; one line says that tensors on the CPU stay."""
    caplog.set_level(logging.INFO, "hmpx")
    with hmpx.convert() as session:
        assert session.device_types == {"cuda"}
        assert not torch.cuda.is_initialized()
        assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    said = [record.getMessage() for record in caplog.records if record.name == "hmpx"]
    assert said == [
        "casting on cuda: tensors on the CPU are not cast; "
        'convert(device_types={"cpu"}) casts those'
    ]


# --- 0-dim tensors on the CPU, which kernels take beside those on a device -----------------------


class Arriving(TorchDispatchMode):
    """Notes the floating dtypes that the kernels of a call get, casts aside."""

    def __init__(self) -> None:
        """Starts without any."""
        super().__init__()
        self.dtypes: list[list[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes a call."""
        given = [t.dtype for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
        floating = [dtype for dtype in given if dtype.is_floating_point]
        if len(floating) > 1:
            self.dtypes.append(floating)
        return func(*args, **(kwargs or {}))


def on_device(*shape: int) -> Tensor:
    """Returns a tensor on what stands in for an accelerator: it has no values."""
    return torch.empty(*shape, device="meta")


def set_items(x: Tensor, number: Tensor) -> Tensor:
    x[torch.tensor([0, 1], device=x.device)] = number
    return x


#: Calls with a tensor on the device and a 0-dim one on the CPU whose kernels take no mixed dtypes.
WITH_NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "setitem": set_items,
    "index_put": lambda x, n: x.index_put((torch.tensor([0], device=x.device),), n),
    "index_put_": lambda x, n: x.index_put_((torch.tensor([0], device=x.device),), n),
    "heaviside": lambda x, n: torch.heaviside(x, n),
    "Tensor.heaviside": lambda x, n: x.heaviside(n),
    "heaviside by name": lambda x, n: torch.heaviside(x, values=n),
    "lerp": lambda x, n: torch.lerp(x, x * 2, n),
    "lerp_": lambda x, n: x.lerp_(x * 2, n),
    "mul": lambda x, n: torch.mul(x, n),
    "rmul": lambda x, n: n * x,
}


@pytest.mark.native
@pytest.mark.parametrize("kind", ["lists", "low", "fp32"])
def test_numbers_from_the_cpu_are_cast_as_tensors_on_the_device(kind: str) -> None:
    """No kernel gets one in another dtype, which those of CUDA refuse."""
    policy: dict[str, object] = {"lists": "hmpx"}
    if kind != "lists":
        policy[kind] = ["heaviside", "lerp", "mul"]
    found = {}
    with hmpx.convert(policy=policy, device_types={"meta"}):
        for name, call in WITH_NUMBERS.items():
            if kind != "low" and name in ("mul", "rmul"):
                continue  # torch's kernels promote them
            for dtype in (torch.bfloat16, torch.float32):
                with Arriving() as arriving:
                    call(on_device(4, 4).to(dtype), torch.tensor(0.3))
                    call(on_device(4, 4).to(dtype), torch.tensor(0.3).bfloat16())
                found[name, dtype] = arriving.dtypes
    assert not [case for case, dtypes in found.items() if not dtypes]
    faults = {
        case: dtypes for case, dtypes in found.items() if any(len(set(d)) > 1 for d in dtypes)
    }
    assert not faults
