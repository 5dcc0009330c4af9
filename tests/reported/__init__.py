"""Training scripts after public reports, with truths found without recompute-scan."""
