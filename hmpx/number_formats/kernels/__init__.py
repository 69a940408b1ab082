"""The compiled kernels of this process, from a library compiled when hmpx was installed.

Without it, torch ops give the same results, bit for bit. ``HMPX_KERNELS`` overrides the choice: ``off``, or the
path of another installation's library.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ...errors import OptionError, printable, suggestion
from .sources import digest

_LOGGER: Final = logging.getLogger("hmpx")
_FOLDER: Final = Path(__file__).parent
_ON: Final = ("", "on", "1", "yes", "true")
_OFF: Final = ("off", "0", "no", "false")

#: The processor's instructions, by torch's name -> the libraries that run on it, the fastest first.
_BY_CAPABILITY: Final = {"AVX512": ("avx512", "avx2"), "AVX2": ("avx2",)}


@dataclass(frozen=True)
class Kernels:
    """The kernels with which this process rounds.

    Attributes:
        library: The compiled kernels; None if torch ops round.
        path: The library's path.
        fault: Why there is none; empty if there is, or if ``HMPX_KERNELS`` is off.
    """

    library: ctypes.CDLL | None = None
    path: Path | None = None
    fault: str = ""


def library(*, is_essential: bool = True) -> ctypes.CDLL | None:
    """Returns the compiled kernels; None if there are none.

    Args:
        is_essential: Whether to warn if there are none.

    Raises:
        OptionError: ``HMPX_KERNELS`` has an invalid value, or names an unusable library.
    """
    found = kernels_in_use()
    if is_essential and found.fault:
        _warn_once(found.fault)
    return found.library


@functools.cache
def kernels_in_use() -> Kernels:
    """Returns the kernels of this process, which are chosen once.

    Raises:
        OptionError: As for `library`.
    """
    setting = os.environ.get("HMPX_KERNELS", "").strip()
    if setting.lower() in _OFF:
        return Kernels()
    if setting.lower() in _ON:
        names = _BY_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), ("default",))
        paths = [path for name in names if (path := _FOLDER / f"rounding.{name}.so").exists()]
        if not paths:
            return Kernels(fault="none for this processor were compiled when hmpx was installed")
        loaded = _load(paths[0])
        return Kernels(fault=loaded) if isinstance(loaded, str) else Kernels(loaded, paths[0])
    path = Path(setting)
    if not path.is_absolute():
        raise OptionError(
            f"HMPX_KERNELS={printable(setting)}: it can be on, off, or the absolute path of a library "
            "in another installation of hmpx" + suggestion(setting.lower(), ["on", "off"])
        )
    loaded = _load(path)
    if isinstance(loaded, str):
        raise OptionError(f"HMPX_KERNELS={printable(setting)} can't be used: {loaded}")
    return Kernels(loaded, path)


def _load(path: Path) -> ctypes.CDLL | str:
    """Returns the library at ``path``, or why it can't be used."""
    try:
        loaded = ctypes.CDLL(str(path))
        version = ctypes.c_char_p.in_dll(loaded, "source_digest").value
    except (OSError, ValueError) as error:  # ValueError: a missing symbol
        return printable(str(error))
    if version != digest().encode():
        return f"{path} was compiled from other sources than those of this version of hmpx"
    return loaded


@functools.cache
def _warn_once(fault: str) -> None:
    _LOGGER.warning(
        "torch ops round to number formats, several times slower than compiled kernels: %s; install a C "
        "compiler and then hmpx again (HMPX_KERNELS=off hides this)",
        fault,
    )
