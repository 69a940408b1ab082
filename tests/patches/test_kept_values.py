"""Parameters, buffers and gradients that a program makes while torch is converted."""

from __future__ import annotations

import copy
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, vector_to_parameters

import hmpx
from hmpx.patches import values

BF16, FP32 = torch.bfloat16, torch.float32

pytestmark = pytest.mark.filterwarnings("error::hmpx.HmpxWarning")


@pytest.fixture(autouse=True)
def low_parameters_are_hidden(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hides those of other tests, except where they are what is tested."""
    if "before" not in request.node.name:
        monkeypatch.setattr(values, "gc", types.SimpleNamespace(get_objects=list))


def product() -> Tensor:
    """Returns a result that the conversion made low."""
    made = torch.randn(4, 4) @ torch.randn(4, 4)
    assert made.dtype is BF16
    return made


class Symmetric(nn.Module):
    """A parametrization whose value, and whose inverse, is a product."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.eye(4)

    def right_inverse(self, x: Tensor) -> Tensor:
        return x @ torch.eye(4)


def data() -> Tensor:
    linear = nn.Linear(4, 4)
    linear.weight.data = torch.randn(4, 4) @ linear.weight.data
    return linear.weight


def buffer() -> Tensor:
    module = nn.Module()
    module.register_buffer("b", product())
    return module.get_buffer("b")


def set_buffer() -> Tensor:
    module = nn.Module()
    module.register_buffer("b", torch.zeros(4, 4))
    module.b = product()
    return module.get_buffer("b")


def gradient() -> Tensor:
    made = nn.Parameter(torch.zeros(4, 4))
    made.grad = product()
    assert made.grad is not None
    return made.grad


def set_to() -> Tensor:
    made = nn.Parameter(torch.zeros(4, 4))
    with torch.no_grad():
        assert made.set_(product()) is made
    return made


def assigned_state() -> Tensor:
    linear = nn.Linear(4, 4)
    linear.load_state_dict({"weight": product(), "bias": torch.zeros(4)}, assign=True)
    return linear.weight


def assigned_buffers() -> Tensor:
    norm = nn.BatchNorm1d(4)
    state = norm.state_dict()
    state["running_var"] = product()[0]
    norm.load_state_dict(state, assign=True)
    assert norm.running_var is not None
    return norm.running_var


def vector() -> Tensor:
    linear = nn.Linear(4, 4)
    vector_to_parameters(
        torch.eye(20) @ parameters_to_vector(linear.parameters()), linear.parameters()
    )
    return linear.weight


def orthogonal() -> Tensor:
    linear = parametrizations.orthogonal(nn.Linear(4, 4))
    parametrize.remove_parametrizations(linear, "weight")
    return linear.weight


def registered() -> Tensor:
    linear = parametrize.register_parametrization(nn.Linear(4, 4), "weight", Symmetric())
    return linear.parametrizations.weight.original


def set_parametrized() -> Tensor:
    linear = parametrize.register_parametrization(nn.Linear(4, 4), "weight", Symmetric())
    linear.weight = product()
    return linear.parametrizations.weight.original


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Parameter(product()),
        lambda: nn.Parameter(product().t().contiguous() * 2),
        lambda: nn.Parameter(torch.randn(4, 4, requires_grad=True) @ torch.randn(4, 4)),
        *(data, buffer, set_buffer, gradient, set_to, assigned_state, assigned_buffers),
        *(vector, orthogonal, registered, set_parametrized),
    ],
)
@pytest.mark.parametrize("options", [{}, {"lists": "autocast-cuda"}, {"legalize": "always"}])
def test_what_is_kept_stays_fp32(make: Callable[[], Tensor], options: dict[str, Any]) -> None:
    with hmpx.convert(device_types={"cpu"}, **options):
        assert make().dtype is FP32


def test_small_steps_move_a_weight_that_a_product_made() -> None:
    with hmpx.convert(device_types={"cpu"}):
        weight = nn.Parameter(torch.ones(4, 4) @ torch.eye(4))
        optimizer = torch.optim.SGD([weight], 1.0)
        for _ in range(10):
            weight.grad = torch.full((4, 4), 1e-3)
            optimizer.step()
    assert torch.allclose(weight, torch.full((4, 4), 0.99))


# --- what the program asks for -----------------------------------------------------------------


