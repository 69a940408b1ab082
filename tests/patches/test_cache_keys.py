"""What torch.compile caches on disk is kept apart by all that decides what calls give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hmpx
from hmpx import formats
from hmpx.casting import Options
from hmpx.patches import compiled
from tests import forks

pytestmark = pytest.mark.usefixtures("no_search_for_early_names")

BASE: dict[str, Any] = {"device_types": {"cpu"}, "low_precision_type": "float8_e4m3fn"}

MODULE = torch.nn.Linear(2, 2)

#: Each changes one thing that decides; options by their names.
CHANGES: dict[str, dict[str, Any]] = {
    "policy": {"policy": {"low": ["linear"]}, "low_precision_type": None},
    "low_precision_type": {"low_precision_type": "float8_e5m2"},
    "device_types": {"device_types": {"cpu", "cuda"}},
    "legalize": {"legalize": "never"},
    "keep_weight_casts": {"keep_weight_casts": True},
    "rounding": {"rounding": "toward_zero"},
    "overflow": {"overflow": "saturate"},
    "round_gradients": {"round_gradients": True},
    "hardware": {"hardware": "never"},
    "within": {"within": MODULE},
}


def key(**options: Any) -> str:
    """Returns the part of a cache's key that is a conversion's."""
    given = {name: value for name, value in {**BASE, **options}.items() if value is not None}
    with hmpx.convert(**given):
        assert compiled._tag is not None
        return compiled._tag()


@pytest.fixture
def own_format() -> Iterator[Callable[..., Any]]:
    """A number format of the user's, and functions that compute in it."""
    formats.register(formats.Posit("own", 8, 0))
    yield formats.register_op
    formats.unregister("own")


def test_each_setting_has_its_own_key() -> None:
    """Equal conversions share a key, and no two others do."""
    assert {field.name for field in dataclasses.fields(Options)} <= CHANGES.keys()
    keys = [key(), *[key(**change) for change in CHANGES.values()]]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_functions_have_keys_of_their_own(own_format: Callable[..., Any]) -> None:
    """Other processes may have others under the same names: a rule, an op computed otherwise, a format."""
    keys = [key(low_precision_type="own")]
    own_format(lambda x, w, b=None: x, "linear", "own")
    keys.append(key(low_precision_type="own"))
    own_format(lambda x, w, b=None: w, "linear", "own")
    keys.append(key(low_precision_type="own"))
    hmpx.register_rule("linear", lambda call: hmpx.FOLLOW)
    try:
        keys.append(key(low_precision_type="own"))
    finally:
        hmpx.unregister_rule("linear")
    assert len(set(keys)) == len(keys)


def test_processes_share_keys() -> None:
    """Equal conversions of other processes are served what this one compiled."""
    script = (
        "import hmpx\nfrom hmpx.patches import compiled\n"
        f"with hmpx.convert(**{BASE!r}): print(compiled._tag())\n"
    )
    done = forks.run("-W", "ignore::DeprecationWarning", "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == key()
