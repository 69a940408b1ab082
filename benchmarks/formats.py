"""What rounding to a number format costs, in multiples of copying the tensor.

    python benchmarks/formats.py [--save] [--threads N] [--rounds N] [--peers]
    python benchmarks/formats.py --device cuda --elements 134217728

Every figure comes from one process, the candidates interleaved, the minimum over the rounds taken;
compare within a table only. On Linux the process starts itself anew with malloc's mmap off: otherwise fresh pages for each
result take longer than rounding does. Candidates:

NAME           hmpx, with kernels that the system's compiler built
NAME, ops      hmpx, by torch ops: where there is no compiler, and on most other devices
NAME, compiled hmpx, by torch ops under torch.compile; on a GPU
NAME, encode   hmpx, with kernels: to codes; "decode" is from these to values
NAME, axis 0   hmpx, with kernels: along the first axis of a square matrix
torch ...      x.to(dtype).to(x.dtype); rounds as hmpx does but for overflow to float8_e4m3fn
PEER NAME      ml_dtypes, gfloat, qtorch and pychop, those that are installed; with --peers
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import timing
import torch
from torch import Tensor

from hmpx.formats import Fixed, Float, Table, decode, encode, get
from hmpx.number_formats import kernels as kernel_library
from hmpx.number_formats import rounder

LARGE, MEDIUM, SMALL = 2**24, 2**20, 4096

#: (format, rounding)
CASES: tuple[tuple[str | Fixed | Float | Table, str], ...] = (
    ("bfloat16", "nearest"),
    ("float16", "nearest"),
    ("tf32", "nearest"),
    ("fp24", "nearest"),
    ("float8_e4m3fn", "nearest"),
    ("float8_e4m3fnuz", "nearest"),
    ("float8_e5m2", "nearest"),
    ("float6_e3m2fn", "nearest"),
    ("float4_e2m1fn", "nearest"),
    (Float("float10_e5m4", 5, 4), "nearest"),
    ("float8_e4m3fn", "up"),
    ("float8_e4m3fn", "stochastic"),
    ("bfloat16", "stochastic"),
    ("posit8_0", "nearest"),
    ("posit16_1", "nearest"),
    ("posit16_2", "nearest"),
    ("posit16_1", "stochastic"),
    ("mxfp8_e4m3", "nearest"),
    ("mxfp6_e3m2", "nearest"),
    ("mxfp4_e2m1", "nearest"),
    ("mxfp8_e4m3", "stochastic"),
    ("mxint8", "nearest"),
    ("nvfp4", "nearest"),
    ("float8_e4m3fn_tensor", "nearest"),
    ("float8_e4m3fn_row", "nearest"),
    ("float8_e4m3fn_block128", "nearest"),
    ("float8_e4m3fn_block128x128", "nearest"),
    ("int8", "nearest"),
    ("int4_block128", "nearest"),
    (Fixed("q4_12", 4, 12), "nearest"),
    (Table("table16", tuple(i * abs(i) / 64 for i in range(-8, 8))), "nearest"),
    (Table("table199", tuple(i * abs(i) / 2500 for i in range(-99, 100))), "nearest"),
    (Table("table16", tuple(i * abs(i) / 64 for i in range(-8, 8))), "stochastic"),
)

#: Formats whose codes are made and read.
CODED: tuple[str | Fixed | Table, ...] = (
    *("bfloat16", "float8_e4m3fn", "posit8_0", "posit16_1", "mxfp8_e4m3", "mxint8"),
    *("nvfp4", "float8_e4m3fn_tensor", "float8_e4m3fn_row", "int8_row", "nf4"),
    Fixed("q4_12", 4, 12),
    Table("table16", tuple(i * abs(i) / 64 for i in range(-8, 8))),
)

#: Formats of which the first axis is measured, too.
ACROSS = (
    "mxfp8_e4m3",
    "mxint8",
    "nvfp4",
    "float8_e4m3fn_row",
    "float8_e4m3fn_block128x128",
    "int8_row",
)

TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}

#: Formats that peers round to: exponent bits, mantissa bits.
PEER_FORMATS = {
    "bfloat16": (8, 7),
    "float16": (5, 10),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}

Step = Callable[[], Any]


def without_malloc_noise() -> None:
    """Starts the program anew with an allocator that keeps its pages, where that can be chosen."""
    chosen = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**35)}
    if sys.platform == "linux" and "MALLOC_MMAP_MAX_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **chosen})


def own(x: Tensor) -> dict[str, Step]:
    """Returns hmpx's candidates; kernels must have been built."""
    steps: dict[str, Step] = {}
    for has_kernels in (True, False):
        for format, rounding in CASES:
            own_format = copy.copy(get(format))  # with plans and kernels of its own
            name = own_format.name + ("" if rounding == "nearest" else f", {rounding}")
            run = rounder(own_format, rounding)
            if not has_kernels:
                run.plan(x.dtype).function = None
            steps[name if has_kernels else f"{name}, ops"] = lambda run=run: run(x)
    return steps


