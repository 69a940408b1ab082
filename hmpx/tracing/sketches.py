"""Sketches: some numbers of a tensor that tell how far it is from another one that is not there.

A projection of a tensor is the sum with random signs of those of its values that one of 40 buckets gets. The squares of
the differences of two tensors' projections add up to an unbiased estimate of the squared norm of the tensors' difference
(Thorup, Zhang 2004). Here they are larger by the root of 40, so that each one's square is such an estimate.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..comparing import BELOW_FP16, all_contents
from ..compute import nodes_in_use
from ..tensors import long_name

#: Projections of a tensor. The standard deviation of an estimate is a ninth of it.
PROJECTIONS: Final = 40

#: The number of values in a row: prime, so that each column of a tensor is in many buckets.
_COLUMNS: Final = 1021
#: Buckets of a row's columns, in turn.
_TURNS: Final = -(-_COLUMNS // PROJECTIONS)
#: Rows of a part of a tensor, which has its own signs: those of 2**18 values.
_PART: Final = 264
#: Values of parts that are read together: on the CPU, where they stay in its cache, and on a device, where each time
#: costs many kernels.
FEW: Final = 1 << 16
_MANY: Final = 64 * _PART * _COLUMNS

#: Squares of larger values, or of smaller ones than its inverse, may not be float64 numbers.
_HUGE: Final = 2.0**500

#: The variance of a projection's rounding to float32, for a norm of 1.
_ROUNDING: Final = 2.0**-48 / 6

_MODULUS: Final = 1 << 64
_MULTIPLIER: Final = 0x9E3779B97F4A7C15

#: Of the encoded numbers: digest, count of non-finite values, norm, least and largest value; projections follow.
_HEAD: Final = struct.Struct("<QIddd")
_PROJECTIONS: Final = struct.Struct(f"<{PROJECTIONS}f")


@dataclass(frozen=True, slots=True)
class Sketch:
    """Numbers of a tensor.

    Attributes:
        digest: A hash of the bits, in the order of the shape.
        nonfinite: How many values are infinite or NaN; the numbers below are without them.
        norm: The L2 norm; 0 for integers, as the numbers below.
        least: The least value, and
        largest: the largest one.
        projections: 40 sums with random signs; () for integers.
        places: A hash of which values are NaN, inf and -inf; 0 for none, and in older traces.
    """

    digest: int
    nonfinite: int = 0
    norm: float = 0.0
    least: float = 0.0
    largest: float = 0.0
    projections: tuple[float, ...] = ()
    places: int = 0

    def encoded(self) -> str:
        """Returns it as text, with projections as float32 parts of the norm."""
        data = _HEAD.pack(self.digest, self.nonfinite, self.norm, self.least, self.largest)
        if self.norm:
            data += _PROJECTIONS.pack(*[each / self.norm for each in self.projections])
        if self.places:
            data += self.places.to_bytes(8, "little")
        return base64.b85encode(data).decode()

    @classmethod
    def decoded(cls, text: str) -> Sketch:
        """Returns the sketch that `encoded` wrote."""
        data = base64.b85decode(text)
        digest, nonfinite, norm, least, largest = _HEAD.unpack_from(data)
        end, numbers = _HEAD.size, list[float]()
        if norm:
            numbers = [each * norm for each in _PROJECTIONS.unpack_from(data, end)]
            end += _PROJECTIONS.size
        places = int.from_bytes(data[end:], "little")
        return cls(digest, nonfinite, norm, least, largest, tuple(numbers), places)


class Estimate(NamedTuple):
    """An estimated relative L2 difference of two tensors, and its standard error."""

    rel: float
    error: float = 0.0

    @property
    def least(self) -> float:
        """The least difference that it allows for."""
        return self.rel - 2 * self.error


def difference(a: Sketch, b: Sketch) -> Estimate:
    """Returns the L2 norm of the tensors' difference, relative to ``a``'s norm."""
    if a.digest == b.digest:
        return Estimate(0.0)
    if not (a.norm and b.projections) or a.nonfinite != b.nonfinite:
        return Estimate(math.inf)
    if a.places != b.places and a.places and b.places:  # inf against NaN
        return Estimate(math.inf)
    size = max(a.norm, b.norm)  # whose square may be too large for a float
    squares = [
        (x / size - y / size) ** 2 for x, y in zip(a.projections, b.projections, strict=True)
    ]
    rounding = math.hypot(a.norm / size, b.norm / size) ** 2 * _ROUNDING  # of those in the file
    mean = sum(squares) / len(squares)
    if not math.isfinite(mean):  # float64 has no such numbers
        return Estimate(math.inf)
    square = max(mean - rounding, 0.0)
    error = (mean * math.sqrt(2 / len(squares)) + rounding) / (2 * math.sqrt(max(square, rounding)))
    unit = size / a.norm
    return Estimate(math.sqrt(square) * unit, error * unit)


def values_of(tensor: Tensor) -> Tensor:
    """Returns the values of a tensor that `has_values` in the order of its shape; may share its memory."""
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.contiguous().view(-1)


def is_read_alone(values: Tensor) -> bool:
    """Whether nothing is saved by reading them together with others: they are many, or there is a kernel."""
    return len(values) > FEW or _kernel(values) is not None


def _kernel(values: Tensor) -> Any:
    return getattr(nodes_in_use().module, "sketch", None) if values.is_cpu else None


def sketches(values: Sequence[Tensor]) -> list[tuple[Sketch, bool]]:
    """Returns the sketches of some `values_of` tensors of one dtype and device, and whether they surely need their dtype."""
    kernel = _kernel(values[0])
    read = _read_together(values) if kernel is None else [_read_by(kernel, e) for e in values]
    return [
        (_joined(each, [one for one, _ in of]), any(is_wide for _, is_wide in of))
        for each, of in zip(values, read, strict=True)
    ]


def low_contents(values: Sequence[Tensor]) -> list[str]:
    """Returns the name of the narrower dtype that each tensor's values came from; "" for none."""
    pairs = zip(values, all_contents(values), strict=True)
    return ["" if low in (None, each.dtype) else long_name(low) for each, low in pairs]


