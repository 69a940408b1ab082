"""Sums of thousands of equal terms on the CPU, whose kernels for low precision add up in that and stop growing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hmpx
from tests.ops.test_selecting import Largest

BF16, FP16 = torch.bfloat16, torch.float16

#: More terms than either type counts one by one.
COUNT = 5000
HUB = torch.zeros(COUNT, dtype=torch.long)


def of_equal_indices(x: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(HUB[None], x, (1,))


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "index_add": lambda x: x.new_zeros(1).index_add(0, HUB, x),
    "index_add_": lambda x: x.new_zeros(1).index_add_(0, HUB, x),
    "index_put": lambda x: x.new_zeros(1).index_put((HUB,), x, accumulate=True),
    "index_put_": lambda x: x.new_zeros(1).index_put_((HUB,), x, True),
    "put": lambda x: x.new_zeros(1).put(HUB, x, accumulate=True),
    "histc": lambda x: torch.histc(x, 1, 0, 2),
    "segment_reduce": lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([COUNT])),
    "addbmm": lambda x: x.new_zeros(1, 1).addbmm(x[:, None, None], x.new_ones(COUNT, 1, 1))[0],
    "coalesce": lambda x: of_equal_indices(x).coalesce().values(),
    "to_dense": lambda x: of_equal_indices(x).to_dense(),
}
GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "index_select": lambda x: x.index_select(0, HUB),
    "take": lambda x: x.take(HUB),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([COUNT])),
    "embedding": lambda x: F.embedding(HUB, x[:, None]),
    "embedding_bag": lambda x: F.embedding_bag(HUB[:, None], x[:, None]),
    "weighted embedding_bag": lambda x: F.embedding_bag(
        HUB[:, None], x[:, None], mode="sum", per_sample_weights=x.new_ones(COUNT, 1)
    ),
    "embedding_bag of maxima": lambda x: F.embedding_bag(HUB[:, None], x[:, None], mode="max"),
    "pad": lambda x: F.pad(x[None], (0, COUNT - 1), mode="replicate"),
    "grid_sample": lambda x: F.grid_sample(
        x[None, None, None], x.new_zeros(1, 1, COUNT, 2), align_corners=True
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("options", [{}, {"lists": "autocast-cuda"}, {"policy": {"lists": "none"}}])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_sums_go_on_growing(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Under any list; torch's kernels stop at 256 in bfloat16, at 2,048 in float16."""
    if "policy" not in options:
        options = {**options, "low_precision_type": dtype}
    with hmpx.convert(**options):
        found = {name: call(torch.ones(COUNT, dtype=dtype)).item() for name, call in SUMS.items()}
        for name, call in GRADIENTS.items():
            x = torch.ones(1, dtype=dtype, requires_grad=True)
            result = call(x)
            assert result.dtype is dtype, name
            (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result))
            assert gradient.dtype is dtype
            found[f"gradient of {name}"] = gradient.item()
    assert found == dict.fromkeys(found, float(torch.tensor(COUNT, dtype=dtype)))


#: A large table, of which the calls read few rows. The rows, twice each, and negative where torch takes that.
ROWS = torch.tensor([3, 1, 3, 1 << 15])
LARGE: dict[str, Callable[[Tensor], Tensor]] = {
    "index_select": lambda x: x.index_select(0, ROWS),
    "index_select by name": lambda x: torch.index_select(input=x, dim=-2, index=ROWS.int()),
    "take": lambda x: x.take(torch.tensor([[5, 5], [-1, 7]])),
    "embedding": lambda x: F.embedding(ROWS[None], x),
    "padded embedding": lambda x: F.embedding(ROWS, x, padding_idx=3),
    "scaled embedding": lambda x: F.embedding(ROWS, x, padding_idx=4, scale_grad_by_freq=True),
    "embedding_bag": lambda x: F.embedding_bag(ROWS.view(2, 2), x),
    "padded embedding_bag": lambda x: F.embedding_bag(ROWS, x, ROWS[:1] - 3, padding_idx=3),
    "weighted embedding_bag": lambda x: F.embedding_bag(
        ROWS.view(2, 2), x, mode="sum", per_sample_weights=x.detach()[:2]
    ),
    "embedding_bag of maxima": lambda x: F.embedding_bag(ROWS.view(2, 2), x, mode="max"),
}


