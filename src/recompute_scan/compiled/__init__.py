"""Compiled regions: what the compiler's own graphs say runs again in their backward pass."""
