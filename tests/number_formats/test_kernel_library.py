"""Compiled kernels: what is loaded and from whom, what compilers may do, and what users are shown.

Each case runs in a process with a cache of its own. Libraries that must not be loaded write a file as
soon as they are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from hmpx.number_formats.kernels import cache as kernel_cache
from hmpx.number_formats.kernels import files as kernel_files
from hmpx.number_formats.kernels.files import Stamp

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or not hasattr(os, "fork"), reason="no compiler, or no fork, here"
)

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act as another user"
)

needs_mount = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can mount a file system"
)

#: Forks one child an order, so that torch is imported once for all of them.
SERVER = """
import atexit, json, os, signal, sys, threading, time
import torch, hmpx
from hmpx import cli, formats
from hmpx.number_formats.kernels import cache as kernel_cache, compiler as kernel_compiler
from hmpx.number_formats.kernels import files as kernel_files, library as kernel_library
torch.set_num_threads(1)
kernel_cache._source_digest()  # other users may not be able to read the package
x = torch.randn(1000)
expected = x.to(torch.float8_e4m3fn).float()

def is_right():
    return torch.equal(formats.quantize(x, "float8_e4m3fn"), expected)

def is_compiled():
    with open("/proc/self/maps") as maps:
        return any("rounding-" in line or ".unfinished-" in line or "named" in line for line in maps)

def show():
    print(is_right(), is_compiled())

def wait_for_build():
    kernel_library._builder.join()

def leave(status=0):
    # As at the end of a program, but without taking torch apart, which takes long.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)

for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
        for descriptor, name in ((1, "out"), (2, "err")):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(order[name], flags), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        if order["uid"] is not None:
            os.setgroups([])
            os.setgid(order["uid"])
            os.setuid(order["uid"])
        exec(order["program"])
        leave()
    print(os.waitpid(child, 0)[1], flush=True)
"""

SHOW = "show()"

#: As `SHOW` prints them: values are right, and compiled kernels gave them; or torch ops did.
BY_KERNELS, BY_OPS = "True True\n", "True False\n"

OTHER_USER, THIRD_USER = 65534, 54321


class Outcome(NamedTuple):
    """Exit status (as os.waitpid has it) and output of a process."""

    status: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """Runs `SERVER`."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def shelf() -> Iterator[Path]:
    """Yields a folder that all users can read, with a compiler that takes no time.

    It gives what the real one made of the kernels' source once, and notes each call in ``compiled``.
    """
    shelf = Path(tempfile.mkdtemp(prefix="hmpx-test-"))
    shelf.chmod(0o755)
    source = Path(kernel_cache.__file__).with_name("rounding_kernels.c")
    flags = ["-O1", "-std=gnu11", "-fPIC", "-ffp-contract=off", "-fopenmp"]
    subprocess.run(["cc", *flags, "-c", source, "-o", shelf / "kernels.o"], check=True)
    write_script(
        shelf / "quick-cc",
        'echo "$@" >> "$COMPILED"\n'
        'case " $* " in *" -c "*) while [ "$1" != -o ]; do shift; done; '
        f'cp {shelf}/kernels.o "$2" ;; *) exec {shutil.which("cc")} "$@" ;; esac\n',
    )
    yield shelf
    shutil.rmtree(shelf)


