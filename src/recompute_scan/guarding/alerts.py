"""Alerts of the guard, and comparisons of single recomputes with their forward.

An alert names the change and the step time and memory that changed with it. Comparisons take one
call of one region now and then, within a share of the training's time.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from msgspec.structs import replace

from recompute_scan import trackers
from recompute_scan.fidelity.comparison import Comparing
from recompute_scan.guarding.judge import IN_A_ROW, Change, TalliedRegion
from recompute_scan.record.isolation import Call, Guard, Patches
from recompute_scan.record.measure import kernel_bytes
from recompute_scan.record.modules import ModuleIndex
from recompute_scan.record.region_ranges import watch_what_is_handed
from recompute_scan.record.torch_versions import compiled_something
from recompute_scan.report.templating import sentence, visible
from recompute_scan.result.fidelity import ComparedRegion

_KEPT = 65
_log = logging.getLogger("recompute_scan.guard")
Listening = Callable[[Change], object]

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;"
    "color-scheme:light dark}table{border-collapse:collapse;width:100%}"
    "th,td{border-bottom:1px solid #8886;padding:.4rem .6rem;text-align:left;vertical-align:top}"
)
_COLUMNS = (
    "From step",
    "Kind",
    "Where",
    "Recomputes per forward",
    "Step time",
    "Memory",
    "Change",
)


def tell(changes: Sequence[Change], callbacks: Sequence[Listening], *, on_trackers: bool) -> None:
    """Send the last of these changes to the log, callbacks and trackers."""
    change = changes[-1]
    _log.warning("%s", change.text)
    for callback in list(callbacks):
        try:
            callback(change)
        except Exception:  # the training goes on whatever a callback does
            _log.exception("A callback of the guard has failed")
    if on_trackers:
        trackers.tell(
            trackers.Note(
                step=change.alert_step,
                text=change.text,
                scalars={"recomputes_per_forward": change.after, "changes": len(changes)},
                alert=f"Recomputes have changed: {change.kind}",
                artifact="recompute-scan-guard",
                files={"guard.html": alert_page(changes)},
            )
        )


def with_pace(change: Change, pace: Pace) -> Change:
    """The change, with what step time and memory have become together with it."""
    slower, memory = pace.slower(), pace.memory()
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

    def slower(self) -> float | None:
        """Median time of the last steps over the median before them; ``None`` with too few."""
        times = self._times()
        since, before = times[-IN_A_ROW:], times[:-IN_A_ROW]
        if len(before) < IN_A_ROW:
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
    return kernel_bytes("self/status", "VmRSS")


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
        "<p>Sent by the guard of recompute-scan while the training went on.</p>"
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


_FIRST = 3


class _Sample:
    """One step in which one region is compared; ended by :meth:`end`."""

    def __init__(self, region: TalliedRegion, index: ModuleIndex, guard: Guard) -> None:
        self.region = region
        self._patches = Patches()
        self._taken = False
        self._comparing = Comparing(index.name_of, guard.around)
        watch_what_is_handed(self._comparing, guard, self._patches)
        region.sampling = self

    def call(self, function: object) -> Any:
        """The call to compare, of this function: the first of the step; ``None`` for others."""
        if self._taken:
            return None
        self._taken = True
        region = self.region
        known = ComparedRegion(region.name or "", "", region.variant, "", region.site)
        module = region.module
        return self._comparing.region(known, function, [module] if module is not None else [])

    def end(self) -> list[str] | None:
        """The step is over: the differences, by kind; ``None`` where nothing was compared."""
        self.region.sampling = None
        self._patches.undo()
        outcome = self._comparing.outcome()
        if not outcome.compared:
            return None
        return [
            said
            for one in outcome.compared
            for said in (
                *(
                    f"{each.kind} at {each.operation.name}"
                    + (f" ({each.operation.site})" if each.operation.site else "")
                    for each in one.differences
                ),
                *(f"no gradient for {each.name or 'a tensor'}" for each in one.lost),
                *(f"{each.name} is updated again" for each in one.states if each.is_buffer),
            )
        ]


def compared_runs(
    function: Any, call: Any, guard: Guard, *, has_run: bool = False
) -> Callable[..., Any]:
    """The function: all its runs are recomputes, but the forward's where that is the first one."""

    def run(passed: Call, *args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        around = call.recompute() if has_run else call.forward()
        has_run = True
        with around as returned:
            result = passed(*args, **kwargs)
            if returned is not None:
                returned(result)
            return result

    return guard.around(function, run, named=False)


class Sampling:
    """Takes one region after another, one in a step, some steps apart.

    State between calls that a region's first look shows (statistics that every recompute adds to)
    was there from the beginning; only new differences are reported.

    Attributes:
        due: From the end of this step on, :meth:`step` has something to do.
    """

    def __init__(self, index: ModuleIndex, guard: Guard, every: int, share: float | None) -> None:
        self._index = index
        self._guard = guard
        self._every = every
        self._share = share
        self.due: float = _FIRST if every else math.inf
        self._turn = 0
        self._sample: _Sample | None = None
        self._began = 0.0
        self._known: dict[str, tuple[str, ...]] = {}

    def step(
        self, number: int, regions: Sequence[TalliedRegion], pace: Pace
    ) -> tuple[TalliedRegion, list[str]] | None:
        """A step has ended: the new differences that the comparison in it has shown."""
        sample, self._sample = self._sample, None
        found = None
        if sample is not None:
            said = sample.end()
            spent = perf_counter() - self._began
            self.due = number + self._distance(spent, pace.usual_s)
            if said is not None:
                found = self._judged(sample.region, said)
        elif compiled_something():  # it runs no operators
            self.due = number + self._every
        elif self._every and number >= self.due:
            named = [one for one in regions if one.name is not None and not one.gone]
            if named:
                self._turn += 1
                self._sample = _Sample(named[self._turn % len(named)], self._index, self._guard)
                self._began = perf_counter()
        return found

    def drop(self) -> None:
        """Compare no more."""
        sample, self._sample = self._sample, None
        self._every, self.due = 0, math.inf
        if sample is not None:
            sample.end()

    def _distance(self, spent: float, usual_s: float | None) -> int:
        if self._share is None or not usual_s:
            return self._every
        extra = max(0.0, spent - usual_s)
        return max(self._every, int(extra / (self._share * usual_s)))

    def _judged(
        self, region: TalliedRegion, said: list[str]
    ) -> tuple[TalliedRegion, list[str]] | None:
        before = self._known.get(region.name or "")
        self._known[region.name or ""] = tuple(said)
        if before is None:
            said = [one for one in said if not one.endswith("is updated again")]
        new = [one for one in said if before is None or one not in before]
        return (region, new) if new else None
