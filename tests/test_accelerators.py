"""What holds beside an accelerator, shown without one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import hmpx
from hmpx import habana_shim


@pytest.fixture
def has_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has torch be one for CUDA, on a machine with two devices, which nothing may initialize."""

    def initialize(*args: Any) -> Any:
        raise AssertionError("the driver is initialized: forked processes can't use it any more")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_device_count_amdsmi", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_lazy_init", initialize)
    for name in ("_cuda_getDeviceCount", "_cuda_init"):
        monkeypatch.setattr(torch._C, name, initialize, raising=False)


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
    assert habana_shim.device_type() == "cuda"
    said = [record.getMessage() for record in caplog.records if record.name == "hmpx"]
    assert said == [
        "casting on cuda: tensors on the CPU are not cast; "
        'convert(device_types={"cpu"}) casts those'
    ]


@IMPORTS
@pytest.mark.usefixtures("has_cuda_devices")
@pytest.mark.parametrize("device_types", [{"cpu"}, {"cuda"}])
def test_who_names_device_types_is_not_told(
    device_types: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is the machine looked at."""
    caplog.set_level(logging.INFO, "hmpx")
    with hmpx.convert(device_types=device_types) as session:
        assert session.device_types == device_types
    assert not [record for record in caplog.records if record.name == "hmpx"]


def test_without_devices_tensors_on_the_cpu_are_cast(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by a torch that was built for CUDA."""
    caplog.set_level(logging.INFO, "hmpx")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with hmpx.convert() as session:
        assert session.device_types == {"cpu"}
    assert not [record for record in caplog.records if record.name == "hmpx"]
