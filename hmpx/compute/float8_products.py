"""Matrix products of float8 values by the kernels of devices that have them, forward and backward.

The factors have the emulation's codes and scales. Results differ from the emulation's only by the order of fp32 sums
and by one rounding of each factor to fp32, which its values are, and hardware's products of codes are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from .. import ops
from ..errors import OptionError
from ..number_formats import Format, Scaled, get
from ..tensors import CAST
from ..torch_internals import has_kernel_for, has_tangents, transforms
from ..torch_state import without_casts
from .emulated_products import WINDOW, EmulatedProduct
from .watching import COMPUTED

if TYPE_CHECKING:
    from .delayed import Scaler
    from .emulation import Formats

#: The elements that kernels multiply.
_ELEMENTS: Final = {get(dtype): dtype for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}


#: Magnitudes above round beyond float8_e4m3fn's largest number, 448, to the code of NaN.
_OVERFLOWING: Final = 464.0


@dataclass(frozen=True)
class Float8Kernels:
    """What a device's kernels of float8 products take."""

    is_hardware: bool  # rather than torch's reference
    capability: tuple[int, int] = (0, 0)  # the least
    multiple: int = 1  # of the columns of both matrices; others are padded with zeros
    refused: frozenset[tuple[torch.dtype, torch.dtype]] = frozenset()  # dtypes of both matrices
    row_outputs: frozenset[torch.dtype] = frozenset(CAST)  # with scales by row


#: Device type -> its kernels: torch's checks in aten/src/ATen/native/cuda/ScaledBlas.cpp.
KERNELS: Final = {
    "cpu": Float8Kernels(is_hardware=False),
    "cuda": Float8Kernels(
        is_hardware=True,
        capability=(8, 9),
        multiple=16,
        refused=frozenset({(torch.float8_e5m2, torch.float8_e5m2)}),
        row_outputs=frozenset({torch.bfloat16}),
    ),
}


def has_float8(device_type: str, hardware: str = "auto") -> bool:
    """Whether kernels may multiply float8 values on devices of a type: in hardware, unless they are required."""
    found = KERNELS.get(device_type)
    if found is None or hardware == "never":
        return False
    return found.is_hardware or hardware == "require"


def kernels_on(device: torch.device) -> Float8Kernels | None:
    """Returns a device's kernels, or None."""
    found = KERNELS.get(device.type)
    if device.type == "cpu":  # since torch 2.12
        return found if has_kernel_for("aten::_scaled_mm_v2", "CPU") else None
    if device.type != "cuda" or found is None:
        return found
    if torch.version.hip or not torch.cuda.is_available():  # fake tensors need no device
        return None
    return found if torch.cuda.get_device_capability(device) >= found.capability else None


def element_of(format: Format) -> torch.dtype | None:
    """Returns the dtype of a format's codes if kernels take them with its scales, or None."""
    if not isinstance(format, Scaled):
        return _ELEMENTS.get(format)
    is_shared = format.granularity in ("tensor", "row")
    return _ELEMENTS.get(format.element) if is_shared and format.scale_format != "e4m3" else None


def why_not(
    op: str,
    formats: Formats,
    output_dtype: torch.dtype | str | None,
    accumulate: torch.dtype | None,
) -> str:
    """Returns why no kernel computes an op in these formats, with the remedy; ``""`` if some do."""
    found = ops.product(op)
    if found is None or found.is_convolution:
        return "only products of two matrices have kernels"
    if not isinstance(output_dtype, torch.dtype):
        return "its results are rounded to the format: add output=bfloat16 to its line"
    if accumulate not in (None, torch.float32):
        return f"kernels sum in float32, not in {accumulate}"
    if formats.rounding != "nearest" or formats.overflow not in (None, "saturate"):
        return "kernels take values rounded to nearest, saturated or by the format's standard"
    given = [formats.weights, formats.activations, formats.gradients]
    for format in given:
        if format is not None and element_of(format) is None:
            return (
                "kernels take float8_e4m3fn and float8_e5m2, alone or with scales by tensor or row, "
                f"not {format.name}"
            )
    return ""


