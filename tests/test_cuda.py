"""What only a GPU can show: the pipeline on the CPU stays as it was, graphs, loss scaling."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).cuda()


def test_only_tensors_on_the_gpu_are_cast_by_default() -> None:
    """The data pipeline on the CPU stays fp32."""
    with hmpx.convert() as session:
        assert session.device_types == {"cuda"}
        assert network()(torch.randn(2, 16, device="cuda")).dtype is BF16
        assert F.linear(torch.randn(2, 4), torch.randn(3, 4)).dtype is FP32


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8), nn.InstanceNorm1d(8)]
)
def test_norms_keep_the_low_type_of_their_input(norm: nn.Module) -> None:
    """Whatever the kernel takes beside it."""
    shape = (4, 8) if isinstance(norm, nn.LayerNorm) else (4, 8, 6)
    x = torch.randn(shape, device="cuda", requires_grad=True)
    norm.cuda()
    expected = norm(x.detach().bfloat16().float())
    with hmpx.convert():
        actual = norm(x)
        actual.float().sum().backward()
    assert actual.dtype is BF16
    torch.testing.assert_close(actual.float(), expected, rtol=2**-6, atol=2**-6)
    assert x.grad is not None and x.grad.dtype is FP32


def test_a_cuda_graph_replays_the_casts() -> None:
    """Of the weights as they are at the time of the replay (pytorch #71631, #84289)."""
    model, x = network(), torch.randn(8, 16, device="cuda")
    with hmpx.convert(), torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(x)
        assert output.dtype is BF16
        for _ in range(2):
            x.normal_()
            model[0].weight.mul_(1.5)
            graph.replay()
            torch.testing.assert_close(output, model(x), rtol=0, atol=0)


def test_loss_scaling_in_fp16_trains_as_in_fp32() -> None:
    """With torch's own GradScaler: gradients and parameters are fp32."""
    x = torch.randn(64, 16, device="cuda")
    y = torch.randint(4, (64,), device="cuda")

    def losses() -> list[float]:
        model, scaler = network(), torch.amp.GradScaler("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {FP32}
            scaler.step(optimizer)
            scaler.update()
            found.append(loss.item())
        return found

    expected = losses()
    with hmpx.convert(low_precision_type=FP16):
        actual = losses()
    assert actual == pytest.approx(expected, rel=0.05)
    assert actual[-1] < actual[0]


@pytest.mark.parametrize("region", [BF16, FP16])
def test_the_lists_win_inside_an_autocast_region(region: torch.dtype) -> None:
    a = torch.randn(4, 4, device="cuda")

    def outcome() -> list[Tensor]:
        return [a @ a, F.linear(a, a), torch.softmax(a @ a, -1), F.layer_norm(a, (4,))]

    with hmpx.convert():
        expected = outcome()
        with torch.autocast("cuda", region):
            actual = outcome()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
