"""The examples of number formats: what they print is what their docstrings promise."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from hmpx import formats
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
@pytest.mark.parametrize("model", ["gpt", "resnet"])
def test_bf16_is_bf16_and_float8_learns(
    table: dict[str, dict[str, tuple[float, float]]], model: str
) -> None:
    """Both bf16 losses are one and close to fp32's; e4m3 learns, unless gradients vanish in it."""
    rows = table[model]
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


# --- formats_sweep.py ----------------------------------------------------------------------------


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


@pytest.mark.slow
def test_training_in_a_format(tmp_path: Path) -> None:
    """Blocks with their own scale hold gradients of any size, e4m3 with one epoch hardly any."""
    output = run_example(
        *("formats_sweep.py", "--bits", "8", "8", "--epochs", "1", "--train"), cwd=tmp_path
    )
    fp32 = float(re.findall(r"^fp32: (\d+\.\d)%", output, re.M)[0])
    trained = dict(re.findall(r"^(\w+) .* (\d+\.\d)%$", output, re.M))
    assert float(trained["mx_e4m3"]) > fp32 - 10
    assert float(trained["e2m5"]) < 50


# --- posits.py -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def posits() -> Iterator[ModuleType]:
    """The example as a module, its ops and its format forgotten afterwards."""
    module = load("posits")
    yield module
    LOWERINGS.change({})


def operands() -> tuple[Tensor, Tensor]:
    """Returns pairs of codes: by chance, neighbours, equal, negated, zero and not a real."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(65536, (40_000,), generator=generator)
    b = torch.randint(65536, (40_000,), generator=generator)
    near = (a + torch.randint(-2000, 2000, (40_000,), generator=generator)) & 0xFFFF
    special = torch.tensor([0, 1, 2, 0x3FFF, 0x4000, 0x4001, 0x7FFE, 0x7FFF])
    special = torch.cat([special, 0x8000 + special])
    pairs = torch.cartesian_prod(special, special)
    return (
        torch.cat([a, a, a[:1000], a[:1000], pairs[:, 0]]),
        torch.cat([b, near, a[:1000], -a[:1000] & 0xFFFF, pairs[:, 1]]),
    )


def by_hmpx(op: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Returns codes of a sum or product, exact in fp64, rounded once."""
    values = [formats.decode(code.to(torch.uint16), "posit16_1").double() for code in (a, b)]
    return torch.as_tensor(formats.encode(op(*values), "posit16_1")).long()


def test_posits_of_the_example_are_those_of_hmpx(posits: ModuleType) -> None:
    """Decoded, added and multiplied: the same codes, on integers and in fp64."""
    significands, exponents = posits.table()
    codes = torch.arange(65536)
    values = torch.ldexp(significands.double(), exponents)
    values[0x8000] = math.nan
    expected = formats.decode(codes.to(torch.uint16), "posit16_1").double()
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    a, b = operands()
    assert torch.equal(posits.add_integers(a, b), by_hmpx(torch.add, a, b))
    assert torch.equal(posits.mul_integers(a, b), by_hmpx(torch.mul, a, b))


class StandIn:
    """What the example calls of SoftPosit; counts the calls."""

    def __init__(self, module: ModuleType) -> None:
        self.calls = 0
        self._module = module

    def posit16(self, bits: int) -> StandIn.Code:
        return StandIn.Code(bits)

    class Code:
        """What SoftPosit makes of bits."""

        def __init__(self, v: int) -> None:
            self.bits = v

        @property
        def v(self) -> StandIn.Scalar:
            return StandIn.Scalar(self.bits)

    class Scalar:
        """What SoftPosit's functions take and give."""

        def __init__(self, v: int) -> None:
            self.v = v

    def _call(self, function: Callable[[Tensor, Tensor], Tensor], a: Scalar, b: Scalar) -> Scalar:
        self.calls += 1
        return StandIn.Scalar(int(function(torch.tensor([a.v]), torch.tensor([b.v]))))

    def p16_add(self, a: Scalar, b: Scalar) -> Scalar:
        return self._call(self._module.add_integers, a, b)

    def p16_mul(self, a: Scalar, b: Scalar) -> Scalar:
        return self._call(self._module.mul_integers, a, b)


def test_a_library_of_scalars_computes_tensors(
    posits: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SoftPosit if it is here, else what has its interface; each pair is computed once."""
    stand_in = StandIn(posits)
    if importlib.util.find_spec("softposit") is None:
        monkeypatch.setitem(sys.modules, "softposit", stand_in)  # type: ignore[arg-type]
    add, mul = posits.arithmetic("softposit")
    a, b = (codes[::40] for codes in operands())
    assert torch.equal(add(a, b), posits.add_integers(a, b))
    assert torch.equal(mul(a[:, None], b[:3]), posits.mul_integers(a[:, None], b[:3]))
    monkeypatch.setitem(sys.modules, "softposit", stand_in)  # type: ignore[arg-type]
    stand_in.calls = 0
    add, _ = posits.arithmetic("softposit")
    add(torch.zeros(50, dtype=torch.int64), torch.arange(2).repeat(25))
    assert stand_in.calls == 2


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
