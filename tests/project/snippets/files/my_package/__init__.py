"""A package that documents name."""
