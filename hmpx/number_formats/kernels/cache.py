"""Where compiled kernels are kept, whether they can be used here, and how they are built.

No compiler is needed to find them: an image without one uses kernels that were built before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...errors import KernelsError
from ..families import PLANS
from . import compiler, files
from .files import PrivateFolder, Stamp

_SOURCE: Final = Path(__file__).with_name("rounding_kernels.c")

#: What it includes.
_PARTS: Final = tuple(
    Path(__file__).with_name(name)
    for name in ("bfloat16_kernels.h", "code_kernels.h", "scaled_kernels.h", "small_tables.h")
)

_SYMBOLS: Final = (
    *(symbol for plan in PLANS.values() for symbol in plan.symbols()),
    *(
        f"encode_{symbol}"
        for plan in PLANS.values()
        if plan.has_encoder
        for symbol in plan.symbols()
    ),
    *(
        f"decode_{kind}_{width}"
        for kind in ("float", "posit", "fixed", "table")
        for width in ("f32", "f64")
    ),
    "decode_scaled_f32",
    *("extremes_f32", "extremes_bf16", "extremes_f16"),
    *("bf16_rounded", "bf16_mapped", "bf16_scaled"),
)

#: Instruction sets of every x86-64 processor since 2015 or so, as Linux names them.
_X86_64_V3: Final = (
    *("abm", "avx", "avx2", "bmi1", "bmi2", "cx16", "f16c", "fma", "movbe", "popcnt", "ssse3"),
    *("sse4_1", "sse4_2", "xsave"),
)

# --- finding -----------------------------------------------------------------------------------


def find() -> ctypes.CDLL | None:
    """Returns the library in the cache; None if there is none.

    Raises:
        KernelsError: It can't be used.
    """
    place = kernels_path()
    if not os.path.lexists(place.parent):
        return None
    with PrivateFolder(place.parent) as folder:
        try:
            content = folder.read(place.name)
            if content is None:
                return None
            _check_stamp(files.unseal(content))
            return _with_symbols(folder.load(place.name))
        except KernelsError as error:
            raise KernelsError(f"{place} can't be used: {error}") from error


def read(named: Path) -> ctypes.CDLL:
    """Returns the library that the user named, whoever owns it.

    Raises:
        KernelsError: It can't be used.
    """
    _check_supported()
    _check_stamp(files.unseal(files.read(named)))
    return _with_symbols(files.load(named))


def kernels_path() -> Path:
    """Returns where the kernels for this source and this kind of machine are kept.

    Raises:
        KernelsError: There is no home folder.
    """
    _check_supported()
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # which its specification says to ignore
        root = Path(os.path.expanduser("~"), ".cache")  # noqa: PTH111  # Path.home() raises
    if not root.is_absolute():
        raise KernelsError("there is no home folder to keep kernels in; set HOME to its path")
    machine = (_source_digest(), _system(), _features(), platform.libc_ver(), sys.maxsize)
    key = hashlib.sha256(repr(machine).encode()).hexdigest()[:16]
    return root / "hmpx" / f"rounding-{key}.so"


def _check_supported() -> None:
    """Raises KernelsError on systems whose files and processes work in another way."""
    if sys.platform == "win32":
        raise KernelsError("kernels are compiled on Linux and macOS only")


def _check_stamp(stamp: Stamp) -> None:
    """Raises KernelsError if a library was not built from this source and for this machine."""
    if stamp.source != _source_digest():
        raise KernelsError("it was built by another version of hmpx")
    if stamp.system != _system():
        raise KernelsError(f"it was built for {stamp.system}, and this is {_system()}")
    missing = [name for name in stamp.features if name not in _features()]
    if missing:
        raise KernelsError(f"it was built for processors with {', '.join(missing)}")


def _with_symbols(library: ctypes.CDLL) -> ctypes.CDLL:
    """Returns ``library``.

    Raises:
        KernelsError: A kernel is missing.
    """
    missing = [name for name in _SYMBOLS if not hasattr(library, name)]
    if missing:
        raise KernelsError(f"it has no {', '.join(missing)}")
    return library


@functools.cache
def _source_digest() -> str:
    """Returns a digest that changes when kernels are called in another way, or give other values."""
    digest = hashlib.sha256(repr(compiler.FLAGS).encode())
    for part in (_SOURCE, *_PARTS):
        content = part.read_bytes()
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def _system() -> str:
    return f"{sys.platform}-{platform.machine()}"


@functools.cache
def _features() -> tuple[str, ...]:
    """Returns the processor's instruction sets, by the system's names."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", errors="replace") as lines:  # noqa: PTH123
        for line in lines:
            if line.startswith(("flags", "Features", "features")):
                return tuple(sorted(set(line.partition(":")[2].split())))
    return (platform.processor(),)


