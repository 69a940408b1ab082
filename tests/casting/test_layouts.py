"""Casts in front of ops whose gradients are sparse, and of sparse tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx
from hmpx import Policy

BF16, FP32 = torch.bfloat16, torch.float32

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR):UserWarning")

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
}

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "@": lambda x, y: x @ y,
    "mm": torch.mm,
    "mv": lambda x, y: torch.mv(x, y[:, 0]),
    "addmm": lambda x, y: torch.addmm(torch.ones(8, 4), x, y),
    "torch.sparse.mm": torch.sparse.mm,
    "dense @ sparse": lambda x, y: y.t() @ x,
}


def derived(product: Callable[[Tensor, Tensor], Tensor], layout: Callable[[Tensor], Tensor]) -> Any:
    """Returns a product of a sparse result of a linear layer, and the gradient of the layer's weight."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8))
    output = product(layout(F.linear(torch.eye(8), weight)), torch.randn(8, 4))
    output.float().sum().backward()
    return output.float(), weight.grad


@pytest.mark.sampled(6)
@pytest.mark.parametrize("options", [{}, {"lists": "autocast-cpu"}, {"legalize": "always"}])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_of_sparse_results_run_where_fp32_runs(
    product: str, layout: str, options: dict[str, Any]
) -> None:
    try:
        expected = derived(PRODUCTS[product], LAYOUTS[layout])
    except RuntimeError as error:
        assert str(error)  # torch has no such product
        return
    with hmpx.convert(device_types={"cpu"}, **options):
        actual = derived(PRODUCTS[product], LAYOUTS[layout])
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=5e-2)


def embedding(weight: Tensor) -> Tensor:
    return F.embedding(torch.tensor([1, 2, 1]), weight, sparse=True)


def bag(weight: Tensor) -> Tensor:
    return F.embedding_bag(torch.tensor([[1, 2, 1]]), weight, mode="sum", sparse=True)


@pytest.mark.parametrize("look_up", [embedding, bag])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("listed", ["low", "fp32"])
def test_gradients_of_cast_tables_stay_sparse(
    look_up: Callable[[Tensor], Tensor], dtype: torch.dtype, listed: str
) -> None:
    policy = Policy.from_ops(**{listed: ["embedding", "embedding_bag"]})
    table = torch.ones(4, 2, dtype=dtype, requires_grad=True)
    with hmpx.convert(policy=policy, device_types={"cpu"}):
        output = look_up(table)
        output.float().sum().backward()
    assert output.dtype is (BF16 if listed == "low" else FP32)
    assert table.grad is not None
    assert table.grad.layout is torch.sparse_coo and table.grad.dtype is dtype
    assert table.grad.to_dense().tolist() == [[0, 0], [2, 2], [1, 1], [0, 0]]


def test_a_cast_table_has_dense_gradients_where_they_are_asked_for() -> None:
    table = torch.ones(4, 2, dtype=BF16, requires_grad=True)
    with hmpx.convert(policy=Policy.from_ops(fp32=["embedding"]), device_types={"cpu"}):
        F.embedding(torch.tensor([1]), table).sum().backward()
    assert table.grad is not None and table.grad.layout is torch.strided
