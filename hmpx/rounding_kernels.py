"""Rounding on the CPU at the speed of memory: ``rounding_kernels.c``, built by the system's compiler.

Built once for a machine, in the background, and kept in the user's cache. Until then, and where
there is no compiler, torch ops do the same. ``HMPX_KERNELS`` says otherwise: ``off`` never builds,
``wait`` waits for the build. Knows plans; nothing of formats, dtypes of users, layouts, autograd.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from .rounding import (
    FP32,
    MODES,
    BitsPlan,
    BlockPlan,
    FixedPlan,
    FloatPlan,
    Plan,
    PositPlan,
    TablePlan,
)

#: (source address, target address, elements, key, key, threads, length of a row)
Kernel: TypeAlias = Callable[[int, int, int, int, int, int, int], None]

_LOGGER: Final = logging.getLogger("hmpx")
_SOURCE: Final = Path(__file__).with_suffix(".c")

#: None of them changes a value. OpenMP comes with the threads that torch has running already.
_FLAGS: Final = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fopenmp-simd",
)

#: Tried in turn: not every compiler knows every machine, nor has the OpenMP that torch runs on.
_MORE_FLAGS: Final = (("-march=native", "-fopenmp"), ("-march=native",), ())

_BUILD_LIMIT_S: Final = 120.0

#: Up to so many values of a table are compared one by one.
_SMALL_TABLE: Final = 16

#: By so many upper bits the values of a larger one are found: sign, exponent and 3 to 9 more.
_SHIFTS: Final = tuple(32 - upper for upper in range(12, 19))

#: Lengths of rows whose specs a plan of blocks keeps.
_MOST_LENGTHS: Final = 1024

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_is_begun = False


def library() -> ctypes.CDLL | None:
    """Returns the compiled kernels; None while there are none. The first call begins to build."""
    if _library is None and not _is_begun:
        _begin()
    return _library


def kernel(plan: Plan, library: ctypes.CDLL) -> Kernel | None:
    """Returns what rounds as the plan does, given addresses; None if no kernel does."""
    kind, make_spec = _spec(plan)
    if kind is None:
        return None
    function = getattr(library, f"{kind}_{'f32' if plan.binary is FP32 else 'f64'}")
    function.restype = None
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_int,
    ]
    if isinstance(plan, BlockPlan):
        by_length: dict[int, Any] = {}

        def run_blocks(  # noqa: PLR0917  # as the C function
            source: int, target: int, count: int, key0: int, key1: int, threads: int, length: int
        ) -> None:
            spec = by_length.get(length)
            if spec is None:
                if len(by_length) >= _MOST_LENGTHS:
                    by_length.clear()
                spec = by_length[length] = make_spec(length)
            function(source, target, count, ctypes.addressof(spec), key0, key1, threads)

        return run_blocks

    spec = make_spec(0)
    address = ctypes.addressof(spec)

    def run(  # noqa: PLR0917  # as the C function
        source: int,
        target: int,
        count: int,
        key0: int,
        key1: int,
        threads: int,
        length: int,
        _keep: Any = spec,
    ) -> None:
        function(source, target, count, address, key0, key1, threads)

    return run


def _spec(plan: Plan) -> tuple[str | None, Callable[[int], Any]]:
    """Returns a kernel's name, and what makes its spec for a length of rows."""
    mode = MODES.index(plan.mode)
    if isinstance(plan, FloatPlan):
        numbers = _float_spec(plan)
        return "float", lambda length: (ctypes.c_int64 * 8)(*numbers)
    if isinstance(plan, BitsPlan):
        numbers = [
            mode,
            plan.unit,
            plan.lowest_unit,
            plan.max,
            plan.beyond,
            plan.has_negative_zero,
        ]
        return "bits", lambda length: (ctypes.c_int64 * 6)(*numbers)
    if isinstance(plan, PositPlan):
        numbers = [mode, plan.bits, plan.es, plan.least, plan.most, plan.parity, plan.last]
        return "posit", lambda length: (ctypes.c_int64 * 7)(*numbers)
    if isinstance(plan, FixedPlan):
        most = (1 << (plan.bits - 1)) - 1
        scale = 1 << plan.fraction
        return "fixed", lambda length: _FixedSpec(mode, scale, 1 / scale, -most - 1, most)
    if isinstance(plan, BlockPlan):
        numbers = [*_float_spec(plan.element), plan.element.max_exponent, plan.size]
        return "block", lambda length: (ctypes.c_int64 * 11)(*numbers, length)
    if isinstance(plan, TablePlan) and plan.binary is FP32 and plan.mode != "stochastic":
        spec = _table_spec(plan)
        if spec is not None:
            return "table", lambda length: spec
    return None, lambda length: None


def _float_spec(plan: FloatPlan) -> list[int]:
    return [
        MODES.index(plan.mode),
        plan.lowest,
        plan.highest,
        plan.lift,
        plan.lowest_power,
        plan.binary.bits_of(plan.max),
        plan.binary.bits_of(plan.beyond),
        plan.has_negative_zero,
    ]


