"""Environment variables by which one command of hmpx tells another what to do."""

from __future__ import annotations

from typing import Final

#: A policy file that outranks the lists that ``hmpx run`` is given: that which ``hmpx tune`` tries.
POLICY_VARIABLE: Final = "HMPX_POLICY"

#: Where ``hmpx run`` writes a report, as JSON.
REPORT_VARIABLE: Final = "HMPX_REPORT"