def on_device(x: Tensor) -> dict[str, Step]:
    """Returns the candidates on a GPU. A step ends when the device has finished."""
    steps = {"clone": x.clone, **casts(x)}
    for format, rounding in CASES:
        run = rounder(get(format), rounding)
        name = get(format).name + ("" if rounding == "nearest" else f", {rounding}")
        steps[f"{name}, ops"] = functools.partial(run, x)
        if rounding == "nearest":
            steps[f"{name}, compiled"] = functools.partial(torch.compile(run), x)
    return {name: functools.partial(finished, step) for name, step in steps.items()}


def finished(step: Step) -> None:
    """Waits for the device after a step."""
    step()
    torch.cuda.synchronize()


def codes(x: Tensor) -> dict[str, Step]:
    """Returns what makes and reads codes, and blocks along another axis, by kernels."""
    steps: dict[str, Step] = {}
    for format in CODED:
        known = get(format)
        coded = encode(x, known)
        steps[f"{known.name}, encode"] = lambda known=known: encode(x, known)
        steps[f"{known.name}, decode"] = lambda known=known, coded=coded: decode(coded, known)
    square = x.view(int(x.numel() ** 0.5), -1)
    for name in ACROSS:
        along = rounder(get(name).along(0))
        steps[f"{name}, axis 0"] = lambda along=along: along(square)
    return steps


def casts(x: Tensor) -> dict[str, Step]:
    """Returns torch's casts, there and back."""
    return {
        f"torch {name}": lambda dtype=dtype: x.to(dtype).to(x.dtype)
        for name, dtype in TORCH_DTYPES.items()
    }


def peers(x: Tensor) -> dict[str, Step]:
    """Returns the candidates of other libraries, those that can be imported."""
    steps: dict[str, Step] = {}
    for add in (add_ml_dtypes, add_gfloat, add_qtorch, add_pychop, add_microxcaling):
        try:
            add(steps, x)
        except (ImportError, OSError, RuntimeError) as error:
            print(f"left out: {add.__name__.removeprefix('add_')}: {str(error).splitlines()[0]}")
    return steps


def add_ml_dtypes(steps: dict[str, Step], x: Tensor) -> None:
    """By way of numpy, on one thread."""
    ml_dtypes = importlib.import_module("ml_dtypes")
    array = x.numpy()
    for name in PEER_FORMATS:
        dtype = getattr(ml_dtypes, name, "float16")
        steps[f"ml_dtypes {name}"] = lambda dtype=dtype: array.astype(dtype).astype("float32")


def add_gfloat(steps: dict[str, Step], x: Tensor) -> None:
    """On torch tensors."""
    gfloat, known = importlib.import_module("gfloat"), importlib.import_module("gfloat.formats")
    infos = {
        "bfloat16": known.format_info_bfloat16,
        "float16": known.format_info_binary16,
        "float8_e4m3fn": known.format_info_ocp_e4m3,
        "float8_e5m2": known.format_info_ocp_e5m2,
    }
    for name, info in infos.items():
        steps[f"gfloat {name}"] = lambda info=info: gfloat.round_ndarray(info, x)


