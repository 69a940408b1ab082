"""The examples of number formats: what they print is what their docstrings promise."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hmpx.compute import LOWERINGS

from .test_examples import EXAMPLES, run_example

#: Deviation of a mixed-precision loss from fp32 that HMP's users accept before training.
RTOL = 0.05


def load(name: str) -> ModuleType:
    """Imports an example; nothing in it runs."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- formats_train.py ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[float, float]]]:
    """Returns model -> way of training -> (first loss, last losses)."""
    output = run_example("formats_train.py", "--steps", "12", cwd=tmp_path_factory.mktemp("train"))
    assert output.count("bf16 losses, native and emulated: equal bit for bit") == 2
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for line in output.splitlines():
        if title := re.fullmatch(r"(\w+): 12 steps", line):
            rows = found[title[1]] = {}
        elif row := re.fullmatch(r"  +(\S.*?)  +(\S+)  +(\S+)  +\S+%  +\S+ s", line):
            rows[row[1]] = (float(row[2]), float(row[3]))
    return found


@pytest.mark.models
@pytest.mark.sampled(4)
def test_bf16_is_bf16_and_float8_learns(
    table: dict[str, dict[str, tuple[float, float]]],
) -> None:
    """Both bf16 losses are one and close to fp32's; e4m3 learns, unless gradients vanish in it."""
    for rows in table.values():
        assert rows["native bf16"] == rows["emulated bf16"]
        assert rows["native bf16"] == pytest.approx(rows["fp32"], rel=RTOL)
        assert rows["float8_e4m3fn"][0] != rows["fp32"][0]
        assert rows["float8_e4m3fn"] == pytest.approx(rows["fp32"], rel=RTOL)
        for first, last in (rows["fp32"], rows["float8_e4m3fn"]):
            assert last < 0.95 * first
        unscaled, scaled = rows["gradients too"][1], rows["loss x 256"][1]
        assert unscaled > 1.1 * rows["fp32"][1]
        assert scaled < unscaled


# --- fp8_recipes.py ------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.models
def test_recipes_of_hardware_learn_as_fp32_does(tmp_path: Path) -> None:
    """One table: bf16 and fp8 with scales are close to fp32, and fp4 learns, too; one figure."""
    pytest.importorskip("matplotlib")
    output = run_example("fp8_recipes.py", "--steps", "12", "--draw", "a.svg", cwd=tmp_path)
    rows = re.findall(r"^(gpt|resnet) +(\w+) +12 +(\S+) +(\S+) +\S+%$", output, re.MULTILINE)
    found = {(model, recipe): (float(a), float(b)) for model, recipe, a, b in rows}
    recipes = ("fp32", "bf16", "fp8", "delayed", "mxfp8", "nvfp4")
    assert list(found) == [(model, recipe) for model in ("gpt", "resnet") for recipe in recipes]
    for (model, recipe), (first, last) in found.items():
        assert last < 0.97 * first
        if recipe != "nvfp4":
            assert last == pytest.approx(found[model, "fp32"][1], rel=RTOL)
    assert "</svg>" in (tmp_path / "a.svg").read_text("utf-8")


@pytest.mark.slow
def test_accuracy_rises_with_bits(tmp_path: Path) -> None:
    """With 8 bits all families reach fp32 within a percent; with 4 bits floats and posits don't."""
    output = run_example(
        *("formats_sweep.py", "--bits", "4", "8", "--epochs", "5", "--draw", "a.svg"), cwd=tmp_path
    )
    fp32 = float(re.findall(r"^fp32: (\d+\.\d)%", output, re.M)[0])
    rows = re.findall(r"^(\w+) +(\d+(?:\.\d+)?) +\S+ +\S+ +(\d+\.\d)%$", output, re.M)
    assert len(rows) == 34
    assert fp32 > 85
    for name, bits, found in rows:
        if float(bits) >= 8:
            assert float(found) > fp32 - 1.5, name  # five or six of 360 images
        if name in ("e2m1", "posit4_0"):
            assert float(found) < fp32 - 5, name
    assert "drawn: a.svg" in output
    picture = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "<svg" in picture


# --- posits.py -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def posits() -> Iterator[ModuleType]:
    """The example as a module, its ops and its format forgotten afterwards."""
    module = load("posits")
    yield module
    LOWERINGS.change({})


@pytest.mark.sampled(4)
def test_posits(tmp_path: Path) -> None:
    """The perceptron trains to fp32's accuracy less a percent, the residual network keeps its own."""
    output = run_example(
        *("posits.py", "--library", "integers", "--epochs", "1", "--images", "20"), cwd=tmp_path
    )
    shares = [float(share) for share in re.findall(r"(\d+\.\d)%$", output, re.M)]
    perceptron, in_posits, residual, run_in_posits = shares
    assert perceptron > 70
    assert in_posits >= perceptron - 1
    assert "  within 1% of fp32" in output
    assert residual > 85
    assert abs(run_in_posits - residual) < 5.1  # one image of 20
    assert output.count("torch.float32, all posits") == 2
