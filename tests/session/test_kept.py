"""Equal blocks one after another: the conversion stays prepared, and nobody sees that."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

import hmpx
from hmpx import patching
from hmpx.session import switching as sessions
from tests import forks
from tests.conftest import differences, namespaces

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.ones(2, 2)


def block(**options: Any) -> hmpx.Session:
    return hmpx.convert(device_types={"cpu"}, **options)


def prepared(**options: Any) -> None:
    """Leaves a block that the next one can be."""
    with block(**options):
        pass
    assert is_prepared()


def is_prepared() -> bool:
    left = sessions._left
    return left is not None and left.kept is not None and left.kept.enter(patching.Draft())


def wrappers() -> list[Callable[..., Any]]:
    found = {
        id(each): each
        for names in namespaces().values()
        for each in names.values()
        if "__hmpx_site__" in getattr(each, "__dict__", {})
    }
    return list(found.values())


@pytest.fixture
def module() -> Iterator[Any]:
    made = types.ModuleType("a_module")
    sys.modules["a_module"] = made
    yield made
    del sys.modules["a_module"]


def test_an_equal_block_has_the_same_wrappers_and_torch_is_as_it_was_between() -> None:
    before = namespaces()
    policy = hmpx.Policy.from_ops(low=["linear"])
    seen: dict[int, list[Any]] = {}
    for _ in range(3):
        for at, options in enumerate(({}, {}, {"policy": policy}, {"policy": policy})):
            with block(**options):
                assert F.linear(X, X).dtype is BF16
                seen.setdefault(at, []).append(F.linear)
            assert differences(before) == []
            assert F.linear(X, X).dtype is FP32
            assert not hmpx.is_converted()
        assert seen[0][-1] is seen[1][-1]
        assert seen[2][-1] is seen[3][-1]


def test_names_that_are_taken_between_blocks_or_in_one_are_found(module: Any) -> None:
    for first, second in ((torch.bmm, F.linear), (F.linear, torch.softmax), (torch.mm, torch.bmm)):
        module.first = first
        module.functions = {"second": second}
        with block():
            assert module.first is not first
            assert module.functions["second"].__wrapped__ is second
            module.taken = torch.matmul
            module.script = torch.jit.script
        assert module.first is first
        assert module.functions["second"] is second
        assert module.taken is torch.matmul
        assert module.script is torch.jit.script
    module.taken = None


def test_what_somebody_else_puts_into_torch_between_blocks_is_wrapped() -> None:
    prepared()
    original = F.linear

    def theirs(*args: Any) -> torch.Tensor:
        return original(*args) + 1

    F.linear = theirs
    try:
        with block():
            assert torch.equal(F.linear(X, X), torch.full((2, 2), 3, dtype=BF16))
        assert F.linear is theirs
    finally:
        F.linear = original
    with pytest.warns(hmpx.HmpxWarning, match="torch.mm"), block():
        wrapped, torch.mm = torch.mm, theirs
    assert torch.mm is theirs
    torch.mm = wrapped.__wrapped__  # type: ignore[attr-defined]


def test_functions_that_a_model_keeps_are_torchs_between_blocks() -> None:
    """Taken in the first block, and dropped at last; the blocks in between only write their patches again."""
    prepared()
    with block():
        kept = torch.mm
    for number in range(3):
        assert is_prepared() is (number > 0)
        assert kept(X, X).dtype is FP32
        assert pickle.loads(pickle.dumps(kept)) is kept
        with block():
            assert torch.mm is kept
            assert kept(X, X).dtype is BF16
            assert pickle.loads(pickle.dumps(kept)) is kept
    del kept
    with block():
        assert torch.mm(X, X).dtype is BF16
    assert torch.mm(X, X).dtype is FP32


BLOCKS = """\
import hmpx, torch
from hmpx.session import switching

def main():
    with hmpx.convert(device_types={"cpu"}):
        pass
    with hmpx.convert(device_types={"cpu"}):
        kept = torch.mm
    with hmpx.convert(device_types={"cpu"}):
        pass
    held = switching._left.kept._held
    assert kept in held
    assert len(held) < 5, held  # of hmpx's own functions, some wrap wrappers

