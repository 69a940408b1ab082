"""bfloat16 for numpy, which has none: kept as the uint16 of its bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import OptionError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def to_uint16(values: Tensor | npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.uint16]:
    """Returns the bfloat16 encodings of ``values``: sign, 8 exponent bits, 7 mantissa bits.

    Rounds as torch's own casts do: to nearest, ties to even, beyond the greatest value to infinity;
    a NaN stays one.

    Args:
        values: Floating, of any shape and device.

    Returns:
        An array of its own, with the shape of ``values``.

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
    """Returns the bfloat16 tensor whose encoding by `to_uint16` this is.

    Args:
        encoded: uint16, of any shape.

    Returns:
        A tensor of its own on the CPU, with the shape of ``encoded``.

    Raises:
        OptionError: ``encoded`` is not of uint16.
    """
    import numpy as np

    array = np.asarray(encoded)
    if array.dtype.kind != "u" or array.dtype.itemsize != 2:
        raise OptionError(f"encoded bfloat16 must be uint16, not {array.dtype}")
    native = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(native).view(torch.bfloat16)
