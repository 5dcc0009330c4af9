"""Recomputes from kernels alone, attention's or pairs': where a trace has no operators or hides them."""
