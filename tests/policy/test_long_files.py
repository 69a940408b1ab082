"""Long files: how long they take, and how much of their faults is shown."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import hmpx
from hmpx import HmpxError, HmpxWarning, OpListError, cli, load_policy
from hmpx.policy import lists as oplists
from tests.conftest import differences, namespaces

#: What the longest input may take, of an idle processor's time.
MOST_S = 2.0


@pytest.fixture(autouse=True)
def nothing_is_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch is as it was, whatever was read."""
    monkeypatch.chdir(tmp_path)
    before = namespaces()
    yield
    assert not hmpx.is_converted()
    assert not differences(before)


def taking(call: Callable[[], object]) -> float:
    """Returns the processor time of this thread that ``call`` takes, in seconds."""
    before_s = time.thread_time()
    call()
    return time.thread_time() - before_s


@pytest.fixture(scope="module")
def slowness() -> float:
    """Returns how much slower than an idle machine's this processor is now; at least 1."""

    def count() -> None:
        names = {f"name{i}": f"a.txt:{i}" for i in range(100_000)}
        assert sum(name in names for name in list(names)) == len(names)

    return max(1.0, min(taking(count) for _ in range(5)) / 0.03)


def test_special_files_in_a_directory_of_lists_are_no_lists(tmp_path: Path) -> None:
    """They are passed over there, as any file of another name is."""
    os.mkfifo(tmp_path / "bf16.txt")
    with pytest.raises(HmpxError, match="is neither a shipped set"):
        load_policy(lists=tmp_path)


LONG_LISTS: dict[str, Callable[[int], str]] = {
    "comments": lambda n: "# a comment\n" * n,
    "blank lines": lambda n: "\n" * n,
    "one op": lambda n: "mul\n" * n,
    "one unknown name": lambda n: "matmull\n" * n,
    "unknown names": lambda n: "".join(f"unknown{i}\n" for i in range(n)),
    "unknown qualified names": lambda n: "".join(f"torch.u{i}\n" for i in range(n)),
    "one op with options": lambda n: "sum output=float32\n" * n,
    "unknown names with options": lambda n: "".join(f"u{i} output=fp32\n" for i in range(n)),
    "removals": lambda n: "@hmp\n" + "-mul\n" * n,
    "an op that comes and goes": lambda n: "mul\n-mul\n" * (n // 2),
    "everything": lambda n: "*\n" * n,
    "one long name": lambda n: "m" * 20 * n,
    "one long line": lambda n: "m " * (8 * n),
    "spaces": lambda n: " " * 20 * n,
    "dots": lambda n: "." * 20 * n,
}


@pytest.mark.parametrize("name", LONG_LISTS)
def test_fifty_thousand_lines_take_less_than_a_second(name: str, slowness: float) -> None:
    """Whatever is in them, and with messages of a few lines."""
    Path("long.txt").write_text(LONG_LISTS[name](50_000))
    messages: list[str] = []

    def load() -> None:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                load_policy("long.txt")
            messages.extend(str(warning.message) for warning in caught)
        except HmpxError as error:
            messages.append(str(error))

    assert taking(load) < slowness
    assert sum(map(len, messages)) < 10_000


def test_of_many_faults_some_are_shown_and_the_others_counted() -> None:
    """In warnings, in errors, and over all lists together."""
    Path("a.txt").write_text("".join(f"unknown{i}\n" for i in range(30)) + "mul\n" * 30)
    Path("b.txt").write_text("".join(f"unknown{i}\n" for i in range(30, 60)))
    with pytest.warns(HmpxWarning) as caught:
        load_policy("a.txt", "b.txt")
    unknown, repeated = [str(warning.message).splitlines() for warning in caught]
    assert len(unknown) == 22
    assert unknown[1].startswith("  a.txt:1: unknown op 'unknown0'")
    assert unknown[-1] == "  and 40 more"
    assert repeated[-1] == "and 9 more"
    with pytest.raises(OpListError) as error:
        load_policy("a.txt", "b.txt", strict=True)
    assert str(error.value).splitlines()[-1] == "and 40 more"


def test_check_shows_more_faults_than_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred of a kind."""
    Path("a.txt").write_text("".join(f"unknown{i}\n" for i in range(150)))
    assert cli.main(["check", "a.txt"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[-1]) == (101, "and 50 more")


def test_long_names_are_cut_in_messages() -> None:
    """And not compared with all names, which takes time by the square of their length."""
    Path("a.txt").write_text("x" * 1_000_000)
    with pytest.warns(HmpxWarning) as caught:
        load_policy("a.txt")
    assert str(caught[0].message) == (
        f"left out of the op lists:\n  a.txt:1: unknown op {'x' * 80!r}... (1,000,000 characters)"
    )


def test_a_thousand_sections_of_everything_take_less_than_two_seconds(slowness: float) -> None:
    """To load, and to convert with."""
    sections = "".join(f'- ndim: {i}\n  low: ["*"]\n' for i in range(1000))
    Path("p.yaml").write_text(f"lists: none\nsections:\n{sections}")
    found: list[hmpx.Policy] = []
    assert taking(lambda: found.append(load_policy(policy="p.yaml"))) < MOST_S * slowness
    (policy,) = found
    assert len(policy.sections) == 1000
    assert policy.sections[999].decisions["tan"].reason == "p.yaml:2002"
    x = torch.ones(2, 2)
    try:
        assert taking(lambda: hmpx.convert(policy=policy, legalize="never")) < MOST_S * slowness
        assert torch.tan(x).dtype is torch.bfloat16
    finally:
        hmpx.revert()


def test_time_grows_with_the_number_of_lines() -> None:
    """Not with its square: ten times as many take at most twenty times as long."""

    def parse(lines: int) -> float:
        text = "".join(f"u{i} output=fp32\n-u{i}\nmul\n-mul\n" for i in range(lines // 4))
        return min(taking(lambda: oplists.parse(text, "a.txt")) for _ in range(3))

    parse(1000)
    assert parse(50_000) < 20 * parse(5_000)
