"""Habana's modules by name: their stand-ins, and errors with a remedy for everything else."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, Final

from ..errors import HmpxError

_LOGGER: Final = logging.getLogger("hmpx")

ROOT: Final = "habana_frameworks"

_FORMATS: Final = (
    "compute in 8 bits with hmpx's formats, such as "
    'hmpx.convert(low_precision_type="float8_e4m3fn")'
)

#: Prefix of a name that the stand-in lacks -> what to do instead.
_REMEDIES: Final = {
    "habana_frameworks.mediapipe": "load data with torch.utils.data.DataLoader",
    "habana_frameworks.torch.core.quantization": _FORMATS,
    "habana_frameworks.torch.gpu_migration": "leave out the import, and place on 'hpu' what is placed on "
    "'cuda'",
    "habana_frameworks.torch.hpex.experimental": _FORMATS,
    "habana_frameworks.torch.hpex.kernels": "call torch's function, such as "
    "torch.nn.functional.scaled_dot_product_attention",
    "habana_frameworks.torch.hpex.normalization": "use torch.nn.functional.rms_norm",
    "habana_frameworks.torch.hpex.optimizers": "use an optimizer of torch.optim",
    "habana_frameworks.torch.hpu.metrics": "measure with torch.profiler",
    "habana_frameworks.torch.utils.debug": "look with torch.profiler",
}

#: Module -> prefixes of settings of Gaudi's software in it; no result depends on them.
_SETTINGS: Final = {
    "habana_frameworks.torch.core": ("enable_", "disable_", "set_dynamic", "hpu_initialize"),
    "habana_frameworks.torch.hpu": ("enable_", "disable_", "set_sync_debug_mode"),
    "habana_frameworks.torch.utils.debug": (
        *("_enable_", "_disable_", "_set_", "_memstat_", "_mem_log", "_hb_print", "_hg_print"),
        *("_bridge_cleanup", "_clear_", "_towl_", "clear_"),
    ),
    "habana_frameworks.torch.utils.experimental": ("_record_", "_set_", "enable_", "set_"),
    "habana_frameworks.torch.utils.library_loader": ("load_habana_",),
}


class GaudiError(HmpxError, NotImplementedError):
    """The program uses a feature that only a Gaudi has."""


class StandIn(types.ModuleType):
    """A module under Habana's name; a missing name is an `AttributeError` with a remedy."""

    def __init__(
        self, name: str, contents: Mapping[str, Any], more: types.ModuleType | None = None
    ) -> None:
        """Takes the name on a Gaudi, the module's contents, and where to look up other names."""
        super().__init__(name, f"Stands in for ``{name}``.")
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        vars(self).update(contents, __hmpx_more__=more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_SETTINGS.get(self.__name__, ())):
            return _without_effect(f"{self.__name__}.{name}")
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
        """Returns None for other modules.

        Raises:
            ModuleNotFoundError: The stand-in has no such module; the message has the remedy. It has no
                ``name``, so that ``from module import name`` passes it on.
        """
        if not name.startswith(f"{ROOT}."):
            return None
        remedy = _remedy(name) or "guard its import with try and except ImportError"
        raise ModuleNotFoundError(
            f"hmpx's stand-in for {ROOT!r} has no {name!r}; {remedy}, or run where the real one is "
            "installed"
        )


def _remedy(name: str) -> str | None:
    return next((do for root, do in _REMEDIES.items() if f"{name}.".startswith(f"{root}.")), None)


_noted: set[str] = set()


def _without_effect(name: str) -> Callable[..., None]:
    """Returns a function that does nothing, and logs this once at level INFO."""

    def function(*args: object, **kwargs: object) -> None:
        if name not in _noted:
            _noted.add(name)
            _LOGGER.info("%s() has no effect on this device", name)

    return function
