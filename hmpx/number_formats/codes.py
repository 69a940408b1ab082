"""Codes of number formats: the bits in which hardware stores them, as integer tensors.

The compiled kernels encode and decode them; without kernels, torch ops do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import OptionError
from ..tensors import CAST, is_in_memory
from . import kernels
from .bits import FP32, FP64, NO_KEYS, draw_keys
from .families import Coded, Custom, Format, SharedScales, Table, code_dtype, params_of
from .registered import get
from .rounding import FormatRounding, check_dense, has_own_memory, quantize, rounding_of
from .unpatched import CLONE, CONTIGUOUS, EMPTY, EMPTY_LIKE

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


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

    In blocks, elements have codes, and so have scales: uint8, the shared exponent plus 127; 255
    marks a block with infinity or NaN. Scales have x's shape, with one per block on the axis of
    blocks. So have those of `Scaled` formats: values in float32, or codes of e4m3.

    NaN becomes the format's NaN. Without one it becomes zero (in floats with the opposite sign, like
    ml_dtypes), or in tables the value nearest to zero.

    Args:
        x: As for `quantize`.
        format: As for `quantize`, except `Custom` formats.
        rounding: As for `quantize`.
        overflow: As for `quantize`.
        generator: As for `quantize`.

    Returns:
        Codes in x's shape; for a `Block` or `Scaled` format (codes, scales), or with ``tensor_scale``
        (codes, scales, the tensor's scale).

    Raises:
        OptionError: As for `quantize`; or the format is `Custom`, which has no codes.

    Example:
        >>> hmpx.formats.encode(torch.tensor([1.0, -2.0]), "float8_e4m3fn")
        tensor([ 56, 192], dtype=torch.uint8)
    """
    known = _coded(format)
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
            found = _encoded(work, known, rounding, overflow, generator)
            if found is not None:
                return found
        if work.dtype is torch.float32 and not known.is_exact_in_float32:
            work = CAST[torch.float64](work)
        rounded = quantize(work, known, rounding, overflow, generator)
        return known.encoded(work, rounded, FP64 if rounded.dtype is torch.float64 else FP32)


def _coded(format: str | torch.dtype | Format) -> Coded:
    known = get(format)
    if isinstance(known, Custom):
        raise OptionError(
            f"format {known.name} is given by a function and has no codes; quantize rounds to it"
        )
    return known


def _encoded(
    x: Tensor, format: Coded, rounding: str, overflow: str | None, generator: torch.Generator | None
) -> Tensor | tuple[Tensor, ...] | None:
    """Returns the codes that a kernel makes, with those of scales; None if there is none."""
    if torch.compiler.is_dynamo_compiling() or not has_own_memory(x):
        return None
    run, count = rounding_of(format, rounding, overflow), x.numel()
    if x.dtype not in run.encoders:
        run.encoders[x.dtype] = _encoder(run, x.dtype)
    kernel, coding, function = run.encoders[x.dtype]
    shared = format if isinstance(format, SharedScales) else None
    if function is None or (shared and not count):
        return None
    keys = NO_KEYS if run.mode != "stochastic" else draw_keys(generator)
    if shared or keys is not NO_KEYS:
        x = CONTIGUOUS(x)
    dtype, *of_scales = _dtypes(format)
    codes = EMPTY_LIKE(x, dtype=dtype)
    if codes.stride() != x.stride():
        x = CLONE(x)
    shapes = () if shared is None else (shared.scales_shape(x.shape), ())
    parts = [EMPTY(s, dtype=d, device="cpu") for s, d in zip(shapes, of_scales, strict=False)]
    written = [part.data_ptr() for part in parts]
    if coding.kind == "scaled":
        written = [*written, 0][:2]
    function(
        *(x.data_ptr(), codes.data_ptr(), count, kernel.struct_for(x), *keys),
        *(kernels.threads_for(count), coding.spec, codes.element_size(), *written),
    )
    return (codes, *parts) if shared else codes


