"""The JSON Schemas of policy files and contracts against the readers of these files."""

from __future__ import annotations

import ast
import contextlib
import importlib.resources
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hmpx import HmpxError, HmpxWarning, checking, cli, load_policy
from hmpx.policy.files import from_mapping, read_options
from tests import forks
from tests.project.markdown import DOCUMENTS, ROOT, blocks

FOLDER = importlib.resources.files(checking) / "schemas"
SCHEMAS = {
    kind: jsonschema.Draft202012Validator(json.loads((FOLDER / f"{kind}.json").read_text("utf-8")))
    for kind in ("policy", "contract", "options")
}

#: What a policy or a contract begins a line with.
KEYS = re.compile(
    r"^(expect|lists|exclude|sections|low|fp32|widest|first|follow|pass|low_precision_type):", re.M
)


def kind_of(content: Any) -> str:
    return "contract" if isinstance(content, dict) and "expect" in content else "policy"


def is_read(content: Any) -> bool:
    """Whether hmpx reads it without an error or a warning."""
    try:
        if kind_of(content) == "contract":
            checking.read(content)
        else:
            from_mapping(content)
    except (HmpxError, HmpxWarning):
        return False
    return True


def parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        return None


def in_tests() -> Iterator[dict[str, Any]]:
    """Yields the policies and contracts in the tests' strings and dicts, whether or not hmpx reads them."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text("utf-8")
        if not re.search("policy|expect:|contract", text):
            continue
        for node in ast.walk(ast.parse(text)):
            content = None
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                content = parsed(node.value) if KEYS.search(node.value) else None
            elif isinstance(node, ast.Dict) and any(
                isinstance(key, ast.Constant) and KEYS.match(f"{key.value}:") for key in node.keys
            ):
                with contextlib.suppress(ValueError):
                    content = ast.literal_eval(node)
            if isinstance(content, dict):
                yield content


def test_the_files_are_current() -> None:
    """`python scripts/schemas.py` writes them."""
    program = "import sys; sys.path.insert(0, 'scripts'); import json, schemas; print(json.dumps(schemas.schemas()))"
    made = json.loads(forks.run("-c", program, cwd=ROOT).stdout)
    assert made == {
        f"{kind}.json": (FOLDER / f"{kind}.json").read_text("utf-8") for kind in SCHEMAS
    }
    for each in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(each.schema)
        jsonschema.Draft7Validator.check_schema(each.schema)  # for editors


def test_documents_and_shipped_files_are_valid() -> None:
    texts = [
        block.text
        for document in DOCUMENTS
        for block in blocks(document)
        if block.language == "yaml" and KEYS.search(block.text)
    ]
    texts += [path.read_text("utf-8") for path in sorted((ROOT / "examples").rglob("*.yaml"))]
    assert len(texts) > 20
    for text in texts:
        content = parsed(text)
        SCHEMAS[kind_of(content)].validate(content)
        assert is_read(content)
    for path in (ROOT / "lists").rglob("*.yaml"):
        read_options(str(path))
        SCHEMAS["options"].validate(parsed(path.read_text("utf-8")))
    for shipped in ("hmp", "hmpx", "lean"):
        SCHEMAS["policy"].validate(parsed(load_policy(lists=shipped).to_yaml()))


def test_what_hmpx_reads_in_the_tests_is_valid() -> None:
    contents = [content for content in in_tests() if is_read(content)]
    assert len(contents) > 100
    for content in contents:
        SCHEMAS[kind_of(content)].validate(content)


@pytest.mark.parametrize(
    "text",
    [
        "lowe: [mm]",
        "list: hmpx",
        "low: {ad: [mm]}",
        "low: {add: [mm], removed: [mv]}",
        "fp32: {exp: 1}",
        "low: null",
        "rounding: neares",
        "overflow: satürate",
        "low_precision_type: [bfloat16]",
        "excludes: [head]",
        "exclude: {module: head}",
        "sections: {module: head}",
        "sections: [{modul: head, fp32: [mm]}]",
        "sections: [{module: head, fp32: {add: [mm]}}]",
        "sections: [{mode: training, fp32: [mm]}]",
        "sections: [{min_numel: many, fp32: [mm]}]",
        "sections: [{ndim: [2, -1], fp32: [mm]}]",
        "sections: [{dtype: float33, fp32: [mm]}]",
        "sections: [{fp32: [mm]}]",
        "sections: [{module: head}]",
        "[mm]",
        "expects: [{op: mm, compute: float32}]",
        "expect: [{ops: mm, compute: float32}]",
        "expect: [{op: mm, computed: float32}]",
        "expect: [{op: mm, compute: floatt32}]",
        "expect: [{op: mm, compute: [float32, int8]}]",
        "expect: [{op: mm, phase: back, compute: float32}]",
        "expect: [{op: mm}]",
        "expect: [{tensor: a, op: mm, contents: float32}]",
        "expect: [{tensor: a, compute: float32}]",
        "expect: [{optimizer: a, module: b, contents: float32}]",
        "expect: [mm]",
    ],
)
def test_faults_that_hmpx_names_are_found(text: str) -> None:
    content = parsed(text)
    assert not SCHEMAS["contract" if text.startswith("expect") else "policy"].is_valid(content)
    if isinstance(content, dict):
        assert not is_read(content)


def test_the_command_prints_paths_and_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in paths] == ["contract.json", "options.json", "policy.json"]
    assert cli.main(["schema", "--vscode"]) == 0
    setting = json.loads(capsys.readouterr().out)["yaml.schemas"]
    assert setting[paths[2].as_uri()] == ["policy.yaml", "*.policy.yaml"]
    assert cli.main(["schema", "--modeline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"# yaml-language-server: $schema={path.as_uri()}" for path in paths]
