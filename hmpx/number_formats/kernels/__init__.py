"""Compiled kernels that round on the CPU: built, kept, loaded and called."""
