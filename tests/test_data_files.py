"""The `.ini` files that come with hmpx are read as `configparser` reads them."""

from __future__ import annotations

import configparser
import importlib.resources

import pytest

from hmpx.files import read_sections

FILES = [
    ("hmpx.ops", "ops.ini"),
    ("hmpx.compute", "kernels.ini"),
    ("hmpx.number_formats", "vocabulary.ini"),
    ("hmpx.torch_internals", "compiler.ini"),
    ("hmpx.torch_internals", "parts.ini"),
    ("hmpx.integrations", "habana.ini"),
]


@pytest.mark.parametrize(("package", "name"), FILES, ids=[name for _, name in FILES])
def test_configparser_reads_the_same(package: str, name: str) -> None:
    parser = configparser.ConfigParser(allow_no_value=True, delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read_string(importlib.resources.files(package).joinpath(name).read_text("utf-8"))
    expected = {s: {k: v or "" for k, v in parser[s].items()} for s in parser.sections()}
    assert read_sections(package, name) == expected
