"""The device types with known facts: one row each.

Any other type of torch's works without a row. ``compute.capabilities`` measures what a device computes
natively; facts about single ops are in ``ops.ini`` and ``kernels.ini``.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class DeviceType(NamedTuple):
    """Facts about one device type."""

    name: str  # As torch calls it
    is_suggested: bool  # Error texts list it among the known types
    has_autocast: bool  # Torch.autocast may be on for it
    # ``kernels.ini`` says which ops lack kernels there. On other types, ops that lack a kernel
    # on some type are tried.
    has_kernel_table: bool
    # Its place in the order in which ``torch_state.switch`` uses autocast bits of absent devices as
    # marks; None if its bit is not used
    spare: int | None
    spellings: tuple[str, ...] = ()  # Its other names, for hints


DEVICE_TYPES: Final = (
    DeviceType("cpu", True, True, True, None),
    DeviceType("cuda", True, True, True, 6, ("gpu", "nvidia", "rocm", "amd")),
    DeviceType("hpu", True, True, False, 3, ("gaudi", "habana")),
    DeviceType("xpu", True, True, False, 4, ("intel",)),
    # The first: autocast itself never reads its bit
    DeviceType("mps", True, True, False, 0, ("metal", "apple")),
    DeviceType("mtia", True, False, False, 1),
    DeviceType("xla", True, False, False, 2, ("tpu",)),
    DeviceType("ipu", False, False, False, None),  # its bit marks training
    DeviceType("privateuseone", False, True, False, 5),
)
