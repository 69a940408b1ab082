"""What zoo/ says of other packages under a conversion: why tests fail, and what stays fp32."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]

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


def results(folder: Path, which: str) -> dict[str, Any]:
    """Runs the suite in this process; returns what became of its tests, by their functions' names."""
    found = folder / f"{which}.json"
    options = ["-p", "peers_plugin", "-q", "--tb=no"]
    options += [f"-pno:{plugin}" for plugin in ("cacheprovider", "unraisableexception")]
    options += ["-c", str(folder / "none.ini"), "--rootdir", str(folder), "--import-mode=importlib"]
    pytest.main([*options, f"--peers-run={which}", f"--peers-results={found}", str(folder)])
    sys.modules.pop("test_suite")
    outcomes = json.loads(found.read_text("utf-8"))
    return {name.rpartition("::")[2]: outcome for name, outcome in outcomes.items()}


def test_failures_are_told_apart_without_reading_what_they_say(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By running them again: where dtypes don't count, where rounding doesn't, where it is small."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    peers = load("peers")
    (tmp_path / "none.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
    plain, default = (results(tmp_path, which) for which in ("plain", "default"))
    failing = {name: default[name] for name in peers.newly_failing(plain, default)}
    variations = {which: results(tmp_path, which) for which in peers.VARIATIONS}
    assert peers.reasons(failing, variations) == {
        "test_dtype_assert": peers.DTYPE,
        "test_dtype_assert_close": peers.DTYPE,
        "test_tolerance": peers.TOLERANCE,
        "test_tolerance_by_hand": peers.TOLERANCE,
        "test_crash": peers.CRASH,
        "test_other": peers.OTHER,
    }
    assert plain["test_fails_anyway"]["outcome"] == "failed"
    assert results(tmp_path, "none") == plain
    slow = {name: plain[name] | {"exception": "TimedOutError"} for name in plain}
    assert peers.differences(slow, default) == []
    text = peers.section("toy 1", {"plain": plain, "default": default}, {"test_crash": "crash"}, [])
    assert "| default | 1 passed, 7 failed | 6 |" in text
    assert "| `test_crash` | crash | TypeError: fp32, please |" in text


@pytest.mark.slow
def test_a_run_is_a_process_of_its_own(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tests chosen by name, and the package's tests found in its unpacked distribution."""
    peers = load("peers")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --unknown\n", encoding="utf-8")
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
    monkeypatch.setattr(peers, "fetch", lambda peer, folder: tmp_path)
    peer = peers.Peer("toy", "toy", "sdist", ("test_suite.py",), 1, (), {})
    only = ["test_suite.py::test_same", "test_suite.py::test_dtype_assert"]
    found = peers.run(peer, "default", tmp_path, every=1, seconds=60, only=only)
    assert {name: result["outcome"] for name, result in found.items()} == {
        "test_suite.py::test_same": "passed",
        "test_suite.py::test_dtype_assert": "failed",
    }


def test_every_peer_is_described_whole(load: Any) -> None:
    """Its distribution, where its tests lie, and which ones run."""
    for peer in load("peers").read_peers().values():
        assert peer.source in {"sdist", "installed"}
        assert peer.tests
        assert peer.every >= 1


def test_a_part_of_the_document_is_replaced_alone(load: Any) -> None:
    """Between its marks; a new one is added at the end."""
    put = load("peers").put
    text = put(put("# Peers\n", "a", "one"), "b", "two")
    assert put(text, "a", "three") == text.replace("one", "three")
    assert text.startswith("# Peers\n\n<!-- a -->\none\n<!-- end of a -->\n")


#: Metrics that compute with sums, products and quotients, whose examples are run.
METRICS = (
    "classification.accuracy",
    "classification.calibration_error",
    "regression.explained_variance",
    "text.perplexity",
    "image.psnr",
)


def test_metrics_are_bit_equal(load: Any) -> None:
    """The examples of torchmetrics' docstrings give the same bits under a conversion."""
    pipelines = load("pipelines")
    names = [f"torchmetrics.functional.{metric}" for metric in METRICS]
    found, unusable = pipelines.verdicts(list(pipelines.docstring_cases("torchmetrics", *names)))
    assert [(each.name, str(each.hmpx), each.ops) for each in found if each.hmpx] == []
    assert len(found) >= len(METRICS)
    assert len(unusable) <= len(found) // 4


def test_data_preparation_differs_in_products_alone(load: Any) -> None:
    """As it does under torch.autocast."""
    pipelines = load("pipelines")
    found, _ = pipelines.verdicts(list(pipelines.torch_cases()))
    assert {each.name: each.ops for each in found if each.hmpx} == {
        "covariance by @": ("matmul",),
        "moving average by conv1d": ("conv1d",),
        "mel spectrogram by @": ("matmul",),
        "luma by einsum": ("einsum",),
    }
    assert not [each.name for each in found if each.hmpx.is_worse_than(each.autocast)]


def test_a_difference_is_told_in_numbers_dtypes_or_words(load: Any) -> None:
    """Bits count: NaNs are equal in equal places, zeros of either sign are equal numbers."""
    pipelines = load("pipelines")
    ones, nan = torch.ones(3), torch.tensor([1.0, float("nan"), 3.0])

    def between(a: object, b: object) -> str:
        return str(pipelines.difference(list(pipelines.leaves(a)), list(pipelines.leaves(b))))

    assert between({"a": [ones, nan, 2]}, {"a": [ones, nan, 2]}) == "equal"
    assert between(ones, ones * 1.5) == "5.0e-01"
    assert between(ones, ones.bfloat16()) == "equal, other dtype"
    assert between(ones, nan) == "inf or NaN in other places"
    assert between(ones, ones[:2]) == "other shapes"
    assert between("a", "b") == "b for a"
    raised = pipelines.difference([ones], pipelines.Raised("ValueError", "no"))
    assert raised.raised
    assert raised.is_worse_than(pipelines.Difference(0.5))
    assert pipelines.Difference(0.0, True).is_worse_than(pipelines.Difference())
    assert not pipelines.Difference(1e-3).is_worse_than(pipelines.Difference(1e-3, True))
