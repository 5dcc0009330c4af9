"""How much a test tries: all of it in ``make test-all``, a part in ``make test``."""

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

# Set by `make test-all`.
THOROUGH = "RECOMPUTE_SCAN_THOROUGH"


def examples(number: int) -> int:
    """``max_examples`` for Hypothesis: ``number`` in ``make test-all``, else a fifth."""
    return number if os.environ.get(THOROUGH) else -(-number // 5)


def some(cases: Iterable[T], one_in: int) -> list[T]:
    """All cases in ``make test-all``, else one in so many, evenly spread, with the first."""
    found = list(cases)
    return found if os.environ.get(THOROUGH) else found[::one_in]
