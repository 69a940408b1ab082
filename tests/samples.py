"""Samples: of torch's OpInfo database, from a fixed seed; and of cases, drawn by their names."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput


def is_drawn(name: str, n: int) -> bool:
    """Whether a case is among the one in ``n`` that run, the same ones at every commit."""
    return crc32(name.encode()) % n == 0


def drawn(infos: Iterable[OpInfo], n: int, *, whole: bool) -> list[OpInfo]:
    """Returns one in ``n`` of the infos, or all."""
    return [info for info in infos if whole or is_drawn(info.formatted_name, n)]


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


def spread(samples: list[Any], most: int) -> list[Any]:
    """Returns at most ``most`` of the samples, first and last among them, always the same ones.

    They are taken at uneven distances, so that none of the options that samples combine is always the
    same.
    """
    if len(samples) <= most:
        return samples
    drawn = random.Random(0).sample(range(1, len(samples) - 1), most - 2)
    return [samples[position] for position in sorted({0, *drawn, len(samples) - 1})]
