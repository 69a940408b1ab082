"""The fixture ``hmpx_expect`` for pytest. Imports neither hmpx nor torch before a test asks for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def hmpx_expect() -> Iterator[Callable[..., Any]]:
    """Returns a function that holds the rest of the test to a contract, like `hmpx.expect`.

    Example:
        def test_router_stays_in_fp32(hmpx_expect):
            hmpx_expect("contract.yaml")
            train_step()
    """
    import hmpx

    with contextlib.ExitStack() as block:
        yield lambda *args, **kwargs: block.enter_context(hmpx.expect(*args, **kwargs))
