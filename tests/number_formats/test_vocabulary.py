"""Names that people use: each is understood, or answered with what to write, wherever a format may stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import hmpx
from hmpx import HmpxError, OptionError, cli, formats
from hmpx.formats import Float, get, quantize

#: Name -> the format that it stands for.
UNDERSTOOD: dict[Any, str] = {
    **dict.fromkeys(("e4m3", "E4M3", "e4m3fn", "E4M3FN", "fp8e4m3", "fp8_e4m3"), "float8_e4m3fn"),
    **dict.fromkeys(("FP8_E4M3FN", "fp8-e4m3", "F8E4M3FN", "e4m3_float8"), "float8_e4m3fn"),
    **dict.fromkeys(("float8_e4m3fn", "torch.float8_e4m3fn"), "float8_e4m3fn"),
    **dict.fromkeys(("e5m2", "E5M2", "fp8_e5m2", "fp8e5m2", "torch.float8_e5m2"), "float8_e5m2"),
    **dict.fromkeys(("bf16", "BF16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "FP16", "half", "torch.half", "f16", "binary16"), "float16"),
    **dict.fromkeys(("fp32", "float", "single", "FP32"), "float32"),
    **dict.fromkeys(("tf32", "TF32", "tensorfloat32", "TensorFloat-32"), "tf32"),
    **dict.fromkeys(("mxfp4", "MXFP4", "mx-fp4"), "mxfp4_e2m1"),
    **dict.fromkeys(("e2m1", "fp4_e2m1", "torch.float4_e2m1fn_x2"), "float4_e2m1fn"),
    **dict.fromkeys(("e3m2", "fp6_e3m2"), "float6_e3m2fn"),
    **dict.fromkeys(("e2m3", "fp6_e2m3"), "float6_e2m3fn"),
    **dict.fromkeys(("int8", "INT8", "torch.int8", "i8"), "int8"),
    **dict.fromkeys(("int4", "torch.int4"), "int4"),
    **dict.fromkeys(("nvfp4", "NVFP4"), "nvfp4"),
    **dict.fromkeys(("nf4", "NF4", "normalfloat4"), "nf4"),
    "mxint8": "mxint8",
    **dict.fromkeys(("e8m0", "UE8M0", "torch.float8_e8m0fnu"), "float8_e8m0fnu"),
    "e3m0": "float4_e3m0",
    "binary8p3": "p3109_k8p3se",
    "posit32": "posit32_2",
    **dict.fromkeys(("takum", "linear_takum16", "takum_linear16"), "takum16"),
    "e4m3fnuz": "float8_e4m3fnuz",
    "ml_dtypes.float8_e4m3b11fnuz": "float8_e4m3b11fnuz",
    "custom[posit16_1]16": "posit16_1",
    "custom[posit16_1]16x4": "posit16_1",
    "custom[posit8_2]8x16": "posit8_2",
}

DTYPES: dict[Any, str] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e4m3fnuz: "float8_e4m3fnuz",
    torch.float8_e5m2: "float8_e5m2",
    torch.float8_e5m2fnuz: "float8_e5m2fnuz",
    torch.int8: "int8",
    np.int8: "int8",
    torch.float8_e8m0fnu: "float8_e8m0fnu",
    ml_dtypes.float8_e8m0fnu: "float8_e8m0fnu",
    torch.float4_e2m1fn_x2: "float4_e2m1fn",
    np.float16: "float16",
    np.dtype("float16"): "float16",
    ml_dtypes.bfloat16: "bfloat16",
    ml_dtypes.float8_e4m3: "float8_e4m3",
    ml_dtypes.float8_e4m3fn: "float8_e4m3fn",
    np.dtype(ml_dtypes.float8_e4m3b11fnuz): "float8_e4m3b11fnuz",
    np.dtype(ml_dtypes.float6_e2m3fn): "float6_e2m3fn",
    ml_dtypes.float4_e2m1fn: "float4_e2m1fn",
}

TWO = "it stands for two formats: float8_e4m3fn for values, float8_e5m2 for gradients"
INTEGERS = "integers have a sign here: int8 and int4 are symmetric, and share a scale"
DOUBLE = (
    "formats are computed in float64, and none is as wide; ops compute in it by accumulate=float64"
)

#: Name -> the end of the message that it is answered with.
ANSWERED: dict[Any, str] = {
    "fp8": "did you mean 'float8_e4m3fn' or 'float8_e5m2'?",
    "FP8": "did you mean 'float8_e4m3fn' or 'float8_e5m2'?",
    "float8": "did you mean 'float8_e4m3fn' or 'float8_e5m2'?",
    "fp6": "did you mean 'float6_e3m2fn' or 'float6_e2m3fn'?",
    "fp4": "did you mean 'float4_e2m1fn' or 'mxfp4_e2m1' or 'nvfp4' or 'bnb_fp4'?",
    "mxfp8": "did you mean 'mxfp8_e4m3' or 'mxfp8_e5m2'?",
    "mxfp6": "did you mean 'mxfp6_e3m2' or 'mxfp6_e2m3'?",
    "posit8": "did you mean 'posit8_2' or 'posit8_0'?",
    "posit16": "did you mean 'posit16_2' or 'posit16_1'?",
    "f8E4M3": "did you mean 'float8_e4m3' or 'float8_e4m3fn'?",
    "HFP8": TWO,
    "hybrid": TWO,
    "uint8": INTEGERS,
    "torch.uint4": INTEGERS,
    "double": DOUBLE,
    "fp64": DOUBLE,
    "float8_e4m3f": "did you mean 'float8_e4m3fn'?",
    "posit16_3": "did you mean 'posit16_2'?",
}


def named(value: Any) -> str:
    """Returns what a test is called by."""
    return value if isinstance(value, str) else f"{type(value).__module__}-{value}".split(" at ")[0]


def low_type(name: str) -> Any:
    """Returns the low-precision type of that name: hmpx has dtypes for two of them."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name) or get(name)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Forgets what a test registered."""
    before = set(formats.names())
    yield
    for name in set(formats.names()) - before:
        formats.unregister(name)


