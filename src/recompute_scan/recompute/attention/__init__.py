"""Recomputes from attention's kernels alone, where operators are missing or hidden."""