# --- building ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """Newly built kernels.

    Attributes:
        library: Loaded.
        fault: Why they are not in the cache; empty if they are.
    """

    library: ctypes.CDLL
    fault: str


def build_kernels() -> Built:
    """Returns newly built kernels for this machine, which are left in the cache if they can be.

    Raises:
        KernelsError: There is no compiler, or it fails, or this process can't load the library.
    """
    try:
        place = kernels_path()
        cache = PrivateFolder.create(place.parent)
    except KernelsError as error:
        return Built(_compile(_native_variants(), None)[0], str(error))
    with cache:
        library, sealed = _compile(_native_variants(), cache)
        try:
            cache.write(place.name, sealed)
        except KernelsError as error:
            return Built(library, str(error))
    return Built(library, "")


def build_portable(output: Path) -> None:
    """Writes newly built kernels for ``HMPX_KERNELS`` on this and on other machines.

    Raises:
        KernelsError: As `build`; or ``output`` can't be written.
    """
    files.write(output, _compile(_portable_variants(), None)[1])


def _compile(
    variants: dict[tuple[str, ...], tuple[str, ...]], spare: PrivateFolder | None
) -> tuple[ctypes.CDLL, bytes]:
    """Returns a library, loaded, and the content of a file of it.

    Args:
        variants: Flags -> the processor's features that the library then needs.
        spare: To load from on systems that run nothing out of their temporary folder.

    Raises:
        KernelsError: There is no compiler, or it fails, or this process can't load the library.
    """
    _check_supported()
    with contextlib.ExitStack() as stack:
        try:
            scratch = Path(tempfile.mkdtemp(prefix="hmpx-"))
        except OSError as error:
            raise KernelsError(f"there is no folder for temporary files: {error}") from error
        # Not a TemporaryDirectory, which a forked process would remove when it ends.
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        folders = [stack.enter_context(PrivateFolder(scratch)), *([spare] if spare else [])]
        reason = ""
        for flags, library in compiler.libraries(_SOURCE, scratch, tuple(variants)):
            sealed = files.seal(library, Stamp(_source_digest(), _system(), variants[flags]))
            for folder in folders:
                try:
                    return _with_symbols(folder.load_once(sealed)), sealed
                except KernelsError as error:
                    reason = reason or str(error)
        raise KernelsError(f"what was compiled can't be loaded: {reason}")


def _native_variants() -> dict[tuple[str, ...], tuple[str, ...]]:
    return {
        ("-march=native", "-fopenmp"): _features(),
        ("-march=native",): _features(),
        (): (),
    }


def _portable_variants() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Returns flags for any processor of this architecture that is not too old."""
    variants: dict[tuple[str, ...], tuple[str, ...]] = {}
    if _system() == "linux-x86_64":
        level = "-march=x86-64-v3"
        variants = {(level, "-fopenmp"): _X86_64_V3, (level,): _X86_64_V3}
    return {**variants, ("-fopenmp",): (), (): ()}
