"""Recomputes from kernels alone, attention's or pairs', where operators are missing or hidden."""
