"""Arguments of several classes: a class with its own ``__torch_function__`` gets them as they came, whatever the others are."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

import hmpx

BF16 = torch.bfloat16

#: The arguments that overrides got, as in the calls.
seen: list[tuple[Any, ...]] = []


def opened(value: Any) -> Any:
    return value.data_ if isinstance(value, (ByDispatch, ByBoth, NoTensor)) else value


class ByDispatch(Tensor):
    """Computes in ``__torch_dispatch__``, and overrides no function."""

    data_: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)
        made.data_ = data
        return made

    def __init__(self, data: Tensor) -> None:
        """Keeps ``data``, which `__new__` did."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes on what is inside."""
        return op(*tree_map(opened, args), **tree_map(opened, kwargs or {}))


class ByDispatchAlone(ByDispatch):
    """The same, with the ``__torch_function__`` of every tensor."""

    __torch_function__ = Tensor.__torch_function__


def overriding(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Notes its arguments, and computes on what is inside."""
    seen.append(args)
    args, kwargs = tree_map(opened, args), tree_map(opened, kwargs or {})
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def passing_on(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Notes its arguments, computes on what is inside, and leaves other classes their turn."""
    seen.append(args)
    return func(*tree_map(opened, args), **tree_map(opened, kwargs or {}))


class ByFunction(Tensor):
    """Overrides functions, and computes like any tensor."""

    __torch_function__ = classmethod(overriding)


class ByBoth(ByDispatch):
    """Overrides functions; whatever reaches its ``__torch_dispatch__`` is refused, casts too."""

    __torch_function__ = classmethod(passing_on)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses."""
        raise NotImplementedError(str(op))


class NoTensor:
    """Is not a tensor, and overrides functions."""

    __torch_function__ = classmethod(passing_on)

    def __init__(self, data: Tensor) -> None:
        self.data_ = data


class Weight(nn.Parameter):
    """A parameter that overrides nothing."""


class OverridingWeight(nn.Parameter):
    """A parameter that overrides functions."""

    __torch_function__ = classmethod(overriding)


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda data: data,
    "by dispatch": ByDispatch,
    "by dispatch alone": ByDispatchAlone,
    "by function": lambda data: data.as_subclass(ByFunction),
    "by both": ByBoth,
    "no tensor": NoTensor,
    "parameter": Weight,
    "overriding parameter": OverridingWeight,
}


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


@sdpa_kernel(SDPBackend.MATH)  # the other one rounds elsewhere in each dtype
def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


#: By lambdas, since conversions replace functions. A call of each plan: low, fp32, widest, first, a norm; in C++ and Python, as function, method and operator.
CALLS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "linear": (lambda a, w, b: F.linear(a, w, b), [normal(3, 4), normal(5, 4), normal(5)]),
    "baddbmm": (
        lambda c, a, b: torch.baddbmm(c, a, b),
        [normal(2, 3, 3), normal(2, 3, 4), normal(2, 4, 3)],
    ),
    "conv2d": (
        lambda a, w, b: F.conv2d(a, w, b),
        [normal(1, 2, 5, 5), normal(3, 2, 2, 2), normal(3)],
    ),
    "attention": (attended, [normal(2, 3, 4)] * 3),
    "matmul": (lambda a, b: torch.matmul(a, b), [normal(3, 4), normal(4, 5)]),
    "@": (lambda a, b: a @ b, [normal(3, 4), normal(4, 5)]),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), [normal(3, 4), normal(4, 5)]),
    "mse_loss": (lambda a, b: F.mse_loss(a, b), [normal(3, 4), normal(3, 4).bfloat16()]),
    "softmax": (lambda a: torch.softmax(a, -1), [normal(3, 4).bfloat16()]),
    "cat": (lambda a, b: torch.cat([a, b]), [normal(3, 4), normal(2, 4)]),
    "lerp": (lambda a, b, w: torch.lerp(a, b, w), [normal(3, 4), normal(3, 4), normal(3, 4)]),
    "layer_norm": (
        lambda a, w, b: F.layer_norm(a, (4,), w, b),
        [normal(3, 4), normal(4), normal(4)],
    ),
}
REGIONS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "fp32": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=BF16),
    "hmpx": lambda: hmpx.convert(device_types={"cpu"}),
}


def result(call: Callable[..., Any], args: list[Any]) -> Tensor | Exception:
    seen.clear()
    try:
        found = opened(call(*args))
    except Exception as error:  # what stops it in one region may not in another
        return error
    return found.detach().as_subclass(Tensor).double()  # type: ignore[no-any-return]


def combinations(count: int) -> Iterator[tuple[str, ...]]:
    """Yields classes by position: each one at each position beside each other one; the third is plain."""
    for kinds in itertools.product(KINDS, repeat=min(2, count)):
        for first in range(max(1, count - 1)):
            before = ("plain",) * first
            yield (*before, *kinds, *("plain",) * (count - first - len(kinds)))


@pytest.mark.parametrize("name", CALLS)
def test_an_override_gets_arguments_as_they_came(name: str) -> None:
    """Each class at each position beside each other one: as in fp32, or as exact as under torch.autocast."""
    call, tensors = CALLS[name]
    exact = call(*[tensor.double() for tensor in tensors])
    errors: dict[str, dict[tuple[str, ...], Any]] = {}
    for region, enter in REGIONS.items():
        with enter():
            errors[region] = {}
            for kinds in combinations(len(tensors)):
                args = [KINDS[kind](tensor) for kind, tensor in zip(kinds, tensors, strict=True)]
                found = result(call, args)
                is_stopped = isinstance(found, Exception)
                errors[region][kinds] = (
                    found if is_stopped else (found - exact).norm() / exact.norm()
                )
                for got in itertools.chain(*seen[:1]):
                    for value in got if isinstance(got, list) else [got]:
                        is_given = any(value is each for each in args)
                        assert is_given or not hasattr(value, "__torch_function__"), (region, kinds)
    fitting = [kinds for kinds, error in errors["fp32"].items() if isinstance(error, Tensor)]
    assert len(fitting) >= len(KINDS)
    for kinds in fitting:
        ours, autocast = errors["hmpx"][kinds], errors["autocast"][kinds]
        if isinstance(autocast, Tensor):
            assert isinstance(ours, Tensor), (kinds, ours)
            assert ours <= 1.01 * autocast + 1e-6, kinds
