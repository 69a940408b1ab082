"""Legalization: low-precision calls that a device lacks or runs slowly are computed in fp32 and rounded."""
