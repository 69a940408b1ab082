"""Tests of hmpx.watch."""