def _encoder(run: FormatRounding, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Returns the kernel that rounds tensors of a dtype, the coding, and the C function that encodes, or None."""
    format: Any = run.format
    is_drawn = isinstance(format, Table) and run.mode == "stochastic"
    is_known = dtype is torch.float64 or format.is_exact_in_float32
    plan = None if is_drawn or not is_known else run.plan(dtype)
    if plan is None or plan.kernel is None or plan.params.binary.dtype is not dtype:
        return None, None, None
    coding, width = format.coding(plan.params.binary), plan.params.binary.width
    if coding is None or not coding.can_encode:
        return None, None, None
    kind = f"encode_{coding.kind}" if isinstance(format, SharedScales) else "encode"
    return plan.kernel, coding, kernels.function(f"encode_{plan.kernel.name}_f{width}", kind)


def decode(codes: Tensor | tuple[Tensor, ...], format: str | torch.dtype | Format) -> Tensor:
    """Returns the values of codes.

    Args:
        codes: A result of `encode`: integers, or for a `Block` or `Scaled` format a tuple.
        format: A format, or an argument of `get`; not a `Custom` format.

    Returns:
        float32, or float64 if float32 lacks some of the format's values.

    Raises:
        OptionError: The format is unknown or has no codes, or ``codes`` are not integers.

    Example:
        >>> hmpx.formats.decode(torch.tensor([56, 192], dtype=torch.uint8), "float8_e4m3fn")
        tensor([ 1., -2.])
    """
    known = _coded(format)
    values = _decoded(codes if isinstance(known, SharedScales) else (codes,), known)
    return known.decoded(codes) if values is None else values


def _decoded(parts: Any, format: Coded) -> Tensor | None:
    """Returns the values of codes by a kernel; None if there is none, or if they are wrong."""
    if torch.compiler.is_dynamo_compiling() or not isinstance(parts, tuple | list):
        return None
    dtypes, (coding, function, kernel) = _dtypes(format), _decoder(format)
    is_right = len(parts) == len(dtypes) and all(map(_is_readable, parts, dtypes))
    if function is None or not is_right:
        return None
    codes, count = CONTIGUOUS(parts[0]), parts[0].numel()
    values = EMPTY_LIKE(codes, dtype=torch.float32 if format.is_exact_in_float32 else torch.float64)
    options = coding.spec, codes.element_size(), kernels.threads_for(count)
    if not isinstance(format, SharedScales):
        function(codes.data_ptr(), values.data_ptr(), count, *options)
        return values
    scales, *tensor_scale = parts[1:]
    if tuple(scales.shape) != format.scales_shape(codes.shape) or any(
        each.dim() for each in tensor_scale
    ):
        return None
    if count:
        scales = CONTIGUOUS(scales)
        addresses = codes.data_ptr(), scales.data_ptr(), values.data_ptr()
        whole = tensor_scale[0].item() if tensor_scale else 1.0
        function(*addresses, count, kernel.struct_for(codes), *options, whole)
    return values


def _dtypes(format: Coded) -> list[torch.dtype]:
    """Returns the dtypes of codes, of scales, and of the tensor's scale."""
    if not isinstance(format, SharedScales):
        return [code_dtype(format.bits)]
    of_scales = torch.float32 if format.scale_format == "float32" else torch.uint8
    found = [code_dtype(format.element.bits), of_scales, torch.float32]
    return found if format.tensor_scale else found[:2]


def _is_readable(part: Any, dtype: torch.dtype) -> bool:
    return isinstance(part, Tensor) and part.dtype is dtype and has_own_memory(part)


def _decoder(format: Coded) -> tuple[Any, Any, Any]:
    """Returns the coding, the C function that decodes or None, and the kernel whose struct it takes for scales."""
    if "decoder" not in format.derived:
        binary, kernel = FP32 if format.is_exact_in_float32 else FP64, None
        coding, function = format.coding(binary), None
        if isinstance(format, SharedScales):
            kernel = format.kernel(params_of(format, torch.float32))
        if coding is not None and coding.can_decode:
            kind = "decode" if kernel is None else "decode_scaled"
            function = kernels.function(f"decode_{coding.kind}_f{binary.width}", kind)
        format.derived["decoder"] = coding, function, kernel
    return format.derived["decoder"]  # type: ignore[no-any-return]


# --- bfloat16 in numpy, which lacks it, as the uint16 of its bits ------------------------------


def to_uint16(values: Tensor | npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.uint16]:
    """Returns the bfloat16 encodings of ``values`` in a new array: sign, 8 exponent bits, 7 mantissa bits.

    Rounds like torch's casts: to nearest, ties to even, beyond the largest value to infinity; NaN
    stays NaN.

    Args:
        values: Floating, of any shape and device.

    Raises:
        OptionError: ``values`` are not floating.
    """
    import numpy as np

    if not isinstance(values, Tensor):
        array = np.asarray(values)
        if array.dtype.kind != "f" or array.dtype.itemsize > 8:
            raise OptionError(f"values must be float16, float32 or float64, not {array.dtype}")
        values = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    if not values.is_floating_point():
        raise OptionError(f"values must be floating, not {values.dtype}")
    encoded = values.detach().to("cpu", torch.bfloat16, copy=True)
    return encoded.contiguous().view(torch.uint16).numpy()


def from_uint16(encoded: npt.NDArray[np.uint16]) -> Tensor:
    """Returns the bfloat16 tensor of an encoding by `to_uint16`: a new one, on the CPU.

    Args:
        encoded: uint16, of any shape.

    Raises:
        OptionError: ``encoded`` is not uint16.
    """
    import numpy as np

    array = np.asarray(encoded)
    if array.dtype.kind != "u" or array.dtype.itemsize != 2:
        raise OptionError(f"encoded bfloat16 must be uint16, not {array.dtype}")
    native = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(native).view(torch.bfloat16)