def add_qtorch(steps: dict[str, Step], x: Tensor) -> None:
    """Compiles itself when it is imported."""
    quantize = importlib.import_module("qtorch.quant").float_quantize
    for name, (exponent, mantissa) in PEER_FORMATS.items():
        steps[f"qtorch {name}"] = lambda e=exponent, m=mantissa: quantize(x, e, m, "nearest")


def add_pychop(steps: dict[str, Step], x: Tensor) -> None:
    """With its torch backend."""
    pychop = importlib.import_module("pychop")
    pychop.backend("torch")
    for name, (exponent, mantissa) in PEER_FORMATS.items():
        chop = pychop.Chop(exp_bits=exponent, sig_bits=mantissa)
        steps[f"pychop {name}"] = lambda chop=chop: chop(x)


def add_microxcaling(steps: dict[str, Step], x: Tensor) -> None:
    """Its element-wise rounding."""
    quantize = importlib.import_module("mx.elemwise_ops")._quantize_elemwise
    for name, known in (("float8_e4m3fn", "fp8_e4m3"), ("float8_e5m2", "fp8_e5m2")):
        steps[f"microxcaling {name}"] = lambda known=known: quantize(x, known)


def main() -> None:
    """Prints the tables; with ``--save`` also writes the figures."""
    parser = timing.make_parser(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--elements", type=int, default=LARGE, help="of the large tensor")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peers", action="store_true", help="also other libraries")
    options = parser.parse_args()
    if options.device == "cuda":
        steps = on_device(torch.randn(options.elements, device="cuda"))
        us = {}
        for name, step in list(steps.items()):  # each by itself: some take much memory
            step()
            us |= timing.fastest({name: step}, 1, options.rounds)
            print(f"{name:34}{us[name] / us['clone']:12.2f}{us[name] / 1e3:16.2f}", flush=True)
        ratios = {name: found / us["clone"] for name, found in us.items()}
        figures = {"elements": options.elements, "ratios": ratios, "large_us": us}
        timing.save(options.save, "formats", figures, device="cuda", threads=options.threads)
        return
    without_malloc_noise()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if kernel_library.library() is None:
        raise SystemExit("this installation has no compiled kernels; see `hmpx doctor`")

    x, medium, tiny = (torch.randn(n) for n in (options.elements, MEDIUM, SMALL))
    steps = {"clone": x.clone, **own(x), **codes(x), **casts(x)}
    steps.update(peers(x) if options.peers else {})
    for step in steps.values():
        step()
    large_us = timing.fastest(steps, 1, options.rounds)
    steps = {"clone": medium.clone, **own(medium), **codes(medium), **casts(medium)}
    for step in steps.values():
        step()
    medium_us = timing.fastest(steps, 2, options.rounds)
    steps = {"clone": tiny.clone, **own(tiny), **codes(tiny), **casts(tiny)}
    small_us = timing.fastest(steps, 200, options.rounds)
    print(f"\n{'elements':34}{options.elements:12,}{options.elements:16,}{MEDIUM:12,}{SMALL:12,}")
    print(f"{'':34}{'over clone':>12}{'milliseconds':>16}{'over clone':>12}{'us a call':>12}")
    ratios = {name: us / large_us["clone"] for name, us in large_us.items()}
    for name, ratio in ratios.items():
        small = ""
        if name in small_us:
            small = f"{medium_us[name] / medium_us['clone']:12.2f}{small_us[name]:12.2f}"
        print(f"{name:34}{ratio:12.2f}{large_us[name] / 1e3:16.2f}{small}")
    figures = {
        "elements": options.elements,
        "ratios": ratios,
        "large_us": large_us,
        "medium_us": medium_us,
        "small_us": small_us,
    }
    timing.save(options.save, "formats", figures, device="cpu", threads=options.threads)


if __name__ == "__main__":
    main()
