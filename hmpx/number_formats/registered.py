"""Formats by name: built-in ones and those that users register."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from .. import arguments
from ..errors import OptionError, cut, shown, suggestion
from ..registry import Registry, exclusive
from .families import (
    FORMATS,
    Block,
    Custom,
    Exponent,
    Fixed,
    Float,
    Format,
    Posit,
    Scaled,
    Table,
    Takum,
)
from .vocabulary import meaning, name_of, plain, said_of

#: Type codes of TVM's custom types start here; lower ones are TVM's own. A code is one byte.
_FIRST_CODE: Final = 129
_LAST_CODE: Final = 255

#: TVM's spelling: with the bits, and with lanes, which are ignored.
_FLOAT: Final = re.compile(r"e([0-9]{1,2})m([0-9]{1,2})")
_CUSTOM: Final = re.compile(r"custom\[(\w{1,100})\]([0-9]{1,4})(?:x[0-9]{1,4})?")

_E4M3FN: Final = Float("float8_e4m3fn", 4, 3, kind="fn")
_E5M2: Final = Float("float8_e5m2", 5, 2)
_E3M2FN: Final = Float("float6_e3m2fn", 3, 2, kind="finite")
_E2M3FN: Final = Float("float6_e2m3fn", 2, 3, kind="finite")
_E2M1FN: Final = Float("float4_e2m1fn", 2, 1, kind="finite")

_INTEGER8: Final = Fixed("integer8", 8, 0)
_INTEGER4: Final = Fixed("integer4", 4, 0)


def _table(name: str, values: str) -> Table:
    return Table(name, tuple(map(float, values.split())))


#: NormalFloat, of QLoRA: quantiles of the normal distribution, with bitsandbytes' digits.
_NF4: Final = _table(
    "nf4_values",
    """
    -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453
    -0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0.0
    0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
    0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0
    """,
)

#: bitsandbytes' fp4; not the e2m1 of hardware.
_BNB_FP4: Final = _table(
    "bnb_fp4_values",
    """
    -1.0 -0.6666666865348816 -0.5 -0.3333333432674408 -0.25 -0.1666666716337204
    -0.0052083334885537624 0.0 0.0052083334885537624
    0.1666666716337204 0.25 0.3333333432674408 0.5 0.6666666865348816 1.0
    """,
)

_SHIPPED: Final[dict[str, Format]] = {
    format.name: format
    for format in (
        Float("float32", 8, 23),
        Float("bfloat16", 8, 7),
        Float("float16", 5, 10),
        Float("tf32", 8, 10),
        Float("fp24", 7, 16),
        Float("float8_e4m3", 4, 3),
        _E4M3FN,
        Float("float8_e4m3fnuz", 4, 3, kind="fnuz"),
        Float("float8_e4m3b11fnuz", 4, 3, bias=11, kind="fnuz"),
        _E5M2,
        Float("float8_e5m2fnuz", 5, 2, kind="fnuz"),
        Float("float8_e3m4", 3, 4),
        Float("p3109_k8p3se", 5, 2, kind="p3109"),
        Float("p3109_k8p4se", 4, 3, kind="p3109"),
        _E2M3FN,
        _E3M2FN,
        _E2M1FN,
        Float("float4_e3m0", 3, 0, kind="finite"),
        Exponent("float8_e8m0fnu", 8),
        Posit("posit8_0", 8, 0),
        Posit("posit8_1", 8, 1),
        Posit("posit8_2", 8, 2),
        Posit("posit16_1", 16, 1),
        Posit("posit16_2", 16, 2),
        Posit("posit32_2", 32, 2),
        Takum("takum16", 16),
        Block("mxfp8_e4m3", _E4M3FN),
        Block("mxfp8_e5m2", _E5M2),
        Block("mxfp6_e3m2", _E3M2FN),
        Block("mxfp6_e2m3", _E2M3FN),
        Block("mxfp4_e2m1", _E2M1FN),
        Block("mxint8", Fixed("integer8_6", 2, 6)),
        Scaled("nvfp4", _E2M1FN, 16, "e4m3", tensor_scale=True),
        Scaled("float8_e4m3fn_tensor", _E4M3FN),
        Scaled("float8_e4m3fn_row", _E4M3FN, "row"),
        Scaled("float8_e4m3fn_block128", _E4M3FN, 128),
        Scaled("float8_e4m3fn_block128x128", _E4M3FN, (128, 128)),
        Scaled("float8_e5m2_tensor", _E5M2),
        Scaled("float8_e4m3fn_delayed", _E4M3FN, history=16),
        Scaled("float8_e5m2_delayed", _E5M2, history=16),
        Scaled("int8", _INTEGER8),
        Scaled("int8_row", _INTEGER8, "row"),
        Scaled("int4", _INTEGER4),
        Scaled("int4_row", _INTEGER4, "row"),
        Scaled("int4_block128", _INTEGER4, 128),
        Scaled("nf4", _NF4, 64),
        Scaled("bnb_fp4", _BNB_FP4, 64),
    )
}


class _Known(NamedTuple):
    formats: Mapping[str, Format]
    codes: Mapping[int, str]


FORMATS_BY_NAME: Final = Registry(_Known(_SHIPPED, {}))


@exclusive
def register(format: Format, code: int | None = None) -> None:
    """Registers a format under its name.

    Registering an equal format again, with the same code, does nothing.

    Args:
        format: The format.
        code: A type code, 129 to 255, as in TVM's custom types; hmpx only checks that it is unique.

    Raises:
        OptionError: ``format`` is not a format, or its name or code is taken.

    Example:
        >>> hmpx.formats.register(hmpx.formats.Posit("posit10", bits=10, es=2))
        >>> hmpx.formats.quantize(torch.tensor([3.14159]), "posit10")
        tensor([3.1250])
        >>> hmpx.formats.unregister("posit10")
    """
    if not isinstance(format, FORMATS):
        *others, last = [family.__name__ for family in FORMATS]
        families = f"{', '.join(others)} or {last}"
        raise OptionError(f"register takes a {families} format, not {shown(format)}")
    name = format.name
    if code is not None and not (type(code) is int and _FIRST_CODE <= code <= _LAST_CODE):
        raise OptionError(
            f"format {name}: code must be an integer from {_FIRST_CODE} to {_LAST_CODE}, "
            f"not {shown(code)}"
        )
    formats, codes = FORMATS_BY_NAME.value
    known_code = next((known for known, owner in codes.items() if owner == name), None)
    if name in formats and (formats[name] != format or known_code != code):
        if name in _SHIPPED:
            raise OptionError(f"format {name} comes with hmpx; choose another name")
        raise OptionError(
            f"format {name} is already registered, and differs: {cut(repr(formats[name]))}; "
            "choose another name or unregister it first"
        )
    if code is not None and codes.get(code, name) != name:
        raise OptionError(
            f"format {name}: code {code} is that of format {codes[code]}; choose another"
        )
    if code is not None:
        codes = {**codes, code: name}
    FORMATS_BY_NAME.change(_Known({**formats, name: format}, codes))


def without(name: str) -> _Known:
    """Returns the known formats without a registered one; raises `OptionError` if it is not registered."""
    name = arguments.text("name", name, "the name of a format")
    if name in _SHIPPED:
        raise OptionError(f"format {name} comes with hmpx and can't be unregistered")
    formats, codes = FORMATS_BY_NAME.value
    if name not in formats:
        raise OptionError(f"no format {shown(name)} is registered{suggestion(name, formats)}")
    return _Known(
        {known: format for known, format in formats.items() if known != name},
        {code: known for code, known in codes.items() if known != name},
    )


def get(name: str | torch.dtype | Format) -> Format:
    """Returns the format of that name; a format is returned unchanged.

    Args:
        name: Such as ``"posit16_1"``, or ``"custom[posit16_1]16"`` in TVM's spelling; a common name of
            one format, such as ``"e4m3"`` or ``"half"``, see docs/formats.md; ``"e6m3"``, a float of that many
            bits, with infinities; or a dtype of torch, numpy or
            ml_dtypes.

    Raises:
        OptionError: The name is unknown or ambiguous.

    Example:
        >>> hmpx.formats.get("posit16_1")
        Posit(name='posit16_1', bits=16, es=1)
        >>> hmpx.formats.get(torch.float8_e5m2).name
        'float8_e5m2'
    """
    if isinstance(name, FORMATS):
        return name
    spelling = name_of(name)
    if spelling is None:
        raise OptionError(f"a format must be a name or a format, not {shown(name)}")
    formats = FORMATS_BY_NAME.value.formats
    known = formats.get(canonical(spelling))
    if known is not None:
        return known
    match = _FLOAT.fullmatch(plain(spelling))
    if match is not None:
        return Float(match[0], exponent_bits=int(match[1]), mantissa_bits=int(match[2]))
    match = _CUSTOM.fullmatch(spelling)
    if match is not None:
        known = get(match[1])
        if isinstance(known, Custom) or known.bits == int(match[2]):
            return known
        raise OptionError(f"format {match[1]} has {known.bits} bits, not {match[2]}: {shown(name)}")
    hint = (
        said_of(spelling)
        or suggestion(spelling, formats)
        or "; hmpx.formats.names() lists the known ones"
    )
    raise OptionError(f"no format {shown(name)} is known{hint}")


def canonical(name: str) -> str:
    """Returns the registered name for a name; unknown names unchanged."""
    formats = FORMATS_BY_NAME.value.formats
    if name in formats:
        return name
    spelled = plain(name)
    return spelled if spelled in formats else meaning(spelled) or name


def names() -> tuple[str, ...]:
    """Returns the names of all formats, built-in ones first.

    Example:
        >>> "float8_e4m3fn" in hmpx.formats.names()
        True
    """
    return tuple(FORMATS_BY_NAME.value.formats)
