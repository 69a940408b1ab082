"""Watching: the first op whose inputs are finite and whose result is not."""