@pytest.fixture
def place() -> Iterator[Path]:
    """Yields an empty folder that all users can look into: pytest's own is for one user only."""
    place = Path(tempfile.mkdtemp(prefix="hmpx-test-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def run(server: subprocess.Popen[str], shelf: Path, place: Path) -> Run:
    """Returns what runs a program in a new process, the cache being ``place / "cache"``."""

    def run(
        program: str = SHOW, uid: int | None = None, is_tidy: bool = True, **settings: str | None
    ) -> Outcome:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(place / "home"),
            "XDG_CACHE_HOME": str(place / "cache"),
            "TMPDIR": str(temporary),
            "CC": str(shelf / "quick-cc"),
            "COMPILED": str(place / "compiled"),
            "HMPX_KERNELS": "wait",
            **settings,
        }
        order = {
            "program": program,
            "uid": uid,
            "folder": str(place / "work"),
            "environment": {key: value for key, value in environment.items() if value is not None},
            **{name: str(place / name) for name in ("out", "err")},
        }
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        assert not is_tidy or list(temporary.iterdir()) == [], "temporary files are left"
        return Outcome(status, *((place / name).read_text() for name in ("out", "err")))

    temporary = place / "tmp"
    temporary.mkdir()
    (place / "work").mkdir()
    temporary.chmod(0o1777)
    (place / "compiled").touch()
    (place / "compiled").chmod(0o666)
    return run


def write_script(path: Path, text: str) -> Path:
    """Writes a program for the shell."""
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def kept(place: Path) -> Path:
    """Returns the only file in the cache."""
    (found,) = (place / "cache" / "hmpx").iterdir()
    return found


def compilations(place: Path) -> int:
    """Returns how often the compiler has been called to compile."""
    return (place / "compiled").read_text().count(" -c ")


def planted(place: Path, *, stamp: Stamp | None = None) -> bytes:
    """Returns a library that makes the file ``place / "loaded"`` when it is loaded.

    Args:
        place: Where to build it.
        stamp: Seals it.
    """
    marker, source, library = place / "loaded", place / "planted.c", place / "planted.so"
    source.write_text(
        "#include <stdio.h>\n"
        "__attribute__((constructor)) void load(void) "
        f'{{ fclose(fopen("{marker}", "w")); }}\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    content = library.read_bytes()
    source.unlink()
    library.unlink()
    return content if stamp is None else kernel_files.seal(content, stamp)


def stamp_of(path: Path) -> Stamp:
    """Returns the stamp of a library."""
    return kernel_files.unseal(path.read_bytes())


def assert_warned_once(outcome: Outcome, *words: str) -> None:
    """Fails unless the process wrote one line, with these words in it."""
    assert outcome.status == 0, outcome.err
    assert len(outcome.err.splitlines()) == 1, outcome.err
    for word in words:
        assert word in outcome.err


# --- the cache ---------------------------------------------------------------------------------


def test_kernels_are_built_once_for_a_machine(run: Run, place: Path) -> None:
    """What one process built the next one uses, whatever its compiler is; others can't read it."""
    assert run() == (0, BY_KERNELS, "")
    assert compilations(place) == 1
    path = kept(place)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [stat.S_IMODE(each.stat().st_mode) for each in list(path.parents)[:2]] == [0o700, 0o700]
    for compiler in ("no-such-compiler", "cc -DX='", "false", None):
        assert run(CC=compiler, HMPX_KERNELS="") == (0, BY_KERNELS, "")
    assert run(CC=None, PATH="/nowhere") == (0, BY_KERNELS, "")
    assert compilations(place) == 1
    assert kept(place) == path


def truncated(path: Path) -> None:
    """Cuts the file short, in place."""
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    """Leaves nothing in the file."""
    os.truncate(path, 0)


def flipped(path: Path) -> None:
    """Changes one bit of the code."""
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def shortened(path: Path) -> None:
    """Takes off the seal's last byte."""
    path.write_bytes(path.read_bytes()[:-1])


def replaced(path: Path) -> None:
    """Puts a library there that was never sealed."""
    path.write_bytes(planted(path.parents[2]))


def of_another_version(path: Path) -> None:
    """Puts a library there that another version of hmpx built."""
    path.write_bytes(planted(path.parents[2], stamp=Stamp("0" * 64, "linux-x86_64", ())))


def linked(path: Path) -> None:
    """Puts a symbolic link there."""
    library = path.parents[2] / "elsewhere.so"
    library.write_bytes(planted(path.parents[2], stamp=stamp_of(path)))
    library.chmod(0o600)
    path.unlink()
    path.symlink_to(library)


def linked_to_itself(path: Path) -> None:
    """Puts a symbolic link there that leads nowhere."""
    path.unlink()
    path.symlink_to(path)


def piped(path: Path) -> None:
    """Puts a pipe there, from which nobody will ever read."""
    path.unlink()
    os.mkfifo(path, 0o600)


def written_by_all(path: Path) -> None:
    """Lets others write, who do."""
    path.write_bytes(planted(path.parents[2], stamp=stamp_of(path)))
    path.chmod(0o666)


def written_by_a_group(path: Path) -> None:
    """Lets a group write, which does."""
    written_by_all(path)
    path.chmod(0o660)


@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        emptied,
        flipped,
        shortened,
        replaced,
        of_another_version,
        linked,
        linked_to_itself,
        piped,
        written_by_all,
        written_by_a_group,
    ],
)
def test_damaged_and_planted_files_are_not_loaded_but_built_again(
    damage: Callable[[Path], None], run: Run, place: Path
) -> None:
    """Nothing of theirs runs, nothing is said, and the next process finds a whole one."""
    assert run() == (0, BY_KERNELS, "")
    whole = kept(place).read_bytes()
    damage(kept(place))
    assert run(HMPX_KERNELS="off") == (0, BY_OPS, "")
    outcome = run(CC="no-such-compiler")
    assert_warned_once(outcome, "no C compiler no-such-compiler was found (", str(kept(place)))
    assert outcome.out == BY_OPS
    for _ in range(2):
        assert run() == (0, BY_KERNELS, "")
        assert kernel_files.unseal(kept(place).read_bytes()) == kernel_files.unseal(whole)
        assert stat.S_IMODE(kept(place).lstat().st_mode) == 0o600
    assert compilations(place) == 2
    assert not (place / "loaded").exists()


def test_a_library_without_the_kernels_is_built_again(run: Run, place: Path) -> None:
    """A sealed one of this user's, in which functions are missing."""
    assert run() == (0, BY_KERNELS, "")
    kept(place).write_bytes(planted(place, stamp=stamp_of(kept(place))))
    assert run() == (0, BY_KERNELS, "")
    assert run(CC="no-such-compiler") == (0, BY_KERNELS, "")
    assert compilations(place) == 2


def test_what_the_loader_refuses_is_built_again(run: Run, place: Path) -> None:
    """A sealed file that is no library, or needs what this machine's system lacks."""
    assert run() == (0, BY_KERNELS, "")
    kept(place).write_bytes(kernel_files.seal(b"nothing", stamp_of(kept(place))))
    assert run() == (0, BY_KERNELS, "")
    assert compilations(place) == 2


