"""Compiles the kernels that round to number formats, when hmpx is installed or a wheel is built.

Without a compiler hmpx is installed all the same, and torch's ops round. ``python hatch_build.py``
compiles the kernels of this checkout again, after a change of their sources.
"""

from __future__ import annotations

import concurrent.futures
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path(__file__).parent / "hmpx" / "number_formats" / "kernels"

_sources = runpy.run_path(str(KERNELS / "sources.py"))
SOURCE, DIGEST = str(_sources["SOURCE"]), _sources["digest"]()

#: None of them changes a value.
FLAGS = (
    "-O3", "-std=gnu11", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fvisibility=hidden", "-fopenmp-simd",
)  # fmt: skip
#: OpenMP's functions are found in what torch has loaded: a second runtime would have threads of its own.
LINKING = ("-shared", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()))
LIMIT_S = 600


def variants() -> dict[str, tuple[str, ...]]:
    """Returns name of a library -> flags of the instructions that it may use.

    The names are those of `torch.backends.cpu.get_cpu_capability`.
    """
    if platform.machine().lower() in {"x86_64", "amd64"}:
        avx2 = ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt")
        avx512 = (*avx2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
        levels = {"avx2": avx2, "avx512": avx512}
        return {name: tuple(f"-m{each}" for each in level) for name, level in levels.items()}
    return {"default": ()}


def path_of(name: str) -> Path:
    """Returns where a library is installed. The dot in its name keeps Python from importing it as a module."""
    return KERNELS / f"rounding.{name}.so"


def are_compiled() -> bool:
    """Whether all libraries are there, and were compiled from the sources as they are."""
    paths = [path_of(name) for name in variants()]
    return all(path.exists() and DIGEST.encode() in path.read_bytes() for path in paths)


def compile_kernels() -> None:
    """Compiles all variants into the package, in place of earlier ones.

    Raises:
        RuntimeError: No compiler was found, or it fails.
    """
    if sys.platform == "win32":
        raise RuntimeError("they are compiled on Linux and macOS only")
    named = shlex.split(os.environ.get("CC", ""))
    compiler = named or [next(filter(shutil.which, ("cc", "gcc", "clang")), "cc")]
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(f"there is no C compiler {compiler[0]}")
    version = f'-DSOURCE_DIGEST="{DIGEST}"'

    def compile_one(name: str, march: tuple[str, ...], folder: str) -> Path:
        objects, built = Path(folder, f"{name}.o"), Path(folder, f"{name}.so")
        command = [*compiler, *FLAGS, *march, version, "-c", SOURCE, "-o", str(objects)]
        with_openmp = subprocess.run([*command, "-fopenmp"], check=False, timeout=LIMIT_S)
        if with_openmp.returncode:  # not every compiler has it
            subprocess.run(command, check=True, timeout=LIMIT_S)
        # Linked without OpenMP: see `LINKING`.
        link = [*compiler, *LINKING, str(objects), "-o", str(built), "-lm"]
        subprocess.run(link, check=True, timeout=LIMIT_S)
        return built

    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor() as pool:
        running = {
            name: pool.submit(compile_one, name, march, folder)
            for name, march in variants().items()
        }
        try:
            for name, future in running.items():
                target = path_of(name)
                unfinished = target.with_suffix(".unfinished")
                shutil.copy(future.result(), unfinished)
                unfinished.replace(target)
        except (OSError, subprocess.SubprocessError) as error:
            raise RuntimeError(str(error)) from error


class KernelsHook(BuildHookInterface):
    """Puts compiled kernels into wheels, which are then for one platform and for every Python."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, unless this is a source distribution."""
        if self.target_name != "wheel":
            return
        try:
            if not are_compiled():
                compile_kernels()
        except RuntimeError as error:
            self.app.display_warning(
                f"hmpx has no compiled kernels, so torch's ops round to number formats: {error}"
            )
            return
        build_data["artifacts"].append("hmpx/number_formats/kernels/*.so")
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"


if __name__ == "__main__":
    compile_kernels()
