"""Regular expressions of policy files: as Python's, and none of them stops a program."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hmpx.policy.regexes import Regex

PARTS = ["a", "b", ".", r"\.", r"\d", "[ab]", "[^a]", "(", ")", "(?:", "|", "*", "+", "?", "{2}", "{1,3}",
    "*?", "(?i:", "(?!", "(?=", "^", "$", r"\b", "{0,2}"]  # fmt: skip


@given(st.lists(st.sampled_from(PARTS), max_size=9).map("".join), st.text("abA.1", max_size=7))
def test_matches_are_those_of_python(pattern: str, text: str) -> None:
    try:
        regex = Regex(pattern)
    except ValueError:
        return  # as 'a**'; what is refused though Python takes it is tested below
    assert regex.matches(text) is (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+", "(a|a)*", "(a|aa)+", "(.*)*x", ".*.*.*.*.*.*.*.*x", "(?:a{0,60}){0,60}b", "((a*)*)*c",
     "(a?){60000}(a?){60000}x"],
)  # fmt: skip
def test_none_takes_exponential_time(pattern: str) -> None:
    started_s = time.process_time()
    assert not Regex(pattern).matches("a" * 300 + "!")
    assert time.process_time() - started_s < 5


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?<=a)b", "(?<!a)b", "(a)?(?(1)b|c)"])
def test_what_needs_going_back_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not supported; remove it, or use `module`"):
        Regex(pattern)