def test_a_folder_in_the_place_of_the_file(run: Run, place: Path) -> None:
    """It can't be replaced; kernels are used all the same, and it is said once."""
    assert run() == (0, BY_KERNELS, "")
    path = kept(place)
    path.unlink()
    (path / "kept").mkdir(parents=True)
    outcome = run("show(); show()")
    assert outcome.out == 2 * BY_KERNELS
    assert_warned_once(outcome, "can't be kept", str(path), "XDG_CACHE_HOME", "--output PATH")
    assert list(kept(place).iterdir()) == [path / "kept"]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o775, 0o1777, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(mode: int, run: Run, place: Path) -> None:
    """Not read, and not written to; kernels are used all the same, and it is said once."""
    assert run() == (0, BY_KERNELS, "")
    path = kept(place)
    path.write_bytes(planted(place, stamp=stamp_of(path)))
    path.parent.chmod(mode)
    before = path.read_bytes()
    outcome = run("show(); show()")
    assert outcome.out == 2 * BY_KERNELS
    assert_warned_once(
        outcome, f"{path.parent} can't be used: other users can write to it (mode {mode:o}"
    )
    assert kept(place).read_bytes() == before
    assert not (place / "loaded").exists()
    outcome = run(CC="no-such-compiler")
    assert outcome.out == BY_OPS
    assert_warned_once(outcome, "no C compiler", "other users can write to it")


def test_a_linked_folder_is_not_used(run: Run, place: Path) -> None:
    """Who can write above it could turn the link; links further up are the user's own affair."""
    assert run() == (0, BY_KERNELS, "")
    (place / "cache" / "hmpx").rename(place / "cache" / "real")
    (place / "cache" / "hmpx").symlink_to("real")
    outcome = run()
    assert outcome.out == BY_KERNELS
    assert_warned_once(outcome, str(place / "cache" / "hmpx"), "symbolic link")
    (place / "cache" / "hmpx").unlink()
    (place / "cache" / "real").rename(place / "cache" / "hmpx")
    (place / "linked").symlink_to("cache")
    assert run(XDG_CACHE_HOME=str(place / "linked"), CC="false") == (0, BY_KERNELS, "")


def test_the_folder_checked_is_the_folder_loaded_from(run: Run, place: Path) -> None:
    """Though another one has come to stand under its name in between."""
    assert run() == (0, BY_KERNELS, "")
    evil = place / "cache" / "evil"
    evil.mkdir()
    path = kept(place)
    (evil / path.name).write_bytes(planted(place, stamp=stamp_of(path)))
    swap = (
        "check = kernel_cache._check_stamp\n"
        "def swapping(stamp):\n"
        f"    os.rename({str(path.parent)!r}, {str(path.parent) + '-'!r})\n"
        f"    os.rename({str(evil)!r}, {str(path.parent)!r})\n"
        "    check(stamp)\n"
        "kernel_cache._check_stamp = swapping\n"
        "show()"
    )
    assert run(swap) == (0, BY_KERNELS, "")
    assert not (place / "loaded").exists()


def test_folders_further_up_count_where_descriptors_have_no_names(run: Run, place: Path) -> None:
    """As on macOS: who can write to one of them could replace the folder that was checked."""
    assert run() == (0, BY_KERNELS, "")
    unnamed = "from pathlib import Path\nkernel_files._DESCRIPTORS = Path('/nowhere')\n"
    assert run(unnamed + SHOW, CC="false") == (0, BY_KERNELS, "")
    (place / "cache").chmod(0o777)
    outcome = run(unnamed + SHOW, CC="false")
    assert outcome.out == BY_OPS
    assert_warned_once(outcome, f"{place / 'cache'} can't be used: other users can write")
    (place / "cache").chmod(0o1777)
    assert run(unnamed + SHOW, CC="false") == (0, BY_KERNELS, "")
    (place / "cache").chmod(0o777)
    assert run(CC="false") == (0, BY_KERNELS, "")


@pytest.mark.parametrize("cache", ["", ".", "relative", "../relative", "~"])
def test_a_relative_cache_is_none(cache: str, run: Run, place: Path) -> None:
    """Whoever writes the working directory must not have their code run; the home folder has it."""
    assert run() == (0, BY_KERNELS, "")
    content = planted(place, stamp=stamp_of(kept(place)))
    for folder in (place / "work" / cache / "hmpx", place / "work" / "hmpx"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / kept(place).name).write_bytes(content)
    assert run(XDG_CACHE_HOME=cache) == (0, BY_KERNELS, "")
    assert not (place / "loaded").exists()
    assert (place / "home" / ".cache" / "hmpx" / kept(place).name).is_file()


def test_no_home(run: Run, place: Path) -> None:
    """A relative one is none either."""
    outcome = run(XDG_CACHE_HOME=None, HOME="home")
    assert outcome.out == BY_KERNELS
    assert_warned_once(outcome, "there is no home folder to keep kernels in; set HOME to its path")
    assert list((place / "work").iterdir()) == []


