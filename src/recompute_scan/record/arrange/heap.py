"""What a thread took of the system, and when steps on a CPU take long because they get their memory
from it anew.
"""

from __future__ import annotations

from typing import Any

try:
    import resource
except ImportError:  # no Unix
    resource = None  # type: ignore[assignment]

# Only Linux tells this of a thread.
_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)
# A page that is got anew is a minor fault, and takes the system's time. From this share of a step
# on it is worth a word.
_WORTH_TELLING = 0.03
_FEW_PAGES = 100
# Of glibc: what is free at the heap's end stays with the process (mallopt(3)).
_KEEPING = "MALLOC_TRIM_THRESHOLD_=2000000000 MALLOC_MMAP_THRESHOLD_=33554432"


def thread_usage() -> Any:
    """The system's account of this thread (getrusage(2)); ``None`` where it keeps none."""
    return None if _THREAD is None else resource.getrusage(_THREAD)


class Heap:
    """What this thread's steps had to get from the system, by arrangement."""

    def __init__(self) -> None:
        self._began = 0, 0.0
        self._steps: dict[int, list[tuple[int, float, float]]] = {}

    def begin(self) -> None:
        """A step begins."""
        self._began = _usage()

    def end(self, arm: int, ms: float) -> None:
        """It has ended, and had the processor for so long."""
        pages, system_ms = (now - then for now, then in zip(_usage(), self._began, strict=True))
        self._steps.setdefault(arm, []).append((int(pages), system_ms, ms))

    def remarks(self) -> tuple[str, ...]:
        """A sentence where it is a large part of some arrangement's steps."""
        worst, most = 0.0, 0.0
        for steps in self._steps.values():
            pages, system_ms, ms = (sum(each) for each in zip(*steps, strict=True))
            if pages > _FEW_PAGES * len(steps) and ms and system_ms / ms > worst:
                worst, most = system_ms / ms, pages / len(steps)
        if worst < _WORTH_TELLING:
            return ()
        return (
            f"Up to {worst:.0%} of a step here is the system's time, much of it for memory that "
            f"was given back and is got anew ({most:,.0f} pages a step). How much differs from run "
            f"to run, and no GPU does so. With {_KEEPING} in the environment, glibc keeps it.",
        )


def _usage() -> tuple[int, float]:
    """Pages that this thread got anew, and the system's time for it, ms."""
    used = thread_usage()
    return (0, 0.0) if used is None else (used.ru_minflt, 1e3 * used.ru_stime)
