"""Plugins for training frameworks; each module needs its framework, and is imported by name.

``hmpx.integrations.lightning``, ``hmpx.integrations.transformers``, ``hmpx.integrations.accelerate``.
"""