@pytest.mark.parametrize("cache", ["/proc/cache", "/dev/null/cache"])
def test_a_cache_that_cannot_be_written_is_said(cache: str, run: Run) -> None:
    """Once, with what helps; the kernels are used."""
    outcome = run("show(); show()", XDG_CACHE_HOME=cache)
    assert outcome.out == 2 * BY_KERNELS
    assert_warned_once(outcome, "so each process compiles them anew", cache, "XDG_CACHE_HOME")


def test_a_disk_quota(run: Run, place: Path) -> None:
    """Leaves nothing behind, is said once, and the kernels are used."""
    program = (
        "import resource\n"
        "write = kernel_files.PrivateFolder.write\n"
        "def write_up_to_the_quota(folder, name, content):\n"
        "    if folder.path.name == 'hmpx':\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "    write(folder, name, content)\n"
        "kernel_files.PrivateFolder.write = write_up_to_the_quota\n"
        "show()"
    )
    outcome = run(program)
    assert outcome.out == BY_KERNELS
    assert_warned_once(outcome, "File too large", str(place / "cache" / "hmpx"))
    assert list((place / "cache" / "hmpx").iterdir()) == []


@needs_mount
def test_a_disk_that_is_full(run: Run, place: Path) -> None:
    """A real one, too small for the library."""
    (place / "cache").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(place / "cache")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file systems can be mounted here")
    try:
        outcome = run()
        assert outcome.out == BY_KERNELS
        assert_warned_once(outcome, "No space left on device")
        assert list((place / "cache" / "hmpx").iterdir()) == []
    finally:
        subprocess.run(["umount", str(place / "cache")], check=True)


def test_a_loader_that_refuses_temporary_files(run: Run, place: Path) -> None:
    """The library is loaded out of the cache's folder."""
    program = (
        "from hmpx.errors import KernelsError\n"
        "load = kernel_files.PrivateFolder.load\n"
        "def load_from_cache(folder, name):\n"
        "    if folder.path.name != 'hmpx': raise KernelsError('failed to map segment')\n"
        "    return load(folder, name)\n"
        "kernel_files.PrivateFolder.load = load_from_cache\n"
        "show()"
    )
    assert run(program) == (0, BY_KERNELS, "")
    assert kernel_files.unseal(kept(place).read_bytes())
    outcome = run(program, XDG_CACHE_HOME="/proc/cache")
    assert outcome.out == BY_OPS
    assert_warned_once(outcome, "can't be loaded: failed to map segment")


