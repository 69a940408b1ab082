"""Compiles the kernels that round to number formats, and the nodes of `linear` for the torch that is there.

It runs when hmpx is installed or a wheel is built. What can't be compiled is missing, and hmpx works without
it. ``python hatch_build.py`` compiles for this checkout again, after a change of the sources or of torch.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
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

PACKAGE = Path(__file__).parent / "hmpx"
KERNELS, NODES = PACKAGE / "number_formats" / "kernels", PACKAGE / "compute" / "nodes"

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

_nodes = runpy.run_path(str(NODES / "library.py"))

#: No path to torch's libraries: they are loaded before.
NODES_FLAGS = (
    "-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w", "-fopenmp", "-D_GLIBCXX_USE_CXX11_ABI=1",
)  # fmt: skip
NODES_LIBRARIES = ("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10")


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


def compiler_of(variable: str, *names: str) -> list[str]:
    """Returns the command of the compiler that an environment variable names, or else of the first that is there.

    Raises:
        RuntimeError: There is none.
    """
    named = shlex.split(os.environ.get(variable, ""))
    compiler = named or [next(filter(shutil.which, names), names[0])]
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(f"compiler {compiler[0]} not found; set {variable} to name one")
    return compiler


def compile_kernels() -> None:
    """Compiles all variants into the package, in place of earlier ones.

    Raises:
        RuntimeError: No compiler was found, or it fails.
    """
    if sys.platform == "win32":
        raise RuntimeError("they are compiled on Linux and macOS only")
    compiler = compiler_of("CC", "cc", "gcc", "clang")
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


def installed_torch() -> Path:
    """Returns the folder of the torch that can be imported here. Raises RuntimeError if there is none."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise RuntimeError(
            "torch can't be imported here; where it can, use pip install --no-build-isolation"
        )
    return Path(found.origin).parent


def path_of_nodes() -> Path:
    """Returns where the nodes for that torch are installed."""
    version = runpy.run_path(str(installed_torch() / "version.py"))["__version__"]
    path: Path = _nodes["path_for"](version)
    return path


def compile_nodes() -> None:
    """Compiles the nodes for that torch, into the package; removes those of other sources.

    Raises:
        RuntimeError: torch, Python's headers or a compiler is missing, or it fails.
    """
    target, torch = path_of_nodes(), installed_torch()
    if sys.platform != "linux":
        raise RuntimeError("they are compiled on Linux only")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise RuntimeError(f"{headers / 'Python.h'} is missing; install the headers of Python")
    compiler = compiler_of("CXX", "c++", "g++", "clang++")
    folders = (torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include", headers)
    unfinished = target.with_suffix(f".{os.getpid()}")
    objects = Path(f"{unfinished}.o")
    command = [
        *compiler,
        *NODES_FLAGS,
        *(f"-I{each}" for each in folders),
        "-c",
        str(_nodes["SOURCE"]),
    ]
    link = [*compiler, *LINKING, str(objects), f"-L{torch / 'lib'}", *NODES_LIBRARIES]
    try:
        subprocess.run([*command, "-o", str(objects)], check=True, timeout=LIMIT_S)
        # Linked without OpenMP: see `LINKING`.
        subprocess.run([*link, "-o", str(unfinished)], check=True, timeout=LIMIT_S)
        unfinished.replace(target)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{compiler[0]} fails with status {error.returncode}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(str(error)) from error
    finally:
        for left in (unfinished, objects):
            left.unlink(missing_ok=True)
    digest = target.suffixes[-2]
    for other in _nodes["compiled"]():
        if other.suffixes[-2] != digest:
            other.unlink()


class CompiledHook(BuildHookInterface):
    """Puts what is compiled into wheels, which are then for one platform and for every Python.

    Another Python or torch than that of the nodes leaves these aside.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, unless this is a source distribution."""
        if self.target_name != "wheel":
            return
        artifacts = []
        try:
            if not are_compiled():
                compile_kernels()
            artifacts.append("hmpx/number_formats/kernels/*.so")
        except RuntimeError as error:
            self.app.display_warning(
                f"hmpx has no compiled kernels, so torch's ops round to number formats: {error}"
            )
        try:
            if not path_of_nodes().exists():
                compile_nodes()
        except RuntimeError as error:
            if not _nodes["compiled"]():  # for other versions of torch
                self.app.display_warning(
                    f"hmpx has no compiled nodes, so linear takes the host longer: {error}"
                )
        if _nodes["compiled"]():
            artifacts.append("hmpx/compute/nodes/*.so")
        if artifacts:
            build_data["artifacts"] += artifacts
            build_data["pure_python"] = False
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{system}"


if __name__ == "__main__":
    if not are_compiled():
        compile_kernels()
    compile_nodes()
