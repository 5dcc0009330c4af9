"""All known failures, in the order in which they are tried."""

from __future__ import annotations

from recompute_scan.diagnose import checkpointing, parallel, replays, saving
from recompute_scan.diagnose.signature import Signature
from recompute_scan.diagnose.waiting import DIVERGED, NO_PROGRESS, SAVE_HANG, TIMED_OUT

# Those that look at more come first: within a message the particular causes before the general
# one, and "out of memory while saving" before "out of memory".
SIGNATURES: tuple[Signature, ...] = (
    *replays.SIGNATURES,
    *checkpointing.SIGNATURES,
    *saving.SIGNATURES,
    *parallel.SIGNATURES,
)
# Recognised by what ranks do and not by what one exception says.
HANGS: tuple[Signature, ...] = (SAVE_HANG, DIVERGED, TIMED_OUT, NO_PROGRESS)


def names() -> dict[str, str]:
    """The name for each code, in order of the codes."""
    return dict(sorted({one.code: one.name for one in (*SIGNATURES, *HANGS)}.items()))
