"""The version of hmpx, and the torch versions that it is tested with.

A module of its own, so that reading it does not import the package.
"""

__version__ = "0.1.0"

#: A test compares them with docs/evidence/versions.md.
TESTED_TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")
