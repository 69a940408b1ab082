"""`convert(within=module)`: casts only inside of a module's forward."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import multiprocessing
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx import OptionError
from hmpx.integrations import spawning
from tests.casting.test_one_forward import INFOS
from tests.observers.test_matrix import called, outcome
from tests.samples import sample_inputs, spread
from tests.values import same_or_nan

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
CPU: dict[str, Any] = {"device_types": {"cpu"}, "legalize": "never"}


class Block(nn.Module):
    """Notes the dtype of each of its results."""

    def __init__(self, *, is_again: bool = False, breaks: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.is_again, self.breaks = is_again, breaks
        self.dtypes: list[torch.dtype] = []

    def inner(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(x)
        self.dtypes.append(result.dtype)
        return result.sin()  # for whose backward a checkpoint repeats all of it

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return checkpoint(self.inner, x, use_reentrant=False) if self.is_again else self.inner(x)


def pair(**options: bool) -> tuple[Block, Block]:
    torch.manual_seed(0)
    return Block(**options), Block(**options)


def everywhere(model: nn.Module) -> Tensor:
    """Returns the result of a model in low precision."""
    with hmpx.convert(**CPU):
        return model(X).float()


def test_only_the_module_is_cast() -> None:
    """Its result is fp32, as the program around it expects; other calls have torch's bits."""
    ours, theirs = pair()
    expected, plain = everywhere(ours), theirs(X)
    with hmpx.convert(**CPU, within=ours):
        assert not hmpx.casts_enabled()
        result = ours(X)
        assert ours.dtypes[-1] is torch.bfloat16
        assert result.dtype is torch.float32
        assert torch.equal(result, expected)
        assert torch.equal(theirs(X), plain)
        assert (X @ X.t()).dtype is torch.float32
        with hmpx.disable_casts():
            assert ours(X).dtype is ours.dtypes[-1] is torch.float32
    assert ours(X).dtype is ours.dtypes[-1] is torch.float32


def test_in_another_model_and_in_training() -> None:
    ours, theirs = pair()
    whole = nn.Sequential(theirs, ours, nn.Linear(8, 2))
    with hmpx.convert(**CPU, within=ours):
        whole(X).square().sum().backward()
    assert (theirs.dtypes, ours.dtypes) == ([torch.float32], [torch.bfloat16])
    assert all(each.grad is not None for each in whole.parameters())


def test_recomputations_are_inside() -> None:
    ours, theirs = pair(is_again=True)
    with hmpx.convert(**CPU, within=ours):
        (ours(X) + theirs(X)).sum().backward()
    assert ours.dtypes == [torch.bfloat16] * 2
    assert theirs.dtypes == [torch.float32] * 2


def test_a_module_that_computes_in_low_precision_itself_gives_what_it_gives() -> None:
    ours, _ = pair()
    ours.bfloat16()
    with hmpx.convert(**CPU, within=ours):
        assert ours(X.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["parallel", "compiled"])
def test_a_wrapper_stands_for_its_module(
    wrap: Callable[..., nn.Module], fresh_dynamo: None
) -> None:
    ours, _ = pair()
    wrapped = wrap(ours, **({"backend": "eager"} if wrap is torch.compile else {}))
    expected = everywhere(ours)
    with hmpx.convert(**CPU, within=wrapped):
        assert torch.equal(ours(X), expected)
        assert torch.equal(wrapped(X), expected)


@pytest.mark.filterwarnings(
    r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"
)
@pytest.mark.parametrize("breaks", [False, True])
def test_graphs_are_those_of_one_module(breaks: bool, fresh_dynamo: None) -> None:
    """Also of two modules of one class, and in either order."""
    ours, theirs = pair(breaks=breaks)
    expected, plain = everywhere(ours), theirs(X)
    with hmpx.convert(**CPU, within=ours):
        for compiled in (
            {
                "ours": torch.compile(ours, backend="eager"),
                "theirs": torch.compile(theirs, backend="eager"),
            },
        ):
            for _ in range(2):
                assert torch.equal(compiled["theirs"](X), plain)
                assert torch.equal(compiled["ours"](X), expected)


def test_a_graph_around_the_module_casts_nothing(fresh_dynamo: None) -> None:
    """Its result would be low there, where the program's is fp32."""
    ours, theirs = pair()
    whole = nn.Sequential(theirs, ours)
    plain = whole(X)
    with hmpx.convert(**CPU, within=ours):
        assert torch.equal(torch.compile(whole, backend="eager", fullgraph=True)(X), plain)


def test_exports_compute_what_the_module_does() -> None:
    ours, _ = pair()
    with hmpx.convert(**CPU, within=ours):
        expected = ours(X)
        exported = torch.export.export(ours, (X,), strict=False)
        buffer = io.BytesIO()
        torch.export.save(exported, buffer)
    result = torch.export.load(io.BytesIO(buffer.getvalue())).module()(X)
    assert result.dtype is torch.float32
    assert torch.equal(result, expected)


