"""The version of hmpx, and those of torch that its tests were run with.

Here, so that the package is not imported for it.
"""

__version__ = "0.1.0"

#: As docs/versions.md has them; a test compares.
TESTED_TORCH = ("2.13", "2.14", "2.15")
