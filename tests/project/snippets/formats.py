import torch

from hmpx import formats


def add(a, b):
    """Adds values."""
    return a + b


def add_codes(a, b):
    """Multiplies nothing: what integers stand for does not matter here."""
    return a
