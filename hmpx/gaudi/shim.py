"""Stands in for ``habana_frameworks``, so that a script written for Gaudi runs on CUDA or the CPU.

Puts the modules of `hmpx.gaudi.habana_frameworks` into `sys.modules` under Habana's names, and
redirects whatever the script places on ``"hpu"`` to the device that is present. Nothing is cast
before the script's own ``hmp.convert()``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import pkgutil
import sys
import types
from collections.abc import Mapping
from typing import Any, Final

from .. import ops, patching
from ..errors import HmpxError
from ..torch_internals import function_modes
from . import devices, habana_frameworks
from .habana_frameworks import habana_dataloader
from .habana_frameworks.absent import AbsentFinder
from .habana_frameworks.torch import hpu
from .habana_frameworks.torch.hpex import hmp

_ROOT: Final = "habana_frameworks"

#: A module that takes effect when a script imports it.
_ON_IMPORT: Final = "torch.gpu_migration"

_replaced_modules: dict[str, types.ModuleType | None] = {}
_applied: list[patching.Applied] = []
_mode: devices.DeviceMode | None = None
_finder: Final = AbsentFinder()


def install(options: Mapping[str, Any] | None = None) -> bool:
    """Installs the stand-in.

    Args:
        options: Arguments of `hmpx.convert` that the script's ``hmp.convert()`` is to use where it
            does not give them itself.

    Returns:
        Whether it is installed; False if the real ``habana_frameworks`` is importable, which is then
        used.
    """
    global _mode
    if _mode is None:
        if _is_importable(f"{_ROOT}.torch"):
            return False
        ops.table()  # read from torch before anything here changes it
        for name, module in _modules().items():
            _replaced_modules[name] = sys.modules.get(name)
            sys.modules[name] = module
        sys.meta_path.append(_finder)
        _applied.extend(patching.apply(devices.patches(hpu)))
        _mode = devices.DeviceMode()
        _mode.__enter__()  # type: ignore[no-untyped-call]
    hmp.set_defaults(options or {})
    return True


def uninstall() -> None:
    """Removes the stand-in; does nothing if it is not installed.

    Must be called in the thread that called `install`, outside any torch function mode entered since.

    Raises:
        HmpxError: It is called elsewhere.
    """
    global _mode
    if _mode is None:
        return
    stack = function_modes()
    if not stack or stack[-1] is not _mode:
        raise HmpxError(
            "habana_shim.uninstall() in another thread than install(), or inside a torch function "
            "mode entered since; leave that mode first"
        )
    _mode.__exit__(None, None, None)
    _mode = None
    devices.follow_cuda(is_on=False)
    patching.undo(_applied)
    _applied.clear()
    sys.meta_path.remove(_finder)
    for name in [
        n for n in sys.modules if n.startswith(f"{_ROOT}.") and n not in _replaced_modules
    ]:
        _forget(name)
    for name, previous in _replaced_modules.items():
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
    _replaced_modules.clear()
    hmp.set_defaults({})


def _forget(name: str) -> None:
    """Undoes the import of a module that was not loaded when the stand-in was installed."""
    module = sys.modules.pop(name)
    parent, _, child = name.rpartition(".")
    if vars(sys.modules.get(parent, habana_frameworks)).get(child) is module:
        delattr(sys.modules[parent], child)


def options() -> Mapping[str, Any] | None:
    """Returns the options given to `install`; None where the stand-in is not installed."""
    return None if _mode is None else hmp.defaults()


def has_converted() -> bool:
    """Whether the script has called ``hmp.convert()``."""
    return hmp.was_called()


def device_type() -> str:
    """Returns the type of the device that stands in for ``"hpu"``."""
    return devices.device_type()


def _modules() -> dict[str, types.ModuleType]:
    """Returns the entries that `install` makes in `sys.modules`."""
    found = {_ROOT: habana_frameworks}
    prefix = f"{habana_frameworks.__name__}."
    for info in pkgutil.walk_packages(habana_frameworks.__path__, prefix):
        below = info.name.removeprefix(prefix)
        if below.partition(".")[0] == "torch" and below != _ON_IMPORT:
            found[f"{_ROOT}.{below}"] = importlib.import_module(info.name)
    ours = f"{_ROOT}.torch.hpu"
    found |= {n.removeprefix(f"{_ROOT}."): m for n, m in found.items() if n.startswith(ours)}
    if not _is_importable("hmp"):  # somebody else's package of that name stays
        parent = types.ModuleType("hmp", "The package in which HMP came before habana_frameworks.")
        parent.__path__ = []
        parent.__spec__ = importlib.machinery.ModuleSpec("hmp", loader=None, is_package=True)
        parent.hmp = hmp  # type: ignore[attr-defined]
        found |= {"hmp": parent, "hmp.hmp": hmp}
    if not _is_importable("habana_dataloader"):
        found["habana_dataloader"] = habana_dataloader
    return found


def _is_importable(name: str) -> bool:
    """Whether module ``name`` exists as a regular module, not just as a directory of that name."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return True
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None
