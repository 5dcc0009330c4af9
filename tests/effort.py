"""How many random examples a property is held against."""

from __future__ import annotations

import os

# Set by `make test-all`: all of them. `make test` takes a fifth, other ones each time.
THOROUGH = "RECOMPUTE_SCAN_THOROUGH"


def examples(number: int) -> int:
    """``max_examples`` for Hypothesis: ``number`` in ``make test-all``, else a fifth."""
    return number if os.environ.get(THOROUGH) else -(-number // 5)
