"""Checkpoints put around modules and taken from them in memory, and what is saved without them."""
