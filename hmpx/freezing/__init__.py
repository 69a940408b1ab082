"""`freeze`: stores in low precision the weights that a model only uses in low precision."""

from __future__ import annotations

from .freezing import Frozen, freeze, load_frozen
from .layer_cast import is_layer_cast
from .seal import is_sealed
from .weights import Weight