def derived(call: Callable[[Tensor], Tensor], table: Tensor) -> tuple[Tensor, Tensor]:
    table = table.clone().requires_grad_()
    result = call(table)
    seed = torch.linspace(0.1, 0.9, result.numel()).view_as(result).to(BF16).to(result.dtype)
    (gradient,) = torch.autograd.grad(result, table, seed)
    return result, gradient


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("size", [64, 1 << 16])
def test_tables_keep_torchs_values_and_get_fp32_gradients(name: str, size: int) -> None:
    """A large table is not upcast: nothing larger than it is made in the forward."""
    torch.manual_seed(0)
    call = LARGE[name] if size > 64 else lambda x: LARGE[name](F.pad(x, (0, 0, 0, 1 << 15)))
    table = torch.randn(size, 2).to(BF16)
    values = call(table)
    expected = derived(call, table.float())[1].to(BF16)
    with hmpx.convert(policy={"lists": "none"}):
        result, gradient = derived(call, table)
        with Largest() as largest:
            call(table.requires_grad_())
    assert torch.equal(result, values)
    assert torch.equal(gradient, expected)
    if size > 64:
        assert largest.bytes < table.nbytes


def test_what_adds_nothing_up_is_left_to_torch() -> None:
    """Views stay views, an assignment by index does not upcast its target, and gradients may be sparse."""
    x = torch.ones(4, 4, dtype=BF16, requires_grad=True)
    table = torch.ones(1 << 16, 2, dtype=BF16, requires_grad=True)
    dense = torch.ones(2, dtype=BF16)
    sparse = dense.to_sparse()
    with hmpx.convert():
        assert x[0]._base is x
        target = torch.zeros(1 << 16, 2, dtype=BF16)
        with Largest() as largest:
            target.index_put_((HUB[:3],), target.new_ones(3, 2))
            target[HUB[:3]] = 1
            result = F.embedding(ROWS, table, sparse=True)
        result.sum().backward()
        assert dense.to_dense() is dense
        assert sparse.coalesce() is sparse
    assert largest.bytes < target.nbytes
    assert target[0].tolist() == [1, 1]
    assert table.grad is not None and table.grad.is_sparse


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["index_select", "embedding", "pad"])
def test_transforms_and_graphs_run(name: str) -> None:
    """With torch's values; where gradients are recorded they go on growing, too."""
    call = GRADIENTS[name]
    x = torch.ones(1, dtype=BF16)
    with hmpx.convert():
        mapped = torch.func.vmap(call)(x[None].repeat(2, 1))
        gradient = torch.func.grad(lambda x: call(x).float().sum())(x)
        _, tangent = torch.func.jvp(call, (x,), (x,))
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        traced = compiled(x.clone().requires_grad_())
    assert mapped.dtype is tangent.dtype is traced.dtype is BF16
    assert mapped.shape[1:] == tangent.shape == traced.shape
    assert gradient.item() == float(torch.tensor(COUNT, dtype=BF16))


@pytest.mark.filterwarnings("ignore:`torch.jit.[a-z_.]*` is deprecated:DeprecationWarning")
def test_exported_programs_do_not_upcast_tables() -> None:
    """They run without gradients, although the table has some where they are made."""

    class Selecting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.ones(4, 4, dtype=BF16))

        def forward(self, rows: Tensor) -> Tensor:
            return F.embedding(rows, self.table) + self.table[rows] + (self.table * 1)[rows]

    module, rows = Selecting(), ROWS % 4
    with hmpx.convert(policy={"lists": "none"}):
        exported = torch.export.export(module, (rows,))
        traced = torch.jit.trace(module, (rows,))
    assert "float32" not in str(exported.graph) and "aten::to" not in str(traced.graph)
    assert torch.equal(traced(rows), module(rows))


@pytest.mark.parametrize("padding", [None, 0, 2, -1, -1999])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "rows"])
def test_gradients_of_bags_leave_out_the_padding_alone(mode: str, padding: int | None) -> None:
    """Of a large low table, whether the padding is among the indices or not."""

    def gradient() -> Tensor:
        table = (torch.arange(2000 * 64).view(2000, 64) % 7 / 7).to(BF16).requires_grad_()
        index = torch.tensor([[1, 2, 3, 3]])
        if mode == "rows":
            result = F.embedding(index, table, padding_idx=padding)
        else:
            result = F.embedding_bag(index, table, mode=mode, padding_idx=padding)
        result.sum().backward()
        assert table.grad is not None
        return table.grad

    expected = gradient()
    with hmpx.convert(device_types={"cpu"}):
        torch.testing.assert_close(gradient(), expected, rtol=0, atol=0)


def test_tensors_are_not_sequences() -> None:
    """They would be to Python with a `__getitem__` of their class, and `torch.tensor` asks for their lengths."""
    scalars = [torch.tensor(1.0), torch.tensor(2.0)]
    expected = torch.tensor([1.0, 2.0])
    with hmpx.convert(policy={"lists": "none", "low": ["*"]}, device_types={"cpu"}):
        assert not ctypes.pythonapi.PySequence_Check(ctypes.py_object(scalars[0]))
        assert torch.equal(torch.tensor(scalars), expected)
        assert torch.equal(torch.as_tensor(scalars), expected)
        assert torch.equal(expected.new_tensor(scalars), expected)
        assert numpy.array(scalars).tolist() == [1, 2]
