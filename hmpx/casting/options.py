"""How ops compute, by the arguments of `convert`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from .. import arguments, number_formats
from ..arguments import is_a
from ..errors import OptionError, shown
from ..number_formats import OVERFLOWS, ROUNDING_MODES
from ..policy import parse_format

if TYPE_CHECKING:
    from ..number_formats import Format


#: The values of ``legalize``.
LEGALIZE_MODES: Final = ("auto", "always", "never", "fast")


def _option(
    default: Any,
    check: Callable[[str, object], Any],
    help: str = "",
    *,
    is_of_formats: bool = False,
    **flag: Any,
) -> Any:
    """Returns a field of `Options`."""
    shown = {"help": help, **flag} if help else {}
    about = {"check": check, "flag": shown, "is_of_formats": is_of_formats}
    return field(default=default, metadata=about)


def _kept_casts(name: str, value: object) -> bool | str:
    if is_a(value, str) and value == "auto":
        return "auto"
    if is_a(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise OptionError(f"{name} must be 'auto', True or False, not {shown(value)}")


def _rounded_gradients(name: str, value: object) -> bool | Format:
    if is_a(value, str) or number_formats.is_format(value):
        return parse_format(name, value)
    if is_a(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise OptionError(
        f"{name} must be True, False, or a number format or its name, not {shown(value)}"
    )


@dataclass(frozen=True, slots=True)
class Options:
    """How ops compute. Each field is an argument of `convert`, which documents it."""

    legalize: str = _option(
        "auto",
        lambda n, v: arguments.choice(n, v, LEGALIZE_MODES),
        "which low-precision ops compute in fp32 and round. auto, the default: those that are slow "
        "on this machine; always: all; never: none; fast: as auto, but fp32 inputs are not rounded",
        choices=LEGALIZE_MODES,
    )
    reuse_casts: bool = _option(False, arguments.truth)
    keep_weight_casts: bool | str = _option(
        "auto",
        _kept_casts,
        "whether autograd keeps casts of weights for the backward, instead of casting again there",
        choices=("auto", "yes", "no"),
    )
    rounding: str = _option(
        "nearest",
        lambda n, v: arguments.choice(n, v, ROUNDING_MODES, number_formats.spellings("rounding")),
        "how values are rounded",
        is_of_formats=True,
        choices=ROUNDING_MODES,
    )
    overflow: str | None = _option(
        None,
        lambda n, v: None if v is None else arguments.choice(n, v, OVERFLOWS),
        "result for values beyond a format's largest",
        is_of_formats=True,
        choices=OVERFLOWS,
    )
    round_gradients: bool | Format = _option(  # noqa: RUF009
        False,
        _rounded_gradients,
        "round gradients too: yes, to the op's format; or to FORMAT, such as float8_e5m2",
        is_of_formats=True,
        metavar="yes|FORMAT",
    )

    @classmethod
    def checked(cls, given: Mapping[str, object]) -> Options:
        """Returns the options among the arguments of `convert`.

        Raises:
            OptionError: One has an invalid value.
        """
        return cls(**{f.name: f.metadata["check"](f.name, given[f.name]) for f in fields(cls)})
