"""The guard that stays on: whether recomputes stay what they were, through a whole training."""
