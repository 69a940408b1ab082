"""Legalized ops are no less accurate than torch's low-precision kernels, on torch's OpInfo samples."""

from __future__ import annotations

import pytest

from tests.compute.accuracy import Tally, compared
from tests.integration.test_opinfo_conformance import INFOS

MODES = ("always", "auto")

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
