"""All models of the zoo, of those libraries that are installed."""

from __future__ import annotations

import importlib.util
import itertools
from collections import defaultdict
from collections.abc import Sequence

from . import diffusion, hugging_face, images_and_sound, other_libraries, text, vision_libraries
from .entry import Entry


def entries() -> list[Entry]:
    """Returns the models whose libraries are installed."""
    found: list[Entry] = []
    if importlib.util.find_spec("transformers"):
        models = [*text.models(), *images_and_sound.models()]
        found += [hugging_face.entry(model) for model in models]
    found += vision_libraries.entries() + diffusion.entries() + other_libraries.entries()
    installed = {
        library: importlib.util.find_spec(library) is not None
        for library in {entry.library for entry in found}
    }
    return [entry for entry in found if installed[entry.library]]


def sample(choice: Sequence[Entry], count: int) -> list[Entry]:
    """Returns so many of the models, the same ones every time: one of each family, then the next."""
    families: dict[str, list[Entry]] = defaultdict(list)
    for entry in choice:
        families[entry.family].append(entry)
    rounds = itertools.zip_longest(*families.values())
    return [entry for each in rounds for entry in each if entry is not None][:count]
