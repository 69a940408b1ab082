"""What hmpx relies on that torch does not promise: in one place, and stood in for."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hmpx
from hmpx.torch_internals import Later
from hmpx.torch_internals import compiler as compiler_internals
from hmpx.torch_internals import torch_part as torch_parts
from tests import forks

PACKAGE = Path(hmpx.__file__).parent
HOME = PACKAGE / "torch_internals"

#: Attributes with an underscore that hmpx reads of torch's objects, and that are as good as public.
KNOWN = {"_version", "_modules", "_parameters", "_buffers"}


def is_private(part: str) -> bool:
    """Whether a part of a dotted name says that it is nobody else's."""
    return part.startswith("_") and not part.endswith("__") and part not in KNOWN


def private_names(tree: ast.AST) -> list[str]:
    """Returns the dotted names of private parts of torch in a module's imports, code and strings."""
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value
        ):
            names = [node.value]
        found += [
            name
            for name in names
            if name.startswith("torch.") and any(is_private(part) for part in name.split("."))
        ]
    return found


def test_only_one_room_names_private_parts_of_torch() -> None:
    """Whoever adapts hmpx to a new torch reads that one."""
    faults = {
        str(path): names
        for path in PACKAGE.rglob("*.py")
        if HOME not in path.parents and (names := private_names(ast.parse(path.read_text("utf-8"))))
    }
    assert not faults


def test_all_is_as_expected_with_this_torch() -> None:
    """Also what torch.compile brings, once it is imported."""
    parts = [*torch_parts.parts(), *compiler_internals.later_parts()]
    assert [part for part in parts if part.fault] == []
    assert len({part.feature for part in parts}) >= 20
    assert all(part.without for part in parts)


# --- without one part ----------------------------------------------------------------------------

#: Runs in a process of its own: there it breaks one part of torch after the other, each in a child.
WORKER = Path(__file__).with_name("worker.py")

#: What the worker imports: anew for each of its runs this would take as long as all that it tries.
IMPORTED = ("torch._dynamo", "torch.distributed.tensor", "torch.utils.checkpoint")


#: Parts that a test can't break.
UNBREAKABLE = {
    "torch._C._NodeBase.target": "the class is immutable",
    "torch._C._nn": "torch.nn computes with it, and would give nothing to compare",
    "torch._higher_order_ops.effects._EffectType.ORDERED": "members of an enum can't be deleted",
}
NAMES = [
    name
    for part in torch_parts.parts()
    for name in part.names
    if any(map(is_private, name.split("."))) and name not in UNBREAKABLE
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each part is broken in a forked child")
def test_without_a_part_results_are_as_right_or_refused(pytestconfig: pytest.Config) -> None:
    """Nothing is cast wrongly, no error but TorchError is seen, and what is left out is said once."""
    names = NAMES if pytestconfig.getoption("whole") else NAMES[::24]
    outcomes = run_worker(*names)
    assert outcomes.keys() == set(names)
    faults = [f"{name}: {fault}" for name in names if (fault := wrong_in(outcomes[name]))]
    assert not faults, "\n".join(faults)


def run_worker(*arguments: str) -> dict[str, Any]:
    """Returns what the worker prints."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = forks.run(str(WORKER), *arguments, env=environment, timeout=600, imported=IMPORTED)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def wrong_in(outcome: dict[str, Any]) -> str:
    """Returns what is wrong with what a user sees; ``""`` for nothing."""
    if outcome["error"]:
        if outcome["is_torchs_own"]:  # torch does not run without it either
            return ""
        is_clear = "install a newer hmpx" in outcome["error"]
        return "" if outcome["error"].startswith("TorchError") and is_clear else outcome["error"]
    if outcome["difference"]:
        return str(outcome["difference"])
    if len(outcome["warnings"]) != bool(outcome["faults"]):
        return f"{len(outcome['warnings'])} warnings of {outcome['faults']}"
    return ""


def test_what_torch_compile_lacks_is_said_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part that is left out in a warning; of one without which casts would be wrong in an error."""
    monkeypatch.setattr(torch_parts, "_warned", set())
    import torch._dynamo.guards
    import torch._inductor.codecache

    monkeypatch.delattr(torch._inductor.codecache, "FxGraphHashDetails")
    with pytest.warns(hmpx.HmpxWarning, match=r"(?s)caches of compiled graphs.*are not used"):
        assert compiler_internals.of_later(Later.CODE_CACHE, "FxGraphHashDetails") is None
    assert compiler_internals.of_later(Later.CODE_CACHE, "FxGraphHashDetails") is None
    monkeypatch.delattr(torch._dynamo.guards, "install_guard")
    with pytest.raises(hmpx.TorchError, match=r"(?s)guards of compiled graphs.*install_guard"):
        compiler_internals.needed_of_later(Later.DYNAMO_GUARDS, "install_guard")
    monkeypatch.delitem(sys.modules, Later.DYNAMO_SOURCES)  # moved elsewhere
    with pytest.raises(hmpx.TorchError, match=r"(?s)sources of guards.*AttrSource"):
        compiler_internals.needed_of_later(Later.DYNAMO_SOURCES, "AttrSource")


def test_versions_of_torch_are_told() -> None:
    """Local versions, release candidates and nightlies, too."""
    for text, expected in {
        "2.13.0+cpu": (2, 13),
        "2.14.1": (2, 14),
        "2.16.0a0+git1234567": (2, 16),
        "3.0.0.dev20270101": (3, 0),
    }.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "__version__", text)
            assert torch_parts.torch_version() == expected


def test_blocks_that_a_program_never_leaves_end_quietly() -> None:
    """Python ends them when it exits, without torch's modules."""
    program = (
        "import hmpx, torch\n"
        "opened = hmpx.record()\n"
        "opened.__enter__()\n"
        "def recorded():\n"
        "    with hmpx.record():\n"
        "        yield torch.ones(2).sum()\n"
        "running = recorded()\n"
        "next(running)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stderr == b""
