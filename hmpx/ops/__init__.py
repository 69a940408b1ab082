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
    same,
    why_not,
)
from .op_table import (
    Op,
    covered,
    covering,
    covering_among,
    names,
    nearest,
    resolve,
    root,
    table,
    unknown,
)
from .schemas import (
    Numbers,
    Parameters,
    argument,
    converting,
    converts_numbers,
    masks,
    numbers,
    parameter_named,
    parameters,
    python_parameters,
    statistics,
    written,
)
from .sites import Product, Site, draws, facts, product
from .traits import (
    carrying,
    computing,
    is_castable,
    is_decisive,
    is_mask,
    is_view,
    is_weight,
    kind,
    names_weights,
    role,
)
