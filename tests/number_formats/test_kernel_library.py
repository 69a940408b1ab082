"""Compiled kernels: which are loaded, which are refused, and what users are shown."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hmpx
from hmpx.number_formats import kernels
from tests import forks

from .test_quantize import use

ROOT = Path(__file__).resolve().parents[2]

#: Prints whether values are right, and whether compiled kernels gave them.
SHOW = """
import torch, hmpx
from hmpx import formats
from hmpx.number_formats import kernels
x = torch.randn(1000)
is_right = torch.equal(formats.quantize(x, "float8_e4m3fn"), x.to(torch.float8_e4m3fn).float())
print(is_right, kernels.kernels_in_use().library is not None)
"""
BY_KERNELS, BY_OPS = "True True\n", "True False\n"

needs_kernels = pytest.mark.skipif(
    kernels.kernels_in_use().library is None, reason="hmpx was installed without a C compiler"
)
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


def show(**settings: str) -> tuple[int, str, str]:
    """Runs `SHOW` with these environment variables."""
    environment = {k: v for k, v in os.environ.items() if k != "HMPX_KERNELS"} | settings
    done = forks.run("-c", SHOW, env=environment, imported=forks.TORCH)
    return done.returncode, done.stdout, done.stderr


def compiled(path: Path, version: str) -> Path:
    """Compiles a library that holds this version and no kernel."""
    source = path.with_suffix(".c")
    source.write_text(f'const char *const source_digest = "{version}";\n')
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", path], check=True)
    return path


@needs_kernels
@pytest.mark.parametrize("setting", ["", "TRUE"])
def test_the_kernels_of_the_installation_are_used(setting: str) -> None:
    """Without a word."""
    assert show(HMPX_KERNELS=setting) == (0, BY_KERNELS, "")


def test_off() -> None:
    """Torch ops round, without a warning."""
    assert show(HMPX_KERNELS="No") == (0, BY_OPS, "")


@pytest.mark.usefixtures("no_search_for_early_names")
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "ops") for name in ("float8_e4m3fn", "posit16_1", "takum16", "nvfp4", "nf4")),
        ("mxfp8_e4m3", "kernels"),
    ],
)
def test_rounding_calls_nothing_that_a_list_may_name(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every op may be low in every family: what rounds is not rounded itself, without end."""
    use(implementation, monkeypatch)
    x, w = torch.randn(4, 64, requires_grad=True), torch.randn(3, 64)
    policy = hmpx.Policy.from_ops(low=["*"], low_precision_type=name)
    with hmpx.convert(policy=policy, device_types={"cpu"}, round_gradients=True):
        F.linear(x, w).sum().backward()
    assert x.grad is not None


@needs_kernels
def test_a_library_of_another_installation(tmp_path: Path) -> None:
    """Its path is enough."""
    path = kernels.kernels_in_use().path
    assert path is not None
    named = tmp_path / "named.so"
    shutil.copy(path, named)
    assert show(HMPX_KERNELS=str(named)) == (0, BY_KERNELS, "")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="one library serves all others")
def test_a_processor_without_a_library_costs_one_line() -> None:
    """Values are those of torch ops."""
    status, out, err = show(ATEN_CPU_CAPABILITY="default")
    assert (status, out) == (0, BY_OPS)
    assert err == (
        "torch ops round to number formats, several times slower than compiled kernels: none for this "
        "processor were compiled when hmpx was installed; install a C compiler and then hmpx again "
        "(HMPX_KERNELS=off hides this)\n"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("onn", "it can be on, off, or the absolute path of a library in another installation"),
        (
            "/nowhere/kernels.so",
            "can't be used: /nowhere/kernels.so: cannot open shared object file",
        ),
        ("\x1b[31m", r"HMPX_KERNELS=\x1b[31m: it can be"),
    ],
)
def test_a_wrong_setting_is_an_error(setting: str, message: str) -> None:
    """Of the first call that rounds."""
    status, out, err = show(HMPX_KERNELS=setting)
    assert (status, out) == (1, "")
    error = err.strip().splitlines()[-1]
    assert error.startswith("hmpx.errors.OptionError: HMPX_KERNELS="), err
    assert message in error


@needs_compiler
def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    """Its functions might be called in another way, or give other values."""
    other = compiled(tmp_path / "other.so", "0" * 64)
    status, _, err = show(HMPX_KERNELS=str(other))
    assert status == 1
    assert err.strip().endswith(
        f"{other} was compiled from other sources than those of this version of hmpx"
    )


@needs_compiler
@pytest.mark.slow
def test_a_wheel_has_the_kernels_and_needs_no_compiler(tmp_path: Path) -> None:
    """It is for one platform and every Python; without a compiler it is for all platforms."""
    copied = shutil.copytree(
        ROOT, tmp_path / "hmpx", ignore=shutil.ignore_patterns(".*", "*.so", "site", "dist")
    )
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(copied)]
    for compiler, tag in (("no-such-compiler", "py3-none-any"), ("cc", "py3-none-")):
        out = tmp_path / compiler
        environment = {**os.environ, "CC": compiler, "CXX": "no-such-compiler"}
        done = subprocess.run(
            [*build, "--outdir", str(out)],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        [wheel] = out.iterdir()
        names = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".so")]
        assert bool(names) is (compiler == "cc"), wheel
        assert tag in wheel.name
        said = "hmpx has no compiled kernels, so torch's ops round to number formats"
        assert (said in done.stdout + done.stderr) is (compiler != "cc")