@dataclass(frozen=True, eq=False)
class Float8Product(EmulatedProduct):
    """A product that kernels compute, and the products of its gradients, if they are of float8 values, too."""

    op: str
    formats: tuple[Format, ...]  # of factors
    of_gradient: Format | None
    scales: tuple[Tensor | None, ...]  # of factors, by earlier steps
    scaler: Scaler | None  # of the gradient
    output_dtype: torch.dtype
    saturates: bool
    is_required: bool  # rather than emulated where kernels can't
    is_added_to: bool  # so that it is in fp32

    compute = EmulatedProduct.applied  # a kernel has no gradient of its own

    def multiplied(self, factors: Sequence[Tensor]) -> Tensor:
        """Returns the product, by codes where a kernel takes them."""
        dtype = torch.float32 if self.is_added_to else self.output_dtype
        letters, result = self.contraction.factors, self.contraction.result
        matrices = _Matrices(letters, result, tuple(factors), self.formats, self.scales, dtype)
        found = self._by_kernel(matrices, self.op)
        return super().multiplied(factors) if found is None else found

    def gradient_of(self, target: int, factors: Sequence[Tensor], gradient: Tensor) -> Tensor:
        """Returns the unrounded gradient of a factor, by codes where a kernel takes them."""
        gradient, other = CAST[torch.float32](gradient), 1 - target
        if self.of_gradient is None:  # straight through the forward's rounding
            return self.contraction.gradient(target, self.rounded(factors), gradient)
        found = scale = None
        may_lower = not torch.is_grad_enabled()  # else it may have a gradient itself
        if may_lower and self.scaler is not None:
            from .delayed import has_values  # not in a graph

            may_lower = has_values(gradient)
            scale = self.scaler(gradient) if may_lower else None
        if may_lower:
            letters, result = self.contraction.factors, self.contraction.result
            found = self._by_kernel(
                _Matrices(
                    (result, letters[other]),
                    letters[target],
                    (gradient, factors[other]),
                    (self.of_gradient, self.formats[other]),
                    (scale, self.scales[other]),
                    torch.float32,
                ),
                f"a gradient of {self.op}, the product",
            )
        return super().gradient_of(target, factors, gradient) if found is None else found

    def _by_kernel(self, matrices: _Matrices, what: str) -> Tensor | None:
        """Returns the product by a kernel; None if it has to be emulated, and may be. Errors call it ``what``."""
        device = matrices.factors[0].device
        kernels = kernels_on(device)
        if not self.is_required and (kernels is None or not kernels.is_hardware or matrices.batch):
            return None
        if not matrices.fit:
            return None  # torch's own error says so
        why = f"{device} has no float8 kernels" if kernels is None else matrices.refused_by(kernels)
        if not why and kernels is not None:
            return matrices.multiplied(kernels, saturates=self.saturates)
        if self.is_required:
            shapes = " and ".join(str(tuple(each.shape)) for each in matrices.factors)
            raise OptionError(
                f'hardware="require": {what} of {shapes} would be emulated: {why}; take the op out '
                'of the list, or convert with hardware="auto"'
            )
        return None


@dataclass(frozen=True, eq=False)
class _Matrices:
    """A product of two tensors, as `torch.einsum` would compute it, as products of matrices."""

    letters: tuple[str, ...]
    result: str
    factors: tuple[Tensor, ...]
    formats: tuple[Format, ...]
    scales: tuple[Tensor | None, ...]
    dtype: torch.dtype  # of the result

    @property
    def batch(self) -> str:
        """The letters of a batch, whose matrices are multiplied one by one."""
        return "".join([each for each in self.result if all(each in of for of in self.letters)])

    @property
    def fit(self) -> bool:
        """Whether the factors have the same sizes where they share letters."""
        sizes: dict[str, int] = {}
        for letters, factor in zip(self.letters, self.factors, strict=True):
            if any(
                sizes.setdefault(n, size) != size
                for n, size in zip(letters, factor.shape, strict=True)
            ):
                return False
        return True

    def refused_by(self, kernels: Float8Kernels) -> str:
        """Returns why kernels can't compute it, or ``""``."""
        (first, second), result = self.letters, set(self.result)
        shared, free = set(first) & set(second), set(first) ^ set(second)
        dtypes = tuple([element_of(format) for format in self.formats])
        is_by_row = any(map(_is_by_row, self.formats))
        if transforms() is not None or has_tangents():
            return "kernels have neither tangents nor rules for transforms of torch.func"
        if WINDOW in first + second or free != result - shared:
            return "kernels multiply two matrices, without windows or dimensions to expand"
        if dtypes in kernels.refused:
            return f"no kernel multiplies two factors in {dtypes[0]}"
        if is_by_row and self.dtype not in kernels.row_outputs:
            named = ", ".join(map(str, kernels.row_outputs))
            return f"with scales by row, kernels return {named}, without adding to it"
        if is_by_row and len(shared - result) > 1:
            return "it sums over several dimensions, and scales by row are of one"
        return ""

    def multiplied(self, kernels: Float8Kernels, *, saturates: bool) -> Tensor:
        """Returns the product by a kernel, which can compute it."""
        summed = [letter for letter in self.letters[0] if letter not in self.result]
        codes, scales, order, device = [], [], self.batch, self.factors[0].device
        shape: list[int] = []
        with without_casts():
            given = zip(self.factors, self.letters, self.formats, self.scales, strict=True)
            for x, letters, format, known in given:
                free = [letter for letter in letters if letter not in (*self.batch, *summed)]
                moved = x.permute([*map(letters.index, (*self.batch, *free, *summed))])
                sizes, rest = moved.shape[: len(self.batch)], moved.shape[len(self.batch) :]
                rows, columns = rest[: len(free)], rest[len(free) :]
                shape += rows
                order += "".join(free)
                matrices = moved.reshape(*map(math.prod, (sizes, rows, columns)))
                code, scale = _coded(matrices, format, known, saturates=saturates)
                codes.append(code.unbind())
                scales.append(scale.expand(len(code), -1, -1).unbind())
            found = [
                _matmul(kernels, [*pair], [*by], self.dtype)
                for pair, by in zip(
                    zip(*codes, strict=True), zip(*scales, strict=True), strict=True
                )
            ]
            if len(found) != 1:
                found = [
                    torch.stack(found) if found else torch.zeros(0, dtype=self.dtype, device=device)
                ]
            product = found[0].reshape([*sizes, *shape])
            return product.permute([order.index(letter) for letter in self.result]).contiguous()


