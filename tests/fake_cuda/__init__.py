"""Devices without the hardware: functions run in a process that has one whose tensors have no values.

They pass through the autograd and autocast that a build of torch for CPUs has, too; so the ops of a
training step, their dtypes, their casts and their waits for the device are those of a GPU. Its numbers
and its speed are not known. Steps are counted on plain tensors, below all modes: `device.cpp`. Single calls are looked
at on torch's fake tensors.

    def dtype_of_products(shape):  # in a test's module
        with steps.fake("cuda"):
            ...

    def test_products(on_fake_cuda):  # the fixture skips where there is no C++ compiler
        assert on_fake_cuda(dtype_of_products, [4, 4]) == "torch.bfloat16"
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
TIMEOUT_S = 300


#: The library of the fake device, in a process that `serving` starts.
loaded: ctypes.CDLL | None = None


def library() -> Any:
    """Returns the library of the fake device, or None where there is none."""
    return loaded


def missing() -> str | None:
    """Returns why the guard can't be built here, or None."""
    if compiler() is None:
        return "needs a C++ compiler (c++, g++ or clang++)"
    if not hasattr(os, "fork"):
        return "each call is a forked child"
    if torch.version.cuda or torch.version.hip:
        return "needs a torch that was built without CUDA: another one has devices of its own"
    return None


def compiler() -> str | None:
    """Returns the C++ compiler to use, if there is one."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named or "c++", "g++", "clang++"])), None)


def build(folder: Path, device_type: str = "cuda") -> Path:
    """Compiles the device into ``folder`` and returns the library; takes a quarter of a minute.

    Args:
        folder: Exists.
        device_type: Of the fake device: ``"cuda"`` or ``"xpu"``.

    Raises:
        RuntimeError: The compiler fails.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    library = folder / f"{device_type}_guard.so"
    names = ", ".join([f'"{name}"' for name in _with_kernels(root / "include/ATen/ops")])
    named = f"static const std::set<std::string> WITH_KERNELS = {{{names}}};\n"
    (folder / "with_kernels.h").write_text(named, encoding="utf-8")
    headers = [
        f"-I{root / 'include'}",
        f"-I{root / 'include/torch/csrc/api/include'}",
        f"-I{folder}",
    ]
    libraries = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    defined = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    defined += ["-DFAKE_XPU"] if device_type == "xpu" else []
    flags = ("-std=c++20", "-O0", "-shared", "-fPIC", "-w")
    result = subprocess.run(
        [
            *(compiler() or "c++", *flags, *defined, *headers, str(FOLDER / "device.cpp")),
            "-o",
            str(library),
            *libraries,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"the fake device does not compile:\n{result.stderr}")
    return library


def build_once(folder: Path) -> Path:
    """Compiles the device into a folder that processes and runs share, or waits for the one that does."""
    import fcntl

    made_of = [
        path.read_bytes() for path in (FOLDER / "device.cpp", FOLDER / "guard.cpp", Path(__file__))
    ]
    made_of += [repr((torch.__version__, torch.__file__, compiler())).encode()]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / f"cuda_guard_{hashlib.sha256(b''.join(made_of)).hexdigest()[:16]}.so"
        if not library.exists():
            made = folder / "made"
            made.mkdir(exist_ok=True)
            build(made).rename(library)
        return library


#: Made by functions of the device itself, or views.
_OWN = {
    *(
        "_local_scalar_dense",
        "_reshape_alias",
        "as_strided",
        "empty",
        "empty_strided",
        "equal",
        "resize_",
    ),
    *("set_", "unfold", "view"),
}


def _with_kernels(headers: Path) -> list[str]:
    """Returns the ops with kernels on CUDA that composite functions would take apart elsewhere.

    Of structured ops, the composite function calls the kernel, unless torch has another composite one.
    """
    names = {"convolution", "convolution_backward", "copy_"}  # they choose among libraries
    for header in headers.glob("*_cuda_dispatch.h"):
        op = header.name.removesuffix("_cuda_dispatch.h")
        is_structured = (headers / f"{op}_meta.h").exists()
        if is_structured and not (headers / f"{op}_compositeimplicitautograd_dispatch.h").exists():
            continue
        declared = re.findall(r"TORCH_API [^;(]*?\b(\w+)\(", header.read_text("utf-8"))
        names |= {name for name in declared if not name.endswith(("_out", "_outf", "_symint"))}
    return sorted(names - _OWN)


@contextlib.contextmanager
def serving(guard: Path) -> Iterator[Callable[..., Any]]:
    """Yields `call` for many calls: each runs in a child of one process that has imported torch.

    Args:
        guard: What `build` returned.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, str(FOLDER / "worker.py"), str(guard)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        number = itertools.count()

        def serve(function: Callable[..., Any], *arguments: Any) -> Any:
            log, result = (Path(folder, f"{next(number)}.{name}") for name in ("log", "json"))
            named = [function.__module__, function.__qualname__, arguments]
            print(json.dumps([*named, str(log), str(result), TIMEOUT_S]), file=process.stdin)
            process.stdin.flush()
            status = process.stdout.readline().strip()
            assert status == "0", (status, log.exists() and log.read_text(encoding="utf-8"))
            return json.loads(result.read_text(encoding="utf-8"))

        yield serve
        process.stdin.close()
        assert process.wait(timeout=TIMEOUT_S) == 0


def call(guard: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what ``function`` returns in a new process that has a fake CUDA device.

    Args:
        guard: What `build` returned.
        function: Of a module below the repository's root.
        arguments: What JSON can hold, as the result must be, too.

    Raises:
        AssertionError: The function raises.
    """
    with serving(guard) as serve:
        return serve(function, *arguments)
