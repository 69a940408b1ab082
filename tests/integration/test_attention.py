"""Attention as programs call it: transforms of torch.func, FlexAttention. Oracle: torch in fp32."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import hmpx
from tests import forks

BF16 = torch.bfloat16


# --- torch.func ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of torch's own
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_attention_can_be_linearized(dropout: float) -> None:
    """`linearize` traces forward-mode gradients, which roundings in graphs lacked."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, tangent = torch.randn(4, 1, 2, 9, 8, generator=generator)

    def attention(q: Tensor) -> Tensor:
        torch.manual_seed(1)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)

    expected, derivative = torch.func.jvp(attention, (q,), (tangent,))
    with hmpx.convert(legalize="always"):
        found, linear = torch.func.linearize(attention, q)
        torch.manual_seed(1)  # the function that it returns draws again
        found_derivative = linear(tangent)
    assert found.dtype is BF16
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)
    torch.testing.assert_close(found_derivative.float(), derivative, atol=0.03, rtol=0.03)


# --- FlexAttention -------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore")  # of torch's own
def test_flex_attention_compiles() -> None:
    """Inductor puts the function that stands under ``torch.full`` into its graph, and looks it up there."""
    import torch._inductor.lowering  # before torch is converted

    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    expected = F.scaled_dot_product_attention(q, k, v)
    with (
        hmpx.convert(),
        torch.no_grad(),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        found = torch.compile(flex_attention)(q, k, v)
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)


LOWERINGS = """
import torch, hmpx

with hmpx.convert(device_types={"cpu"}):
    from torch._inductor.lowering import lowerings
print(torch.full in lowerings)
"""


def test_inductor_imported_during_a_conversion_knows_torchs_functions() -> None:
    """Once it is reverted FlexAttention would not compile in fp32."""
    run = forks.run("-c", LOWERINGS, imported=forks.TORCH)
    assert (run.returncode, run.stdout.split()) == (0, ["True"]), run.stderr
