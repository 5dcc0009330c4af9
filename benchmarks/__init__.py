"""Measurements whose figures stand in the documentation: ``python -m benchmarks``."""
