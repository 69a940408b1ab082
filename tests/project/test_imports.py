"""What `import hmpx` loads, and what waits until somebody asks for it."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import hmpx
from tests import forks

ROOT = Path(hmpx.__file__).parent

#: Imports every module while torch is converted, and looks at what they hold.
IMPORTED_LATE = """
import importlib, pkgutil
import torch
import hmpx
from tests import forks

hmpx.convert(policy={"lists": "none", "low": ["*"]})
wrapped = torch.mm, torch.Tensor.mul, torch.nn.functional.linear
assert all("__hmpx_site__" in vars(each) for each in wrapped)
held = []
for found in pkgutil.walk_packages(hmpx.__path__, "hmpx."):
    if found.name.startswith(("hmpx.__main__", "hmpx.integrations.")):
        continue  # one runs at once, the others import frameworks
    module = importlib.import_module(found.name)
    for name, value in vars(module).items():
        if "__hmpx_site__" in getattr(value, "__dict__", {}):
            held.append(f"{found.name}.{name}")
assert not held, held
"""

#: What a program without number formats, policy files or reports does not load, nor `convert` for it.
LATER = (
    "hmpx.comparing",
    "hmpx.compute.emulation",
    "hmpx.formats",
    "hmpx.freezing",
    "hmpx.number_formats.families",
    "hmpx.policy.files",
    "hmpx.recording",
    "hmpx.reports",
    "hmpx.tuning",
    "hmpx.watching",
    "configparser",
    "fractions",
    "html",
    "yaml",
)


def run(program: str) -> None:
    done = forks.run("-c", program, imported=forks.TORCH)
    assert done.returncode == 0, done.stderr


def test_what_is_imported_late_holds_torchs_own_functions() -> None:
    """Modules take functions of torch when they are imported, which may be after `convert`."""
    run(IMPORTED_LATE)


def test_the_first_op_needs_few_modules() -> None:
    run(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import hmpx\n"
        "hmpx.convert()\n"
        "torch.nn.Linear(2, 2)(torch.ones(2, 2)).sum().backward()\n"
        f"found = sorted(set({LATER}) & (set(sys.modules) - before))\n"
        "assert not found, found\n"
    )


def test_tools_without_number_formats_import_no_family_of_them() -> None:
    run(
        "import sys, torch, hmpx\n"
        "model, x = torch.nn.Linear(8, 8).eval(), torch.ones(2, 8)\n"
        "hmpx.tune(model, x, progress=False)\n"
        "with hmpx.convert(device_types={'cpu'}), hmpx.record() as recorded:\n"
        "    hmpx.freeze(model, x).summary()\n"
        "str(recorded.report())\n"
        "assert 'hmpx.number_formats.families' not in sys.modules\n"
    )


def rooms_with_later_names() -> list[str]:
    return sorted(
        ".".join(("hmpx", *file.parent.relative_to(ROOT).parts))
        for file in ROOT.rglob("__init__.py")
        if "shown_later(" in file.read_text()
    )


@pytest.mark.parametrize("room", rooms_with_later_names())
def test_names_that_come_later_are_those_that_the_types_say(room: str) -> None:
    """The table of `shown_later` and the imports for type checkers agree, and every name is found."""
    module = importlib.import_module(room)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    [choice] = [
        node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
    ]
    typed = {
        (node.module or alias.name, alias.name if node.module else "")
        for node in choice.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    [table] = [node for node in ast.walk(choice) if isinstance(node, ast.Dict)]
    shown = {
        (package, name)
        for package, names in ast.literal_eval(table).items()
        for name in names.split() or [""]
    }
    assert shown == typed
    for _, name in shown:
        if name:
            assert getattr(module, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hmpx' has no attribute 'freezee'") as caught:
        hmpx.freezee  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("freezee", hmpx)  # Python suggests 'freeze'
    assert "freeze" in dir(hmpx)


def test_packages_are_entered_by_their_doors() -> None:
    """A module imports from another package only what its ``__init__.py`` shows."""
    for path in sorted(ROOT.glob("*/**/*.py")):
        package = path.relative_to(ROOT).parts[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = ("hmpx", *path.relative_to(ROOT).parts[:-1])
                module = ".".join([*base[: len(base) - node.level + 1], node.module or ""])
                target = module.removeprefix("hmpx.").strip(".")
                names = [f"{target}.{alias.name}".strip(".") for alias in node.names]
                files = [
                    n for n in names if ROOT.joinpath(*n.split(".")).with_suffix(".py").exists()
                ]
                for found in (target, *files):
                    is_inside = found.partition(".")[0] in ("hmpx", package) or "." not in found
                    assert is_inside, f"{path}:{node.lineno}: {found}"
