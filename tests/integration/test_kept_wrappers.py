"""Wrappers that programs keep over ``revert``: each does what torch's own function does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hmpx
from hmpx import Policy, ops
from tests.integration.test_opinfo_conformance import INFOS, assert_same, op_name, outcome, uncalled
from tests.samples import drawn, sample_inputs
from tests.values import uniform

pytestmark = pytest.mark.filterwarnings("ignore")  # as samples of torch cause them

NAMES = sorted({name for info in INFOS if (name := op_name(info)) is not None})

CONVERSIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "low": {"policy": Policy.from_ops(low=NAMES), "legalize": "always"},
}


def wrappers() -> dict[int, Callable[..., Any]]:
    """Returns ``id`` of a function of torch's -> the wrapper in its slot."""
    found = [
        getattr(site.owner, site.attribute, None)
        for op in ops.table().values()
        for site in op.sites
        if not site.is_property
    ]
    return {id(each.__wrapped__): each for each in found if hasattr(each, "__hmpx_site__")}


def kept_over(conversion: str) -> dict[int, Callable[..., Any]]:
    """Returns the wrappers of a conversion that has been reverted."""
    with hmpx.convert(**CONVERSIONS[conversion], device_types={"cpu"}):
        return wrappers()


@pytest.mark.sampled(2)
def test_each_does_what_torchs_function_does(pytestconfig: pytest.Config) -> None:
    """On a sample of torch's own, in every spelling: results and failures."""
    kept = {name: kept_over(name) for name in CONVERSIONS}
    compared = dict.fromkeys(kept, 0)
    for info in drawn(INFOS, 8, whole=pytestconfig.getoption("whole")):
        spellings = info.op, info.method_variant, info.operator_variant, info.inplace_variant
        originals = [
            each for each in spellings if any(id(each) in found for found in kept.values())
        ]
        if not originals:
            continue
        torch.default_generator.manual_seed(0)
        sample = next(iter(sample_inputs(info)))
        call = sample.input, tuple(sample.args), sample.kwargs
        for original in originals:
            want = outcome(uncalled(original), call, backward=False)
            for name, found in kept.items():
                if (wrapper := found.get(id(original))) is not None:
                    got = outcome(uncalled(wrapper), call, backward=False)
                    assert_same(got, want, f"{name}: {vars(wrapper)['__hmpx_site__']}")
                    compared[name] += 1
    assert min(compared.values()) > 15, compared


KEPT: dict[str, Callable[[], Callable[..., Any]]] = {
    "linear": lambda: F.linear,
    "mm": lambda: torch.mm,
    "softmax": lambda: torch.softmax,
    "layer_norm": lambda: F.layer_norm,
    "div": lambda: torch.div,
}


@pytest.mark.parametrize("later", [None, {"opt_level": "O2"}], ids=["reverted", "converted"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_each_can_be_compiled(later: dict[str, Any] | None) -> None:
    """As torch's own function, or in a later conversion as what is in its slot then."""
    with hmpx.convert(device_types={"cpu"}, legalize="never"):
        kept = {name: look() for name, look in KEPT.items()}
    if later is not None:
        hmpx.convert(device_types={"cpu"}, legalize="never", **later)
    second = {"softmax": -1, "layer_norm": (4,)}
    for name, function in kept.items():
        a = uniform(4, 4)
        rest = second.get(name, a)
        compiled = torch.compile(lambda a, f=function, b=rest: f(a, b), backend="eager")
        want, actual = function(a, rest), compiled(a)
        assert actual.dtype is want.dtype, name
        torch.testing.assert_close(actual, want)
