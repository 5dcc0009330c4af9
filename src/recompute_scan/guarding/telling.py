"""Where the guard tells what has changed, and the step time and memory that changed with it."""

from __future__ import annotations

import logging
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

import torch
from msgspec.structs import replace

from recompute_scan import trackers
from recompute_scan.errors import RunError
from recompute_scan.guarding.changes import Change
from recompute_scan.guarding.judging import IN_A_ROW
from recompute_scan.report.escape import sentence, visible

_KEPT = 65
_log = logging.getLogger("recompute_scan.guard")
Listening = Callable[[Change], object]

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;"
    "color-scheme:light dark}table{border-collapse:collapse;width:100%}"
    "th,td{border-bottom:1px solid #8886;padding:.4rem .6rem;text-align:left;vertical-align:top}"
)
_COLUMNS = ("Since step", "Kind", "Where", "Recomputes per forward", "Step time", "Memory", "What")


class Telling:
    """Tells each change once.

    Attributes:
        changes: What was told so far.
        callbacks: Called with each change. What one raises is logged, and never the training's.
    """

    def __init__(self, callbacks: Iterable[Listening], *, tell_trackers: bool = False) -> None:
        self._tell_trackers = tell_trackers
        self.changes: list[Change] = []
        self.callbacks = list(callbacks)

    def tell(self, change: Change) -> None:
        """Tell it everyone."""
        self.changes.append(change)
        _log.warning("%s", change.text)
        for callback in list(self.callbacks):
            try:
                callback(change)
            except Exception:  # the training goes on whatever those who are told do
                _log.exception("A callback of the guard has failed")
        if self._tell_trackers:
            trackers.tell(
                trackers.Note(
                    step=change.told,
                    text=change.text,
                    scalars={
                        "recomputes_per_forward": change.after,
                        "changes": len(self.changes),
                    },
                    alert=f"Recomputes have changed: {change.kind}",
                    artifact="recompute-scan-guard",
                    files={"guard.html": alert_page(self.changes)},
                )
            )


def refusal(change: Change) -> RunError:
    """What is raised where a change is to end the training."""
    return RunError("E352", change.text, hint='on_change="tell" only tells')


def with_pace(change: Change, pace: Pace) -> Change:
    """The change, with what step time and memory have become together with it."""
    slower, memory = pace.slower(IN_A_ROW), pace.memory()
    words = []
    if slower is not None and abs(slower - 1) > 0.05:
        words.append(f"steps take {slower:.2f} times as long")
    if memory is not None and abs(memory - 1) > 0.05:
        words.append(f"memory in use is {memory:.2f} times what it was")
    text = change.text + (f" With it, {' and '.join(words)}." if words else "")
    return replace(change, slower=slower, memory=memory, text=text)


class Pace:
    """The latest step times, on the clock of the process, and the memory at the last look.

    Attributes:
        ends: When the latest steps ended, in s of ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self.ends: deque[float] = deque(maxlen=_KEPT)
        self._memory: int | None = None

    @property
    def usual_s(self) -> float | None:
        """Median of the latest step times in s."""
        times = self._times()
        return statistics.median(times) if times else None

    def _times(self) -> list[float]:
        return [end - began for began, end in pairwise(self.ends)]

    def look_at_memory(self) -> None:
        """Keep what is in use now."""
        self._memory = _in_use()

    def slower(self, steps: int) -> float | None:
        """Median time of the last steps over that of those before; ``None`` with too few."""
        times = self._times()
        since, before = times[-steps:], times[:-steps]
        if len(since) < steps or len(before) < steps:
            return None
        return statistics.median(since) / statistics.median(before)

    def memory(self) -> float | None:
        """Memory in use over that at the last look; ``None`` where it is not known."""
        now = _in_use()
        return now / self._memory if now and self._memory else None


def _in_use() -> int | None:
    """Bytes: torch's highest use of the GPU, else what the process holds in memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return int(torch.cuda.max_memory_allocated())
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * int(os.sysconf("SC_PAGE_SIZE"))


def alert_page(changes: Sequence[Change]) -> bytes:
    """One row for each change, the latest first, as HTML in UTF-8 that needs no other file."""
    head = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in _cells(one)) + "</tr>\n"
        for one in reversed(changes)
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        "<title>Recomputes have changed</title>"
        f"<style>{_STYLE}</style><h1>Recomputes have changed</h1>"
        "<p>Told by the guard of recompute-scan while the training went on.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></html>\n"
    ).encode("utf-8", "replace")


def _cells(change: Change) -> tuple[str, ...]:
    where = [escape(visible(one)) for one in (*change.modules, *change.sites)]
    return (
        str(change.step),
        change.kind,
        "<br>".join(where),
        f"{change.after}, {change.before} before",
        _times(change.slower),
        _times(change.memory),
        escape(sentence(change.text, 1000)),
    )


def _times(ratio: float | None) -> str:
    return "not known" if ratio is None else f"{ratio:.2f} times"
