"""Whether a recompute is the computation that it repeats: forward and recompute compared."""
