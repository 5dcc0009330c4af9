"""Guard: alerts when recomputes change during a long training."""
