"""Codes of number formats: the bits in which hardware stores them, as integer tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import OptionError
from ..tensors import CAST, is_in_memory
from . import compiled_codes
from .bits import FP32, FP64
from .families import Format
from .quantization import quantize
from .registered import get
from .rounding import check_dense
from .unpatched import EMPTY_LIKE


def encode(
    x: Tensor,
    format: str | torch.dtype | Format,
    rounding: str = "nearest",
    overflow: str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Returns the codes of ``x`` rounded to a format.

    Codes of up to 8 bits are uint8, of up to 16 uint16, of up to 32 int32, whose sign is the highest
    bit, and longer ones int64. Floats have ml_dtypes' codes, posits those of their standard, fixed
    point has two's complement, and a table the indices of its values.

    In blocks, codes are the elements', and their scales have codes, too: uint8, the shared exponent
    plus 127; 255 says that the block held infinity or NaN. Scales have x's shape, but along the axis
    of blocks there are as many as blocks. `Scaled` formats are coded in the same way, with scales in
    float32 as they are, and those in e4m3 as codes of that; with ``tensor_scale`` the tensor's scale
    is the third part.

    NaN becomes the format's own. Where there is none it becomes a zero, in floats with the other
    sign as ml_dtypes has it; in tables the value nearest to zero.

    Args:
        x: As for `quantize`.
        format: As for `quantize`, but not a `Custom` one.
        rounding: As for `quantize`.
        overflow: As for `quantize`.
        generator: As for `quantize`.

    Returns:
        Codes in x's shape; for a `Block` or `Scaled` format (codes, scales), or with ``tensor_scale``
        (codes, scales, the tensor's scale).

    Raises:
        OptionError: As for `quantize`; or the format is a `Custom` one, which has no codes.

    Example:
        >>> hmpx.formats.encode(torch.tensor([1.0, -2.0]), "float8_e4m3fn")
        tensor([ 56, 192], dtype=torch.uint8)
    """
    format = get(format)
    format.check_coded()
    if not isinstance(x, Tensor):
        raise OptionError(f"encode takes a tensor, not {type(x).__name__}")
    check_dense(x)
    with torch.no_grad():
        work = x.detach()
        if not torch.compiler.is_dynamo_compiling() and not is_in_memory(work):
            work = EMPTY_LIKE(work).copy_(work)
        if x.dtype in CAST and x.dtype is not torch.float64:
            work = CAST[torch.float32](work)
        if work.dtype in CAST and (generator is None or isinstance(generator, torch.Generator)):
            found = compiled_codes.encode(work, format, rounding, overflow, generator)
            if found is not None:
                return found
        if work.dtype is torch.float32 and not format.is_exact_in_float32:
            work = CAST[torch.float64](work)
        rounded = quantize(work, format, rounding, overflow, generator)
        return format.encoded(work, rounded, FP64 if rounded.dtype is torch.float64 else FP32)


def decode(codes: Tensor | tuple[Tensor, ...], format: str | torch.dtype | Format) -> Tensor:
    """Returns the values that codes stand for.

    Args:
        codes: As `encode` returns them: integers, or for a `Block` or `Scaled` format a tuple.
        format: A format, or what `get` takes for one; not a `Custom` one.

    Returns:
        float32, or float64 if float32 lacks some of the format's values.

    Raises:
        OptionError: There is no such format, or it has no codes, or ``codes`` are not integers.

    Example:
        >>> hmpx.formats.decode(torch.tensor([56, 192], dtype=torch.uint8), "float8_e4m3fn")
        tensor([ 1., -2.])
    """
    format = get(format)
    format.check_coded()
    values = compiled_codes.decode(codes, format)
    return format.decoded(codes) if values is None else values
