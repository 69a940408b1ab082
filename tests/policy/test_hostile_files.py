"""Files that are no lists: special, endless, huge; and how long the worst of those that are one take."""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import hmpx
from hmpx import HmpxError, HmpxWarning, OpListError, PolicyFileError, cli, load_policy
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


# --- special files -----------------------------------------------------------------------------


def special(folder: Path) -> dict[str, str]:
    """Makes special files; returns name -> what each is."""
    os.mkfifo(folder / "pipe.txt")
    os.mkfifo(folder / "pipe.yaml")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("socket.txt")
    listening.close()
    (folder / "folder.txt").mkdir()
    (folder / "link.json").symlink_to("/dev/zero")
    return {
        "pipe.txt": "a pipe",
        "pipe.yaml": "a pipe",
        "socket.txt": "a socket or device",
        "folder.txt": "a directory",
        "/dev/zero": "a device",
        "/dev/tty": "",  # where there is none it can't be read
        "link.json": "a device",
    }


def test_special_files_are_refused_without_waiting_for_them(tmp_path: Path) -> None:
    """A pipe has no writer, /dev/zero no end: each is named for what it is."""
    for name, what in special(tmp_path).items():
        for options in ({"policy": name}, {"bf16_file_path": name}, {"fp32_file_path": name}):
            if "policy" in options and not name.endswith((".yaml", ".json")):
                continue
            if name.endswith((".yaml", ".json")) and "fp32_file_path" in options:
                continue
            with pytest.raises(HmpxError) as error:
                hmpx.convert(**options)
            assert str(error.value).startswith(f"{name}: {what}"), name


def test_special_files_in_a_directory_of_lists_are_no_lists(tmp_path: Path) -> None:
    """They are passed over there, as any file of another name is."""
    os.mkfifo(tmp_path / "bf16.txt")
    with pytest.raises(HmpxError, match="is neither a shipped set"):
        load_policy(lists=tmp_path)


def test_the_command_line_does_not_wait_for_them_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what they are."""
    special(tmp_path)
    assert cli.main(["check", "pipe.txt", "pipe.yaml"]) == 1
    assert sorted(capsys.readouterr().out.splitlines(), reverse=True) == [
        "pipe.yaml: a pipe, not a policy file; give a file's path",
        "pipe.txt: a pipe, not an op list; give a file's path",
    ]
    assert cli.main(["ops", "--bf16", "/dev/zero"]) == 2


def test_files_are_read_up_to_the_limit_whatever_size_they_claim(tmp_path: Path) -> None:
    """A sparse file, one of /proc that claims to be empty, and one that grows while it is read."""
    with Path("sparse.txt").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OpListError, match=r"sparse.txt: .* MB is too large for an op list"):
        load_policy("sparse.txt")
    if Path("/proc/self/environ").exists():
        with pytest.raises(OpListError, match="/proc/self/"):
            load_policy("/proc/self/environ")
    growing, done = Path("growing.yaml"), threading.Event()
    growing.write_bytes(b"# \n")

    def grow() -> None:
        with growing.open("ab") as file:
            while not done.is_set():
                file.write(b"#" * 65536)
                file.flush()

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        with pytest.raises(PolicyFileError, match="too large for a policy file; at most 1 MB"):
            for _ in range(1000):
                load_policy(policy="growing.yaml")
    finally:
        done.set()
        thread.join()


# --- size and time -----------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n" * 1_000_001,
         "a.txt: 1,000,001 lines are too many for an op list; at most 1,000,000"),
        ("a.txt", b"m" * (1 << 24) + b"m", "a.txt: 16.8 MB is too large for an op list; at most 16 MB"),
        ("a.txt", b"@hmp\n" * 101,
         "a.txt:101: more than 100 @ lines in one list; one for each set is enough"),
        ("a.txt", b"m" * 500 + b" x y",
         "a.txt:1: low_precision_type must be torch.bfloat16 or torch.float16, or a number format, "
         "not 'x'"),
        ("a.yaml", b"low: [mm]\n" + b"# \n" * 500_000,
         "a.yaml: 1.5 MB is too large for a policy file; at most 1 MB"),
        ("a.yaml", b"low: [" + b"mm," * 100_001 + b"]\n", "a.yaml:1: more than 100,000 items in one file"),
    ],
)  # fmt: skip
def test_limits_are_errors_that_name_them(name: str, content: bytes, message: str) -> None:
    """In every kind of file."""
    Path(name).write_bytes(content)
    with pytest.raises(HmpxError) as error:
        load_policy(name)
    assert str(error.value) == message


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
