"""A ``*`` line in the low-precision list, in each mode of legalization: whatever torch runs, runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import pytest

from tests import forks

#: The process' own, and one that measures.
MOST_THREADS = 2


def results(arguments: Sequence[str], *, give_up_after: int) -> Any:
    """Returns what the worker prints; it does not outlive ``give_up_after`` seconds."""
    environment = dict(os.environ, GIVE_UP_AFTER=str(give_up_after), OMP_NUM_THREADS="1")
    worker = "tests.integration.everything_low_worker"
    done = forks.run("-m", worker, *arguments, env=environment, timeout=give_up_after + 60)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def check(found: Any, *, least_calls: int) -> None:
    assert found["ran"] >= least_calls
    assert found["raised"] == []
    assert found["threads"] <= MOST_THREADS


def test_every_op_runs() -> None:
    """On the first sample of each op: without an end to threads, a hang, or an error of its own."""
    check(results([], give_up_after=240), least_calls=2500)


@pytest.mark.slow
def test_every_op_runs_on_all_samples() -> None:
    """As above."""
    check(results(["--all"], give_up_after=1800), least_calls=60000)