class Asked(nn.Module):
    """Names its dtype wherever it can."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(4, dtype=dtype).uniform_())
        self.random = nn.Parameter(torch.randn(4, 4).to(dtype).t())
        self.like = nn.Parameter(torch.ones_like(self.empty, dtype=dtype))
        self.new = nn.Parameter(self.empty.new_zeros(4))
        self.linear = nn.Linear(4, 4, dtype=dtype)
        self.register_buffer("mask", torch.tensor([1.0, 2.0], dtype=dtype)[None])


def dtypes(module: nn.Module) -> set[torch.dtype]:
    return {value.dtype for value in module.state_dict().values()}


def loaded(module: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    stream.seek(0)
    fresh = Asked(FP32)
    fresh.load_state_dict(torch.load(stream), assign=True)
    return fresh


def under_default_dtype(module: nn.Module) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    finally:
        torch.set_default_dtype(before)


def cast_by_hand(module: nn.Module) -> nn.Module:
    linear = nn.Linear(4, 4)
    for each in linear.parameters():
        each.data = each.data.bfloat16()
    return linear


def cast_product(module: nn.Module) -> nn.Module:
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(product().bfloat16())
    return linear


@pytest.mark.parametrize(
    "make",
    [
        lambda asked: asked,
        copy.deepcopy,
        lambda asked: pickle.loads(pickle.dumps(asked)),
        loaded,
        lambda asked: Asked(FP32).bfloat16(),
        lambda asked: Asked(FP32).to(BF16),
        lambda asked: Asked(FP32).to(torch.zeros(1, dtype=BF16)),
        lambda asked: asked.to("cpu", torch.float64).type(BF16),
        under_default_dtype,
        cast_by_hand,
        cast_product,
    ],
)
def test_what_the_program_asks_for_stays_low(make: Callable[[nn.Module], nn.Module]) -> None:
    with hmpx.convert(device_types={"cpu"}):
        assert dtypes(make(Asked(BF16))) == {BF16}


def test_a_program_that_asks_elsewhere_is_warned_once_at_its_line() -> None:
    with hmpx.convert(device_types={"cpu"}):
        torch.zeros(2, dtype=BF16)
        with pytest.warns(hmpx.HmpxWarning, match=r"a parameter is bf16.*disable_casts") as found:
            first = nn.Parameter(product())
            second = nn.Parameter(product())
    assert first.dtype is BF16 and second.dtype is BF16
    assert [warning.filename for warning in found] == [__file__]


def test_the_remedies_of_the_warning() -> None:
    with hmpx.convert(device_types={"cpu"}):
        torch.zeros(2, dtype=BF16)
        assert nn.Parameter(product().float()).dtype is FP32
        with hmpx.disable_casts():
            low = torch.ones(2, 2, dtype=BF16)
            assert nn.Parameter(low @ low).dtype is BF16
            assert nn.Parameter(torch.ones(2, 2) @ torch.eye(2)).dtype is FP32


def test_low_parameters_from_before_the_conversion_count_as_asked_for() -> None:
    before = nn.Linear(2, 2).bfloat16()
    with hmpx.convert(device_types={"cpu"}), pytest.warns(hmpx.HmpxWarning, match="a parameter"):
        before.weight = nn.Parameter(before.weight * 2)
    assert before.weight.dtype is BF16


def test_a_low_target_stays_low_without_a_warning() -> None:
    low = nn.Linear(2, 2).bfloat16()
    low.register_buffer("b", torch.zeros(2, 2, dtype=BF16))
    with hmpx.convert(device_types={"cpu"}):
        low.weight.data = low.weight.data @ torch.eye(2)
        low.b = low.weight.data @ torch.eye(2)
        low.weight.grad = torch.softmax(low.weight.data, 0)
    assert low.weight.dtype is BF16 and low.b.dtype is BF16 and low.weight.grad.dtype is BF16


def test_following_a_low_result_asks_for_nothing() -> None:
    with hmpx.convert(device_types={"cpu"}):
        made = product()
        torch.zeros_like(made), made.new_zeros(2), torch.ones(4, 4).to(made), made.cpu()
        query = product()[:, None]
        mask = torch.zeros(4, 4, dtype=torch.bool)
        nn.MultiheadAttention(4, 2)(query, query, query, attn_mask=mask)
        assert nn.Parameter(product()).dtype is FP32


@pytest.mark.parametrize(
    "same",
    [
        lambda y: y.to(y.dtype),
        lambda y: y.to(device="cpu", dtype=None),
        lambda y: torch.zeros_like(y, dtype=None) + y,
    ],
)
def test_to_keep_the_dtype_asks_for_nothing(same: Callable[[Tensor], Tensor]) -> None:
    """Code for any dtype says so."""
    with hmpx.convert(device_types={"cpu"}):
        assert nn.Parameter(same(product())).dtype is FP32


@pytest.mark.parametrize(
    "follow",
    [
        lambda y: torch.ones(4) * y.float().to(y.dtype),
        lambda y: torch.zeros(4, 4, dtype=y.dtype),
        lambda y: torch.ones(4, 4).type(y.dtype),
        lambda y: nn.Linear(4, 4, dtype=y.dtype),
    ],
)
def test_a_dtype_that_is_read_from_a_result_asks_for_no_other_value(
    follow: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is upcast that the program names a low dtype for, and nothing else is left low."""
    with hmpx.convert(device_types={"cpu"}):
        y = product()
        monkeypatch.setattr(values, "gc", types.SimpleNamespace(get_objects=lambda: [y]))
        kept = follow(y)
        assert nn.Parameter(product()).dtype is FP32
        if isinstance(kept, Tensor) and kept.dtype is BF16:
            assert nn.Parameter(kept).dtype is BF16
        assert nn.Parameter(product()).dtype is FP32
        y.float().bfloat16()
        with pytest.warns(hmpx.HmpxWarning, match="a parameter is bf16"):
            assert nn.Parameter(product()).dtype is BF16


@pytest.mark.parametrize(
    "load",
    [
        lambda: torch.zeros(4, dtype=torch.int16).view(BF16),
        lambda: torch.frombuffer(bytearray(8), dtype=torch.uint8)[2:6].view(BF16),
        lambda: torch.asarray(torch.UntypedStorage(8), dtype=torch.uint8).view(dtype=BF16),
        lambda: torch.from_numpy(np.zeros(4, np.int16)).cpu().view(BF16),
        lambda: torch.from_dlpack(torch.zeros(4, dtype=BF16)),
    ],
)
def test_memory_that_is_read_as_a_low_dtype_stays_low(load: Callable[[], Tensor]) -> None:
    """As loaders of files read it."""
    with hmpx.convert(device_types={"cpu"}):
        assert nn.Parameter(load()).dtype is BF16


def test_a_layer_of_a_low_dtype_asks() -> None:
    with hmpx.convert(device_types={"cpu"}):
        linear = nn.Linear(2, 2, dtype=BF16)
        with pytest.warns(hmpx.HmpxWarning, match="a parameter is bf16"):
            assert nn.Parameter(linear.weight * 2).dtype is BF16


# --- functions that note requests --------------------------------------------------------------