@pytest.mark.parametrize("name", [*UNDERSTOOD, *DTYPES], ids=named)
def test_a_name_for_one_format_is_that_format(name: Any) -> None:
    """By `get`, and as a policy's low-precision type, where bfloat16 and float16 are torch's dtypes."""
    expected = {**UNDERSTOOD, **DTYPES}[name]
    assert get(name) is get(expected)
    is_tvms = str(name).startswith("custom[")
    low = hmpx.load_policy(low_precision_type=name).low_precision_type
    assert low is (get(name) if is_tvms else low_type(expected))


@pytest.mark.parametrize("name", ["fp8_e5m2", "MXFP4", "half", "custom[posit16_1]16"])
def test_names_wherever_a_format_may_stand(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In calls, on a line of a list, in a policy file, in a section of one, on the command line."""
    expected = low_type(UNDERSTOOD[name])
    x = torch.rand(32) + 0.1
    assert torch.equal(quantize(x, name), quantize(x, UNDERSTOOD[name]))
    with hmpx.convert(low_precision_type=name, device_types={"cpu"}) as session:
        assert session.policy.low_precision_type is expected
    path = tmp_path / "bf16.txt"
    path.write_text(f"mm {name}\n")
    assert hmpx.load_policy(str(path))["mm"].dtype is expected
    path = tmp_path / "p.yaml"
    path.write_text(
        f"low_precision_type: {name}\nlow: [mm]\nsections:\n- {{module: a, low: ['mm {name}']}}\n"
    )
    policy = hmpx.load_policy(policy=str(path))
    assert policy.low_precision_type is policy["mm"].dtype is expected
    assert policy.sections[0].decisions["mm"].dtype is expected
    assert cli.main(["ops", "--low-precision-type", name, "matmul"]) == 0
    assert "LOW" in capsys.readouterr().out


@pytest.mark.parametrize("name", ANSWERED, ids=named)
def test_other_names_are_answered(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same hint everywhere; nothing is patched."""
    hint = f"; {ANSWERED[name]}"
    with pytest.raises(OptionError) as error:
        get(name)
    assert str(error.value) == f"no format {name!r} is known{hint}"
    low = f"low_precision_type must be torch.bfloat16 or torch.float16, or a number format, not {name!r}{hint}"
    with pytest.raises(OptionError) as error:
        hmpx.convert(low_precision_type=name)
    assert str(error.value) == low
    assert not hmpx.is_converted()
    path = tmp_path / "bf16.txt"
    path.write_text(f"# mine\nmm {name}\n")
    with pytest.raises(HmpxError) as caught:
        hmpx.load_policy(str(path))
    assert str(caught.value) == f"{path}:2: {low}"
    path = tmp_path / "p.yaml"
    path.write_text(f"lists: none\nlow_precision_type: {name}\n")
    with pytest.raises(HmpxError) as caught:
        hmpx.load_policy(policy=str(path))
    assert str(caught.value) == f"{path}:2: {low}"
    assert cli.main(["ops", "--low-precision-type", name]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int32, torch.complex64], ids=str
)
def test_dtypes_that_are_no_low_types(dtype: torch.dtype) -> None:
    """float32 is a format, for those who name it, but nobody's low-precision dtype."""
    with pytest.raises(OptionError, match=f"or a number format, not {dtype}"):
        hmpx.convert(low_precision_type=dtype)
    assert get(torch.float32) is get("float32")


def test_what_is_registered_comes_first() -> None:
    """A format of one's own may have any of these names, and all that is known of them gives way."""
    mine = Float("e4m3", 4, 3, bias=9)
    assert get("e4m3").name == "float8_e4m3fn"
    formats.register(mine)
    assert get("e4m3") is mine
    assert hmpx.load_policy(low_precision_type="e4m3").low_precision_type is mine
    formats.register(half := Float("half", 4, 3))
    assert hmpx.load_policy(low_precision_type="half").low_precision_type is half
    assert get("E4M3") is get("torch.e4m3") is mine
    formats.unregister("e4m3")
    assert get("e4m3").name == "float8_e4m3fn"
    with pytest.raises(OptionError, match="no format 'e4m3' is registered"):
        formats.unregister("e4m3")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("nearest_even", "nearest"), ("rne", "nearest"), ("RNE", "nearest")),
        *(("round_to_nearest", "nearest"), ("half-even", "nearest"), ("rtz", "toward_zero")),
        *(("truncate", "toward_zero"), ("floor", "down"), ("ceil", "up"), ("sr", "stochastic")),
        *(("ties_away", "nearest_away"), ("stochastik", "stochastic")),
    ],
)
def test_rounding_modes(name: str, meant: str) -> None:
    """Of `quantize` and of convert."""
    for call in (
        lambda: quantize(torch.ones(2), "posit8_1", name),
        lambda: hmpx.convert(low_precision_type="posit8_1", rounding=name),
    ):
        with pytest.raises(OptionError, match=rf"^rounding must be .*; did you mean '{meant}'\?$"):
            call()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("gpu", "cuda"), ("GPU", "cuda"), ("gaudi", "hpu"), ("tpu", "xla"), ("metal", "mps")],
)
def test_device_types(name: str, meant: str) -> None:
    """What others call them."""
    with pytest.raises(OptionError) as error:
        hmpx.convert(device_types={name})
    expected = f"device_types: torch has no device type {name!r}; did you mean {meant!r}?"
    assert str(error.value) == expected
