"""Faults are reported where the program would go on with them, or stops by itself."""

from __future__ import annotations

import importlib
import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hmpx

FP16 = torch.float16


def in_half(**options: Any) -> Any:
    return hmpx.convert(low_precision_type=FP16, device_types={"cpu"}, **options)


class Loss(nn.Module):
    """Layers, and a loss whose gradient overflows that of their weights alone."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, given: Tensor) -> Tensor:
        return (self.layers(given).float() * 3e4).sum()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("legalize", ["always", "never"])
@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ((nn.Linear(64, 16),), (64, 64)),
        ((nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16)), (64, 64)),
        ((nn.Linear(512, 512),), (512, 512)),
        ((nn.Conv1d(4, 8, 3),), (8, 4, 32)),
        ((nn.Conv2d(4, 8, 3),), (4, 4, 12, 12)),
        ((nn.ConvTranspose2d(4, 8, 3),), (4, 4, 12, 12)),
    ],
    ids=["linear", "two", "large", "conv1d", "conv2d", "transposed"],
)
def test_gradients_of_weights_that_overflow(
    layers: tuple[nn.Module, ...], shape: tuple[int, ...], legalize: str
) -> None:
    """Reported before the optimizer makes the weights infinite."""
    model = Loss(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    given = torch.rand(shape) + 1.0
    with pytest.raises(hmpx.NonFiniteError) as raised, in_half(legalize=legalize), hmpx.watch():
        model(given).backward()
        optimizer.step()
    found = raised.value.offence
    assert found.phase == "backward"
    assert found.kind == "overflow"
    assert all(bool(each.isfinite().all()) for each in model.parameters())


def test_a_program_that_stops_at_its_own_nan(caplog: pytest.LogCaptureFixture) -> None:
    """Its exception has the finding in its notes, and the log has it; type and traceback stay."""
    caplog.set_level(logging.WARNING, logger="hmpx")
    with pytest.raises(AssertionError) as raised, hmpx.watch() as w:
        given = torch.zeros(3, requires_grad=True)
        loss = (given / given).sum()
        assert torch.isfinite(loss), "the loss is NaN"
    (note,) = raised.value.__notes__  # type: ignore[attr-defined]
    assert note == f"hmpx.watch: {w.first}"
    assert note.startswith("hmpx.watch: truediv: NaN")
    assert "truediv: NaN" in caplog.text
    assert raised.traceback[-1].path.name == "test_reported.py"


def test_the_users_own_line_comes_before_that_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "some_package_of_layers.py"
    package.parent.mkdir()
    package.write_text("def divided(h):\n    return h / (h * 0)\n")
    monkeypatch.syspath_prepend(str(package.parent))
    layers = importlib.import_module("some_package_of_layers")
    with hmpx.watch("collect") as w:
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        layers.divided(torch.ones(2))
    assert w.first is not None
    assert w.first.location == f"{__file__}:{line}"
    assert w.first.package_location == f"{package}:2"
    assert f"test_reported.py:{line}\n  in       some_package_of_layers.py:2\n" in str(w.first)
