"""Torch's ops, and those of other libraries: names, call sites, parameters, facts."""

from __future__ import annotations

from .foreign import (
    OPERATORS,
    Found,
    find_foreign,
    is_foreign,
    lacking,
    missing,
    modules_of,
    operator_of,
    refusal,
    same,
    why_not,
)
from .hints import of_modules, unknown
from .known_facts import facts
from .numbers import Numbers, converting, converts_numbers, numbers
from .op_table import Op, covered, covering, is_known, names, resolve, root, table
from .products import Product, product
from .roles import idle_roles, is_mask, is_weight, names_weights
from .signatures import (
    Parameters,
    parameter_named,
    parameters,
    python_parameters,
    statistics,
    written,
)
from .sites import Site
from .traits import computing, is_castable, is_decisive, is_view, kind

__all__ = [
    "OPERATORS",
    "Found",
    "Numbers",
    "Op",
    "Parameters",
    "Product",
    "Site",
    "computing",
    "converting",
    "converts_numbers",
    "covered",
    "covering",
    "facts",
    "find_foreign",
    "idle_roles",
    "is_castable",
    "is_decisive",
    "is_foreign",
    "is_known",
    "is_mask",
    "is_view",
    "is_weight",
    "kind",
    "lacking",
    "missing",
    "modules_of",
    "names",
    "names_weights",
    "numbers",
    "of_modules",
    "operator_of",
    "parameter_named",
    "parameters",
    "product",
    "python_parameters",
    "refusal",
    "resolve",
    "root",
    "same",
    "statistics",
    "table",
    "unknown",
    "why_not",
    "written",
]
