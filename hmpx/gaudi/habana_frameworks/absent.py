"""Names of Habana's that nothing here can stand in for: they can be imported, and raise when used."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, Final

from ...errors import HmpxError

_LOGGER: Final = logging.getLogger("hmpx")
_OURS: Final = __name__.rpartition(".")[0]


class GaudiError(HmpxError, NotImplementedError):
    """The program uses something that only a Gaudi has."""


def habana_name(name: str) -> str:
    """Returns the name that a module of this package has on a Gaudi."""
    return f"habana_frameworks{name.removeprefix(_OURS)}" if name.startswith(_OURS) else name


def unknown(module: str, name: str) -> AttributeError:
    """Returns the error for an attribute that a module of this package lacks."""
    known = habana_name(module)
    return AttributeError(
        f"hmpx's stand-in for {known!r} has no {name!r}; guard its use with "
        f"hasattr({known.rpartition('.')[2]}, {name!r}), or run where the real one is installed"
    )


# --- what raises -------------------------------------------------------------------------------


class _AbsentType(type):
    """A class that can be imported, taken attributes of and derived from, but not called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = absent(cls.__module__, f"{cls.__qualname__}.{name}", cls._remedy)
        setattr(cls, name, made)
        return made

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise _error(cls)

    def __repr__(cls) -> str:
        return f"<absent {cls.__module__}.{cls.__qualname__}>"

    def __iter__(cls) -> Any:
        raise _error(cls)

    def __bool__(cls) -> bool:
        return True


def _error(cls: Any) -> GaudiError:
    # A class of the user's own, derived from one, is named by what it is derived from.
    known = next(c for c in cls.__mro__ if "_remedy" in vars(c))
    return GaudiError(
        f"{known.__module__}.{known.__qualname__} needs a Gaudi; {known._remedy}, or run where the "
        "real habana_frameworks is installed"
    )


def absent(module: str, name: str, remedy: str) -> Any:
    """Returns what stands for ``name`` of ``module``: using it raises `GaudiError`.

    Args:
        module: Name of a module of this package, or of Habana's.
        name: The name in it.
        remedy: What to do instead, as an imperative.
    """
    contents = {"__module__": habana_name(module), "__qualname__": name, "_remedy": remedy}
    return _AbsentType(name.rpartition(".")[2], (), contents)


# --- what has no effect ------------------------------------------------------------------------

_noted: set[str] = set()


def without_effect(module: str, name: str) -> Callable[..., None]:
    """Returns a function that does nothing: a setting of Gaudi's graph compiler, say.

    It says so in the log, once, at level INFO. Results do not depend on such settings.
    """
    known = f"{habana_name(module)}.{name}"

    def function(*args: object, **kwargs: object) -> None:
        if known not in _noted:
            _noted.add(known)
            _LOGGER.info("%s() has no effect on this device", known)

    function.__name__ = function.__qualname__ = name
    function.__module__ = module
    function.__doc__ = "Has no effect here."
    return function


# --- modules -----------------------------------------------------------------------------------

#: Packages all of whose modules are absent -> what to do without them.
PACKAGES: Final[Mapping[str, str]] = {
    "habana_frameworks.mediapipe": "load data with torch.utils.data.DataLoader",
    "habana_frameworks.torch.hpex.experimental": "compute in 8 bits with hmpx's formats, such as "
    'hmpx.convert(low_precision_type="float8_e4m3fn")',
}


class _AbsentModule(types.ModuleType):
    """A module whose every name is absent."""

    def __getattr__(self, name: str) -> Any:
        root = _root(self.__name__)
        if name.startswith("__") or root is None:
            raise unknown(self.__name__, name)
        made = absent(self.__name__, name, PACKAGES[root])
        setattr(self, name, made)
        return made


def _root(name: str) -> str | None:
    """Returns the absent package that module ``name`` is in, or None."""
    return next((root for root in PACKAGES if f"{name}.".startswith(f"{root}.")), None)


class AbsentFinder:
    """Finds the modules of absent packages, whatever they are called."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module in an absent package; None for others."""
        if _root(name) is None:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Returns the module, empty."""
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: attributes are made when they are asked for."""
