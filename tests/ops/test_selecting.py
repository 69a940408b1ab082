"""Ops that select elements: what they return is cast, and not what they select from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from hmpx import Policy, ops
from tests.samples import sample_inputs
from tests.values import mapped, tensors

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SELECTING = [info for info in op_db if ops.resolve(info.name) in ops.facts("selects")]


def test_every_op_of_the_list_has_samples() -> None:
    assert {ops.resolve(info.name) for info in SELECTING} == set(ops.facts("selects"))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("info", SELECTING, ids=lambda info: info.name)
def test_a_selection_of_a_cast_table_is_the_cast_of_a_selection(
    info: Any, dtype: torch.dtype
) -> None:
    """Bit for bit, in every sample."""
    for sample in sample_inputs(info):
        if sample.kwargs.get("max_norm"):  # which writes to the table
            continue
        given = (sample.input, *sample.args), sample.kwargs
        low = mapped(given, lambda t: t.to(dtype) if t.dtype is FP32 else t)
        args, kwargs = mapped(low, lambda t: t.float() if t.dtype is dtype else t)
        selected = info.op(*low[0], **low[1])
        assert selected.dtype is dtype
        assert torch.equal(selected.float(), info.op(*args, **kwargs))


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t.untyped_storage().nbytes() for t in tensors(result)]
        given = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        if not any(t.untyped_storage().data_ptr() in given for t in tensors(result)):
            self.bytes = max([self.bytes, *made])
        return result


ROWS = torch.tensor([3, 1, 3])
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda table: F.embedding(ROWS, table),
    "index_select": lambda table: table.index_select(0, ROWS),
    "gather": lambda table: table.gather(0, ROWS[:, None]),
    "take": lambda table: table.take(ROWS),
    "take_along_dim": lambda table: torch.take_along_dim(table, ROWS[:, None], 0),
}


def derived(call: Callable[[Tensor], Tensor], table: Tensor) -> Iterator[Tensor]:
    """Yields a result, its gradient, and the gradient of that one."""
    table = table.clone().requires_grad_()
    result = call(table)
    yield result
    seed = torch.linspace(0.1, 0.9, result.numel()).view_as(result).to(result.dtype)
    seed.requires_grad_()
    (gradient,) = torch.autograd.grad(result, table, seed, create_graph=True)
    yield gradient
    yield from torch.autograd.grad(gradient.sum(), seed)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [8, 1 << 16])
def test_an_fp32_op_casts_what_it_selects(name: str, size: int) -> None:
    """With the gradients of a cast table; large tables are cast neither forward nor without a gradient."""
    torch.manual_seed(0)
    table, call = torch.randn(size, 2).to(BF16), CALLS[name]
    expected = list(derived(lambda table: call(table.float()), table))
    with hmpx.convert(policy=Policy.from_ops(fp32=[name])):
        for actual, wanted in zip(derived(call, table), expected, strict=True):
            assert actual.dtype is wanted.dtype and torch.equal(actual, wanted)
        for learns in {False, size > 8}:
            with Largest() as largest:
                result = call(table.clone().requires_grad_(learns) if learns else table)
            assert result.dtype is FP32 and result.requires_grad is learns
            assert largest.bytes <= max(64, table.nbytes * learns)  # the clone


def test_a_large_tables_gradient_may_be_sparse() -> None:
    table = torch.ones(1 << 16, 2, dtype=BF16, requires_grad=True)
    with hmpx.convert(policy=Policy.from_ops(fp32=["embedding"])):
        F.embedding(ROWS, table, sparse=True).sum().backward()
    assert table.grad is not None and table.grad.layout is torch.sparse_coo
    assert table.grad.dtype is BF16 and table.grad.coalesce().values().tolist() == [[1, 1], [2, 2]]