class _FixedSpec(ctypes.Structure):
    _fields_ = (
        ("mode", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("step", ctypes.c_double),
        ("least", ctypes.c_double),
        ("most", ctypes.c_double),
    )


class _TableSpec(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("shift", ctypes.c_int64),
        ("values", ctypes.POINTER(ctypes.c_float)),
        ("thresholds", ctypes.POINTER(ctypes.c_float)),
        ("entries", ctypes.POINTER(ctypes.c_float)),
    )


def _table_spec(plan: TablePlan) -> _TableSpec | None:
    """Returns values and thresholds, and where to look, by the upper bits of a number.

    None if values are so near each other that this would take too much memory.
    """
    count = len(plan.values)
    thresholds = torch.tensor(plan.thresholds, dtype=torch.float32)
    if count <= _SMALL_TABLE:
        entries: list[float] = []
        shift = 0
    else:
        for shift in _SHIFTS:
            first, last = _first_and_last(shift, thresholds)
            if int((last - first).max()) <= 1:
                break
        else:
            return None
        values = torch.tensor(plan.values, dtype=torch.float32)
        # A threshold between the two values; or any, between a value and itself.
        between = thresholds[first.clamp(max=count - 2)]
        entries = torch.stack((between, values[first], values[last]), 1).flatten().tolist()
    return _TableSpec(
        count,
        shift,
        (ctypes.c_float * count)(*plan.values),
        (ctypes.c_float * count)(*plan.thresholds, float("inf")),
        (ctypes.c_float * len(entries))(*entries),
    )


def _first_and_last(shift: int, thresholds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the least and the largest index that numbers with the same upper bits have.

    Args:
        shift: How many lower bits may differ.
        thresholds: float32, ascending.
    """
    upper = torch.arange(1 << (32 - shift), dtype=torch.int64) << shift
    signed = torch.where(upper >= 2**31, upper - 2**32, upper)
    near = signed.to(torch.int32).view(torch.float32)
    far = (signed + ((1 << shift) - 1)).to(torch.int32).view(torch.float32)
    # Infinity shares its upper bits with NaNs, for which any index will do.
    far = torch.where(torch.isnan(far), near, far)
    low, high = torch.minimum(near, far), torch.maximum(near, far)
    first, last = torch.bucketize(low, thresholds), torch.bucketize(high, thresholds)
    is_nan = torch.isnan(near)
    return first.masked_fill(is_nan, 0), last.masked_fill(is_nan, 0)


def _begin() -> None:
    """Loads what is in the cache; or else builds, in the background unless it is to be waited for."""
    global _is_begun
    with _lock:
        if _is_begun:
            return
        _is_begun = True
    choice = os.environ.get("HMPX_KERNELS", "").lower()
    if choice in ("off", "0", "no", "false"):
        return
    if choice == "wait" or _cached().is_file():
        _provide()
    else:
        threading.Thread(target=_provide, name="hmpx-kernels", daemon=True).start()


def _provide() -> None:
    """Loads the kernels, built if need be; logs one line if that fails."""
    global _library
    try:
        path = _cached()
        _library = _load(path) if path.is_file() else _build(path)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        _LOGGER.warning(
            "number formats are rounded by torch ops, several times slower than by compiled kernels: "
            "%s (HMPX_KERNELS=off hides this)",
            error,
        )


def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _compiler() -> list[str]:
    """Returns the command of a C compiler.

    Raises:
        RuntimeError: There is none.
    """
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]) is not None:
            return command
    raise RuntimeError(f"no C compiler {' '.join(chosen) or 'cc, gcc or clang'} was found")


def _build(path: Path) -> ctypes.CDLL:
    """Returns the kernels, newly built, and leaves them at ``path``.

    Raises:
        RuntimeError: The compiler failed.
    """
    compiler = _compiler()
    reason = ""
    for more in _MORE_FLAGS:
        with tempfile.TemporaryDirectory(prefix="hmpx-") as folder:
            objects, built = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
            compiling = [*compiler, *_FLAGS, *more, "-c", str(_SOURCE), "-o", str(objects)]
            # Linked without OpenMP: its functions are found in what torch has loaded. A runtime of
            # its own would have threads of its own.
            linking = [*compiler, "-shared", *_LINKING, str(objects), "-o", str(built), "-lm"]
            for command in (compiling, linking):
                result = subprocess.run(
                    command, capture_output=True, text=True, timeout=_BUILD_LIMIT_S, check=False
                )
                if result.returncode:
                    lines = result.stderr.strip().splitlines() or ["no message"]
                    reason = f"{shlex.join(compiler)} failed: {lines[0]}"
                    break
            else:
                try:
                    loaded = _load(built)
                except OSError as error:
                    reason = str(error)
                    continue
                _keep(built, path)
                return loaded
    raise RuntimeError(reason)


_LINKING: Final = ("-undefined", "dynamic_lookup") if platform.system() == "Darwin" else ()


def _keep(built: Path, path: Path) -> None:
    """Moves what was built into the cache, if that can be written to."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as copy:
            copy.write(built.read_bytes())
        Path(copy.name).replace(path)  # at once, whoever else builds
    except OSError as error:
        _LOGGER.debug("kernels of number formats are not kept in %s: %s", path.parent, error)


def _cached() -> Path:
    """Returns where the kernels for this source, compiler and processor are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    try:
        compiler = _compiler()
    except RuntimeError:
        compiler = []
    parts = (_SOURCE.read_text(encoding="utf-8"), compiler, _FLAGS, _MORE_FLAGS, _processor())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return Path(root) / "hmpx" / f"rounding-{key}.so"


def _processor() -> str:
    """Returns what distinguishes processors on which other instructions run."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return platform.machine() + line
    return platform.machine() + platform.processor()


def _forget_begun_build() -> None:
    """Lets a forked process begin anew: the thread that built stayed behind."""
    global _is_begun, _lock
    _lock = threading.Lock()
    if _library is None:
        _is_begun = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_begun_build)
