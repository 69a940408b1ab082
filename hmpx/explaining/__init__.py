"""Explaining: what a policy does with an op, why, and where."""
