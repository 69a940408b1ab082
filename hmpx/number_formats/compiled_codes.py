"""Codes made and read by the compiled kernels, where there are some; elsewhere torch ops do the same."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from .bits import FP32, FP64
from .families import Block, CodedFormat, Format, code_dtype
from .families.number_format import NumberFormat
from .kernels import calls
from .kernels import library as kernel_library
from .keys import draw_keys
from .rounding import (
    ONE_ROW,
    THREADED,
    Rounding,
    has_own_memory,
    rounding_of,
)
from .rows import rows_of
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
) -> Tensor | tuple[Tensor, Tensor] | None:
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
    if x.is_neg() or x._is_zerotensor():
        x = EMPTY_LIKE(x).copy_(x)
    keys = NO_KEYS if run.mode != "stochastic" else draw_keys(generator)
    axis, width = format.block_axis, _bits(format)
    if axis is not None or keys is not NO_KEYS:
        x = CONTIGUOUS(x)
    codes = EMPTY_LIKE(x, dtype=code_dtype(width))
    if codes.stride() != x.stride():
        x = CLONE(x)
    rows = ONE_ROW if axis is None else rows_of(x, axis)
    count = x.numel()
    threads = 1 if count < THREADED else torch.get_num_threads()
    rest = (x.data_ptr(), codes.data_ptr(), count, *keys, threads, rows, codes.element_size())
    if not isinstance(format, Block):
        encoder(*rest)
        return codes
    shape = list(x.shape) or [1]
    shape[format.axis] = -(-shape[format.axis] // format.size)
    scales = EMPTY(shape, dtype=torch.uint8, device="cpu")
    if count:
        encoder(*rest, scales.data_ptr())
    return codes, scales


def decode(codes: Any, format: Format) -> Tensor | None:
    """Returns the values that codes stand for; None if no kernel reads them."""
    if torch.compiler.is_dynamo_compiling():
        return None
    if isinstance(format, Block):
        return _decoded_blocks(codes, format)
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


def _decoded_blocks(pair: Any, format: Block) -> Tensor | None:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return None
    codes, scales = pair
    if not all(isinstance(part, Tensor) and has_own_memory(part) for part in pair):
        return None
    if codes.dtype is not code_dtype(format.element.bits) or scales.dtype is not torch.uint8:
        return None
    shape = list(codes.shape) or [1]
    if not -len(shape) <= format.axis < len(shape):
        return None
    shape[format.axis] = -(-shape[format.axis] // format.size)
    decoder = _decoder(format)
    if decoder is None or list(scales.shape or [1]) != shape:
        return None
    codes, scales = CONTIGUOUS(codes), CONTIGUOUS(scales)
    values = EMPTY_LIKE(codes, dtype=torch.float32)
    count = codes.numel()
    threads = 1 if count < THREADED else torch.get_num_threads()
    if count:
        decoder(
            codes.data_ptr(),
            scales.data_ptr(),
            values.data_ptr(),
            count,
            codes.element_size(),
            threads,
            rows_of(codes, format.axis),
        )
    return values


def _bits(format: Format) -> int:
    """Returns the bits of a code, in blocks of an element's."""
    if isinstance(format, Block):
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
        binary = FP32 if format.is_exact_in_float32 else FP64
        coding = format.coding(binary)
        if isinstance(format, Block):
            plan = format.plan_in(FP32, "nearest", "saturate")
            found = calls.block_decoder(plan, coding, library) or False
        else:
            found = calls.decoder(coding, binary.width, library) or False
        format.derived[_DECODER] = found
    return found or None
