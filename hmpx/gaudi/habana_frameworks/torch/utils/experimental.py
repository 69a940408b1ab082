"""``habana_frameworks.torch.utils.experimental``: addresses, and the device type."""

from __future__ import annotations

import enum
from typing import Any

import torch

from ...absent import unknown, without_effect


class synDeviceType(enum.Enum):  # noqa: N801  # Habana's name
    """The generations of Gaudi; the device that stands in is none of them."""

    synDeviceTypeInvalid = 0  # noqa: N815  # Habana's names
    synDeviceGaudi = 1  # noqa: N815
    synDeviceGaudi2 = 4  # noqa: N815
    synDeviceGaudi3 = 5  # noqa: N815


def _get_device_type() -> synDeviceType:
    """Returns the value for "invalid": there is no Gaudi."""
    return synDeviceType.synDeviceTypeInvalid


def _data_ptr(t: torch.Tensor) -> int:
    """Returns the address of a tensor's data."""
    return t.data_ptr()


def _compute_stream() -> int:
    """Returns 0: the device's streams are those of `torch.hpu`."""
    return 0


def __getattr__(name: str) -> Any:
    if name.startswith(("_record_", "_set_", "enable_", "set_")):
        return without_effect(__name__, name)
    raise unknown(__name__, name)
