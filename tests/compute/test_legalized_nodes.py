"""Legalized `linear` and attention by compiled nodes: the bits that hmpx computes without them, and only usual calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hmpx
from tests.compute import test_nodes
from tests.compute.test_nodes import (
    BF16,
    CASES,
    Dispatch,
    Subclass,
    assert_equal_bits,
    built,
    converted,
    hook,
    is_fused,
    nothing,
)

__all__ = ["built", "hook"]  # fixtures

pytestmark = [
    pytest.mark.usefixtures("built", "lacks_low_precision"),
    pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning"),  # by torch.func.jvp
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # by compiled autograd
]

SDPA = F.scaled_dot_product_attention  # torch's
X = torch.linspace(-2, 2, 1024).view(4, 16, 16).sin()
W = torch.linspace(-1, 1, 1024).view(64, 16).cos().requires_grad_()
WEIGHT, BIAS = nn.Parameter(W.detach()), nn.Parameter(torch.ones(64))
Q, K, V = torch.linspace(-3, 3, 3 * 4 * 8 * 2 * 8).sin().view(3, 4, 8, 2, 8).transpose(2, 3)


@contextlib.contextmanager
def legalized(*, with_nodes: bool = True, **options: Any) -> Iterator[None]:
    """As `converted`, where both ops have been called: nodes compute the calls that follow."""
    with converted(with_nodes=with_nodes, **({"legalize": "auto"} | options)):
        F.linear(X, WEIGHT, BIAS)
        F.scaled_dot_product_attention(Q, K, V)
        yield


class Attend(nn.Module):
    def forward(self, qkv: Tensor) -> Tensor:
        batch, length, width = qkv.shape
        q, k, v = qkv.view(batch, length, 3, 2, width // 6).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(batch, length, width // 3)


def make_attentive_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 96), Attend(), nn.Linear(32, 40))


ATTENTIVE = (
    *("plain", "gradient of x", "gradient of x alone", "two backwards", "inference"),
    *("writes between calls", "reentrant checkpoint", "checkpoint", "functional_call", "threads"),
    *("func.grad", "anomaly detection", "torch.compile", "compiled autograd"),
)


@pytest.mark.parametrize("legalize", ["auto", "fast", "always"])
@pytest.mark.parametrize("name", CASES)
def test_bits_of_linear(name: str, legalize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_nodes, "X", X)
    with legalized(with_nodes=False, legalize=legalize):
        expected = CASES[name]()
    with legalized(legalize=legalize):
        actual = CASES[name]()
    assert_equal_bits(actual, expected)


@pytest.mark.parametrize("legalize", ["auto", "fast"])
@pytest.mark.parametrize("name", ATTENTIVE)
def test_bits_of_attention(name: str, legalize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_nodes, "make_net", make_attentive_net)
    test_bits_of_linear(name, legalize, monkeypatch)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("legalize", ["auto", "fast"])
def test_bits_of_special_values(legalize: str, threads: int) -> None:
    """NaN, infinities, subnormal numbers and halfway ones, in layers beyond one thread's share."""
    special = torch.tensor([1e-40, -1e-45, 3e38, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0])
    x = torch.linspace(-1, 1, 600 * 256).view(600, 256).clone()
    x[:, :8] = special
    x[5, 1], x[6, 2] = float("inf"), float("nan")
    before = torch.get_num_threads()

    def results() -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(256, 288), nn.GELU(), nn.Linear(288, 256))
        y = net(x)
        q = y.view(3, 200, 4, 64).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q)
        y.float().sin().sum().backward()
        return [y.detach().view(torch.int16), *[p.grad.view(torch.int32) for p in net.parameters()]]

    torch.set_num_threads(threads)
    try:
        with legalized(with_nodes=False, legalize=legalize):
            expected = results()
        with legalized(legalize=legalize):
            actual = results()
    finally:
        torch.set_num_threads(before)
    assert_equal_bits(actual, expected)


ATTENTION: dict[str, Callable[..., Tensor]] = {
    "plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "by position": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.0, True),
    "as in transformers": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=None, dropout_p=0.0, scale=0.3, is_causal=False
    ),
    "fewer keys": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, 3:], v[:, :, 3:]),
    "low and fp32": lambda q, k, v: F.scaled_dot_product_attention(q, k.to(BF16), v.to(BF16)),
    "low slices": lambda q, k, v: F.scaled_dot_product_attention(
        *(torch.stack([q, k, v]).to(BF16) * 1).unbind()
    ),
    "dense heads": lambda q, k, v: F.scaled_dot_product_attention(
        q.to(BF16).contiguous(), k.to(BF16), v.to(BF16)
    ),
}

