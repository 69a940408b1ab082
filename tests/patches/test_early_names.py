"""Names taken before convert: found in loaded modules, rebound, and restored."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils._expanded_weights.expanded_weights_impl import (
    ExpandedWeight,
    expanded_weights_rnn_decomps,
)
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

import hmpx
from hmpx import Policy

POLICY = Policy.from_ops(low=["gelu", "matmul", "linear", "normalize"])
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def early() -> Iterator[Any]:
    """A user's module that took its names before convert."""
    module: Any = types.ModuleType("early_module")
    module.gelu = F.gelu
    module.normalize = F.normalize
    module.method = torch.Tensor.matmul
    module.activations = {"gelu": F.gelu, "relu": F.relu, 3: "three"}
    module.layers = [F.linear, None]
    module.product = functools.partial(torch.matmul, torch.ones(2, 2))
    module.unrelated = len
    sys.modules["early_module"] = module
    yield module
    del sys.modules["early_module"]


def test_names_dicts_lists_and_partials_are_rebound_and_restored(early: Any) -> None:
    """Each casts while converted, and is the same object as before after revert."""
    before = dict(vars(early)), dict(early.activations), list(early.layers)
    a = torch.ones(2, 2)
    calls = {
        "global": lambda: early.gelu(a),
        "python function": lambda: early.normalize(a),
        "method": lambda: early.method(a, a),
        "dict": lambda: early.activations["gelu"](a),
        "list": lambda: early.layers[0](a, a),
        "partial": lambda: early.product(a),
    }
    assert {name: call().dtype for name, call in calls.items()} == dict.fromkeys(calls, FP32)
    with hmpx.convert(policy=POLICY):
        assert {name: call().dtype for name, call in calls.items()} == dict.fromkeys(calls, BF16)
        assert early.activations["relu"] is F.relu
        assert early.unrelated is len
    assert (dict(vars(early)), dict(early.activations), list(early.layers)) == before


def test_a_name_taken_while_converted_casts_in_the_next_conversion(early: Any) -> None:
    """It is torch's function in between."""
    a, kept = torch.ones(2, 2), []
    with hmpx.convert(policy=POLICY):
        early.later = torch.matmul
        kept.append(early.later)
        assert early.later(a, a).dtype is BF16
    assert early.later is torch.matmul
    assert kept[0](a, a).dtype is FP32
    with hmpx.convert(policy=POLICY):
        assert early.later(a, a).dtype is BF16


def test_names_taken_while_converted_hold_torchs_functions_after_revert(early: Any) -> None:
    """In dicts, lists, partials and tables, too, whatever conversions came one after the other."""
    hmpx.convert(policy=POLICY)
    early.taken = torch.matmul
    early.taken_dict, early.taken_list = {"gelu": F.gelu}, [torch.matmul]
    early.taken_partial = functools.partial(torch.matmul, torch.ones(2, 2))
    early.taken_table = {torch.matmul: "matmul", F.gelu: torch.matmul}
    hmpx.convert()
    early.taken_later = torch.matmul, F.gelu  # found by nobody: it acts as torch's
    hmpx.revert()
    assert early.taken is early.taken_list[0] is torch.matmul
    assert early.taken_dict == {"gelu": F.gelu}
    assert early.taken_partial(torch.ones(2, 2)).dtype is FP32
    assert early.taken_table[torch.matmul] == "matmul"
    assert early.taken_table[F.gelu] is torch.matmul
    assert early.taken_later[0](torch.ones(2, 2), torch.ones(2, 2)).dtype is FP32


def test_sets_know_the_functions_however_they_are_called(early: Any) -> None:
    """By which a ``__torch_function__`` tells what it is handed; made before, or meanwhile."""

    class Known:
        EARLY: ClassVar[set[Any]] = {torch.matmul}

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> tuple[bool, ...]:
            return func in early.functions, func in cls.EARLY, func in early.later

    def known() -> tuple[bool, ...]:
        return torch.matmul(Known(), torch.ones(2))  # type: ignore[arg-type, return-value]

    early.Known, early.functions, early.later = Known, {torch.matmul, len, 1}, set()
    for _ in range(2):
        with hmpx.convert(policy=POLICY):
            early.later.add(torch.matmul)
            assert known() == (True, True, True)
        assert known() == (True, True, True)
        assert early.functions == {torch.matmul, len, 1}
        assert {torch.matmul} == Known.EARLY


def test_what_the_user_changed_meanwhile_stays(early: Any) -> None:
    """A name or item given another value during the conversion keeps that."""

    def mine(value: Tensor) -> Tensor:
        return value

    hmpx.convert(policy=POLICY)
    early.gelu = mine
    early.activations["gelu"] = mine
    early.layers.clear()
    hmpx.revert()
    assert early.gelu is early.activations["gelu"] is mine
    assert early.layers == []


