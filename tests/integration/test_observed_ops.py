"""Samples of torch's OpInfo database, recorded and watched: results and errors are as without."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import hmpx
from hmpx.observers import ATTACHED
from tests.samples import sample_inputs
from tests.values import tensors

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.opinfo]

#: Of each op, in each dtype.
SAMPLES = 3

#: OpInfos whose results hold memory that was never written, or that differ from run to run.
LEFT_OUT = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "linalg.lstsq",
    "linalg.lstsq.grad_oriented",
}

#: Conversions: to observe another one takes as long as many ops.
CHUNKS = 10

INFOS = [info for info in op_db if info.full_name not in LEFT_OUT]


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """A block in which no observer is told of calls."""
    for attached in ATTACHED.value:
        attached.pause()
    try:
        yield
    finally:
        for attached in ATTACHED.value:
            attached.resume()


def outcomes(info: OpInfo, dtype: torch.dtype) -> list[list[Tensor] | str]:
    """Returns what each sample gives, and its gradients; or the class of the error that it raises."""
    learns = dtype in (torch.float32, torch.complex64) and info.supports_autograd
    samples = sample_inputs(info, dtype, requires_grad=learns)
    return [outcome(info, sample) for sample in list(itertools.islice(samples, SAMPLES))]


def outcome(info: OpInfo, sample: SampleInput) -> list[Tensor] | str:
    """Returns what a sample gives, and its gradients; or the class of the error that it raises."""
    torch.default_generator.manual_seed(0)
    try:
        result = info.op(sample.input, *sample.args, **sample.kwargs)
        found = [each for each in tensors(result) if isinstance(each, Tensor)]
        learning = [each for each in found if each.requires_grad]
        if learning:
            given = [
                each
                for each in tensors([sample.input, sample.args, sample.kwargs])
                if each.requires_grad and each.is_leaf
            ]
            sums = [torch.ones_like(each) for each in learning]
            gradients = torch.autograd.grad(learning, given, sums, allow_unused=True)
            found += [each for each in gradients if each is not None]
    except Exception as error:  # torch's own, of any class
        return type(error).__name__
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_observed_calls_do_the_same(chunk: int) -> None:
    """On real, complex and whole numbers, with gradients."""
    faults = []
    with (
        hmpx.convert(device_types={"cpu"}, legalize="never"),
        hmpx.record() as rec,
        hmpx.watch("collect"),
    ):
        for info in INFOS[chunk::CHUNKS]:
            for dtype in (torch.float32, torch.complex64, torch.int64):
                if dtype not in info.dtypes:
                    continue
                with unobserved():
                    expected = outcomes(info, dtype)
                for number, actual in enumerate(outcomes(info, dtype)):
                    if not is_same(actual, expected[number]):
                        faults.append(f"{info.full_name}, sample {number} of {dtype}: {actual}")
    assert rec.report().totals.calls > SAMPLES
    assert not faults


def is_same(actual: Any, expected: Any) -> bool:
    """Whether two outcomes are equal, NaN to NaN."""
    if not isinstance(expected, list) or not isinstance(actual, list):
        return bool(actual == expected)
    return len(actual) == len(expected) and all(map(is_same_tensor, actual, expected))


def is_same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN; of sparse ones, the kind is."""
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    if a.layout is not torch.strided or a.is_nested or a.is_quantized:
        return True
    if a.dtype is torch.complex32:  # which nothing compares
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    a, b = a.detach(), b.detach()
    return bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124  # NaN
