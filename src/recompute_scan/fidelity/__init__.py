"""Comparison of each recompute with its forward."""
