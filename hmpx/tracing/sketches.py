"""Sketches: some numbers of a tensor that tell how far it is from another one that is not there.

A projection of a tensor is its sum with random signs. The square of the difference of two tensors' projections
is an unbiased estimate of the squared norm of the tensors' difference (Alon, Matias, Szegedy 1996). A sign is a
product of three: of the row, of the column and of the value, so that a matrix product makes all projections.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..comparing import BELOW_FP16, contents, has_values
from ..tensors import long_name

#: Projections of a tensor. The standard deviation of an estimate is a ninth of it.
PROJECTIONS: Final = 40

#: The number of values in a row, and of rows that are read at a time.
_COLUMNS: Final = 1024
_ROWS: Final = 256
#: Parts that are read at a time on a device, where each part costs several kernels.
_PARTS: Final = 64

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
    squares = [(x - y) ** 2 for x, y in zip(a.projections, b.projections, strict=True)]
    rounding = (a.norm**2 + b.norm**2) * _ROUNDING  # of the projections in the file
    mean = sum(squares) / len(squares)
    square = max(mean - rounding, 0.0)
    error = (mean * math.sqrt(2 / len(squares)) + rounding) / (2 * math.sqrt(max(square, rounding)))
    return Estimate(math.sqrt(square) / a.norm, error / a.norm)


def values_of(tensor: Tensor) -> Tensor:
    """Returns the values of a tensor that `has_values` in the order of its shape; may share its memory."""
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.contiguous().view(-1)


def are_few(values: Tensor) -> bool:
    """Whether `sketches` takes these `values_of` a tensor."""
    return 0 < len(values) <= _COLUMNS and values.device.type == "cpu"


def sketch(values: Tensor) -> Sketch:
    """Returns the sketch of the `values_of` a tensor. Reads them twice."""
    digest = _digest(values)
    if not values.is_floating_point() or not len(values):
        return Sketch(digest)
    if values.element_size() == 1:  # float8 has no arithmetic
        values = values.float()
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    found = _numbers(values, wide)
    nonfinite = places = 0
    if not math.isfinite(found[0]):
        is_finite = torch.isfinite(values)
        nonfinite = len(values) - int(is_finite.sum())
        kinds = values.where(~is_finite, 0).nan_to_num(1.0, 2.0, 3.0)
        places = _digest(kinds.to(torch.uint8))  # the same for each dtype
        found = _numbers(values.where(is_finite, 0), wide)
    norm, least, largest, *projections = found
    return Sketch(digest, nonfinite, norm, least, largest, tuple(projections), places)


def sketches(values: Sequence[Tensor]) -> list[tuple[Sketch, str]]:
    """Returns the sketch and the `low_contents` of each of these: `are_few`, of one dtype."""
    lengths, dtype = torch.tensor([len(each) for each in values]), values[0].dtype
    bits = pad_sequence([_bits(each) for each in values], batch_first=True)
    weighted = (_mixed(bits) * _weights("cpu")[: bits.shape[1]]).sum(1).tolist()
    counts = [len(each) * dtype.itemsize // bits.dtype.itemsize for each in values]
    digests = [(n * _MULTIPLIER + w) % _MODULUS for n, w in zip(counts, weighted, strict=True)]
    if not dtype.is_floating_point:
        return [(Sketch(each), "") for each in digests]
    given = bits.view(dtype).double()
    _, columns, signs = _signs("cpu", torch.float64)
    found = given * signs[: given.shape[1]]
    is_pad = torch.arange(given.shape[1]) >= lengths[:, None]
    least = given.masked_fill(is_pad, math.inf).amin(1)
    largest = given.masked_fill(is_pad, -math.inf).amax(1)
    ends = torch.stack([(found * found).sum(1).sqrt(), least, largest], 1)
    sums = found @ columns[:, : given.shape[1]].T
    is_wide = [dtype not in (torch.float32, torch.float64)] * len(values)
    if dtype is torch.float32:
        is_wide = ((bits & BELOW_FP16) != 0).any(1).tolist()
    found_numbers = torch.cat([ends, sums], 1).tolist()
    made = list[tuple[Sketch, str]]()
    for each, digest, numbers, is_plain in zip(
        values, digests, found_numbers, is_wide, strict=True
    ):
        norm, least_, largest_, *projections = numbers
        one = Sketch(digest, 0, norm, least_, largest_, tuple(projections))
        one = one if math.isfinite(norm) else sketch(each)
        made.append((one, "" if is_plain else low_contents(each)))
    return made


def low_contents(tensor: Tensor) -> str:
    """Returns the low dtype that an fp32 tensor's values were, by its name; ``""`` for other tensors."""
    if tensor.dtype not in (torch.float32, torch.float64) or not has_values(tensor):
        return ""
    found = contents(tensor)
    return "" if found in (None, tensor.dtype) else long_name(found)


