"""What zoo/ says of other packages under a conversion: why tests fail, and what stays fp32."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hmpx

ROOT = Path(__file__).parent.parent

#: One test for each class, and one that no conversion touches.
SUITE = """
import numpy as np
import torch
from torch.testing import assert_close

torch.manual_seed(0)
A, B = torch.randn(8, 8), torch.randn(8, 8)
EXACT = (A.double() @ B.double()).float()

def test_same():
    assert_close(A + B, B + A)

def test_dtype_assert():
    assert (A @ B).dtype == torch.float32

def test_dtype_assert_close():
    assert_close(torch.eye(8) @ torch.eye(8), torch.eye(8))

def test_tolerance():
    assert torch.allclose((A @ B).float(), EXACT, atol=1e-5)

def test_tolerance_by_hand():
    assert (A @ B - EXACT).abs().max() < 1e-5

def test_crash():
    (A @ B).view(torch.int32)
    if (A @ B).dtype != torch.float32:
        raise TypeError("fp32, please")

def test_other():
    assert (A @ B).element_size() == 4 or EXACT[0, 0] > 1000

def test_fails_anyway():
    assert False
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that imports a module of zoo/, for one test."""

    def load_module(name: str) -> Any:
        monkeypatch.syspath_prepend(str(ROOT / "zoo"))
        for each in ("peers", "peers_plugin", "pipelines"):
            monkeypatch.delitem(sys.modules, each, raising=False)
        return importlib.import_module(name)

    return load_module
