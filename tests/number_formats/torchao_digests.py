"""What torchao quantizes a million values to, kept as digests: torchao itself is needed to make them.

    python -m tests.number_formats.torchao_digests      # writes torchao_digests.json beside this file

Made with torchao 0.18.0. Values are left out for which torchao's results are accidents of how it
computes on a CPU: see `random_blocks`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PATH = Path(__file__).with_suffix(".json")

COUNT = 2**20
RULES = ("floor", "rceil", "ceil", "even")

#: Format of MX -> mantissa bits, largest element, its exponent.
ELEMENTS = {
    "mxfp8_e4m3": (3, 448.0, 8),
    "mxfp8_e5m2": (2, 57344.0, 15),
    "mxfp6_e3m2": (2, 28.0, 4),
    "mxfp6_e2m3": (3, 7.5, 2),
    "mxfp4_e2m1": (1, 6.0, 2),
}


def digest(codes: Tensor) -> str:
    """Returns the digest of codes of 8 bits, or of float32."""
    return hashlib.sha256(codes.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def random_blocks(size: int, lowest: int, highest: int) -> Tensor:
    """Returns float32 of random bits, a million in rows of one block, whose exponents are near each other.

    Not in it: amaxes so small that torchao divides by 2**-126 where it stores the scale 2**-127; so
    large that its results would be infinite; and those at which its log2 in float32 is an integer
    though it should be a little more, which has the rule "rceil" round down.

    Args:
        size: Values of a row.
        lowest: The least exponent of a row's largest value.
        highest: The greatest.
    """
    random = np.random.default_rng(0)
    rows = COUNT // size
    top = random.integers(lowest, highest + 1, (rows, 1))
    exponents = np.maximum(top - random.integers(0, 14, (rows, size)), -127)
    fraction = random.integers(0, 2**23, (rows, size))
    fraction[::3] &= -(2**19)  # ties, and powers of two
    sign = random.integers(0, 2, (rows, size))
    bits = (sign << 31) | ((exponents + 127) << 23) | fraction
    x = bits.astype(np.uint32).view(np.float32)
    x[::64] = 0.0
    x[::32, 0] = -0.0
    amax = np.abs(x).max(axis=1)
    is_near = np.zeros(rows, bool)
    for _, largest, _ in ELEMENTS.values():
        mantissa = (amax / np.float32(largest)).view(np.uint32) & (2**23 - 1)
        is_near |= (mantissa > 0) & (mantissa < 256)
    x[is_near] = 1.0
    return torch.from_numpy(x)


def all_codes(values: npt.ArrayLike, lowest: int, highest: int) -> Tensor:
    """Returns each value of an element at each power of two, in blocks of 32 with the largest one."""
    elements = np.asarray(values, np.float32)
    parts = np.resize(elements, (-(-len(elements) // 31), 31))
    largest = np.full((len(parts), 1), np.abs(elements).max(), np.float32)
    blocks = np.concatenate([largest, parts], axis=1)
    powers = np.exp2(np.arange(lowest, highest + 1, dtype=np.float32))
    return torch.from_numpy((blocks[None] * powers[:, None, None]).reshape(-1, 32))


def nvfp4_blocks() -> Tensor:
    """Returns a million values, of rows that are up to 2**20 apart."""
    return random_blocks(16, -10, 10)


def main() -> None:
    """Writes the digests."""
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.kernels import unpack_uint4

    from hmpx import formats

    types: dict[str, Any] = {
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp6_e3m2": "fp6_e3m2",
        "mxfp6_e2m3": "fp6_e2m3",
        "mxfp4_e2m1": torch.float4_e2m1fn_x2,
    }
    found: dict[str, list[str]] = {}
    for name, rule in itertools.product(ELEMENTS, RULES):
        for kind, x in mx_inputs(name).items():
            mode = ScaleCalculationMode(rule)
            scales, codes = mx_tensor.to_mx(x, types[name], 32, mode)
            values = mx_tensor.to_dtype(codes, scales, types[name], 32, torch.float32)
            codes = unpack_uint4(codes) if name == "mxfp4_e2m1" else codes.view(torch.uint8)
            found[f"{name} {rule} {kind}"] = [
                digest(scales.view(torch.uint8)), digest(codes), digest(values)
            ]  # fmt: skip
    for kind, x in nvfp4_inputs().items():
        scale = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().amax())
        made = nvfp4_tensor.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
        found[f"nvfp4 {kind}"] = [
            digest(made.scale.view(torch.uint8)),
            digest(unpack_uint4(made.qdata.view(torch.uint8))),
            digest(made.dequantize(torch.float32)),
        ]
        made = nvfp4_tensor.NVFP4Tensor.to_nvfp4(x)
        found[f"nvfp4 without the tensor's scale {kind}"] = [
            digest(made.scale.view(torch.uint8)),
            digest(unpack_uint4(made.qdata.view(torch.uint8))),
            digest(made.dequantize(torch.float32)),
        ]
    PATH.write_text(json.dumps(found).replace("], ", "],\n ") + "\n")
    print(len(found), "written;", formats.__name__)


def mx_inputs(name: str) -> dict[str, Tensor]:
    """Returns what formats of MX are tried on."""
    from hmpx import formats

    element = formats.get(name).element  # type: ignore[union-attr]
    codes = torch.arange(2**element.bits, dtype=torch.uint8)  # type: ignore[union-attr, operator]
    values = formats.decode(codes, element).nan_to_num(0, 0, 0)  # type: ignore[arg-type]
    highest = 126 - ELEMENTS[name][2]
    return {
        "random": random_blocks(32, -100, 125),
        "all codes": all_codes(values.numpy(), -110, highest),
    }


def nvfp4_inputs() -> dict[str, Tensor]:
    """Returns what NVFP4 is tried on."""
    from hmpx import formats

    elements = formats.decode(torch.arange(16, dtype=torch.uint8), "float4_e2m1fn")
    scales = formats.decode(torch.arange(8, 127, dtype=torch.uint8), "float8_e4m3fn")
    return {"random": nvfp4_blocks(), "all codes": torch.outer(scales, elements)}


if __name__ == "__main__":
    main()