def _numbers(values: Tensor, dtype: torch.dtype) -> list[float]:
    """Returns norm, least and largest value, and the projections."""
    rows, columns, each = _signs(str(values.device), dtype)
    least, largest = torch.aminmax(values)
    if len(values) <= _COLUMNS:
        found = values * each[: len(values)]
        square = found @ found
        sums = columns[:, : len(values)] @ found
    else:
        square = torch.zeros((), dtype=dtype, device=values.device)
        total = torch.zeros(PROJECTIONS, _COLUMNS, dtype=dtype, device=values.device)
        first = 0
        for part in _parts(values):
            found = (part * each[: part.shape[1]]).view(-1)
            square += found @ found
            if rest := -len(found) % _COLUMNS:
                found = torch.nn.functional.pad(found, (0, rest))
            matrix = found.view(-1, _COLUMNS)
            total.addmm_(rows(first, first + len(matrix)), matrix)
            first += len(matrix)
        sums = (total * columns).sum(1)
    ends = torch.stack([square.sqrt(), least.to(dtype), largest.to(dtype)])
    return [float(each) for each in torch.cat([ends, sums]).tolist()]


def _digest(values: Tensor) -> int:
    """Returns a hash that any change of one value changes, and others with a probability of 1 - 2**-32."""
    bits = _bits(values)
    total, weights = len(bits), _weights(str(bits.device))
    for part in _parts(bits):
        for weighted in (_mixed(part) * weights[: part.shape[1]]).sum(1).tolist():
            total = (total * _MULTIPLIER + weighted) % _MODULUS
    return total


def _bits(values: Tensor) -> Tensor:
    return values.view({1: torch.uint8, 2: torch.int16}.get(values.element_size(), torch.int32))


def _mixed(bits: Tensor) -> Tensor:
    # Times an odd number, the highest bit is the same but for its sign: flips of signs would cancel.
    return bits ^ (bits >> 15) if bits.dtype is torch.int32 else bits


def _parts(values: Tensor) -> Iterator[Tensor]:
    """Yields the values as rows of 2**18, then the rest as one: a row at a time on the CPU, many elsewhere."""
    size, count = _ROWS * _COLUMNS, 1 if values.device.type == "cpu" else _PARTS
    whole = len(values) // size * size
    for part in torch.split(values[:whole], size * count):
        if len(part):
            yield part.view(-1, size)
    if whole < len(values):
        yield values[whole:].view(1, -1)


def _stream(name: str, size: int) -> bytearray:
    """Returns random bytes, the same in every process; a longer stream begins with the shorter one."""
    return bytearray(hashlib.shake_128(name.encode()).digest(size))


@functools.lru_cache(maxsize=8)
def _weights(device: str) -> Tensor:
    """Returns odd factors for the values of a part."""
    numbers = torch.frombuffer(_stream("weights", 4 * _ROWS * _COLUMNS), dtype=torch.int32)
    return (numbers | 1).to(device)


def _random_signs(name: str, *shape: int) -> Tensor:
    bits = torch.frombuffer(_stream(name, math.prod(shape) // 8), dtype=torch.uint8)
    found = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return found.view(shape).double() * 2 - 1


class _RowSigns:
    """Signs of rows: matrices of `PROJECTIONS` by rows. More are made as they are asked for."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._known = torch.empty(PROJECTIONS, 0)

    def __call__(self, first: int, last: int) -> Tensor:
        if self._known.shape[1] < last:
            found = _random_signs("rows", 2 * last, PROJECTIONS).T.contiguous()
            self._known = found.to(self._device, self._dtype)
        return self._known[:, first:last]


@functools.lru_cache(maxsize=8)
def _signs(device: str, dtype: torch.dtype) -> tuple[_RowSigns, Tensor, Tensor]:
    """Returns the signs of rows, the matrix of those of columns, and those of a part's values."""
    columns = _random_signs("columns", PROJECTIONS, _COLUMNS).to(device, dtype)
    values = _random_signs("values", _ROWS * _COLUMNS).to(device, dtype)
    return _RowSigns(device, dtype), columns, values
