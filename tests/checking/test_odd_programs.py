"""Programs with tensors and calls whose values can't be read: contracts and lint leave them running."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor

import hmpx
from tests.upstream_bugs import drawn

BF16 = torch.bfloat16


def low_softmax(x: torch.Tensor) -> torch.Tensor:
    return (x.to(BF16) * 3).float().softmax(-1)


def sparse() -> None:
    x = drawn(8, 8).relu().to_sparse()
    torch.sparse.mm(x, drawn(8, 8))
    (x * 2).to(BF16)
    drawn(8, 8).relu().to_sparse_csr() @ drawn(8, 8)


def nested() -> None:
    for layout in (torch.strided, torch.jagged):
        (torch.nested.nested_tensor([drawn(2, 3), drawn(4, 3)], layout=layout) * 2).to(BF16)


def without_values() -> None:
    low_softmax(torch.ones(8, 8, device="meta"))
    torch.arange(1000, device="meta").to(BF16)
    with FakeTensorMode():
        low_softmax(torch.ones(8, 8))
        torch.arange(1000).to(BF16)


def complex_numbers() -> None:
    torch.fft.fft(drawn(64)).abs().log()
    torch.stft(drawn(400), 64, return_complex=True).abs().log()


def negative_views() -> None:
    torch.view_as_complex(drawn(64, 2)).conj().imag.exp()


def freed_storage() -> None:
    model = nn.Linear(8, 8)
    model(drawn(2, 8))
    model.weight.untyped_storage().resize_(0)


def transforms() -> None:
    torch.func.vmap(low_softmax)(drawn(4, 8))
    torch.func.vmap(lambda x: torch.arange(300.0).to(BF16)[:8] * x)(drawn(4, 8))
    torch.func.jvp(low_softmax, (drawn(8),), (drawn(8),))


def graphs() -> None:
    torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), drawn(2, 4))(drawn(2, 4))
    torch.export.export(nn.Linear(4, 4), (drawn(2, 4),))


def subclasses() -> None:
    (masked_tensor(drawn(4, 4), drawn(4, 4) > 0) * 2).sum()
    nn.LazyLinear(4)(drawn(2, 4))


def odd_values() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e38] * 8).to(BF16)
    low_softmax(x + x)
    low_softmax(torch.empty(0, 8))
    drawn(8, 8).to(torch.float8_e4m3fn).to(BF16)


CONTRACT = {
    "expect": [
        {"op": "softmax", "compute": "float32"},
        {"module": "*", "output": "float32", "contents": "float32", "gradient": "float32"},
        {"contents": "float32", "gradient": "float32"},
        {"tensor": "*", "contents": "float32", "gradient": "float32"},
    ]
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("observer", [hmpx.lint, lambda: hmpx.expect(CONTRACT, mode="collect")])
@pytest.mark.parametrize(
    "program",
    [
        sparse,
        nested,
        without_values,
        complex_numbers,
        negative_views,
        freed_storage,
        transforms,
        graphs,
        subclasses,
        odd_values,
    ],
)
def test_it_runs(program: Callable[[], None], observer: Callable[[], hmpx.Lint]) -> None:
    program()
    with observer():
        program()
    assert not hmpx.is_converted()
