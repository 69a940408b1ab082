"""Stands in for ``habana_frameworks``, so that a script written for Gaudi runs on CUDA or the CPU."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, Final

from torch.utils.data import DataLoader

from .. import ops, patching
from ..errors import raised_here
from ..files import read_sections
from . import devices, hpex, hpu, optimizers

ROOT: Final = "habana_frameworks"


class StandIn(types.ModuleType):
    """A module under Habana's name; a missing name is an `AttributeError` with a remedy."""

    def __init__(
        self, name: str, contents: Mapping[str, Any], more: types.ModuleType | None = None
    ) -> None:
        super().__init__(name, f"Stands in for ``{name}``.")
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        vars(self).update(contents, __hmpx_more__=more)

    def __getattr__(self, name: str) -> Any:
        settings = _facts()["settings"].get(self.__name__, "")
        if name.startswith(tuple(settings.split())):
            return lambda *args, **kwargs: _note(f"{self.__name__}.{name}")
        more = vars(self).get("__hmpx_more__")
        if not name.startswith("_") and hasattr(more, name):
            return getattr(more, name)
        remedy = _remedy(f"{self.__name__}.{name}") or (
            f"guard its use with hasattr({self.__name__.rpartition('.')[2]}, {name!r})"
        )
        raise AttributeError(
            f"hmpx's stand-in for {self.__name__!r} has no {name!r}; {remedy}, or run where the real one "
            "is installed"
        )


class Finder:
    """Refuses to import Habana's modules that have no stand-in."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises an error without a ``name``, so that ``from module import name`` passes it on."""
        asker = sys._getframe(2).f_globals.get("__name__")  # find_spec asks whether a module exists
        if not name.startswith(f"{ROOT}.") or asker == "importlib.util":
            return None
        remedy = _remedy(name) or "guard its import with try and except ImportError"
        raise ModuleNotFoundError(
            f"hmpx's stand-in for {ROOT!r} has no {name!r}; {remedy}, or run where the real one is "
            "installed"
        )


def _remedy(name: str) -> str | None:
    remedies = _facts()["remedies"].items()
    return next((do for root, do in remedies if f"{name}.".startswith(f"{root}.")), None)


@functools.cache
def _facts() -> Mapping[str, Mapping[str, str]]:
    return read_sections(str(__package__), "habana.ini")


@functools.cache
def _note(name: str) -> None:
    logging.getLogger("hmpx").info("%s() has no effect on this device", name)


# --- the modules ---------------------------------------------------------------------------------


def _named(*objects: Any) -> dict[str, Any]:
    return {each.__name__: each for each in objects}


_HCCL: Final = _named(hpex.initialize_distributed_hpu)

#: Habana's module, relative to its package -> its contents.
_CONTENTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "torch": _named(hpex._hpex_C),
    "torch.core": {
        **_named(hpex.mark_step, hpex.is_enabled_weight_permute_pass),
        **dict.fromkeys(
            ["hpu_set_env", "hpu_inference_set_env"], lambda model=None, *_, **__: model
        ),
    },
    "torch.core.hccl": _HCCL,
    "torch.distributed": {},
    "torch.distributed.hccl": _HCCL,
    "torch.hpex": {},
    "torch.hpex.hmp": _named(hpex.convert, hpex.disable_casts),
    "torch.hpex.movingavrg": _named(hpex.FusedEMA),
    "torch.hpex.normalization": _named(hpex.FusedClipNorm),
    "torch.hpex.optimizers": _named(
        optimizers.FusedAdagrad,
        optimizers.FusedAdamW,
        optimizers.FusedLamb,
        optimizers.FusedLars,
        optimizers.FusedResourceApplyMomentum,
        optimizers.FusedSGD,
    ),
    "torch.utils": {},
    "torch.utils.debug": {"_is_enabled_weight_permute_pass": hpex.is_enabled_weight_permute_pass},
    "torch.utils.distributed_utils": _HCCL,
    "torch.utils.experimental": {
        "_get_device_type": lambda: hpex.synDeviceType.synDeviceTypeInvalid,
        **_named(hpex.synDeviceType),
    },
    "torch.utils.internal": _named(hpex.is_lazy),
    "torch.utils.library_loader": {
        "is_habana_available": hpu.is_available,
        "is_habana_avaialble": hpu.is_available,  # an earlier spelling
    },
}

_replaced_modules: dict[str, types.ModuleType | None] = {}
_applied: list[patching.Applied] = []
_mode: devices.DeviceMode | None = None
_finder: Final = Finder()


def install(options: Mapping[str, Any] | None = None) -> bool:
    """Installs the stand-in unless the real ``habana_frameworks`` is importable; returns whether it did.

    The script's ``hmp.convert()`` uses these ``options`` of `hmpx.convert` unless it gives its own.
    """
    global _mode
    if _mode is None:
        if _is_importable(f"{ROOT}.torch"):
            return False
        ops.table()  # read from torch before anything here changes it
        modules = _modules()
        _replaced_modules.update({name: sys.modules.get(name) for name in modules})
        sys.modules.update(modules)
        sys.meta_path.append(_finder)
        _applied.extend(patching.apply(devices.patches(modules["torch.hpu"])))
        _mode = devices.DeviceMode()
        _mode.__enter__()  # type: ignore[no-untyped-call]
    hpex.set_defaults(options or {})
    return True


def uninstall() -> None:
    """Removes the stand-in; call it in the thread of `install`, outside any torch function mode entered since."""
    global _mode
    if _mode is None:
        return
    _mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    _mode = None
    patching.undo(_applied)
    _applied.clear()
    sys.meta_path.remove(_finder)
    for name, previous in _replaced_modules.items():
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
    _replaced_modules.clear()
    hpex.set_defaults({})


def options() -> Mapping[str, Any] | None:
    """Returns the options given to `install`; None if the stand-in is not installed."""
    return None if _mode is None else hpex.defaults()


def _modules() -> dict[str, types.ModuleType]:
    # `hmpx.tensors.devices` looks for the mark: a stand-in is not a Gaudi.
    found: dict[str, types.ModuleType] = {ROOT: StandIn(ROOT, {"__hmpx_shim__": True})}
    for below, contents in _CONTENTS.items():
        found[f"{ROOT}.{below}"] = StandIn(f"{ROOT}.{below}", contents)
    for below in ("", ".events", ".graphs", ".memory", ".random", ".streams"):
        name = f"torch.hpu{below}"
        found[name] = found[f"{ROOT}.{name}"] = StandIn(f"{ROOT}.{name}", {}, hpu)
    if not _is_importable("hmp"):  # another package of that name stays
        found |= {"hmp": StandIn("hmp", {}), "hmp.hmp": found[f"{ROOT}.torch.hpex.hmp"]}
    if not _is_importable("habana_dataloader"):
        found["habana_dataloader"] = StandIn("habana_dataloader", {"HabanaDataLoader": DataLoader})
    for name, module in found.items():
        parent, _, child = name.rpartition(".")
        if parent in found:
            setattr(found[parent], child, module)
    return found


def _is_importable(name: str) -> bool:
    """Whether module ``name`` exists as a regular module, not just as a directory of that name."""
    if sys.modules.get(name) is not None:
        return True
    try:
        spec = importlib.util.find_spec(name)
    except raised_here(ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None
