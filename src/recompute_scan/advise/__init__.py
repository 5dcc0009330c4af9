"""Advice: the checkpoint to keep, in sentences and as a diff."""
