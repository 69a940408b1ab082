"""The version of hmpx: here, so that the package is not imported for it."""

__version__ = "0.1.0"
