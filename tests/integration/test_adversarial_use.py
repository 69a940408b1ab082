"""What an outsider tried: the first part are faults found, the second what held and is worth keeping."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import io
import itertools
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from hmpx import formats

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def casts() -> bool:
    """Whether torch really casts here and now."""
    return torch.mm(X, X).dtype is torch.bfloat16


def star(tmp_path: Path) -> tuple[str, str]:
    """Returns a low list that holds every op, and an empty fp32 list."""
    (tmp_path / "star.txt").write_text("*\n")
    (tmp_path / "none.txt").write_text("")
    return str(tmp_path / "star.txt"), str(tmp_path / "none.txt")


@contextlib.contextmanager
def interrupted(line: int, only: Callable[[types.CodeType], bool]) -> Iterator[list[int]]:
    """Raises KeyboardInterrupt at the ``line``-th line that runs in code that ``only`` holds for."""
    ran = [0]

    def local(frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            ran[0] += 1
            if ran[0] == line:
                raise KeyboardInterrupt
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: local if only(frame.f_code) else None)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield ran
    finally:
        sys.settrace(before)


# --- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_sessions_left_in_any_order_leave_torch_unpatched(order: tuple[int, ...]) -> None:
    sessions = [
        hmpx.convert().__enter__(),
        hmpx.convert(opt_level="O2").__enter__(),
        hmpx.convert(low_precision_type=torch.float16).__enter__(),
    ]
    for index in order:
        sessions[index].__exit__(None, None, None)
    assert not hmpx.is_converted()


def test_overlapping_with_blocks_of_two_tasks_leave_torch_unpatched() -> None:
    async def first() -> None:
        with hmpx.convert():
            await asyncio.sleep(0.05)

    async def second() -> None:
        await asyncio.sleep(0.02)
        with hmpx.convert(opt_level="O2"):
            await asyncio.sleep(0.1)

    async def both() -> None:
        await asyncio.gather(first(), second())

    asyncio.run(both())
    assert not hmpx.is_converted()
    assert not casts()


def test_a_task_that_outlives_the_block_it_was_made_in_agrees_with_torch() -> None:
    hmpx.convert()

    async def child(over: asyncio.Event) -> tuple[bool, bool]:
        await over.wait()
        return casts(), hmpx.casts_enabled()

    async def main() -> tuple[bool, bool]:
        over = asyncio.Event()
        with hmpx.disable_casts():
            task = asyncio.create_task(child(over))
            await asyncio.sleep(0)
        over.set()
        return await task

    really, said = asyncio.run(main())
    assert really == said


def test_whether_such_a_task_casts_does_not_depend_on_blocks_elsewhere() -> None:
    hmpx.convert()
    opened, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with hmpx.disable_casts():
            opened.set()
            done.wait(20)

    async def child(over: asyncio.Event) -> list[bool]:
        await over.wait()
        seen = [casts()]
        thread = threading.Thread(target=elsewhere)
        thread.start()
        opened.wait(20)
        seen.append(casts())
        done.set()
        thread.join()
        return seen

    async def main() -> list[bool]:
        over = asyncio.Event()
        with hmpx.disable_casts():
            task = asyncio.create_task(child(over))
            await asyncio.sleep(0)
        over.set()
        return await task

    alone, beside = asyncio.run(main())
    assert alone == beside


def test_a_task_made_in_a_block_does_not_switch_off_its_thread_for_good() -> None:
    hmpx.convert()

    async def child() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        with hmpx.disable_casts():
            pass

    async def main() -> None:
        with hmpx.disable_casts():
            task = asyncio.create_task(child())
            await asyncio.sleep(0)
        await task

    try:
        asyncio.run(main())
        assert hmpx.casts_enabled()
        with torch.autocast("cuda", enabled=False):  # any region makes hmpx look closer
            assert casts()
    finally:
        torch.set_autocast_enabled("maia", False)


def test_everything_low_leaves_the_weights_of_a_deep_copy_as_they_are(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with hmpx.convert(*star(tmp_path)):
        copied = copy.deepcopy(model)
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
        averaged = torch.optim.swa_utils.AveragedModel(model)
    assert copied.weight.dtype is torch.float32
    assert torch.equal(copied.weight, model.weight)
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}
    assert {p.dtype for p in averaged.parameters()} == {torch.float32}


def test_everything_low_leaves_the_state_of_an_optimizer_in_fp32(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(4))
    with hmpx.convert(*star(tmp_path)):
        optimizer = torch.optim.Adagrad([weight])
    assert optimizer.state[weight]["sum"].dtype is torch.float32


def test_an_interrupt_in_convert_leaves_the_collector_on() -> None:
    off = []
    for line in range(1, 12):
        with interrupted(line, lambda code: code.co_name == "paused_gc"):
            hmpx.convert()
        if not gc.isenabled():
            gc.enable()
            off.append(line)
        hmpx.revert()
    assert not off


def test_an_interrupted_undo_can_be_done_again() -> None:
    hmpx.convert()
    stuck = []
    for line in range(1, 10_000, 5):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
        frozen = hmpx.freeze(model, X)
        with interrupted(line, lambda code: "hmpx" in Path(code.co_filename).parts) as ran:
            frozen.undo()
        ended = ran[0] < line
        frozen.undo()
        try:
            model.train()
        except hmpx.FreezeError as error:
            stuck.append((line, str(error)))
        if ended:
            break
    assert not stuck


class _NoNames(types.ModuleType):
    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("no names here")


class _NoAttributes(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} here")


@pytest.mark.parametrize("kind", [_NoNames, _NoAttributes])
def test_a_module_that_shows_no_names_does_not_keep_torch_from_being_converted(
    kind: type[types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "an_odd_module", kind("an_odd_module"))
    hmpx.convert()
    assert casts()


def test_the_log_follows_stdout() -> None:
    logger = logging.getLogger("hmpx")
    before, root = list(logger.handlers), logging.getLogger()
    kept, root.handlers, logger.handlers = root.handlers, [], []
    try:
        first, second, errors = io.StringIO(), io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(first):
            hmpx.convert(isVerbose=True)
        first.close()  # as a notebook's cell, or a test's capture, ends
        with contextlib.redirect_stdout(second), contextlib.redirect_stderr(errors):
            torch.mm(X, X)
    finally:
        root.handlers, logger.handlers = kept, before
    assert "Logging error" not in errors.getvalue()
    assert "casting" in second.getvalue()


# --- what held ----------------------------------------------------------------------------------


@pytest.mark.parametrize("statistics", [torch.float32, torch.float64, torch.bfloat16, None])
@pytest.mark.parametrize("legalize", ["never", "always", "auto", "fast"])
def test_running_statistics_of_any_dtype_are_those_of_torch(
    statistics: torch.dtype | None, legalize: str, tmp_path: Path
) -> None:
    def run(dtype: torch.dtype, given: torch.dtype) -> tuple[torch.Tensor, ...] | None:
        norm = nn.BatchNorm1d(4, momentum=None).to(dtype)
        if statistics is not None:
            norm.running_mean = norm.running_mean.to(statistics)
            norm.running_var = norm.running_var.to(statistics)
        mean = norm.running_mean
        x = torch.arange(48.0).reshape(4, 4, 3).sin().to(given)
        try:
            for _ in range(3):
                norm(x)
        except RuntimeError:
            return None
        assert norm.running_mean is mean
        return norm.running_mean, norm.running_var, norm.num_batches_tracked

    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    plain = {pair: run(*pair) for pair in itertools.product(dtypes, dtypes)}
    with hmpx.convert(*star(tmp_path), legalize=legalize):
        cast = {pair: run(*pair) for pair in plain}
    for pair, expected in plain.items():
        if expected is not None:
            found = cast[pair]
            assert found is not None
            for a, b in zip(found, expected, strict=True):
                assert a.dtype is b.dtype
                torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


def test_somebody_elses_patch_between_two_conversions_stays_and_torch_is_uncast() -> None:
    builtin = torch.mm
    hmpx.convert()
    beneath = torch.mm

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return beneath(*args, **kwargs)

    torch.mm = theirs
    try:
        with pytest.warns(hmpx.HmpxWarning, match="somebody else"):
            hmpx.convert(opt_level="O2")
        hmpx.revert()
        assert torch.mm is theirs
        assert torch.mm(X, X).dtype is torch.float32
    finally:
        torch.mm = builtin


def test_a_rule_that_reverts_or_converts_does_not_hang() -> None:
    hmpx.convert()

    @hmpx.register_rule("mm")
    def reverting(call: hmpx.Call) -> hmpx.CastPolicy:
        hmpx.revert()
        return hmpx.ALLOW

    try:
        torch.mm(X, X)
        assert not hmpx.is_converted()
        assert not casts()
    finally:
        hmpx.unregister_rule("mm")


def test_a_rule_of_every_op_may_use_torch_itself() -> None:
    hmpx.convert()
    asking = hmpx.register_rule("*", lambda call: torch.mm(X, X) and None)
    del asking
    try:
        hmpx.unregister_rule("*")
        assert casts()
    finally:
        with contextlib.suppress(hmpx.HmpxError):
            hmpx.unregister_rule("*")


def test_a_finalizer_that_reverts_leaves_all_in_agreement() -> None:
    class Ends:
        def __del__(self) -> None:
            hmpx.revert()

    hmpx.convert()
    cycle = Ends()
    cycle.itself = cycle  # type: ignore[attr-defined]
    del cycle
    hmpx.convert(opt_level="O2")
    gc.collect()
    assert casts() == hmpx.casts_enabled()


@pytest.mark.parametrize("method", ["__iter__", "__getitem__", "__setitem__", "items", "values"])
def test_a_table_that_raises_is_no_obstacle(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise RuntimeError(method)

    module: Any = types.ModuleType("an_odd_module")
    module.table = type("Table", (dict,), {method: refuse})(a=torch.mm)
    module.direct = mm = torch.mm
    monkeypatch.setitem(sys.modules, "an_odd_module", module)
    hmpx.convert()
    assert module.direct is torch.mm is not mm
    hmpx.revert()
    assert module.direct is torch.mm is mm


@pytest.mark.parametrize("mode", ["always", "fast"])
@pytest.mark.parametrize("name", ["norm", "cdist", "pow", "sdpa", "log_softmax"])
def test_gradients_at_the_edges_are_finite_where_those_of_torch_are(
    name: str, mode: str, tmp_path: Path
) -> None:
    zeros = torch.cat([torch.zeros(2, 5), torch.ones(1, 5)])
    masked = torch.tensor([[False] * 5] + [[True] * 5] * 4)
    call: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
        "norm": (lambda t: torch.linalg.vector_norm(t, dim=1), zeros),
        "cdist": (lambda t: torch.cdist(t, t), torch.ones(3, 5)),
        "pow": (lambda t: t**0.5, torch.tensor([0.0, 1e-38, 1.0])),
        "sdpa": (
            lambda t: F.scaled_dot_product_attention(t, t, t, attn_mask=masked),
            torch.ones(1, 1, 5, 8),
        ),
        "log_softmax": (lambda t: F.log_softmax(t, 1), torch.tensor([[-torch.inf, 0.0, 1.0]])),
    }
    function, value = call[name]

    def gradient(legalize: str) -> torch.Tensor:
        x = value.clone().requires_grad_()
        with hmpx.convert(*star(tmp_path), legalize=legalize):
            y = function(x)
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    native = gradient("never")
    assert not (~gradient(mode).isfinite() & native.isfinite()).any()


def test_undo_gives_back_nans_signed_zeros_and_subnormals() -> None:
    hmpx.convert()
    model = nn.Linear(4, 4).eval()
    with torch.no_grad():
        model.weight[0] = torch.tensor([torch.nan, -0.0, torch.inf, 1e-45])
        model.weight.view(torch.int32)[1, 0] = 0x7F800001  # a signalling NaN
    bits = model.weight.detach().view(torch.int32).clone()
    hmpx.freeze(model, X).undo()
    assert torch.equal(model.weight.detach().view(torch.int32), bits)


def test_a_second_undo_does_not_drop_what_was_trained_since() -> None:
    hmpx.convert()
    model = nn.Linear(4, 4).eval()
    frozen = hmpx.freeze(model, X)
    frozen.undo()
    with torch.no_grad():
        model.weight.fill_(7.0)
    frozen.undo()
    assert (model.weight == 7.0).all()


@pytest.mark.parametrize("value", [None, -1, 1.5, "x" * 10**5, b"x", [], {1: 2}, object(), torch])
def test_formats_refuse_nonsense_with_errors_of_their_own(value: Any) -> None:
    for call in (
        lambda: formats.quantize(X, value),
        lambda: formats.decode(X, value),
        lambda: formats.register(value),
        lambda: formats.Float("n", value, value),
        lambda: formats.Block("n", value, 16),
        lambda: formats.register_op(value, "add", "posit16_1"),
    ):
        with pytest.raises((hmpx.HmpxError, TypeError)):
            call()