def _read_by(kernel: Any, values: Tensor) -> list[tuple[Sketch, bool]]:
    """Returns as `_read` does, of each part of a tensor; the kernel is that of `compute.nodes`."""
    dtype, parts = values.dtype, -(-values.numel() // (_PART * _COLUMNS))
    is_low = dtype.is_floating_point and dtype not in (torch.float32, torch.float64)
    wide = values.float() if is_low else values
    bits = values.new_zeros((parts, 2), dtype=torch.int64)
    numbers = values.new_zeros((parts, 3 + PROJECTIONS), dtype=torch.float64)
    signs, order = _signs("cpu", dtype if dtype is torch.float64 else torch.float32)
    kernel(values, wide, *_weights("cpu"), signs, order, _signs_of_parts(parts), bits, numbers)
    below = {torch.float32: BELOW_FP16, torch.float64: 0}.get(dtype, -1)
    found = zip(bits.tolist(), numbers.tolist(), strict=True)
    if not dtype.is_floating_point:
        return [(Sketch(digest), True) for (digest, _), _ in found]
    return [
        (Sketch(digest, 0, math.sqrt(square), least, largest, tuple(of)), bool(union & below))
        for (digest, union), (square, least, largest, *of) in found
    ]


def _read_together(values: Sequence[Tensor]) -> list[list[tuple[Sketch, bool]]]:
    """Returns as `_read` does, of the parts of each tensor; reads parts of several tensors at once."""
    parts = [torch.split(each, _PART * _COLUMNS) if each.numel() else () for each in values]
    most = FEW if values[0].device.type == "cpu" else _MANY
    found, together, size = list[tuple[Sketch, bool]](), list[tuple[Tensor, int]](), 0
    for part, number in [(part, number) for each in parts for number, part in enumerate(each)]:
        size += len(part) + _COLUMNS
        if together and size > most:
            found += _read(together)
            together, size = [], len(part) + _COLUMNS
        together.append((part, number))
    found += _read(together) if together else []
    rest = iter(found)
    return [[*itertools.islice(rest, len(each))] for each in parts]


def _joined(values: Tensor, parts: Sequence[Sketch]) -> Sketch:
    """Returns the sketch of values from those of their parts."""
    digest = values.numel()
    for each in parts:
        digest = (digest * _MULTIPLIER + each.digest) % _MODULUS
    if not all(math.isfinite(each.least) and math.isfinite(each.largest) for each in parts):
        if values.element_size() == 1:  # float8 has no arithmetic
            values = values.float()
        is_finite = torch.isfinite(values)
        kinds = values.where(~is_finite, 0).nan_to_num(1.0, 2.0, 3.0)
        ((places, _),) = sketches([kinds.to(torch.uint8)])  # the same for each dtype
        ((found, _),) = sketches([values.where(is_finite, 0)])
        nonfinite = values.numel() - int(is_finite.sum())
        return replace(found, digest=digest, nonfinite=nonfinite, places=places.digest)
    if len(parts) == 1 and values.dtype is not torch.float64:
        return Sketch(
            digest, 0, parts[0].norm, parts[0].least, parts[0].largest, parts[0].projections
        )
    norm, sums = math.hypot(*[each.norm for each in parts]), [each.projections for each in parts]
    least = min([each.least for each in parts], default=0.0)
    largest = max([each.largest for each in parts], default=0.0)
    found = Sketch(digest, 0, norm, least, largest, tuple(map(sum, zip(*sums, strict=True))))
    size = max(largest, -least)
    if values.dtype is torch.float64 and size and not 1 / _HUGE < size < _HUGE:
        factor = 1 / _HUGE if size > 1 else _HUGE
        ((scaled, _),) = sketches([values * factor])
        projections = tuple([each / factor for each in scaled.projections])
        return replace(found, norm=scaled.norm / factor, projections=projections)
    return found


def _read(parts: Sequence[tuple[Tensor, int]]) -> list[tuple[Sketch, bool]]:
    """Returns a sketch of each part, and whether it surely needs its dtype; reads all at once as a matrix of rows."""
    (values, _), *others = parts
    device, dtype = values.device, values.dtype
    lengths = [each.numel() for each, _ in parts]
    zeros = values.new_zeros(_COLUMNS)
    padded = [part for each, _ in parts for part in (each, zeros[: -each.numel() % _COLUMNS])]
    is_whole = not others and not padded[1].numel()
    bits = _bits(values if is_whole else torch.cat(padded)).view(
        -1, _COLUMNS * max(1, dtype.itemsize // 4)
    )
    if others:
        counts = [range(-(-length // _COLUMNS)) for length in lengths]
        at = torch.tensor([n for count in counts for n in count], device=device)
        owners = torch.tensor([n for n, of in enumerate(counts) for _ in of], device=device)

    def of_rows(table: Tensor) -> Tensor:
        return table.index_select(0, at) if others else table[: len(bits)]

    def sums(of: Tensor) -> Tensor:
        if not others:
            return of.sum(0, keepdim=True)
        return of.new_zeros(len(parts), *of.shape[1:]).index_add_(0, owners, of)

    # Times an odd number, a sign's bit would stay alone, and so would a change of it in the sum.
    mixed = (bits >> 15).bitwise_xor_(bits) if bits.dtype is torch.int32 else bits
    weights, row_weights = _weights(str(device))
    mixed = mixed.long().mul_(weights[: bits.shape[1]])
    digests = sums(mixed.sum(1) * of_rows(row_weights)).tolist()
    del mixed  # its memory, in the cache, is used again
    if not dtype.is_floating_point:
        return [(Sketch(each), True) for each in digests]
    is_wide = [dtype not in (torch.float32, torch.float64)] * len(parts)
    if dtype is torch.float32:  # few values tell it of most
        is_wide = [any(n & BELOW_FP16 for n in _bits(each[:8]).tolist()) for each, _ in parts]

    wide = torch.float32 if device.type == "mps" else torch.float64
    given = bits.view(dtype)
    given = given if dtype in (torch.float32, torch.float64) else given.float()
    signs, order = _signs(str(device), given.dtype)
    signed = (given * of_rows(signs)).to(wide)
    found = sums(signed)
    for number, (_, part) in enumerate(parts):
        if part:
            found[number] *= _part_signs(part, str(device), wide)
    found = torch.nn.functional.pad(found, (0, 1)).index_select(1, order)
    projections = found.view(-1, _TURNS, PROJECTIONS).sum(1) * math.sqrt(PROJECTIONS)
    norms = sums(torch.linalg.vector_norm(signed, dim=1).square_()).sqrt_()
    sizes = [part for n in lengths for part in (n, -n % _COLUMNS)]
    unpadded = torch.split(given.view(-1), sizes)[::2]
    ends = torch.stack([end for each in unpadded for end in torch.aminmax(each)])
    numbers = torch.cat([norms[:, None], ends.to(wide).view(-1, 2), projections], 1).tolist()
    return [
        (Sketch(digest, 0, norm, least, largest, tuple(of)), is_plain)
        for digest, is_plain, (norm, least, largest, *of) in zip(
            digests, is_wide, numbers, strict=True
        )
    ]


def _bits(values: Tensor) -> Tensor:
    return values.view({1: torch.uint8, 2: torch.int16}.get(values.element_size(), torch.int32))


def _stream(name: str, size: int) -> bytearray:
    """Returns random bytes, the same in every process; a longer stream begins with the shorter one."""
    return bytearray(hashlib.shake_128(name.encode()).digest(size))


@functools.lru_cache(maxsize=8)
def _weights(device: str) -> tuple[Tensor, Tensor]:
    """Returns odd factors for the columns of a row of up to 8 bytes each, and for the rows of a part."""
    columns = torch.frombuffer(_stream("columns", 16 * _COLUMNS), dtype=torch.int64)
    rows = torch.frombuffer(_stream("rows", 8 * _PART), dtype=torch.int64)
    return (columns | 1).to(device), (rows | 1).to(device)


def _random_signs(name: str, *shape: int) -> Tensor:
    bits = torch.frombuffer(_stream(name, math.prod(shape) // 8 + 1), dtype=torch.uint8)
    found = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return found.view(-1)[: math.prod(shape)].view(shape).double() * 2 - 1


@functools.lru_cache(maxsize=8)
def _signs(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the signs of a part's values, and the columns by bucket; those after the last one are 0."""
    random = torch.frombuffer(_stream("order", 4 * _COLUMNS), dtype=torch.int32)
    order = torch.cat([random.argsort(), torch.full((_TURNS * PROJECTIONS - _COLUMNS,), _COLUMNS)])
    return _random_signs("signs", _PART, _COLUMNS).to(device, dtype), order.to(device)


@functools.lru_cache(maxsize=8)
def _signs_of_parts(parts: int) -> Tensor:
    """Returns the signs of the columns of each part of a tensor, as large as projections are."""
    found = [_part_signs(each, "cpu", torch.float64) for each in range(parts)]
    return torch.stack([torch.ones(_COLUMNS).double(), *found[1:]]) * math.sqrt(PROJECTIONS)


@functools.lru_cache(maxsize=1 << 12)
def _part_signs(part: int, device: str, dtype: torch.dtype) -> Tensor:
    """Returns the signs of the columns of a tensor's part."""
    return _random_signs(f"part {part}", _COLUMNS).to(device, dtype)
