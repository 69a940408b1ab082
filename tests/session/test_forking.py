"""A child of `os.fork` never waits for a thread of its parent, and finds whole state."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import threading
from pathlib import Path

import pytest

import hmpx
from tests import forks

PACKAGE = Path(hmpx.__file__).parent

#: Classes of the standard library that lock, or start threads.
LOCKING = {
    *("Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier"),
    *("Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "ThreadPool", "Pool"),
    *("Queue", "LifoQueue", "PriorityQueue", "SimpleQueue", "cached_property", "allocate_lock"),
    *("register_at_fork", "start_new_thread"),
}

LIBRARIES = {
    *("threading", "_thread", "queue", "functools", "os", "concurrent.futures", "futures"),
    *("multiprocessing", "multiprocessing.pool"),
}

#: Uses of them outside of ``forks.py``, and how each survives a fork.
KNOWN = {
    ("registry.py", "Thread"): "started again in the child",
    ("registry.py", "register_at_fork"): "that start",
    ("cli/output.py", "Thread"): "shows a line in the parent alone, and holds no lock",
    ("cli/run.py", "register_at_fork"): "drops what the parent has recorded",
    ("integrations/devices.py", "Thread"): "the class, which the stand-in patches",
}


def uses() -> set[tuple[str, str]]:
    """Returns where hmpx's source uses a name of `LOCKING`: the file, and the name."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in LIBRARIES:
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module in LIBRARIES:
                names = [each.name for each in node.names]
            found |= {(path.relative_to(PACKAGE).as_posix(), name) for name in names}
    return {(path, name) for path, name in found if name in LOCKING and path != "forks.py"}


def test_every_lock_and_thread_is_one_for_which_forks_wait() -> None:
    """`hmpx.forks` makes them all."""
    new = uses() - KNOWN.keys()
    assert not new, (
        f"{sorted(new)}: use new_lock, holding, CachedProperty or in_own_thread of hmpx.forks"
    )
    assert KNOWN.keys() <= uses()  # no entry is out of date


def test_forks_wait_for_every_lock_of_a_module() -> None:
    """The objects in the loaded modules."""
    kinds = (type(threading.Lock()), type(threading.RLock()))
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(hmpx.__path__, "hmpx.")
        if not module.name.startswith(("hmpx.__main__", "hmpx.integrations"))
    ]
    waited = {id(lock) for lock in hmpx.forks._all()}
    count = 0
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, kinds):
                assert id(value) in waited, f"{module.__name__}.{name}"
                count += 1
    assert count >= 4


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no forks")

#: What each program begins with. A child that waits for ever is ended by its alarm.
START = """
import os, signal, sys, threading, time, torch, hmpx
from hmpx import forks
x = torch.ones(8, 8)
# A child waits for ever for the C++ part of an op that another thread calls for the first time, also without hmpx.
torch.set_num_threads(1)
for low in (x.bfloat16(), x.half(), x):
    torch.mm(low, low).float(), low @ low, torch.nn.functional.linear(low, low).float()

def outcome(act):
    '''Returns the exit status of a forked child that calls act.'''
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            act()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def use():
    '''Finds all of torch converted, or nothing; then reverts and converts.'''
    dtypes = {torch.mm(x, x).dtype, (x @ x).dtype, torch.nn.functional.linear(x, x).dtype}
    assert len(dtypes) == 1, dtypes
    hmpx.revert()
    assert torch.mm(x, x).dtype is torch.float32
    hmpx.convert(device_types={"cpu"})
    assert torch.mm(x, x).dtype is torch.bfloat16
"""

#: Forks at many times of first conversions, which import modules, read files and measure the CPU.
FIRST = """
def work():
    hmpx.convert(device_types={"cpu"})
    x @ x
    with hmpx.record() as recorded:
        x @ x
    recorded.by_op()
    hmpx.convert(low_precision_type="float16", device_types={"cpu"})
    hmpx.revert()

def program(pause):
    thread = threading.Thread(target=work)
    thread.start()
    while True:
        time.sleep(pause)
        is_over = not thread.is_alive()
        assert outcome(use) == 0
        if is_over:
            break
    thread.join()

assert outcome(lambda: program(0.1)) == 0
"""

#: A signal handler forks while its thread changes torch, and while another one measures the CPU for it.
HANDLER = """
from hmpx.compute import capabilities as capability
changing, measuring, found, parent = threading.Event(), threading.Event(), [], os.getpid()

def measured(kind, device, dtype, original=capability._measured):
    measuring.set()
    time.sleep(0.3)
    return original(kind, device, dtype)

def fork(number, frame):
    child = os.fork()
    found.append(child)
    if not child:
        found.clear()
        signal.alarm(60)

def interrupt(event):
    event.wait()
    os.kill(os.getpid(), signal.SIGUSR1)

class Policy(dict):
    def items(self):
        changing.set()
        time.sleep(0.3)
        return super().items()

signal.signal(signal.SIGUSR1, fork)
capability._measured = measured
for event in (changing, measuring):
    threading.Thread(target=interrupt, args=(event,), daemon=True).start()
hmpx.convert(policy=Policy(low=["mm"]), device_types={"cpu"})
assert torch.mm(x, x).dtype is torch.bfloat16
assert capability.capability("gemm", "cpu", torch.bfloat16).inference
use()
for child in found:
    assert os.waitpid(child, 0)[1] == 0
assert os.getpid() != parent or len(found) == 2
os._exit(0)
"""

#: A thread forks amid an import for which the thread that converts waits: neither waits for ever.
IMPORTING = """
import pathlib, tempfile
forks._PATIENCE_S = 0.3
holds = threading.Event()
sys.path.insert(0, tempfile.mkdtemp())
pathlib.Path(sys.path[0], "lib.py").write_text('''
import __main__
__main__.holds.wait()
__main__.status = __main__.outcome(__main__.use)
''')

@hmpx.registry.exclusive
def wait():
    holds.set()
    time.sleep(0.1)
    import lib

importing = threading.Thread(target=lambda: __import__("lib"))
importing.start()
wait()
importing.join()
assert status == 0
"""

#: What waits for the end of a conversion in its own thread is done in a child, too.
LATE = """
hmpx.registry._PATIENCE_S, done = 0.1, []
late = hmpx.registry.eventually(lambda: done.append(os.getpid()))

def check():
    hmpx.registry.LOCK.release()
    end = time.monotonic() + 30
    while done != [os.getpid()]:
        assert time.monotonic() < end
        time.sleep(0.01)

hmpx.registry.LOCK.acquire()
thread = threading.Thread(target=late)
thread.start()
thread.join()
assert not done
assert outcome(check) == 0
check()
"""


@needs_fork
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "program", [FIRST, HANDLER, IMPORTING, LATE], ids=["first", "handler", "importing", "late"]
)
def test_no_child_waits_for_a_thread_that_it_lacks(program: str, tmp_path: Path) -> None:
    """Whatever the parent's threads were doing."""
    (tmp_path / "script.py").write_text(START + program)
    path = str(tmp_path / "script.py")
    done = forks.run("-W", "ignore", path, imported=forks.TORCH, timeout=120)
    warned = "half changed" in done.stderr
    assert done.returncode == 0, done.stderr
    assert warned == (program is IMPORTING), done.stderr
