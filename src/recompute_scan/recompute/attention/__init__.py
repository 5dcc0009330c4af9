"""Recomputes from attention's kernels alone, without operators."""
