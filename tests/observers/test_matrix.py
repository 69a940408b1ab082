"""Every observer on every op and on tensors of all kinds: results, gradients and random numbers stay the same."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

import hmpx

CONTRACT = {
    "expect": [{"module": "*", "saved": "float32"}, {"compute": "float32"}, {"contents": "float32"}]
}


def repeat(call: hmpx.OpCall, tensors: hmpx.CallTensors | None) -> None:
    """Runs a call again; an error of it is the observer's own."""
    if tensors is not None:
        with contextlib.suppress(Exception):
            tensors.in_fp32()


OBSERVERS: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {
    "attach": lambda path: hmpx.attach(repeat, tensors=True, every_op=True),
    "contract": lambda path: hmpx.expect(CONTRACT, mode="collect"),
    "lint": lambda path: hmpx.lint(),
    "record": lambda path: hmpx.record(memory=True),
    "trace": lambda path: hmpx.trace(path / "a.hmpx"),
    "watch": lambda path: hmpx.watch(mode="collect", underflow=True),
}

PROGRAMS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "fp32": nullcontext,
    "converted": lambda: hmpx.convert(device_types={"cpu"}),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def described(value: Any) -> Any:
    """Returns a value as equal objects are: tensors by dtype, layout, version and bits."""
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    if not isinstance(value, Tensor):
        return repr(value)
    about = [
        type(value).__name__,
        value.dtype,
        value.layout,
        value.device.type,
        value.requires_grad,
    ]
    about += [value.is_conj(), value.is_neg(), None if value.is_inference() else value._version]
    if value.is_nested:
        return [*about, *map(described, value.unbind())]
    about.append(tuple(value.shape))
    value = value.detach()
    if value.layout is torch.sparse_coo:
        return [*about, value._indices().tolist(), _bits(value._values())]
    if value.layout in (torch.sparse_csr, torch.sparse_csc):
        return [*about, _bits(value.to_dense())]
    if value.layout is not torch.strided or value.is_meta:
        return about
    return [*about, value.stride(), _bits(value.int_repr() if value.is_quantized else value)]


def _bits(value: Tensor) -> bytes:
    value = value.as_subclass(Tensor).resolve_conj().resolve_neg().contiguous()
    return bytes(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(run: Callable[[], Any]) -> Any:
    """Returns what a run gives, or its error, and the state of random numbers after it."""
    torch.manual_seed(3)
    with quiet():
        try:
            found = described(run())
        except Exception as error:
            found = type(error).__name__, str(error)[:60]
    return found, bytes(torch.get_rng_state().numpy())


def assert_same(run: Callable[[], Any], program: str, observer: str, path: Path) -> Any:
    """Asserts that a run's outcome is the same with the observer as without it, and returns it."""
    with PROGRAMS[program]():
        expected = outcome(run)
        with OBSERVERS[observer](path):
            found = outcome(run)
    assert found == expected
    return expected


# --- kinds of tensors ----------------------------------------------------------------------------


class Logged(Tensor):
    """Counts the calls of functions of torch that it gets."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Logged.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def of_subclass() -> Any:
    Logged.calls = 0
    x = torch.randn(4, 4).as_subclass(Logged)
    y = (x @ x).softmax(-1)
    return y, Logged.calls


def of_nested() -> Any:
    x = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    y = F.linear(x, weight)
    y.unbind()[0].sum().backward()
    return y, weight.grad


def of_sparse() -> Any:
    sparse, dense = torch.eye(4).to_sparse().requires_grad_(), torch.randn(4, 4, requires_grad=True)
    y = torch.sparse.mm(sparse, dense)
    y.float().sum().backward()
    return y, torch.sparse.softmax(sparse, 1), sparse.grad, dense.grad


def of_sparse_csr() -> Any:
    return torch.eye(4).to_sparse_csr() @ torch.randn(4, 4)


def of_quantized() -> Any:
    x = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)
    return x, F.relu(x), x.dequantize() @ x.dequantize()


def of_meta() -> Any:
    x = torch.randn(4, 4, device="meta", requires_grad=True)
    y = F.layer_norm(x @ x, (4,))
    y.sum().backward()
    return y, x.grad


def of_complex() -> Any:
    x = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
    y = x.conj() @ x
    y.abs().sum().backward()
    return y, x.grad.clone(), y.imag  # in a mode, torch adds up gradients in new memory


def of_inference() -> Any:
    with torch.inference_mode():
        x = torch.randn(4, 4)
        return x @ x, x.softmax(-1)


def of_vmap() -> Any:
    x = torch.randn(3, 4, 4)
    return torch.func.vmap(lambda each: (each @ each).softmax(-1))(x)


def of_grad() -> Any:
    x = torch.randn(4, 4)
    return torch.func.grad(lambda each: (each @ each).float().exp().sum())(x)


def of_jvp() -> Any:
    x = torch.randn(4, 4)
    return torch.func.jvp(lambda each: (each @ each).softmax(-1), (x,), (torch.ones(4, 4),))


def of_jacrev() -> Any:
    return torch.func.jacrev(lambda each: (each @ each).softmax(-1))(torch.randn(2, 2))


def of_views() -> Any:
    x = torch.randn(4, 4, requires_grad=True)
    y = (x * 2)[1:]
    y[0] = 5
    y.mul_(2).t().exp().sum().backward()
    return y, x.grad


def of_generators() -> Any:
    generator = Generator().manual_seed(3)
    x = torch.normal(torch.ones(4), torch.ones(4), generator=generator)
    return x, F.gumbel_softmax(x), torch.rand(2, generator=generator)


def of_twice_differentiated() -> Any:
    x = torch.randn(4, 4, requires_grad=True)
    (first,) = torch.autograd.grad((x @ x).float().exp().sum(), x, create_graph=True)
    first.square().sum().backward()
    return first, x.grad.clone()


def of_optimizer() -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4)).float().square().sum().backward()
    optimizer.step()
    return [*model.parameters()], [each.grad for each in model.parameters()]


KINDS = [
    of_complex, of_generators, of_grad, of_inference, of_jacrev, of_jvp, of_meta, of_nested, of_optimizer,
    of_quantized, of_sparse, of_sparse_csr, of_subclass, of_twice_differentiated, of_views, of_vmap,
]  # fmt: skip


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_all_kinds(
    kind: Callable[[], Any], program: str, observer: str, tmp_path: Path
) -> None:
    assert_same(kind, program, observer, tmp_path)
