"""Where the guard tells what has changed: its logger, and whoever wants to be called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from recompute_scan import trackers
from recompute_scan.errors import RunError
from recompute_scan.guarding.changes import Change
from recompute_scan.guarding.judging import IN_A_ROW
from recompute_scan.guarding.pace import Pace

_log = logging.getLogger("recompute_scan.guard")
Listening = Callable[[Change], object]


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
