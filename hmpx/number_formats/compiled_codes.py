"""Codes made and read by the compiled kernels, where there are some; elsewhere torch ops do the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .bits import FP32, FP64
from .families import Block, CodedFormat, Format, Scaled, code_dtype
from .families.number_format import NumberFormat
from .kernels import calls
from .kernels import library as kernel_library
from .keys import draw_keys
from .layouts import NO_GRID
from .rounding import (
    THREADED,
    Rounding,
    has_own_memory,
    rounding_of,
)
from .torch_rounding import NO_KEYS
from .unpatched import CLONE, CONTIGUOUS, EMPTY, EMPTY_LIKE

#: Under which the kernel is kept among what is derived from a format; False if there is none.
_DECODER: Final = "decoder"


def encode(
    x: Tensor,
    format: Format,
    rounding: str,
    overflow: str | None,
    generator: torch.Generator | None,
) -> Tensor | tuple[Tensor, ...] | None:
    """Returns the codes of ``x`` rounded, as `codes.encode` does; None if no kernel makes them.

    Raises:
        OptionError: As there.
    """
    if torch.compiler.is_dynamo_compiling() or not has_own_memory(x):
        return None
    run = rounding_of(format, rounding, overflow)
    encoder = _encoder(run, x.dtype)
    if encoder is None:
        return None
    keys = NO_KEYS if run.mode != "stochastic" else draw_keys(generator)
    layout = format.layout
    if layout is not None or keys is not NO_KEYS:
        x = CONTIGUOUS(x)
    codes = EMPTY_LIKE(x, dtype=code_dtype(_bits(format)))
    if codes.stride() != x.stride():
        x = CLONE(x)
    grid, count = NO_GRID if layout is None else layout.grid(x), x.numel()
    threads = 1 if count < THREADED else torch.get_num_threads()
    rest = (x.data_ptr(), codes.data_ptr(), count, *keys, threads, grid, codes.element_size())
    if isinstance(format, Block):
        return codes, _scales(encoder, rest, format.scale_shape(x.shape), torch.uint8)
    if not isinstance(format, Scaled):
        encoder(*rest)
        return codes
    if not count:
        return None
    dtype = torch.float32 if format.scale_format == "float32" else torch.uint8
    shape = format.shape_for(x.shape, format.layout)
    if not format.tensor_scale:
        return codes, _scales(encoder, rest, shape, dtype)
    tensor_scale = EMPTY((), dtype=torch.float32, device="cpu")
    return codes, _scales(encoder, rest, shape, dtype, tensor_scale), tensor_scale


def _scales(
    encoder: calls.Encoder,
    rest: tuple[Any, ...],
    shape: Sequence[int],
    dtype: torch.dtype,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """Has an encoder write codes, and returns the scales that it writes."""
    scales = EMPTY(shape, dtype=dtype, device="cpu")
    if scales.numel():
        addresses = (scales.data_ptr(), 0 if tensor_scale is None else tensor_scale.data_ptr())
        encoder(*rest, *addresses)
    return scales


def decode(codes: Any, format: Format) -> Tensor | None:
    """Returns the values that codes stand for; None if no kernel reads them."""
    if torch.compiler.is_dynamo_compiling():
        return None
    if isinstance(format, Block | Scaled):
        return _decoded_scaled(codes, format)
    if not isinstance(format, CodedFormat) or not isinstance(codes, Tensor):
        return None
    if codes.dtype is not code_dtype(_bits(format)):
        return None
    if not has_own_memory(codes):
        return None
    decoder = _decoder(format)
    if decoder is None:
        return None
    dtype = torch.float32 if format.is_exact_in_float32 else torch.float64
    values = EMPTY_LIKE(codes, dtype=dtype)
    if values.stride() != codes.stride():
        codes = CLONE(codes)
    count = codes.numel()
    threads = 1 if count < THREADED else torch.get_num_threads()
    decoder(codes.data_ptr(), values.data_ptr(), count, codes.element_size(), threads)
    return values


def _decoded_scaled(parts: Any, format: Block | Scaled) -> Tensor | None:
    has_tensor_scale = isinstance(format, Scaled) and format.tensor_scale
    if not isinstance(parts, tuple | list) or len(parts) != 2 + has_tensor_scale:
        return None
    if not all(isinstance(part, Tensor) and has_own_memory(part) for part in parts):
        return None
    codes, scales = parts[:2]
    axis, dim = format.block_axis, max(codes.dim(), 1)
    if axis is not None and not -dim <= axis < dim:
        return None
    if isinstance(format, Block):
        shape, dtype = format.scale_shape(codes.shape), torch.uint8
        scales = scales.view(1) if not codes.dim() and scales.numel() == 1 else scales
    else:
        shape = format.shape_for(codes.shape, format.layout)
        dtype = torch.float32 if format.scale_format == "float32" else torch.uint8
    if codes.dtype is not code_dtype(_bits(format)) or scales.dtype is not dtype:
        return None
    if tuple(scales.shape) != tuple(shape):
        return None
    tensor_scale = 1.0
    if has_tensor_scale:
        if parts[2].dtype is not torch.float32 or parts[2].dim():
            return None
        tensor_scale = parts[2].item()
    decoder = _decoder(format)
    if decoder is None:
        return None
    codes, scales = CONTIGUOUS(codes), CONTIGUOUS(scales)
    values, count = EMPTY_LIKE(codes, dtype=torch.float32), codes.numel()
    if count:
        threads = 1 if count < THREADED else torch.get_num_threads()
        addresses = (codes.data_ptr(), scales.data_ptr(), values.data_ptr())
        grid, width = format.layout.grid(codes), codes.element_size()
        decoder(*addresses, count, grid, width, threads, tensor_scale)
    return values


def _bits(format: Format) -> int:
    """Returns the bits of a code, of formats that share scales those of an element's."""
    if isinstance(format, Block | Scaled):
        return format.element.bits
    assert isinstance(format, CodedFormat)
    return format.bits


def _encoder(run: Rounding, dtype: torch.dtype) -> calls.Encoder | None:
    """Returns the kernel that rounds tensors of one dtype to codes."""
    if dtype not in run.encoders:
        plan = run.format.coded_plan(dtype, run.mode, run.overflow)  # type: ignore[arg-type]  # checked
        library = None if plan is None else kernel_library.library()
        if plan is None or library is None:
            return None
        run.encoders[dtype] = calls.encoder(plan, run.format.coding(plan.binary), library)
    return run.encoders[dtype]


def _decoder(format: NumberFormat) -> Any:
    """Returns the kernel that reads a format's codes."""
    found = format.derived.get(_DECODER)
    if found is None:
        library = kernel_library.library()
        if library is None:
            return None
        is_narrow = isinstance(format, Block | Scaled) or format.is_exact_in_float32
        binary = FP32 if is_narrow else FP64
        coding = format.coding(binary)
        if isinstance(format, Block | Scaled):
            plan = format.plan_in(FP32, "nearest", "saturate")
            found = calls.scaled_decoder(plan.decoding_spec, coding, library) or False
        else:
            found = calls.decoder(coding, binary.width, library) or False
        format.derived[_DECODER] = found
    return found or None
