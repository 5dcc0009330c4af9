"""Recomputes of attention, from its kernels alone: where a trace has no operators or hides them."""
