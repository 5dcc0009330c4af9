"""All known failures, in the order in which they are tried."""

from __future__ import annotations

from recompute_scan.diagnose import (
    checkpointing,
    hangs,
    out_of_memory,
    parallel,
    recomputes,
    reentrant,
    saving,
)
from recompute_scan.frameworks import known
from recompute_scan.frameworks.signature import Signature


def _with_frameworks(general: tuple[Signature, ...]) -> tuple[Signature, ...]:
    """Each framework's own causes before the last one of their code, which is the general one."""
    found = list(general)
    for one in known.signatures():
        places = [place for place, other in enumerate(found) if other.code == one.code]
        found.insert(places[-1] if places else len(found), one)
    return tuple(found)


# Those that look at more come first: within a message the particular causes before the general
# one, and "out of memory while saving" before "out of memory".
SIGNATURES = _with_frameworks(
    (
        *recomputes.SIGNATURES,
        *reentrant.SIGNATURES,
        *checkpointing.SIGNATURES,
        *saving.SIGNATURES,
        *out_of_memory.SIGNATURES,
        *parallel.SIGNATURES,
    )
)
# Seen in a run alone: what its weights show, without any failure.
IN_RUNS: tuple[Signature, ...] = (reentrant.SILENT,)
# Recognised by what ranks do and not by what one exception says.
HANGS: tuple[Signature, ...] = hangs.ALL


def names() -> dict[str, str]:
    """The name for each code, in order of the codes."""
    return dict(sorted({one.code: one.name for one in (*SIGNATURES, *IN_RUNS, *HANGS)}.items()))
