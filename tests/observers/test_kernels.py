"""The dtypes that kernels compute in: those that only make or move values don't count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from hmpx.observers import Kernels

X = torch.arange(1.0, 13.0).reshape(3, 4)
INDEX = torch.tensor([[2, 1, 0, 1]])

MOVING: dict[str, Callable[[torch.Tensor], object]] = {
    "views": lambda x: x.T[1:].reshape(-1).unsqueeze(0),
    "copies": lambda x: torch.ops.aten.select_copy(x.clone().contiguous().to(torch.bfloat16), 0, 1),
    "makes": lambda x: (torch.zeros_like(x), torch.full_like(x, 0.1), x.new_empty(3), x.item),
    "writes": lambda x: (torch.empty(3, 4).copy_(x), x.clone().zero_(), x.clone().fill_(3)),
    "joins": lambda x: (torch.cat([x, x]), torch.stack([x, x]), x.repeat(2, 1)),
    "selects": lambda x: (x[INDEX[0, :3]], x.gather(0, INDEX), x.index_select(0, INDEX[0])),
    "turns": lambda x: (x.flip(0), x.roll(1), F.pad(x, (1, 1))),
    "reads": lambda x: x[0, 0].item(),
}


@pytest.mark.parametrize("name", MOVING)
def test_moves_don_t_count(name: str) -> None:
    with Kernels() as kernels:
        MOVING[name](X)
    assert kernels.dtypes == ()


def test_computations_count_in_the_order_of_their_dtypes() -> None:
    with Kernels() as kernels, torch.autocast("cpu"):
        (X @ X.T).float().exp()
    assert kernels.dtypes == (torch.bfloat16, torch.float32)


def test_elementwise_kernels_compute_in_the_widest_dtype_of_their_inputs() -> None:
    for run in (lambda x: x * x.half(), lambda x: x.half() * x, lambda x: x.half().add_(x)):
        with Kernels() as kernels:
            run(X)
        assert kernels.dtypes == (torch.float32,)
    with Kernels() as kernels:
        X.half() * torch.tensor(2.0)
    assert kernels.dtypes == (torch.float16,)
