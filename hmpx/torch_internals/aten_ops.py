"""Operators of ATen that calls become below autograd, and that torch keeps private."""

from __future__ import annotations

from .torch_part import is_found, rely_on


class _NoOp:
    """Replaces an operator that torch does not have: no call is one of it."""


#: What a cast becomes.
CAST_OP = rely_on(
    "torch.ops.aten._to_copy.default",
    feature="memory of casts",
    since="2.13",
    without="record(memory=True) and hmpx.plan count casts of weights as other tensors",
    behaves=is_found,
    instead=(_NoOp(),),
)

#: What ``.item()``, and an ``if`` on a tensor, become.
VALUE_OP = rely_on(
    "torch.ops.aten._local_scalar_dense.default",
    feature="values in plans",
    since="2.13",
    without="hmpx.plan fails where parameters' first values depend on values",
    behaves=is_found,
    instead=(_NoOp(),),
)

#: Batch norm with running statistics, as compiled programs have it.
BATCH_NORM_OP = rely_on(
    "torch.ops.aten._native_batch_norm_legit.default",
    feature="batch norm in plans",
    since="2.13",
    without="its statistics have the wrong dtype there",
    behaves=is_found,
    instead=(_NoOp(),),
)

#: CUDA's fused kernels of attention: without a mask in low precision, and the other.
FLASH_ATTENTION, MASKED_ATTENTION = rely_on(
    "torch.ops.aten._scaled_dot_product_flash_attention",
    "torch.ops.aten._scaled_dot_product_efficient_attention",
    feature="attention in plans",
    since="2.13",
    without="hmpx.plan counts scores of attention for a device that is not there",
    behaves=is_found,
    instead=(None, None),
)
