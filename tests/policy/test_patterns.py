"""Patterns of module names: those of Python's re, in time that no pattern makes explode."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
import torch

import hmpx
from hmpx.policy import matches

_ATOMS = ["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", "^", "$", r"\b", "1", "{x"]
_REPEATS = ["*", "+", "?", "{1,2}", "{2}", "{,2}", "{1,}", "*?"]


def _pattern(draw: random.Random, depth: int) -> str:
    way = draw.random()
    if depth == 0 or way < 0.35:
        return draw.choice(_ATOMS)
    first, second = _pattern(draw, depth - 1), _pattern(draw, depth - 1)
    if way < 0.55:
        return first + second
    if way < 0.7:
        return f"({first}){draw.choice(_REPEATS)}"
    if way < 0.85:
        return f"(?:{first}|{second})"
    return f"{draw.choice(['(?=', '(?!'])}{first})" if way < 0.93 else f"{first}|{second}"


def test_patterns_match_as_in_re() -> None:
    draw = random.Random(0)
    compared = 0
    while compared < 4000:
        pattern = _pattern(draw, 4)
        try:
            expected = re.compile(pattern)
        except re.error:
            continue
        for _ in range(4):
            name = "".join(draw.choice("ab.1") for _ in range(draw.randrange(6)))
            found = matches("module_regex", pattern, name)
            assert found is (expected.fullmatch(name) is not None), (pattern, name)
            compared += 1


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        *(("module_regex", each) for each in (
            "(a+)+$", "(a|aa)+$", "((a*)*)*c", "(a?){40}a{60}", "(.*a){25}c", ".*" * 30 + "c", "(?=(a+)+$)x",
        )),
        ("module", "*a" * 30 + "c"),
    ],
)  # fmt: skip
def test_no_pattern_hangs(key: str, pattern: str) -> None:
    start = time.perf_counter()
    assert not matches(key, pattern, "a" * 100 + "b")
    assert time.perf_counter() - start < 1


def test_a_forward_with_a_hostile_pattern_ends() -> None:
    model = torch.nn.Sequential()
    model.add_module("a" * 60 + "b", torch.nn.GELU())
    sections = [{"module_regex": "(a+)+$", "low": ["gelu"]}]
    with hmpx.convert(policy={"sections": sections}, device_types={"cpu"}):
        assert model(torch.ones(2)).dtype is torch.float32


@pytest.mark.parametrize(
    "pattern", [r"(?<=a)b", r"(a)\1", "(?>a)", "a*+", "(?i:a)", "(" * 30 + ")" * 30, "(a"]
)
def test_other_patterns_are_refused_with_their_line(pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(f"sections:\n- low: [gelu]\n  module_regex: '{pattern}'\n", "utf-8")
    with pytest.raises(
        hmpx.PolicyFileError, match=r"policy\.yaml:3: module_regex: not a regular expression: "
    ):
        hmpx.load_policy(policy=path)
