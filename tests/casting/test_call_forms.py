"""However a call gives its arguments, it computes the same, and whoever overrides it sees it as given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import hmpx
from hmpx import Policy

pytestmark = pytest.mark.native

BF16, FP32 = torch.bfloat16, torch.float32
Form = Callable[[Callable[..., Any], dict[str, Any]], Any]


def tensors(dtype: torch.dtype) -> dict[str, Any]:
    """Returns inputs by name; sizes fit each other."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (3, 4), "w": (4, 4), "v": (4,), "i": (1, 2, 4, 4), "k": (2, 2, 3, 3), "c": (2,)}
    made = {n: torch.randn(s, generator=generator).to(dtype) for n, s in sizes.items()}
    return made | {"m": torch.tril(torch.ones(4, 4, dtype=torch.bool))}


#: Spelling -> op, forms of one and the same call.
FORMS: dict[str, tuple[str, tuple[Form, ...]]] = {
    "linear without bias": (
        "linear",
        (
            lambda f, t: f(t["x"], t["w"]),
            lambda f, t: f(t["x"], t["w"], None),
            lambda f, t: f(t["x"], t["w"], bias=None),
            lambda f, t: f(t["x"], weight=t["w"]),
            lambda f, t: f(input=t["x"], weight=t["w"], bias=None),
        ),
    ),
    "linear": (
        "linear",
        (
            lambda f, t: f(t["x"], t["w"], t["v"]),
            lambda f, t: f(t["x"], t["w"], bias=t["v"]),
            lambda f, t: f(t["x"], bias=t["v"], weight=t["w"]),
            lambda f, t: f(bias=t["v"], input=t["x"], weight=t["w"]),
        ),
    ),
    "conv2d": (
        "conv2d",
        (
            lambda f, t: f(t["i"], t["k"], None, 1, 1, 1, 1),
            lambda f, t: f(t["i"], t["k"], None, 1, 1, 1),
            lambda f, t: f(t["i"], t["k"], None, 1, 1),
            lambda f, t: f(t["i"], t["k"], padding=1),
            lambda f, t: f(t["i"], t["k"], padding="same"),
            lambda f, t: f(t["i"], weight=t["k"], padding=1, groups=1),
            lambda f, t: f(weight=t["k"], padding=1, input=t["i"]),
        ),
    ),
    "conv2d with bias": (
        "conv2d",
        (
            lambda f, t: f(t["i"], t["k"], t["c"], 1, 1),
            lambda f, t: f(t["i"], t["k"], padding=1, bias=t["c"]),
        ),
    ),
    "layer_norm": (
        "layer_norm",
        (
            lambda f, t: f(t["x"], (4,), t["v"], t["v"], 1e-5, True),
            lambda f, t: f(t["x"], (4,), t["v"], t["v"], 1e-5),
            lambda f, t: f(t["x"], (4,), t["v"], t["v"]),
            lambda f, t: f(t["x"], (4,), t["v"], bias=t["v"], eps=1e-5),
            lambda f, t: f(t["x"], (4,), bias=t["v"], weight=t["v"]),
            lambda f, t: f(t["x"], normalized_shape=(4,), bias=t["v"], weight=t["v"]),
        ),
    ),
    "layer_norm without bias": (
        "layer_norm",
        (
            lambda f, t: f(t["x"], (4,), t["v"], None),
            lambda f, t: f(t["x"], (4,), t["v"]),
            lambda f, t: f(t["x"], (4,), weight=t["v"]),
        ),
    ),
    "softmax": (
        "softmax",
        (
            lambda f, t: f(t["x"], -1),
            lambda f, t: f(t["x"], -1, None),
            lambda f, t: f(t["x"], dim=-1),
            lambda f, t: f(t["x"], axis=-1),
            lambda f, t: f(t["x"], dim=-1, dtype=None),
            lambda f, t: f(input=t["x"], dim=-1),
        ),
    ),
    "scaled_dot_product_attention": (
        "scaled_dot_product_attention",
        (
            lambda f, t: f(t["i"], t["i"], t["i"], t["m"]),
            lambda f, t: f(t["i"], t["i"], t["i"], t["m"], 0.0, False),
            lambda f, t: f(t["i"], t["i"], t["i"], attn_mask=t["m"], dropout_p=0.0),
            lambda f, t: f(t["i"], t["i"], t["i"], is_causal=True),
            lambda f, t: f(t["i"], t["i"], value=t["i"], is_causal=True),
            lambda f, t: f(query=t["i"], key=t["i"], value=t["i"], is_causal=True),
        ),
    ),
}

#: Op -> torch's spelling of it.
SPELLED: dict[str, Callable[[], Callable[..., Any]]] = {
    "linear": lambda: F.linear,
    "conv2d": lambda: F.conv2d,
    "layer_norm": lambda: torch.layer_norm,
    "softmax": lambda: torch.softmax,
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention,
}

CASES = [(name, form) for name, (_, forms) in FORMS.items() for form in range(len(forms))]


@pytest.mark.parametrize("given", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("name", "form"), CASES)
def test_forms_compute_the_same(name: str, form: int, given: torch.dtype) -> None:
    """What torch computes on inputs cast by hand, bit by bit; with or without anything to cast.

    A norm's weights stay fp32.
    """
    op, forms = FORMS[name]
    kept = {"v": tensors(given)["v"]} if op == "layer_norm" else {}
    expected = forms[0](SPELLED[op](), tensors(BF16) | kept)
    with hmpx.convert(policy=Policy.from_ops(low=[op])):
        actual = forms[form](SPELLED[op](), tensors(given))
    assert actual.dtype is BF16
    assert torch.equal(actual, expected)


class Noting(TorchFunctionMode):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, tuple[str, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((len(args), tuple(kwargs or ())))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "form"), CASES)
def test_modes_see_a_call_as_it_was_given(name: str, form: int) -> None:
    """Those that torch's own function gives them first."""
    op, forms = FORMS[name]
    given = tensors(BF16)
    with Noting() as expected:
        forms[form](SPELLED[op](), given)
    with hmpx.convert(policy=Policy.from_ops(low=[op])), Noting() as actual:
        forms[form](SPELLED[op](), given)
    assert actual.calls[:1] == expected.calls[:1]


@pytest.mark.parametrize(
    "call",
    [
        lambda f, t: f(t["x"]),
        lambda f, t: f(t["x"], None),
        lambda f, t: f(t["x"], "w"),
        lambda f, t: f(t["x"], t["w"], None, bias=t["v"]),
        lambda f, t: f(t["x"], t["w"], scale=2),
        lambda f, t: f(t["x"], t["w"], None, None),
        lambda f, t: f(t["x"], bias=t["v"]),
    ],
    ids=["one", "none", "text", "twice", "unknown", "too many", "keyword only"],
)
def test_wrong_calls_fail_as_torch_has_them_fail(call: Form) -> None:
    t = tensors(BF16)
    with pytest.raises(TypeError) as expected:
        call(F.linear, t)
    with hmpx.convert(policy=Policy.from_ops(low=["linear"])), pytest.raises(TypeError) as actual:
        call(F.linear, t)
    assert str(actual.value) == str(expected.value)
