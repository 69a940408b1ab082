"""The types of devices that something is known about beforehand: one row each.

Any other type that torch has works too, without a row. What a device computes natively is asked and
measured in ``compute.legalize.capability``; facts about single ops stand in ``ops.ini`` and ``kernels.ini``.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class DeviceType(NamedTuple):
    """What is known about a type of devices."""

    name: str  # As torch calls it
    is_suggested: bool  # Error texts name it among the types that there are
    has_autocast: bool  # Torch.autocast may be on for it
    # ``kernels.ini`` says which ops lack kernels there. On others, ops that lack a kernel
    # anywhere are tried.
    has_kernel_table: bool
    # Its place in the order in which autocast bits of absent devices are taken for marks, see
    # ``torch_state.marks``; None for a type whose bit is not taken
    spare: int | None
    spellings: tuple[str, ...] = ()  # What people call it otherwise, for hints


DEVICE_TYPES: Final = (
    DeviceType("cpu", True, True, True, None),
    DeviceType("cuda", True, True, True, 6, ("gpu", "nvidia", "rocm", "amd")),
    DeviceType("hpu", True, True, False, 3, ("gaudi", "habana")),
    DeviceType("xpu", True, True, False, 4, ("intel",)),
    DeviceType(
        "mps", True, True, False, 0, ("metal", "apple")
    ),  # first: autocast itself never reads its bit
    DeviceType("mtia", True, False, False, 1),
    DeviceType("xla", True, False, False, 2, ("tpu",)),
    DeviceType("ipu", False, False, False, None),  # its bit marks training
    DeviceType("privateuseone", False, True, False, 5),
)