def test_low_results_that_escape_stop_nothing() -> None:
    """A module may keep a low result, which torch's products do not take beside fp32 weights."""

    class Keeping(Block):
        def inner(self, x: Tensor) -> Tensor:
            self.kept = super().inner(x)
            return self.kept

    torch.manual_seed(0)
    ours, theirs = Keeping(), nn.Linear(8, 2)
    with hmpx.convert(**CPU, within=ours):
        ours(X)
        assert ours.kept.dtype is torch.bfloat16
        result = theirs(ours.kept)
    expected = theirs(ours.kept.float())
    torch.testing.assert_close(result.float(), expected, rtol=2**-8, atol=2**-8)


def test_values_kept_outside_are_the_programs() -> None:
    ours, _ = pair()
    low = torch.tensor([1.0, 2.0]).to(torch.bfloat16)
    with hmpx.convert(**CPU, within=ours):
        assert nn.Parameter(low * 2).dtype is torch.bfloat16


def test_rules_and_records_work_there() -> None:
    ours, theirs = pair()
    policy = {"lists": "hmpx", "exclude": ["b"]}
    with hmpx.convert(policy=policy, **CPU, within=ours), hmpx.record() as rec:
        theirs(ours(X))
    assert ours.dtypes == [torch.float32]
    found = {(row.module, row.dtype) for row in rec.rows if row.op == "linear"}
    assert found == {("a", "bfloat16"), ("a", "float32"), ("b", "float32")}
    assert rec.report().about["within"] == "Block"


def test_explain_says_where_it_casts() -> None:
    ours, _ = pair()
    with hmpx.convert(**CPU, within=ours):
        assert "convert(within=...) casts inside of its module only" in str(hmpx.explain("linear"))


def test_other_conversions_differ_from_it_and_modules_are_not_kept_alive() -> None:
    ours, theirs = pair()
    for each, dtype in ((ours, torch.bfloat16), (theirs, torch.float32), (None, torch.bfloat16)):
        with hmpx.convert(**CPU, within=each):
            ours(X)
            assert ours.dtypes[-1] is dtype
    gone = weakref.ref(ours)
    hmpx.convert(**CPU, within=ours)
    del ours, each
    gc.collect()
    assert gone() is None
    assert theirs(X).dtype is torch.float32
    hmpx.revert()


def _work(queue: Any) -> None:
    queue.put(hmpx.is_converted())


def test_started_processes_are_not_converted(caplog: pytest.LogCaptureFixture) -> None:
    ours, _ = pair()
    context = multiprocessing.get_context("spawn")
    queue, stop = context.Queue(), spawning.follow()
    with hmpx.convert(**CPU, within=ours):
        process = context.Process(target=_work, args=(queue,))
        process.start()
        assert queue.get(timeout=120) is False
        process.join()
    stop()
    assert "convert(within=...) names a module of this one; convert there, too" in caplog.text


@pytest.mark.parametrize("wrong", [3, "model", [nn.ReLU()], nn.ReLU])
def test_a_wrong_module_is_an_error(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"within must be a torch\.nn\.Module, not"):
        hmpx.convert(within=wrong)
    assert not hmpx.is_converted()


def test_tools_convert_their_whole_model() -> None:
    ours, _ = pair()
    with pytest.raises(OptionError, match=r"hmpx\.compare has no argument 'within'"):
        hmpx.compare(ours, X, within=ours)


# --- outside -------------------------------------------------------------------------------------

IN_PLACE = [n for n in dir(Tensor) if n[0] != "_" and n[-1] == "_"]
IN_PLACE += [f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow")]


def in_place() -> dict[str, Tensor]:
    """Returns the results of the in-place calls that torch runs, on one dtype and on two."""
    low, wide = (X.abs() + 0.5).to(torch.bfloat16), X.abs() / 3 + 0.4
    found = {}
    for name in IN_PLACE:
        for target in (low, wide):
            for number, args in enumerate([(), (low,), (wide,), (low, wide), (wide, low), (0.5,)]):
                torch.manual_seed(0)
                with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
                    result = getattr(target.clone(), name)(*args)
                    if isinstance(result, Tensor):
                        found[f"{target.dtype} {name} {number}"] = result
    return found


@pytest.mark.filterwarnings("ignore")
def test_calls_outside_have_torchs_bits() -> None:
    """Each op of the low list and its gradients, and each in-place method."""
    ours, _ = pair()
    found = {
        f"{name} {number}": functools.partial(called, info, sample)
        for name, info in INFOS.items()
        for number, sample in enumerate(spread(list(sample_inputs(info, requires_grad=True)), 2))
    }
    expected, written = {name: outcome(run) for name, run in found.items()}, in_place()
    assert len(written) > 200
    with hmpx.convert(**CPU, within=ours):
        seen, now = {name: outcome(run) for name, run in found.items()}, in_place()
    assert [name for name in found if seen[name] != expected[name]] == []
    for name, result in written.items():
        same_or_nan(now[name], result)
