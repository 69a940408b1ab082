"""Legalized ops are no less accurate than torch's low-precision kernels, on torch's OpInfo samples."""

from __future__ import annotations

import pytest
import torch

from tests.compute import accuracy
from tests.compute.accuracy import LOW, Outcome, Tally, compare, compared, ulps
from tests.integration.test_opinfo_conformance import INFOS

MODES = ("always", "auto")
FP32, FP64 = torch.float32, torch.float64

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.opinfo,
    pytest.mark.usefixtures("slow_machine", "no_search_for_early_names"),
]


def tallies(*, few: bool) -> dict[str, Tally]:
    """Returns mode -> how all ops compare in it."""
    found = {mode: Tally() for mode in MODES}
    for mode, tally in compared(INFOS, MODES, few=few):
        found[mode].add(tally)
    return found


def check(found: dict[str, Tally], least_compared: int) -> None:
    for mode, tally in found.items():
        assert tally.raised == [], mode
        assert tally.non_finite == [], mode
        assert tally.worse == [], mode
        assert tally.compared >= least_compared
        assert tally.apart <= tally.compared // 50  # else the exact values are none


def test_results_and_gradients_are_as_near_to_float64_as_those_of_torch() -> None:
    """Within an ulp of bfloat16, on two samples of each op; finite where torch's are."""
    check(tallies(few=True), least_compared=1900)


@pytest.mark.slow
def test_results_and_gradients_of_all_samples_are_as_near_to_float64_as_those_of_torch() -> None:
    """As above, on all samples of each op."""
    check(tallies(few=False), least_compared=20000)


# --- what is measured -----------------------------------------------------------------------------


def test_ulps() -> None:
    """By the exact value's binade; near zero by the share of the greatest."""
    exact = torch.tensor([1.0, 1.5, 2.0, -4.0, 1e-6], dtype=FP64)
    off = torch.tensor([2.0**-7, 2.0**-7, 2.0**-6, 2.0**-6, 2.0**-15], dtype=FP64)
    found = ulps(exact + off, exact)
    assert found.tolist() == pytest.approx([1, 1, 1, 0.5, 1])


def outcomes(legalized: float, native: float, wide: float) -> Tally:
    """Returns how an op compares whose exact value is 1."""
    low = [Outcome((torch.tensor([value]).to(LOW),)) for value in (legalized, native)]
    reference = (Outcome((torch.tensor([wide]),)), Outcome((torch.ones(1, dtype=FP64),)))
    return compare("op", *low, *reference)


def test_what_is_worse() -> None:
    """More than an ulp further off than torch's kernel, where fp32 gives the exact value."""
    ulp = 2.0**-7
    assert outcomes(1, 1, 1) == Tally(compared=1)
    assert outcomes(1 + ulp, 1, 1) == Tally(compared=1)
    assert outcomes(1 + 2 * ulp, 1, 1) == Tally(compared=1, worse=["op, tensor 0: 2.00"])
    assert outcomes(1 + 3 * ulp, 1 - 2 * ulp, 1) == Tally(compared=1)
    assert outcomes(1 + 2 * ulp, 1, 1.01) == Tally(apart=1)
    assert outcomes(float("nan"), 1, 1) == Tally(apart=1, non_finite=["op, tensor 0"])
    assert outcomes(float("nan"), float("inf"), 1) == Tally(apart=1)


def test_what_is_compared_where_torch_has_no_kernel() -> None:
    """That it runs, and is right at all."""
    exact, wide = Outcome((torch.ones(1, dtype=FP64),)), Outcome((torch.ones(1),))
    missing = Outcome(error="NotImplementedError: op")
    near, far = (Outcome((torch.tensor([value]).to(LOW),)) for value in (1.03, 0.0))
    assert compare("op", near, missing, wide, exact) == Tally(compared=1, without_native=1)
    assert compare("op", far, missing, wide, exact).worse == ["op, tensor 0: 16.00"]
    assert compare("op", missing, missing, wide, exact) == Tally(without_native=1)
    other = Outcome(error="AttributeError: op")
    assert compare("op", other, missing, wide, exact).raised == ["op: AttributeError: op"]
    assert compare("op", other, near, wide, exact).raised == ["op: AttributeError: op"]
    assert compare("op", other, missing, other, exact) == Tally()


def test_a_call_is_given_what_bfloat16_represents() -> None:
    """In each dtype the same numbers, gradients included."""
    call = (torch.tensor([1 / 3], requires_grad=True), (), {})
    found = [
        accuracy.run(lambda a, args, kwargs: a * 2, call, dtype=dtype)
        for dtype in (LOW, FP32, FP64)
    ]
    for dtype, outcome in zip((LOW, FP32, FP64), found, strict=True):
        for tensor, expected in zip(outcome.found, found[0].found, strict=True):
            assert tensor is not None
            assert expected is not None
            assert tensor.dtype is dtype
            assert tensor.double().equal(expected.double())