def test_torchs_own_tables_are_left_alone() -> None:
    """torch.overrides goes on describing the functions that torch dispatches on."""
    table = torch.overrides.get_testing_overrides()
    described = list(table)
    with hmpx.convert():
        assert list(torch.overrides.get_testing_overrides()) == described
        assert torch._C._nn.avg_pool2d in table
        assert vars(torch.nn.modules.rnn)["_VF"] is torch._VF


def test_what_stays_uncast_is_listed(early: Any) -> None:
    """By its path: class attributes, defaults, closures, tables in tables; not what is rebound."""

    def outer() -> Any:
        kept = F.linear
        return lambda value: kept(value, value)

    def forward(value: Tensor, activation: Any = F.gelu, *, product: Any = torch.matmul) -> None:
        pass

    early.inner = outer()
    early.forward = forward
    early.Block = type("Block", (), {"act": staticmethod(F.gelu), "__module__": "early_module"})
    early.block = types.SimpleNamespace(act=F.gelu)
    early.tables = {"one": {"two": [F.gelu]}}
    early.pair = (F.linear, 3)
    early.tables["one"][early] = F.gelu  # a key to be shown by its type
    early.nested = functools.partial(functools.partial(print, F.gelu), 1)
    with hmpx.convert(policy=POLICY) as session:
        found = {path: f for path, f in session.missed() if path.startswith("early_module.")}
    assert found == {
        "early_module.inner<kept>": F.linear,
        "early_module.forward(activation=)": F.gelu,
        "early_module.forward(product=)": torch.matmul,
        "early_module.Block.act": F.gelu,
        "early_module.block.act": F.gelu,
        "early_module.tables['one']['two'][0]": F.gelu,
        "early_module.pair[0]": F.linear,
        "early_module.tables['one'][<module>]": F.gelu,
        "early_module.nested.args[0]": F.gelu,
    }


class Early(nn.Module):
    """Holds functions of torch in each way that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = F.gelu
        self.mixing = functools.partial(torch.fft.fftn, dim=(1, 2))
        self.steps = [F.linear, {"last": functools.partial(F.gelu, approximate="tanh")}]


@pytest.mark.parametrize("verbose", [True, "once"])
def test_models_that_keep_functions_are_listed_and_logged(
    verbose: bool | str, caplog: pytest.LogCaptureFixture
) -> None:
    """However deep they lie, wherever they are held, each class once; none is kept alive."""
    caplog.set_level("INFO", "hmpx")
    expected = {
        "Early().activation": F.gelu,
        "Early().mixing.func": torch.fft.fftn,
        "Early().steps[0]": F.linear,
        "Early().steps[1]['last'].func": F.gelu,
    }
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(Early(), Early()))))
    with hmpx.convert(policy=POLICY, isVerbose=verbose) as session:
        listed = [(p.removeprefix(f"{__name__}."), f) for p, f in session.missed()]
        found = [(path, function) for path, function in listed if path.startswith("Early()")]
        assert dict(found) == expected
        assert len(found) == len(expected)
        lines = [r.getMessage() for r in caplog.records if f"{__name__}.Early()" in r.getMessage()]
        assert lines == [
            f"not cast  {function!r}  kept since before convert() by {__name__}.{path}"
            for path, function in expected.items()
        ]
        dead = weakref.ref(model)
        del model
        gc.collect()
        assert dead() is None
        assert not any("Early()" in path for path, _ in session.missed())


@pytest.mark.parametrize("name", ["code", "statistics", "tests_of_mine"])
def test_a_module_may_be_called_as_one_of_pythons(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own modules are not looked at, by where their files lie."""
    (tmp_path / f"{name}.py").write_text("from torch.nn.functional import gelu\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    mine = importlib.import_module(name)
    assert mine.__file__ == str(tmp_path / f"{name}.py")
    monkeypatch.setitem(sys.modules, name, mine)
    with hmpx.convert(policy=POLICY):
        assert mine.gelu(torch.ones(2)).dtype is BF16
    assert mine.gelu is F.gelu


@pytest.mark.parametrize("module", [nn.Linear, functools.partial(nn.GRU, batch_first=True)])
def test_per_sample_gradients_are_those_under_autocast(module: Any) -> None:
    """Torch has the functions in tables of a class of its own, and of that class's module."""
    tables = ExpandedWeight.handled_functions, expanded_weights_rnn_decomps
    sizes = [len(table) for table in tables]
    found = []
    for region in (torch.autocast("cpu", torch.bfloat16), hmpx.convert(device_types={"cpu"})):
        torch.manual_seed(0)
        made = module(8, 4)
        with region:
            result = call_for_per_sample_grads(made)(torch.randn(5, 3, 8))
            (result if isinstance(result, Tensor) else result[0]).float().square().sum().backward()
        found.append([p.grad_sample for p in made.parameters()])
    assert [a.dtype for a in found[0]] == [a.dtype for a in found[1]]
    torch.testing.assert_close(*found)
    assert [len(table) for table in tables] == sizes
