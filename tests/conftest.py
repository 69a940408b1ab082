"""Shared fixtures: after every test torch must be as it was before, by key and identity."""

from __future__ import annotations

import gc
import multiprocessing.spawn
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from itertools import compress
from operator import is_not
from typing import Any
from zlib import crc32

import numpy
import pytest
import torch
import torch._dynamo
import torch._inductor  # both replace attributes of torch when they are first imported

import hmpx
from hmpx import ops
from hmpx.casting import retiring
from hmpx.compute import capabilities as capability
from hmpx.ops.sites import NAMESPACES
from hmpx.patches import early_names, values
from hmpx.session import switching

from . import fake_cuda
from .samples import is_drawn
from .speeds import Capability, known_as, measured_by


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--whole``."""
    parser.addoption(
        "--whole", action="store_true", help="run every case of the tests marked sampled"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Has pytest-randomly shuffle tests, but not seed them by the run."""
    config.option.randomly_reset_seed = False


#: Files whose tests have many cases each, all alike, which take long together: one in n runs.
SAMPLED = {
    "test_about": 3,
    "test_accumulation": 8,
    "test_accuracy": 2,
    "test_activations": 2,
    "test_against_runs": 5,
    "test_attention": 2,
    "test_autocast_lists": 5,
    "test_autocast_regions": 2,
    "test_bench": 3,
    "test_buffers": 5,
    "test_call_forms": 2,
    "test_capability": 2,
    "test_casting": 4,
    "test_compare": 3,
    "test_compile": 6,
    "test_compiled": 4,
    "test_compiled_codes": 3,
    "test_copies": 8,
    "test_delayed_scaling": 5,
    "test_distributed": 2,
    "test_draws": 4,
    "test_emulated_products": 2,
    "test_emulation": 6,
    "test_expect": 4,
    "test_export": 2,
    "test_files": 2,
    "test_float8_products": 6,
    "test_following": 4,
    "test_foreign_ops": 2,
    "test_formats_in_transforms": 2,
    "test_framework_plugins": 2,
    "test_freezing": 3,
    "test_growth": 2,
    "test_inputs": 3,
    "test_interrupts": 3,
    "test_invariance": 4,
    "test_kept_parameters": 2,
    "test_kept_values": 2,
    "test_layers_in_inference": 4,
    "test_layers_in_training": 6,
    "test_legalized_nodes": 6,
    "test_legalized_ops": 8,
    "test_lint": 2,
    "test_matrix": 5,
    "test_model_state": 3,
    "test_module_paths": 8,
    "test_monitor": 2,
    "test_no_effect": 5,
    "test_nodes": 4,
    "test_numbers": 4,
    "test_onnx": 2,
    "test_opinfo_conformance": 3,
    "test_optimizers": 3,
    "test_plan": 4,
    "test_planted_faults": 4,
    "test_promotion": 2,
    "test_quantize": 5,
    "test_retrying": 2,
    "test_rules": 5,
    "test_run_report": 2,
    "test_scaled": 4,
    "test_search": 2,
    "test_torch_nn": 5,
    "test_torchao": 2,
    "test_tracing": 5,
    "test_tune": 5,
    "test_vocabulary": 4,
    "test_waits": 3,
    "test_within": 3,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps one case in n of a test marked ``sampled(n)``, or of `SAMPLED`; their names decide which.

    At least one case of each test with several runs; of marked tests without cases one in n. Where cases
    cross several parameters, one in 4n and what `crossing` adds, if that is less than one in n.
    All run with ``--whole``, and where a test is asked for by its name.
    """
    if config.getoption("whole") or any("::" in argument for argument in config.args):
        return
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[int] = set()
    for cases in families.values():
        marker = cases[0].get_closest_marker("sampled")
        n = SAMPLED.get(cases[0].path.stem, 1) if marker is None else marker.args[0]
        cases.sort(key=lambda case: crc32(case.name.encode()))
        crossed = crossing(cases)
        if n > 1 and 0 < len(crossed) <= len(cases) / n:
            n *= 4
            kept |= set(map(id, crossed))
        elif marker is None or "[" in cases[0].name:
            kept.add(id(cases[0]))
        kept |= {id(case) for case in cases if is_drawn(case.name, n)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def crossing(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Returns cases in which each value of each `parametrize` occurs, of a test that has several."""
    values = {
        case: set(enumerate(case.callspec._idlist)) for case in cases if hasattr(case, "callspec")
    }
    several = max(map(len, values.values()), default=0)
    if several < 2:
        return []
    seen: set[tuple[int, str]] = set()
    found = []
    for new in range(several, 0, -1):  # those first in which all values are new
        for case, its in values.items():
            if len(its - seen) >= new:
                seen |= its
                found.append(case)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Gives each test random numbers of its own, the same ones in every run and in whatever order."""
    leave_out_of_collections()
    seed_all(item.nodeid)


#: How many modules were loaded when collections of garbage last left out what is there.
_loaded = [0]


def leave_out_of_collections() -> None:
    """Has collections of garbage leave out what tests have imported meanwhile, such as a compiler."""
    if len(sys.modules) > _loaded[0] + 100:
        gc.collect()
        gc.freeze()
        _loaded[0] = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
    """Does so for a fixture that several tests share, whichever of them is the first."""
    if fixturedef.scope == "function":
        return (yield)
    numbers, torch_numbers = random.getstate(), torch.get_rng_state()
    seed_all(f"{fixturedef.baseid}::{fixturedef.argname}")
    try:
        return (yield)
    finally:
        random.setstate(numbers)
        torch.set_rng_state(torch_numbers)


def seed_all(name: str) -> None:
    """Seeds what tests draw random numbers from by ``name``."""
    seed = crc32(name.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


class _Later:
    """`sys.modules` without those of ``passed_over``."""

    def __init__(self, passed_over: dict[str, types.ModuleType]) -> None:
        self._passed_over = passed_over

    def items(self) -> list[tuple[str, types.ModuleType]]:
        loaded = sys.modules.copy()
        passed_over = map(self._passed_over.get, loaded)
        return [*compress(loaded.items(), map(is_not, passed_over, loaded.values()))]


def pass_over_modules_without_torch() -> None:
    """Has conversions pass over the modules imported so far that keep no function of torch.

    These are all but a few of the thousands that the tests import, and a conversion would spend a third
    of its time on looking for early names there.
    """
    sites = [site for op in ops.table().values() for site in op.sites]
    functions = {
        id(function): function
        for function in [getattr(site.owner, site.attribute) for site in sites]
    }
    searched = {
        name
        for name, module in early_names._modules().items()
        if next(early_names.in_module(module, functions, set()), None) is not None
    }
    idle = {name: module for name, module in sys.modules.items() if name not in searched}
    early_names.sys = types.SimpleNamespace(
        modules=_Later(idle), stdlib_module_names=sys.stdlib_module_names
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Has collections of garbage leave out the million objects that importing the tests makes."""
    gc.disable()
    try:
        return (yield)
    finally:
        pass_over_modules_without_torch()
        gc.enable()
        gc.freeze()
        gc.set_threshold(200_000, 20, 100)


# Else each process that compiles tries the compiler on vector instructions, in processes of its own
# that import torch: seconds each. The variable is for the processes that tests start. Beside a CPU
# capability that is set, inductor would write code for one instruction set and compile it for another.
if "ATEN_CPU_CAPABILITY" not in os.environ:
    torch._inductor.config.cpp.vec_isa_ok = (
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1") == "1"
    )
torch.set_num_threads(1)  # tests run in parallel processes
retiring._MOST = 20_000  # type: ignore[misc]  # else tests with many policies make the same wrappers again and again
# Else each `torch.manual_seed` keeps the text of the whole stack for every kind of device that is not in
# use, which takes a millisecond.
for _device_module in (torch.cuda, torch.xpu, torch.mtia):
    if hasattr(_device_module, "traceback"):
        _device_module.traceback = types.SimpleNamespace(format_stack=list)
torch.set_warn_always(True)  # else a warning fails the test that happens to be first


#: Slots that Python itself fills: by a warning, by pickling.
_CACHES = {"__warningregistry__", "__slotnames__"}


def namespaces() -> dict[str, dict[str, object]]:
    """Returns a copy of ``vars()`` of every namespace that hmpx may patch."""
    return {name: dict(vars(owner)) for name, owner in NAMESPACES.items()}


def differences(before: dict[str, dict[str, object]]) -> list[str]:
    """Returns the slots whose presence or identity differs from ``before``."""
    return [
        f"{name}.{key}"
        for name, now in namespaces().items()
        for key in (before[name].keys() | now.keys()) - _CACHES
        if before[name].get(key, differences) is not now.get(key, differences)
        and not isinstance(now.get(key), types.ModuleType)  # a submodule imported meanwhile
    ]


@pytest.fixture(autouse=True)
def native_where_marked(request: pytest.FixtureRequest) -> None:
    """Takes `has_low_precision` in tests marked ``native``."""
    if request.node.get_closest_marker("native") is not None:
        request.getfixturevalue("has_low_precision")


@pytest.fixture(autouse=True)
def low_parameters_are_hidden() -> Iterator[None]:
    """Hides those of other tests, which say that the program asked for low precision.

    By a patch of its own, so that those of tests are undone before `torch_is_left_untouched` looks.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "gc", types.SimpleNamespace(get_objects=list))
        yield


@pytest.fixture(autouse=True)
def torch_is_left_untouched() -> Iterator[None]:
    """Reverts after each test, then compares every patched namespace by key and identity."""
    before = namespaces()
    yield
    hmpx.revert()
    changed = differences(before)
    assert not changed, f"left patched: {changed}"
    assert not hmpx.torch_state.is_off()
    switch = hmpx.torch_state.switch
    open_ = opened()
    left = [
        {name: getattr(region, name, None) for name in getattr(region, "__slots__", ())}
        for region in open_
    ]
    for region in open_:  # so that the tests to come do not fail for this one
        switch.open_regions.pop(region, None)
    assert not left, f"regions were not left: {left}; threads: {threading.enumerate()}"
    assert not torch.is_autocast_enabled("maia")
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0, "a region of torch.autocast was not left"
    assert not hasattr(multiprocessing.spawn.get_preparation_data, "__hmpx__")


def opened() -> list[object]:
    """Returns the regions that are open, but for those in graphs."""
    switch = hmpx.torch_state.switch
    return [each for each in switch.open_regions if each != switch.IN_GRAPHS]


def forget_regions_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has calls not look closer because other tests have traced regions, until the test ends."""
    switch = hmpx.torch_state.switch
    monkeypatch.setitem(switch.open_regions, switch.IN_GRAPHS, None)
    monkeypatch.delitem(switch.open_regions, switch.IN_GRAPHS)


#: The wrappers of tests in which every device is fast, which they share; and of those in which each is slow.
_FAST: dict[object, object] = {}
_SLOW: dict[object, object] = {}


def wrappers_from(shared: dict[object, object], patches: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes wrappers from ``shared``, and neither the last session left nor regions in graphs.

    The session has other wrappers, and for such regions wrappers look closer at each call.
    """
    patches.setattr(retiring, "_shared", shared)
    forget_regions_in_graphs(patches)
    switching.forget_left()
    yield
    switching.forget_left()


@pytest.fixture
def fresh_wrappers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shares no wrappers with other tests: wrappers know for good which devices are fast."""
    yield from wrappers_from({}, monkeypatch)


@pytest.fixture
def has_low_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every device compute fast in low precision, so that the default legalizes nothing."""
    fast = Capability(reported=True, inference=1.0, training=1.0)
    monkeypatch.setattr(retiring, "_shared", _FAST)
    known_as(monkeypatch, lambda *question: fast)


def slowly(*question: object) -> Capability:
    """Answers as the devices of `lacks_low_precision`."""
    return Capability(reported=False, inference=50.0, training=50.0)


@pytest.fixture
def lacks_low_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has every device compute slowly in low precision, whatever this machine does."""
    known_as(monkeypatch, slowly)
    yield from wrappers_from(_SLOW, monkeypatch)


@pytest.fixture
def slow_machine(fresh_wrappers: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has measurements find every op slow in low precision, so that the default legalizes all."""
    slow = Capability(reported=None, inference=9.0, training=9.0)
    capability.forget()
    measured_by(monkeypatch, lambda *question: slow)
    yield
    capability.forget()


@pytest.fixture
def no_search_for_early_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds conversions up where no call uses a function taken from torch before, or kept after."""
    monkeypatch.setattr("hmpx.session.session.early_name_patches", lambda replacements: iter(()))
    monkeypatch.setattr(
        "hmpx.session.switching.taken_name_patches", lambda draft, wrappers: iter(())
    )


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Has a test compile anew, and leaves no compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def on_fake_cuda(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that has a fake CUDA device; see `fake_cuda.call`."""
    reason = fake_cuda.missing()
    if reason is not None:
        pytest.skip(reason)
    cache = getattr(pytestconfig, "cache", None)  # -p no:cacheprovider leaves none
    folder = cache.mkdir("fake_cuda") if cache else tmp_path_factory.mktemp("fake_cuda")
    guard = fake_cuda.build_once(folder)
    with fake_cuda.serving(guard) as call:
        yield call
