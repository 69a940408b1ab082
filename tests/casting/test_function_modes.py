"""Function modes and tensor subclasses change no cast: every op that torch implements in Python.

``with torch.device(...)`` and `torch.set_default_device` are such modes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import hmpx
from hmpx import ops

BF16 = torch.bfloat16


class Passing(TorchFunctionMode):
    """A mode that does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls what it is handed."""
        return func(*args, **(kwargs or {}))


class Sub(Tensor):
    """A subclass that overrides nothing."""


AROUND: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "torch.device": lambda: torch.device("cpu"),
    "a mode": Passing,
    "two modes": lambda: _both(torch.device("cpu"), Passing()),
    "a subclass": contextlib.nullcontext,
}


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Any:
    with outer, inner:
        yield


def tensor(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.rand(shape, generator=generator) + 0.5


def attend(x: Tensor) -> Any:
    weight, bias = tensor(12, 4).to(x.dtype), tensor(12).to(x.dtype)
    out, none = tensor(4, 4).to(x.dtype), tensor(4).to(x.dtype)
    return F.multi_head_attention_forward(
        x, x, x, 4, 2, weight, bias, None, None, False, 0.0, out, none
    )


def pooled(x: Tensor, dimensions: int) -> Any:
    pool = getattr(F, f"max_pool{dimensions}d")
    y, indices = pool(x, 2, return_indices=True)
    return getattr(F, f"max_unpool{dimensions}d")(y, indices, 2)


#: Slot -> a shape, and a call with a tensor of that shape.
CALLS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {
    "torch.Tensor.__floordiv__": ((4, 4), lambda x: x // 0.3),
    "torch.Tensor.__pow__": ((4, 4), lambda x: x**1.7),
    "torch.Tensor.__rdiv__": ((4, 4), lambda x: x.__rdiv__(1.3)),
    "torch.Tensor.__rfloordiv__": ((4, 4), lambda x: 7.7 // x),
    "torch.Tensor.__rmatmul__": ((4, 4), lambda x: x.__rmatmul__(x)),
    "torch.Tensor.__rmod__": ((4, 4), lambda x: 7.7 % x),
    "torch.Tensor.__rpow__": ((4, 4), lambda x: 1.7**x),
    "torch.Tensor.__rsub__": ((4, 4), lambda x: 1.7 - x),
    "torch.Tensor.__rtruediv__": ((4, 4), lambda x: 1.0 / x),
    "torch.Tensor.lu": ((4, 4), lambda x: x.lu()),
    "torch.Tensor.norm": ((4, 4), lambda x: x.norm(3)),
    "torch.Tensor.stft": ((64,), lambda x: x.stft(16, return_complex=True)),
    "torch.Tensor.unique": ((4, 4), lambda x: x.unique()),
    "torch.block_diag": ((4, 4), lambda x: torch.block_diag(x, x)),
    "torch.lobpcg": ((12, 12), lambda x: torch.lobpcg(x @ x.mT, 2, niter=4)),
    "torch.lu": ((4, 4), lambda x: torch.lu(x)),
    "torch.norm": ((4, 4), lambda x: torch.norm(x, 3)),
    "torch.pca_lowrank": ((8, 8), lambda x: torch.pca_lowrank(x, 3)),
    "torch.stft": ((64,), lambda x: torch.stft(x, 16, return_complex=True)),
    "torch.svd_lowrank": ((8, 8), lambda x: torch.svd_lowrank(x, 3)),
    "torch.unique": ((4, 4), lambda x: torch.unique(x, return_counts=True)),
    **{
        f"torch.nn.functional.adaptive_max_pool{n}d_with_indices": (
            (2, 3, *[6] * n),
            lambda x, n=n: getattr(F, f"adaptive_max_pool{n}d_with_indices")(x, 3),
        )
        for n in (1, 2, 3)
    },
    **{
        f"torch.nn.functional.dropout{n}d": (
            (2, 3, *[4] * n),
            lambda x, n=n: getattr(F, f"dropout{n}d")(x, 0.5),
        )
        for n in (1, 2, 3)
    },
    **{
        f"torch.nn.functional.fractional_max_pool{n}d_with_indices": (
            (2, 3, *[6] * n),
            lambda x, n=n: getattr(F, f"fractional_max_pool{n}d_with_indices")(x, 2, 3),
        )
        for n in (2, 3)
    },
    **{
        f"torch.nn.functional.lp_pool{n}d": (
            (2, 3, *[6] * n),
            lambda x, n=n: getattr(F, f"lp_pool{n}d")(x, 2.5, 2),
        )
        for n in (1, 2, 3)
    },
    **{
        f"torch.nn.functional.max_unpool{n}d": ((2, 3, *[4] * n), lambda x, n=n: pooled(x, n))
        for n in (1, 2, 3)
    },
    "torch.nn.functional.affine_grid": ((2, 2, 3), lambda x: F.affine_grid(x, [2, 1, 3, 3], False)),
    "torch.nn.functional.fold": ((1, 4, 9), lambda x: F.fold(x, (4, 4), 2)),
    "torch.nn.functional.gaussian_nll_loss": (
        (4, 4),
        lambda x: F.gaussian_nll_loss(x, x * 1.3, x * 0.7),
    ),
    "torch.nn.functional.gumbel_softmax": ((4, 4), lambda x: F.gumbel_softmax(x)),
    "torch.nn.functional.interpolate": (
        (1, 2, 5, 5),
        lambda x: F.interpolate(x, (7, 3), mode="bilinear"),
    ),
    "torch.nn.functional.linear_cross_entropy": (
        (4, 6),
        lambda x: F.linear_cross_entropy(x, x * 1.3, torch.tensor([0, 1, 2, 3])),
    ),
    "torch.nn.functional.local_response_norm": (
        (2, 5, 4),
        lambda x: F.local_response_norm(x, 2, 0.7),
    ),
    "torch.nn.functional.multi_head_attention_forward": ((3, 2, 4), attend),
    "torch.nn.functional.multilabel_soft_margin_loss": (
        (4, 4),
        lambda x: F.multilabel_soft_margin_loss(x, x * 0.7),
    ),
    "torch.nn.functional.normalize": ((4, 4), lambda x: F.normalize(x)),
    "torch.nn.functional.smooth_l1_loss": (
        (4, 4),
        lambda x: F.smooth_l1_loss(x, x * 1.7, beta=0.3),
    ),
    "torch.nn.functional.softmin": ((4, 4), lambda x: F.softmin(x, -1)),
    "torch.nn.functional.softsign": ((4, 4), lambda x: F.softsign(x)),
    "torch.nn.functional.tanhshrink": ((4, 4), lambda x: F.tanhshrink(x)),
    "torch.nn.functional.triplet_margin_with_distance_loss": (
        (4, 4),
        lambda x: F.triplet_margin_with_distance_loss(x, x * 1.3, x * 0.7),
    ),
}

IN_PYTHON = [
    (name, site) for name, op in ops.table().items() for site in op.sites if site.is_python
]
#: Ops of integers, of symbols, and such as hand out what there is.
OF_NO_VALUES = {"backward", "index", "resize", "resize_as", "rlshift", "rrshift", "unravel_index"}
if not hasattr(F, "linear_cross_entropy"):
    del CALLS["torch.nn.functional.linear_cross_entropy"]

NAMES = sorted(
    {
        name
        for name, _ in IN_PYTHON
        if name in ops.computing() - OF_NO_VALUES and not name.startswith("sym_")
    }
)


def outcomes(dtype: torch.dtype, kind: str | None) -> dict[str, list[Tensor]]:
    """Returns what each call of `CALLS` gives, inside what ``kind`` names."""
    found = {}
    for name, (shape, call) in CALLS.items():
        with hmpx.disable_casts():
            x = tensor(*shape).to(dtype)
            x = x.as_subclass(Sub) if kind == "a subclass" else x
        torch.manual_seed(0)
        with contextlib.nullcontext() if kind is None else AROUND[kind]():
            result = call(x)
        with hmpx.disable_casts():
            results = result if isinstance(result, tuple) else (result,)
            found[name] = [t.as_subclass(Tensor) for t in results if isinstance(t, Tensor)]
    return found


@pytest.mark.native
@pytest.mark.filterwarnings("ignore:torch.lu is deprecated")
@pytest.mark.filterwarnings("ignore:A window was not provided")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    "policy",
    [
        {"lists": "none", "fp32": NAMES, "low": ["*"]},
        {"lists": "none", "low": NAMES, "fp32": ["*"]},
        {"lists": "hmpx"},
        {"lists": "hmp"},
    ],
    ids=["in fp32", "low", "hmpx", "hmp"],
)
def test_ops_in_python_are_cast_alike_under_modes(
    policy: dict[str, Any], dtype: torch.dtype
) -> None:
    """By their own lists, not op by op by those of what they call: the same dtypes and bits."""
    with hmpx.convert(policy=policy, device_types={"cpu"}):
        expected = outcomes(dtype, None)
        faults = []
        for kind in AROUND:
            for name, actual in outcomes(dtype, kind).items():
                try:
                    torch.testing.assert_close(
                        actual, expected[name], rtol=0, atol=0, equal_nan=True
                    )
                except AssertionError as error:
                    faults.append(f"{name} under {kind}: {error}")
    assert not faults, "\n".join(faults)


@pytest.mark.filterwarnings("ignore:torch.lu is deprecated")
@pytest.mark.filterwarnings("ignore:A window was not provided")
@pytest.mark.parametrize("low", [BF16, torch.float16])
def test_ops_in_python_take_inputs_of_low_types(low: torch.dtype) -> None:
    """What layers before them make of fp32: `torch.lobpcg` knows no float16."""
    with hmpx.convert(device_types={"cpu"}, low_precision_type=low):
        assert outcomes(low, None).keys() == CALLS.keys()


def test_every_op_in_python_that_is_wrapped_is_called_here() -> None:
    """So that one that comes with another version of torch is not forgotten."""
    with hmpx.convert(policy={"lists": "none", "low": ["*"]}, device_types={"cpu"}):
        wrapped = {
            name
            for name, site in IN_PYTHON
            if hasattr(vars(site.owner).get(site.attribute), "__hmpx_site__")
        }
    called = {name for name, site in IN_PYTHON if site.qualified in CALLS}
    assert wrapped & set(NAMES) <= called