UNUSUAL_ATTENTION: dict[str, Callable[..., Tensor]] = {
    "a mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.ones(8, 8).tril().bool()
    ),
    "a float mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.zeros(8, 8)),
    "heads in groups": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, :1], v[:, :1], enable_gqa=True
    ),
    "names": lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v),
    "three dimensions": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
    "another layout": lambda q, k, v: F.scaled_dot_product_attention(
        q.mT.contiguous().mT, k.mT.contiguous().mT, v.mT.contiguous().mT
    ),
    "float64": lambda q, k, v: F.scaled_dot_product_attention(q.double(), k.double(), v.double()),
    "nothing": lambda q, k, v: F.scaled_dot_product_attention(q[:0], k[:0], v[:0]),
}


def attended(function: Callable[..., Tensor], *, gradient: str = "plain") -> tuple[Any, ...]:
    inputs = [each.clone().requires_grad_() for each in (Q, K, V)]
    y = function(*inputs)
    z = y.float()
    z = {"plain": z.sin(), "expanded": z, "transposed": (z.transpose(1, 2) * 2).sin()}[gradient]
    return is_fused(y), [y.detach(), *torch.autograd.grad(z.sum(), inputs, allow_unused=True)]


@pytest.mark.parametrize("gradient", ["plain", "expanded", "transposed"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, gradient: str) -> None:
    with legalized(with_nodes=False):
        was_fused, expected = attended(ATTENTION[name], gradient=gradient)
    with legalized():
        fuses, actual = attended(ATTENTION[name], gradient=gradient)
    assert fuses
    assert not was_fused
    assert actual[0].stride() == expected[0].stride()
    assert_equal_bits(actual, expected)


@pytest.mark.parametrize("name", UNUSUAL_ATTENTION)
def test_unusual_attention_takes_another_way(name: str) -> None:
    with legalized(with_nodes=False):
        _, expected = attended(UNUSUAL_ATTENTION[name])
    with legalized():
        fuses, actual = attended(UNUSUAL_ATTENTION[name])
    assert not fuses
    assert_equal_bits(actual, expected)


CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "a dispatch mode": Dispatch,
    "hooks of saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(nothing, nothing),
    "casts off": hmpx.disable_casts,
    "autocast": lambda: torch.autocast("cpu", BF16),
    "another kernel of attention": lambda: sdpa_kernel(SDPBackend.MATH),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_unusual_contexts_take_another_way(name: str) -> None:
    with legalized(), CONTEXTS[name]():
        attention = attended(F.scaled_dot_product_attention)
        is_linear_fused = is_fused(F.linear(X, WEIGHT, BIAS))
    assert not attention[0]
    assert is_linear_fused is (name == "another kernel of attention")
    with legalized(with_nodes=False), CONTEXTS[name]():
        expected = attended(F.scaled_dot_product_attention)
    assert_equal_bits(attention[1], expected[1])


UNUSUAL: dict[str, Callable[[], Tensor]] = {
    "a subclass": lambda: F.linear(X.as_subclass(Subclass), WEIGHT, BIAS),
    "a weight that is computed": lambda: F.linear(X, W * 1, BIAS),
    "two rows": lambda: F.linear(X[0, :2], nn.Parameter(torch.ones(300, 16)), None),
    "another layout": lambda: F.linear(X.transpose(0, 1), WEIGHT, BIAS),
    "the other low type": lambda: F.linear(X.to(torch.float16), WEIGHT, BIAS),
    "meta tensors": lambda: F.linear(X.to("meta"), WEIGHT.to("meta"), None),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_layers_take_another_way(name: str) -> None:
    with legalized():
        actual = UNUSUAL[name]()
        assert is_fused(F.linear(X, WEIGHT, BIAS))
        assert is_fused(F.linear(X.to(BF16), WEIGHT))
    assert not is_fused(actual)
    with legalized(with_nodes=False):
        expected = UNUSUAL[name]()
    assert actual.dtype is expected.dtype
    assert type(actual) is type(expected)
    if not actual.is_meta:
        assert torch.equal(actual.as_subclass(Tensor), expected.as_subclass(Tensor))


@pytest.mark.parametrize(
    "options", [{"legalize": "never"}, {"low_precision_type": "float16"}, {"lists": "hmp"}], ids=str
)
def test_options_without_legalized_nodes(options: dict[str, Any]) -> None:
    with converted(keep_weight_casts="auto", **options):
        for _ in range(2):
            assert not attended(F.scaled_dot_product_attention)[0]


def test_errors_are_those_without_nodes() -> None:
    found = []
    for with_nodes in (False, True):
        with legalized(with_nodes=with_nodes), pytest.raises(RuntimeError) as raised:
            F.linear(X, nn.Parameter(torch.ones(300, 15)))
        found.append(str(raised.value))
    assert found[0] == found[1]


@pytest.mark.parametrize("wrong", [torch.Tensor, nn.Parameter, int])
def test_a_class_is_no_argument(wrong: Any) -> None:
    with legalized():
        F.scaled_dot_product_attention(Q, K, V)
        with pytest.raises(TypeError):
            F.scaled_dot_product_attention(Q, K, V, wrong)
        with pytest.raises(TypeError):
            F.linear(X, WEIGHT, wrong)


def test_writes_before_the_backward_are_errors() -> None:
    with legalized():
        x, weight = X.to(BF16), nn.Parameter(W.detach().clone())
        x.requires_grad_()
        low = x * 1
        y = F.linear(low, weight)
        attended_ = F.scaled_dot_product_attention(*(low.view(4, 4, 4, 16),) * 3)
        assert is_fused(y)
        assert is_fused(attended_)
        for loss, written in ((y, weight), (attended_, attended_)):
            with torch.no_grad():
                written.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.float().sum().backward(retain_graph=True)


def test_gradients_of_attentions_gradients_do_not_exist() -> None:
    """As without nodes."""
    for with_nodes in (False, True):
        with legalized(with_nodes=with_nodes):
            q = Q.clone().requires_grad_()
            y = F.scaled_dot_product_attention(q, q, q)
            (first,) = torch.autograd.grad(y.float().sin().sum(), q, create_graph=True)
            with pytest.raises(RuntimeError, match="not implemented"):
                first.float().sum().backward()


def test_they_end_with_the_conversion() -> None:
    with legalized():
        kept = F.linear
        assert is_fused(kept(X, WEIGHT, BIAS))
    assert not is_fused(kept(X, WEIGHT, BIAS))
    assert kept(X, WEIGHT, BIAS).dtype is torch.float32
    with converted(legalize="never"), hmpx.record():
        assert not is_fused(kept(X, WEIGHT, BIAS))


def test_observed_calls_have_other_nodes() -> None:
    with legalized(), hmpx.record() as report:
        assert not is_fused(F.linear(X, WEIGHT, BIAS))
        assert not attended(F.scaled_dot_product_attention)[0]
    assert {row.op for row in report.rows} >= {"linear", "scaled_dot_product_attention"}


def test_a_function_of_another_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        calls.append(query.dtype)
        return SDPA(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    with legalized():
        assert not attended(F.scaled_dot_product_attention)[0]
    assert len(calls) == 2


def test_drawn_results() -> None:
    """As a cast, and an op in low precision."""
    inputs = [each.clone().requires_grad_() for each in (Q, K, V)]
    with legalized():
        results = F.linear(X, WEIGHT, BIAS), F.scaled_dot_product_attention(*inputs)
    for result, op in zip(
        results, ("linear", "scaled_dot_product_flash_attention_for_cpu"), strict=True
    ):
        assert is_fused(result)
        found = {(each.kind, each.label) for each in hmpx.draw(result).nodes}
        assert found == {
            *(("cast", "fp32 -> bf16"), ("input", "input")),
            *(("op", op), ("output", "output")),
        }


@pytest.mark.parametrize("with_nodes", [True, False])
@pytest.mark.parametrize("legalize", ["auto", "always", "fast"])
def test_second_order_gradients_are_near_those_of_fp32(legalize: str, with_nodes: bool) -> None:
    """Of the gradient of a large layer's weight, which depends on all inputs."""
    torch.manual_seed(0)
    given = torch.randn(600, 256) / 16, torch.randn(288, 256) / 16, torch.randn(288) / 16

    def second() -> tuple[Tensor, ...]:
        x, *parameters = [each.clone() for each in given]
        leaves = [x.requires_grad_(), *map(nn.Parameter, parameters)]
        loss = F.linear(*leaves).float().square().sum()
        (first,) = torch.autograd.grad(loss, leaves[1], create_graph=True)
        return first.detach(), *torch.autograd.grad(first.square().sum(), leaves)

    expected = second()
    with legalized(legalize=legalize, with_nodes=with_nodes):
        actual = second()
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype is other.dtype
        assert (one - other).norm() <= 0.02 * other.norm()
