"""The process that `tests.fake_cuda.serving` starts: loads the guard, and forks a child for each call.

Reads a call a line, as JSON: module, function, arguments, the file for what the child prints, the file
for the result, and how many seconds it may take. Prints the child's exit status.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

loaded = ctypes.CDLL(sys.argv[1])  # before torch is imported
sys.path[0] = str(Path(__file__).parent.parent.parent)

from tests import fake_cuda  # noqa: E402  # imports torch once for all children

fake_cuda.loaded = loaded


def run(call: list[Any]) -> int:
    """Returns the exit status of a child that writes the result of a call."""
    module, name, arguments, log, result, limit_s = call
    signal.alarm(limit_s)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    try:
        found = getattr(importlib.import_module(module), name)(*arguments)
        Path(result).write_text(json.dumps(found), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


for line in sys.stdin:
    call = json.loads(line)
    if call[0].startswith("tests.fake_cuda."):
        importlib.import_module(call[0])  # what it needs, too, is imported once
    child = os.fork()
    if not child:
        os._exit(run(call))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