@needs_mount
def test_nothing_runs_out_of_the_temporary_folder(run: Run, place: Path) -> None:
    """As on hardened systems; the cache's own folder does."""
    mount = ["mount", "-t", "tmpfs", "-o", "noexec,mode=1777", "none", str(place / "tmp")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file systems can be mounted here")
    try:
        assert run() == (0, BY_KERNELS, "")
        assert kernel_files.unseal(kept(place).read_bytes())
    finally:
        subprocess.run(["umount", str(place / "tmp")], check=True)


def test_what_a_killed_process_left_is_removed(run: Run, place: Path) -> None:
    """Once it is old enough to be nobody's any more."""
    folder = place / "cache" / "hmpx"
    folder.mkdir(parents=True, mode=0o700)
    old, new, other = (folder / name for name in (".unfinished-old", ".unfinished-new", "mine"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    assert run() == (0, BY_KERNELS, "")
    assert not old.exists()
    assert new.exists()
    assert other.exists()


# --- other users -------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("uid", [None, OTHER_USER])
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_another_user_owns_is_not_loaded(
    what: str, uid: int | None, run: Run, place: Path
) -> None:
    """Neither by root nor by anybody else; a file in one's own folder is replaced."""
    (place / "cache").mkdir()
    os.chown(place / "cache", uid or 0, -1)
    assert run(uid=uid) == (0, BY_KERNELS, "")
    path = kept(place)
    path.write_bytes(planted(place, stamp=stamp_of(path)))
    (place / "loaded").unlink(missing_ok=True)
    path.chmod(0o644)
    path.parent.chmod(0o755)
    os.chown(path, THIRD_USER, -1)
    if what == "folder":
        os.chown(path.parent, THIRD_USER, -1)
    outcome = run(uid=uid)
    assert outcome.out == BY_KERNELS
    assert not (place / "loaded").exists()
    if what == "folder":
        assert_warned_once(
            outcome, f"{path.parent} can't be used: it belongs to another user (uid {THIRD_USER})"
        )
        assert path.stat().st_uid == THIRD_USER
    else:
        assert outcome == (0, BY_KERNELS, "")
        assert path.stat().st_uid == (uid or 0)


@needs_root
def test_other_users_use_what_root_has_built(run: Run, place: Path) -> None:
    """Without a compiler, though they can't write there."""
    assert run() == (0, BY_KERNELS, "")
    for path, mode in ((kept(place), 0o644), (kept(place).parent, 0o755), (place / "cache", 0o755)):
        path.chmod(mode)
    assert run(uid=OTHER_USER, CC="no-such-compiler") == (0, BY_KERNELS, "")


@needs_root
def test_a_user_who_may_not_write_is_told_once(run: Run, place: Path) -> None:
    """In a folder of root's that has no kernels."""
    (place / "cache").mkdir(mode=0o755)
    outcome = run("show(); show()", uid=OTHER_USER)
    assert outcome.out == 2 * BY_KERNELS
    assert_warned_once(outcome, str(place / "cache"), "Permission denied")


# --- several processes -------------------------------------------------------------------------


def test_several_processes_build_at_once(run: Run, place: Path) -> None:
    """Each uses the kernels, and one file is left."""
    outcome = run(
        "children = []\n"
        "for _ in range(6):\n"
        "    children.append(os.fork())\n"
        "    if not children[-1]:\n"
        "        leave(not (is_right() and is_compiled()))\n"
        "print([os.waitpid(child, 0)[1] for child in children])\n"
    )
    assert outcome == (0, "[0, 0, 0, 0, 0, 0]\n", "")
    assert stamp_of(kept(place)).source == kernel_cache._source_digest()
    assert run(CC="no-such-compiler") == (0, BY_KERNELS, "")


def test_a_fork_while_kernels_are_built(run: Run, place: Path, shelf: Path) -> None:
    """The child builds its own, or ends at once; either way the parent's build goes on."""
    slow = write_script(place / "slow-cc", f'sleep 1\nexec {shelf}/quick-cc "$@"\n')
    outcome = run(
        "show()\n"
        "while kernel_compiler._running is None: time.sleep(0.01)\n"
        "for is_building in (False, True):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        if is_building:\n"
        "            assert is_right()\n"
        "            wait_for_build()\n"
        "            assert is_right() and is_compiled()\n"
        "        leave()\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "wait_for_build()\n"
        "show()\n",
        CC=str(slow),
        HMPX_KERNELS="",
    )
    assert outcome == (0, BY_OPS + BY_KERNELS, "")
    assert kernel_files.unseal(kept(place).read_bytes())


# --- compilers ---------------------------------------------------------------------------------

LATIN_1 = "printf 'na\\357ve: error: \\033[31mred\\n' >&2; exit 1\n"


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no C compiler no-such-compiler was found"),
        ("cc -DX='", "CC=cc -DX=' can't be split into words: No closing quotation"),
        ("''", "no C compiler  was found"),
        ("false", "false failed: exit status 1"),
        ("/dev", "no C compiler /dev was found"),
        ("X=1 cc", "no C compiler X=1 cc was found"),
        ("$(which cc)", "no C compiler $(which cc) was found"),
        ("\udcff", "no C compiler \\udcff was found"),
        (LATIN_1, "failed: na\\xefve: error: \\x1b[31mred"),
        ("kill -SEGV $$\n", "failed: Segmentation fault"),
        ("kill -KILL 0\n", "failed: exit status"),
        ("exec yes >&2 # without end\n", "was still running after 1 s and was stopped"),
        ("exec yes >&2 & exit 1\n", "failed: "),
        ("exit 0\n", "failed: [Errno 2] No such file or directory"),
        ("while [ $1 != -o ]; do shift; done; echo garbage > $2\n", "can't be loaded"),
    ],
)
@pytest.mark.parametrize("setting", ["wait", ""])
def test_a_compiler_at_fault_costs_one_line(
    setting: str, compiler: str, reason: str, run: Run, place: Path
) -> None:
    """Never an exception, and values are the same."""
    if compiler.endswith("\n"):
        compiler = str(write_script(place / "odd-cc", compiler))
    program = (
        "kernel_compiler.LIMIT_S = 1\n"
        "show()\n"
        "if kernel_library._builder is not None: wait_for_build()\n"
        "show()"
    )
    outcome = run(program, CC=compiler, HMPX_KERNELS=setting)
    assert outcome.out == 2 * BY_OPS
    assert_warned_once(outcome, "rounded by torch ops", reason, "HMPX_KERNELS=off hides this")


@pytest.mark.parametrize("setting", ["wait", ""])
def test_what_is_fast_without_kernels_does_not_miss_them(setting: str, run: Run) -> None:
    """The warning waits for the first rounding, as that is slow without a compiler."""
    measure = """
from hmpx.number_formats import extremes_kernels
print(dict(extremes_kernels()))
if kernel_library._builder:
    wait_for_build()
"""
    settings = {"CC": "no-such-compiler", "HMPX_KERNELS": setting}
    assert run(measure, **settings) == (0, "{}\n", "")
    assert_warned_once(run(measure + SHOW, **settings), "no C compiler no-such-compiler was found")


def test_a_compiler_that_only_a_shell_can_start(run: Run, place: Path, shelf: Path) -> None:
    """A script without a first line that names its interpreter."""
    script = place / "plain-cc"
    script.write_text(f'exec {shelf}/quick-cc "$@"\n')
    script.chmod(0o755)
    assert run(CC=str(script)) == (0, BY_KERNELS, "")


def test_a_compiler_with_arguments(run: Run, shelf: Path) -> None:
    """As in ``CC="ccache gcc"``."""
    assert run(CC=f"env LANG=C '{shelf}/quick-cc' -DX='a b'") == (0, BY_KERNELS, "")


def test_the_real_compiler(run: Run, place: Path) -> None:
    """With the flags that are used."""
    assert run(CC=None) == (0, BY_KERNELS, "")
    assert stamp_of(kept(place)).features == kernel_cache._features()


def wait_until_gone(pids: Sequence[int]) -> None:
    """Fails unless the processes end within some seconds."""
    for pid in pids:
        for _ in range(200):
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                break
            if state == "Z":
                break
            time.sleep(0.05)
        else:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("the compiler is still running")


#: Writes down its process and that of a child, and never ends.
HANGING = 'sleep 1000 &\necho $$ $! > "$COMPILED.new"; mv "$COMPILED.new" "$COMPILED.pids"; wait\n'


@pytest.mark.parametrize(
    ("setting", "end"),
    [
        ("wait", "kernel_compiler.LIMIT_S = 1\nshow()"),
        ("", "show()\nwait_for_pids()\nsys.exit()"),
        ("", "show()\nwait_for_pids()\nos._exit(0)"),
        ("", "show()\nwait_for_pids()\nos.kill(os.getpid(), signal.SIGKILL)"),
        (
            "",
            "show()\nwait_for_pids()\nif not os.fork(): time.sleep(60)\nsys.stdout.flush()\nos._exit(0)",
        ),
        (
            "wait",
            "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
            "threading.Thread(target=lambda: (wait_for_pids(), "
            "os.kill(os.getpid(), signal.SIGALRM))).start()\n"
            "try: show()\n"
            "except KeyboardInterrupt: print('interrupted')\n",
        ),
    ],
    ids=["limit", "end", "exit", "kill", "fork", "interrupt"],
)
def test_a_hanging_compiler_is_killed(setting: str, end: str, run: Run, place: Path) -> None:
    """After a time limit, and whenever the process ends, whatever ends it."""
    hanging = write_script(place / "hanging-cc", HANGING)
    program = (
        "def wait_for_pids():\n"
        f"    while not os.path.exists({str(place / 'compiled.pids')!r}): time.sleep(0.01)\n"
        f"{end}"
    )
    is_killed = "_exit" in end or "SIGKILL" in end  # and leaves its temporary folder
    outcome = run(program, is_tidy=not is_killed, CC=str(hanging), HMPX_KERNELS=setting)
    if "LIMIT_S" in end:
        assert_warned_once(outcome, "hanging-cc was still running after 1 s and was stopped")
    else:
        assert outcome.err == ""
    wait_until_gone([int(pid) for pid in (place / "compiled.pids").read_text().split()])


# --- HMPX_KERNELS ------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["", "on", "1", "yes", "TRUE"])
def test_kernels_are_built_in_the_background(setting: str, run: Run) -> None:
    """The first call does not wait; later ones, and the next process, use them."""
    program = "show()\nwait_for_build()\nshow()"
    assert run(program, HMPX_KERNELS=setting) == (0, BY_OPS + BY_KERNELS, "")
    assert run(HMPX_KERNELS=setting) == (0, BY_KERNELS, "")


@pytest.mark.parametrize("setting", ["off", "0", "No", "false"])
def test_off(setting: str, run: Run, place: Path) -> None:
    """Nothing is built, and what was built is not loaded."""
    assert run() == (0, BY_KERNELS, "")
    assert run(HMPX_KERNELS=setting) == (0, BY_OPS, "")
    shutil.rmtree(place / "cache")
    assert run(HMPX_KERNELS=setting) == (0, BY_OPS, "")
    assert not (place / "cache").exists()


#: Prints the errors of all that may be the first to round, and that the rest of hmpx works.
FAILING = """
from hmpx.errors import OptionError
hmpx.convert()
hmpx.revert()
for _ in range(2):
    for function in (
        is_right,
        lambda: hmpx.convert(low_precision_type="float8_e4m3fn"),
        lambda: formats.quantize(x.double(), "posit16_1", "stochastic"),
    ):
        try:
            function()
        except OptionError as error:
            print(error)
        assert not hmpx.is_converted()
"""


def assert_fails(outcome: Outcome, message: str) -> None:
    """Fails unless each attempt to round gave the same error."""
    assert outcome == (0, 6 * f"{message}\n", "")


@pytest.mark.parametrize(
    ("setting", "hint"),
    [("wiat", "; did you mean 'wait'?"), ("of", "; did you mean 'off'?"), ("./kernels.so", "")],
)
def test_a_wrong_setting_is_an_error(setting: str, hint: str, run: Run, place: Path) -> None:
    """Of the first call that needs it, and of each further one; nothing else is affected."""
    assert_fails(
        run(FAILING, HMPX_KERNELS=setting),
        f"HMPX_KERNELS={setting}: it can be on, off, wait, or the absolute path of a library that "
        f"`hmpx kernels --build --output PATH` wrote{hint}",
    )
    assert compilations(place) == 0


def test_importing_reads_no_setting_and_builds_nothing(place: Path, shelf: Path) -> None:
    """Whatever is wrong with both."""
    settings = {"HMPX_KERNELS": "wiat", "CC": "cc -DX='", "XDG_CACHE_HOME": str(place / "cache")}
    program = [sys.executable, "-c", "import hmpx, hmpx.formats"]
    done = subprocess.run(program, env={**os.environ, **settings}, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert list(place.iterdir()) == []


@pytest.fixture
def named(run: Run, place: Path) -> Path:
    """Returns a library for other machines, as `hmpx kernels --build --output` writes it."""
    path = place / "named.so"
    outcome = run(hmpx_kernels("--build", "--output", str(path)))
    assert outcome == (0, f"library: {path}\nto use it: HMPX_KERNELS={path}\n", "")
    return path


def test_a_named_library_needs_neither_compiler_nor_cache(
    run: Run, named: Path, place: Path
) -> None:
    """As in an image that was built elsewhere; it is nothing that only one user can read."""
    assert stat.S_IMODE(named.stat().st_mode) == 0o644
    settings = {"HMPX_KERNELS": str(named), "CC": None, "PATH": "/nowhere", "HOME": "/nowhere"}
    assert run(**settings, XDG_CACHE_HOME=None) == (0, BY_KERNELS, "")
    link = place / "link-to-named"
    link.symlink_to(named)
    assert run(**{**settings, "HMPX_KERNELS": str(link)}) == (0, BY_KERNELS, "")
    assert not (place / "cache").exists()


def missing(path: Path) -> str:
    """Removes it."""
    path.unlink()
    return "No such file or directory"


def a_folder(path: Path) -> str:
    """Puts a folder there."""
    path.unlink()
    path.mkdir()
    return "it is not a regular file"


def endless(path: Path) -> str:
    """Links it to a device."""
    path.unlink()
    path.symlink_to("/dev/zero")
    return "it is not a regular file"


def huge(path: Path) -> str:
    """Lets it grow, without content."""
    os.truncate(path, 1 << 40)
    return "it is too large to be a library of kernels"


def unsealed(path: Path) -> str:
    """Puts a library there that hmpx did not build."""
    path.write_bytes(planted(path.parent))
    return "it is damaged, or was not written by `hmpx kernels --build`"


def cut(path: Path) -> str:
    """Cuts it short."""
    truncated(path)
    return "it is damaged, or was not written by `hmpx kernels --build`"


def an_empty_one(path: Path) -> str:
    """Leaves nothing in it."""
    emptied(path)
    return "it is damaged, or was not written by `hmpx kernels --build`"


def sealed_for(path: Path, **fields: object) -> None:
    """Puts a planted library there, with another stamp."""
    stamp = replace(stamp_of(path), **fields)  # type: ignore[arg-type]
    path.write_bytes(planted(path.parent, stamp=stamp))


def another_version(path: Path) -> str:
    """Of a different source."""
    sealed_for(path, source="0" * 64)
    return "it was built by another version of hmpx"


def another_machine(path: Path) -> str:
    """Of a different architecture."""
    sealed_for(path, system="linux-pdp11")
    return f"it was built for linux-pdp11, and this is {kernel_cache._system()}"


def another_processor(path: Path) -> str:
    """Of a processor that has more."""
    sealed_for(path, features=("avx1024", "mmx2"))
    return "it was built for processors with avx1024, mmx2"


def an_odd_stamp(path: Path) -> str:
    """Sealed, with a stamp that says nothing."""
    sealed_for(path, features=None)
    return "its stamp can't be read"


@pytest.mark.parametrize(
    "spoil",
    [
        missing,
        a_folder,
        piped,
        endless,
        huge,
        unsealed,
        cut,
        an_empty_one,
        another_version,
        another_machine,
        another_processor,
        an_odd_stamp,
    ],
)
def test_a_named_library_that_cannot_be_used_is_an_error(
    spoil: Callable[[Path], str | None], run: Run, named: Path, place: Path
) -> None:
    """It was asked for by name: silence would hide that it is not there. Nothing of it is loaded."""
    reason = spoil(named) or "it is not a regular file"
    before = compilations(place)
    assert_fails(
        run(FAILING, HMPX_KERNELS=str(named)),
        f"HMPX_KERNELS={named} can't be used: {reason}; write it anew with "
        f"`hmpx kernels --build --output {named}`, or unset HMPX_KERNELS",
    )
    assert not (place / "loaded").exists()
    assert compilations(place) == before


def test_a_named_library_without_the_kernels(run: Run, named: Path, place: Path) -> None:
    """A sealed one in which functions are missing."""
    sealed_for(named)
    outcome = run(FAILING, HMPX_KERNELS=str(named))
    assert (outcome.status, outcome.err) == (0, "")
    assert "can't be used: it has no float_f32, float_f64, bits_f32" in outcome.out


# --- hmpx kernels ------------------------------------------------------------------------------


def hmpx_kernels(*arguments: str) -> str:
    """Returns a program that runs the command."""
    return f"leave(cli.main(['kernels', *{arguments!r}]))"


def exit_status(outcome: Outcome) -> int:
    """Returns what the process gave to sys.exit."""
    return os.waitstatus_to_exitcode(outcome.status)


def test_the_command_builds_and_shows(run: Run, place: Path, shelf: Path) -> None:
    """Where the kernels are, whether they can be used, and what is wrong if not."""
    compiler = f"compiler: {shelf}/quick-cc"
    outcome = run(hmpx_kernels(), HMPX_KERNELS=None)
    library = outcome.out.splitlines()[0]
    assert library.startswith(f"library: {place}/cache/hmpx/rounding-")
    assert outcome == (1 << 8, f"{library}\nstate: not built yet\n{compiler}\n", "")
    assert not (place / "cache").exists()
    assert run(hmpx_kernels("--build"), HMPX_KERNELS="off") == (0, f"{library}\n", "")
    assert run(CC="no-such-compiler") == (0, BY_KERNELS, "")
    for _ in range(2):
        outcome = run(hmpx_kernels(), HMPX_KERNELS=None)
        assert outcome == (0, f"{library}\nstate: ready\n{compiler}\n", "")
        truncated(kept(place))
        outcome = run(hmpx_kernels(), HMPX_KERNELS=None, CC="none")
        assert (exit_status(outcome), outcome.err) == (1, "")
        assert outcome.out.splitlines()[1:] == [
            f"state: {kept(place)} can't be used: it is damaged, or was not written by "
            "`hmpx kernels --build`",
            "compiler: no C compiler none was found",
        ]
        assert exit_status(run(hmpx_kernels("--build"))) == 0
    outcome = run(hmpx_kernels(), HMPX_KERNELS="off")
    assert outcome == (1 << 8, f"library: none\nstate: HMPX_KERNELS=off\n{compiler}\n", "")


def test_the_command_shows_a_named_library(run: Run, named: Path, shelf: Path) -> None:
    """And refuses one that can't be used, as rounding does."""
    outcome = run(hmpx_kernels(), HMPX_KERNELS=str(named))
    assert outcome == (
        0,
        f"library: {named}\nstate: ready\ncompiler: {shelf}/quick-cc\n",
        "",
    )
    emptied(named)
    outcome = run(hmpx_kernels(), HMPX_KERNELS=str(named))
    assert (exit_status(outcome), outcome.out) == (2, "")
    assert outcome.err.startswith(f"hmpx: HMPX_KERNELS={named} can't be used: it is damaged")
    outcome = run(hmpx_kernels("--build", "--output", str(named)), HMPX_KERNELS=str(named))
    assert exit_status(outcome) == 0
    assert run(HMPX_KERNELS=str(named)) == (0, BY_KERNELS, "")


@pytest.mark.parametrize(
    ("arguments", "settings", "status", "message"),
    [
        (("--output", "here.so"), {}, 2, "--output says where --build writes; add --build"),
        (("--build", "--output", "../tmp"), {}, 1, "tmp can't be written: Is a directory"),
        (("--build", "--output", "a/b.so"), {}, 1, "a/b.so can't be written: No such file"),
        (("--build", "--output", "/proc/b.so"), {}, 1, "/proc/b.so can't be written"),
        (("--build",), {"CC": "false"}, 1, "hmpx: false failed: exit status 1"),
        (("--build",), {"XDG_CACHE_HOME": "/proc/x"}, 1, "/proc/x/hmpx can't be made"),
        ((), {"HMPX_KERNELS": "wiat"}, 2, "HMPX_KERNELS=wiat: it can be"),
    ],
)
def test_the_command_says_what_is_wrong(  # noqa: PLR0917  # parameters and fixtures
    arguments: tuple[str, ...],
    settings: dict[str, str],
    status: int,
    message: str,
    run: Run,
    place: Path,
) -> None:
    """With an exit status that scripts can use, and without leaving anything behind."""
    before = sorted(place.iterdir())
    outcome = run(hmpx_kernels(*arguments), **settings)
    assert (exit_status(outcome), outcome.out) == (status, "")
    assert message in outcome.err
    left = {path.name for path in {*place.iterdir()} - {*before}}
    assert left <= {"out", "err", "cache"}
    assert list((place / "work").iterdir()) == []


def test_a_portable_library_runs_on_this_machine(run: Run, place: Path) -> None:
    """Made by the real compiler, and it rounds as the one for this machine does."""
    path = place / "named.so"
    assert exit_status(run(hmpx_kernels("--build", "--output", str(path)), CC=None)) == 0
    assert run(HMPX_KERNELS=str(path)) == (0, BY_KERNELS, "")
    assert set(stamp_of(path).features) < {*kernel_cache._features(), ""}


@pytest.mark.parametrize("part", ["_SOURCE", "_PARTS"])
def test_changed_sources_are_another_version(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the C file and of what it includes: kernels of the version before are not found."""
    before = kernel_cache._source_digest()
    value = getattr(kernel_cache, part)
    original = value if isinstance(value, Path) else value[0]
    changed = tmp_path / original.name
    changed.write_text(original.read_text() + "/* changed */\n")
    monkeypatch.setattr(kernel_cache, part, changed if value is original else (changed,))
    assert kernel_cache._source_digest.__wrapped__() != before


def test_all_that_is_included_is_part_of_the_version() -> None:
    """A file that the digest left out could change without the kernels being built anew."""
    source = kernel_cache._SOURCE
    known = {part.name for part in (source, *kernel_cache._PARTS)}
    for name in known:
        text = source.with_name(name).read_text()
        assert set(re.findall(r'#include "(.*)"', text)) <= known
    assert known == {path.name for path in source.parent.glob("*.[ch]")}