main()
"""


def test_blocks_retire_only_the_functions_that_other_code_keeps() -> None:
    """Not all of them, once a block has ended in which one was taken; in a process that nobody else uses."""
    done = forks.run("-c", BLOCKS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("at", range(0, 30, 5))
@pytest.mark.parametrize("leaves", [False, True], ids=["enter", "leave"])
def test_a_block_that_fails_halfway_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, at: int, leaves: bool
) -> None:
    """Its patches, all written at once, are taken back; leaving is repeated."""
    before = namespaces()
    prepared()
    region = block()
    if not leaves:
        region.revert()
        prepared()
    written, write = [], patching._write

    def failing_write(patch: patching.Patch, value: object) -> None:
        written.append(patch)
        if len(written) == at + 1:
            raise KeyboardInterrupt
        write(patch, value)

    monkeypatch.setattr(patching, "_write", failing_write)
    with pytest.raises(KeyboardInterrupt):
        (region.__exit__ if leaves else block)()
    monkeypatch.undo()
    assert not hmpx.is_converted()
    assert differences(before) == []
    with block():
        assert F.linear(X, X).dtype is BF16
    assert differences(before) == []


def test_modules_and_rules_that_come_between_blocks_count(module: Any) -> None:
    prepared()
    sys.modules["b_module"] = types.ModuleType("b_module")
    try:
        assert not is_prepared()
        with block():
            pass
        assert is_prepared()
    finally:
        del sys.modules["b_module"]
    hmpx.register_rule("linear", lambda call: hmpx.DENY)
    try:
        with block():
            assert F.linear(X, X).dtype is FP32
    finally:
        hmpx.unregister_rule("linear")
    with block():
        assert F.linear(X, X).dtype is BF16


@pytest.mark.usefixtures("fresh_dynamo")
def test_graphs_stay_with_the_conversion_that_they_were_traced_in() -> None:
    counter = CompileCounter()

    @torch.compile(backend=counter)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    for _ in range(2):
        with block():
            pass
    for _ in range(4):
        with block():
            assert step(X).dtype is BF16
            with hmpx.disable_casts():
                assert step(X).dtype is FP32
        assert step(X).dtype is FP32
    assert counter.frame_count == 3
    with block(policy=hmpx.Policy.from_ops(fp32=["matmul"])):
        assert step(X.bfloat16()).dtype is FP32


@pytest.mark.parametrize("argument", ["policy", "bf16_file_path", "lists"])
def test_files_that_change_between_blocks_are_read_again(argument: str, tmp_path: Path) -> None:
    """A block with the same arguments does what the file says then."""
    x = torch.randn(4, 4)
    found = []
    for op in ("linear", "mm"):
        if argument == "policy":
            given = tmp_path / "policy.yaml"
            given.write_text(f"lists: none\nlow: [{op}]\n", encoding="utf-8")
        else:
            given = tmp_path / "bf16.txt"
            given.write_text(f"{op}\n", encoding="utf-8")
            (tmp_path / "fp32.txt").write_text("softmax\n", encoding="utf-8")
        value = tmp_path if argument == "lists" else given
        with hmpx.convert(**{argument: str(value)}, device_types={"cpu"}):  # type: ignore[arg-type]
            found.append([F.linear(x, x).dtype, torch.mm(x, x).dtype])
    assert found == [[torch.bfloat16, torch.float32], [torch.float32, torch.bfloat16]]


def test_formats_that_are_registered_anew_between_blocks_count() -> None:
    """Under the name by which the arguments ask for them."""
    x = torch.randn(16, 16)
    policy = hmpx.Policy.from_ops(low=["linear"], low_precision_type="float8_e4m3fn")
    found = []
    for bits in (6, 9):
        hmpx.formats.register(hmpx.formats.Posit("of_this_test", bits=bits, es=1))
        with hmpx.convert(policy=policy, device_types={"cpu"}, round_gradients="of_this_test"):
            leaf = x.clone().requires_grad_()
            F.linear(leaf, x).backward(x)
            found.append(leaf.grad)
        hmpx.formats.unregister("of_this_test")
    assert not torch.equal(*found)