def _is_by_row(format: Format) -> bool:
    return isinstance(format, Scaled) and format.granularity == "row"


def _coded(
    matrix: Tensor, format: Format, scale: Tensor | None, *, saturates: bool
) -> tuple[Tensor, Tensor]:
    """Returns the codes of matrices, [batch, rows, summed], and scales, [1, 1, 1] or [batch, rows, 1] in float32.

    ``scale`` is known from earlier steps, or None.
    """
    dtype = element_of(format)
    assert dtype is not None
    if isinstance(format, Scaled):
        along = replace(format, axis=-1) if _is_by_row(format) else format
        scale = along.scale(along.amax(matrix)) if scale is None else scale
        scale = scale if scale.dim() else scale.reshape(1, 1, 1)
        matrix = matrix / scale
    else:
        scale = torch.ones((1, 1, 1), dtype=torch.float32, device=matrix.device)
    if saturates or isinstance(format, Scaled):
        largest = torch.finfo(dtype).max
        matrix = matrix.clamp(-largest, largest)
    elif dtype is torch.float8_e4m3fn:  # torch's casts saturate
        matrix = matrix.masked_fill(matrix.abs() > _OVERFLOWING, math.nan)
    return matrix.to(dtype), scale


def _matmul(
    kernels: Float8Kernels, codes: list[Tensor], scales: list[Tensor], dtype: torch.dtype
) -> Tensor:
    """Returns a matrix [m, k] times another [n, k] transposed."""
    (m, k), n, multiple = codes[0].shape, codes[1].shape[0], kernels.multiple
    COMPUTED.is_on_hardware = True
    if not (m and k and n):  # not all kernels take these
        return torch.zeros((m, n), dtype=dtype, device=codes[0].device)
    if k % multiple or n % multiple:
        # As bytes: not all devices pad float8.
        codes = [
            F.pad(each.view(torch.uint8), (0, -k % multiple, 0, more)).view(each.dtype)
            for each, more in zip(codes, (0, -n % multiple), strict=True)
        ]
    kind = ScalingType.TensorWise
    if any(scale.numel() > 1 for scale in scales):
        kind = ScalingType.RowWise
        rows = (m, codes[1].shape[0])
        scales = [
            F.pad(scale.expand(size, 1), (0, 0, 0, count - size), value=1.0)
            for scale, size, count in zip(scales, (m, n), rows, strict=True)
        ]
        scales[1] = scales[1].t()
    else:
        scales = [scale.reshape(()) for scale in scales]
    product = F.scaled_mm(
        codes[0].contiguous(),
        codes[1].contiguous().t(),
        scales[0],
        kind,
        scales[1],
        kind,
        output_dtype=dtype,
        use_fast_accum=False,
    )
    return product.narrow(1, 0, n)
