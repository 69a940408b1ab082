"""The process that `tests.fake_cuda.call` starts: loads the guard, calls, prints the result as JSON."""

import ctypes
import importlib
import json
import sys
from pathlib import Path

guard, module, name, arguments = json.loads(sys.argv[1])
ctypes.CDLL(guard)  # before torch is imported
sys.path[0] = str(Path(__file__).parent.parent.parent)
result = getattr(importlib.import_module(module), name)(*arguments)
print(json.dumps(result))
