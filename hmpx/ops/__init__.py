"""Torch's ops, and those of other libraries: names, call sites, parameters, facts."""

from __future__ import annotations

from .foreign import OPERATORS as OPERATORS
from .foreign import Found as Found
from .foreign import find_foreign as find_foreign
from .foreign import is_foreign as is_foreign
from .foreign import lacking as lacking
from .foreign import missing as missing
from .foreign import modules_of as modules_of
from .foreign import operator_of as operator_of
from .foreign import same as same
from .foreign import why_not as why_not
from .known_facts import Product as Product
from .known_facts import facts as facts
from .known_facts import product as product
from .op_table import Op as Op
from .op_table import covered as covered
from .op_table import covering as covering
from .op_table import covering_among as covering_among
from .op_table import names as names
from .op_table import nearest as nearest
from .op_table import resolve as resolve
from .op_table import root as root
from .op_table import table as table
from .op_table import unknown as unknown
from .schemas import Numbers as Numbers
from .schemas import Parameters as Parameters
from .schemas import converting as converting
from .schemas import converts_numbers as converts_numbers
from .schemas import masks as masks
from .schemas import numbers as numbers
from .schemas import parameter_named as parameter_named
from .schemas import parameters as parameters
from .schemas import python_parameters as python_parameters
from .schemas import statistics as statistics
from .schemas import written as written
from .sites import Site as Site
from .traits import computing as computing
from .traits import is_castable as is_castable
from .traits import is_decisive as is_decisive
from .traits import is_mask as is_mask
from .traits import is_view as is_view
from .traits import is_weight as is_weight
from .traits import kind as kind
from .traits import names_weights as names_weights
