"""`lint`: calls that lose precision or time; `expect`: contracts on the precision of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..later import shown_later
from .findings import RULES, Finding, as_github, as_json, as_sarif, findings_page
from .lint_rules import siblings
from .linting import Lint, lint

if TYPE_CHECKING:
    from .contract_lines import is_contract, read
    from .expecting import Breach, expect
    from .states import differences, read_state
else:
    __getattr__ = shown_later(
        __name__,
        {
            "contract_lines": "is_contract read",
            "expecting": "Breach expect",
            "states": "differences read_state",
        },
    )

__all__ = [
    "RULES",
    "Breach",
    "Finding",
    "Lint",
    "as_github",
    "as_json",
    "as_sarif",
    "differences",
    "expect",
    "findings_page",
    "is_contract",
    "lint",
    "read",
    "read_state",
    "siblings",
]
