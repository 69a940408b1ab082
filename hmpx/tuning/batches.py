"""The inputs that a model is tuned on, what it returns for them, and the random numbers that it draws."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..errors import OptionError, shown
from ..tensors import copied

#: Which inputs an evaluation is made on: those of the search, or those it has never seen.
TUNING: Final = "tuning"
FRESH: Final = "fresh"


@dataclass(frozen=True)
class Batch:
    """The arguments of one call of the model.

    Attributes:
        args: Those given by position.
        kwargs: Those given by name.
        given: The batch as the user gave it, which loss functions get.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: Any

    def run(self, model: Callable[..., Any]) -> Any:
        """Returns what ``model`` returns for copies of the batch's tensors, which it may write to."""
        args, kwargs = copied((self.args, dict(self.kwargs)))
        return model(*args, **kwargs)


def batches(name: str, inputs: Any) -> tuple[Batch, ...]:
    """Returns the batches in ``inputs``: a list has several, anything else is one.

    Args:
        name: What error messages call the argument.
        inputs: A batch, or a list of them. A tuple holds positional arguments, a mapping those by name,
            anything else is the only argument.

    Raises:
        OptionError: The list is empty.
    """
    given = inputs if isinstance(inputs, list) else [inputs]
    if not given:
        raise OptionError(f"{name} is an empty list; give at least one batch")
    return tuple(map(_batch, given))


def _batch(given: Any) -> Batch:
    if isinstance(given, tuple):
        return Batch(given, {}, given)
    if isinstance(given, Mapping):
        names = [key for key in given if not isinstance(key, str)]
        if names:
            raise OptionError(
                f"a batch that is a mapping holds arguments by name, not {shown(names[0])}; "
                "put a mapping that is the only argument into a tuple"
            )
        return Batch((), dict(given), given)
    return Batch((given,), {}, given)


def seed_all(seed: int) -> None:
    """Has torch, Python and NumPy, if it is loaded, draw the random numbers of a seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
