"""Samples of torch's OpInfo database, from a fixed seed."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput


def sample_inputs(
    info: OpInfo, dtype: torch.dtype = torch.float32, *, requires_grad: bool = False
) -> Iterable[SampleInput]:
    """Returns what ``info.sample_inputs`` on the CPU does.

    That seeds each sample by the test's name, for which it looks through the sources of the whole stack:
    half a second, most of what many a test takes.
    """
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # which OpInfo draws from
    found: Iterable[SampleInput] = info.sample_inputs_func(info, "cpu", dtype, requires_grad)
    return found
