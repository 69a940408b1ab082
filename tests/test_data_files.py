"""The `.ini` files that come with hmpx are read as `configparser` reads them."""

from __future__ import annotations

import configparser
import importlib.resources
from pathlib import Path

import pytest

from hmpx.data_files import read_sections

FILES = [
    ("hmpx.ops", "ops.ini"),
    ("hmpx.compute", "kernels.ini"),
    ("hmpx.number_formats", "vocabulary.ini"),
    ("hmpx.torch_internals", "compiler.ini"),
    ("hmpx.torch_internals", "parts.ini"),
    ("hmpx.gaudi", "habana.ini"),
]


@pytest.mark.parametrize(("package", "name"), FILES, ids=[name for _, name in FILES])
def test_configparser_reads_the_same(package: str, name: str) -> None:
    parser = configparser.ConfigParser(allow_no_value=True, delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read_string(importlib.resources.files(package).joinpath(name).read_text("utf-8"))
    expected = {s: {k: v or "" for k, v in parser[s].items()} for s in parser.sections()}
    assert read_sections(package, name) == expected


@pytest.mark.parametrize(
    "text",
    ["name = 1\n", "[a]\n[a]\n", "[a]\nb\nb = 1\n", "[a]\nb = 1\n  more\n", "[a]\n= 1\n"],
    ids=["outside", "section-twice", "name-twice", "continued", "no-name"],
)
def test_a_line_of_another_kind_is_an_error(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `configparser` takes beside plain names and values is refused, not misread."""
    package = tmp_path / "data_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "x.ini").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"x\.ini:\d+: "):
        read_sections("data_of_a_test", "x.ini")
