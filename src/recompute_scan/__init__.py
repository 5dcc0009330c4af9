"""recompute-scan."""
