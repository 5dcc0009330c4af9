"""Names of blocks and checkpoint call sites, by the Python frames of a trace.

The profiler records each Python call as a range named ``file(line): function``, where the line
is the one of the function's ``def``, or ``nn.Module: Class_number`` for a module's call
(``with_stack=True`` or ``with_modules=True``). The frame of a checkpoint function holds the call's
first run; the frames around it show the call site.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.frameworks import pytorch
from recompute_scan.numpy_tools import places_of
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Alignment, Counts
from recompute_scan.recompute.boundaries import Span, merge, same_boundary
from recompute_scan.recompute.layers import Block
from recompute_scan.result import Checkpoint, Variant
from recompute_scan.trace.calls import Calls, nest
from recompute_scan.trace.columns import Kind, Trace

_NUMBERED = re.compile(r"nn\.Module: ((\w+)_\d+)$")
# From a place, ``path:function``, to the name of the mechanism that asks from there.
Recognise = Callable[[str], str]

_FRAME = re.compile(r"(?P<path>[^<>]+)\((?P<line>\d+)\): (?P<function>[^\s:]+)$")
_MODULE = re.compile(r"nn\.Module: (?P<class>\w+?)(_\d+)?$")
_INSTALLED = re.compile(r"^.*[/\\](?:site|dist)-packages[/\\]")
_CLOSE_BY = 8
# Times written as absolute float microseconds are off by up to a quarter of one.
_SLACK_NS = 1000


def name_blocks(
    trace: Trace, calls: Calls, counts: Counts, blocks: Sequence[Block]
) -> tuple[Block, ...]:
    """The blocks, each with the module that holds all of it and nothing of another block.

    Of several such modules, one inside the other, the innermost names it. Blocks that have a
    name keep it; where the trace has no module frames, all stay as they are.
    """
    names = np.array([bool(_NUMBERED.match(name)) for name in trace.names], np.bool_)
    frames = np.flatnonzero((trace.kind == Kind.PYTHON) & names[trace.name])
    if not len(frames):
        return tuple(blocks)
    frames = frames[trace.dur[frames].argsort(kind="stable")]
    begin = trace.ts[frames] - _SLACK_NS
    end = trace.ts[frames] + trace.dur[frames] + _SLACK_NS
    rows = counts.rows[[block.span.first for block in blocks]]
    first, thread = calls.start[rows], calls.thread[rows]
    last = calls.end[counts.rows[[block.span.last for block in blocks]]]
    named = list(blocks)
    for place, block in enumerate(blocks):
        mine = (begin <= first[place]) & (end >= last[place])
        mine &= trace.thread[frames] == thread[place]
        if block.span.module is None and mine.any():
            at = int(mine.argmax())
            held = (thread == thread[place]) & (first >= begin[at]) & (last <= end[at])
            found = _NUMBERED.match(trace.names[trace.name[frames[at]]])
            if found is not None and np.count_nonzero(held) == 1:
                span = replace(block.span, module=found[1], module_class=found[2])
                named[place] = replace(block, span=span)
    return tuple(named)


class _Place(Struct, frozen=True):
    path: str
    line: str
    function: str

    @property
    def text(self) -> str:
        return f"{self.path}:{self.function}"


def has_frames(trace: Trace) -> bool:
    """Does the trace hold Python frames?"""
    return bool((trace.kind == Kind.PYTHON).any())


def spans_from_frames(
    trace: Trace, calls: Calls, alignment: Alignment, recognise: Recognise
) -> list[Span]:
    """One span per checkpointed boundary that the frames show, in forward order."""
    frames = _Frames(nest(trace, (Kind.PYTHON,)))
    started = calls.start[alignment.forward]
    of_thread = {
        thread: (places, started[places])
        for thread, places in places_of(calls.thread[alignment.forward]).items()
    }
    spans = []
    for row in np.flatnonzero(frames.boundary).tolist():
        begin, end, thread = frames.interval(row)
        places, starts = of_thread.get(thread, (started[:0], started[:0]))
        first, stop = starts.searchsorted((begin, end)).tolist()
        if first >= stop:
            continue
        asking, depth = frames.asking(row)
        checkpoint = Checkpoint(
            depth=depth,
            variant=frames.variant(row),
            mechanism=recognise(asking.text) if asking else None,
            call_site=frames.site(row),
        )
        spans.append(Span(int(places[first]), int(places[stop - 1]), (checkpoint,)))
    return merge(spans)


def with_frames(recomputed: list[Span], framed: list[Span]) -> list[Span]:
    """The spans of frames, and of recomputes where no frame was recorded for them.

    A frame also holds what the checkpoint itself does before the module runs; where a recompute
    shows where the module begins, the span begins there.
    """
    ends: dict[int, list[int]] = defaultdict(list)
    for span in recomputed:
        ends[span.last].append(span.first)
    framed = [_without_preparation(span, ends[span.last]) for span in framed]
    known = {span.first: span for span in framed}

    def has_frame(span: Span) -> bool:
        near = range(span.first - _CLOSE_BY, span.first + _CLOSE_BY + 1)
        return any(
            same_boundary((span.first, span.last), (other.first, other.last))
            or (other.first == span.first and span.last <= other.last)
            for other in (known[at] for at in near if at in known)
        )

    left = [span for span in recomputed if not has_frame(span)]
    return sorted([*framed, *left], key=lambda span: (span.first, -span.last))


def _without_preparation(span: Span, firsts: list[int]) -> Span:
    close = [first for first in firsts if 0 < first - span.first <= _CLOSE_BY]
    return replace(span, first=min(close)) if close and span.first not in firsts else span


def _place(name: str) -> _Place | None:
    found = _FRAME.match(name)
    if found is None:
        return None
    path = _INSTALLED.sub("", found["path"]).replace("\\", "/")
    return _Place(path, found["line"], found["function"])


class _Frames:
    """The Python frames of a trace, as calls.

    Attributes:
        calls: The frames.
        boundary: For each: does it hold the first run of a checkpointed function?
    """

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self._places = [_place(name) for name in calls.names]
        frames = vocabulary.CHECKPOINT_FRAMES
        first = [place is not None and place.text in frames for place in self._places]
        self.boundary = np.array(first, np.bool_)[calls.name]

    def _place(self, row: int) -> _Place | None:
        return self._places[int(self.calls.name[row])]

    def _is_hook(self, row: int) -> bool:
        place = self._place(row)
        return place is not None and place.text == vocabulary.COMPOSABLE_HOOK

    def interval(self, row: int) -> tuple[int, int, int]:
        """Begin, end and thread of the first run: of a hook, which ends before, its module's."""
        calls = self.calls
        if self._is_hook(row):
            modules = (one for one in calls.above(row) if _MODULE.match(calls.called(one)))
            row = next(modules, -1)
        return int(calls.start[row]), int(calls.end[row]), int(calls.thread[row])

    def asking(self, row: int) -> tuple[_Place | None, int]:
        """The place that asks for the checkpoint, and how many checkpoints are around the call."""
        asking = self._place(row)
        asks = asking is not None and asking.path != pytorch.CHECKPOINT_FILE
        depth = 0
        for above in self.calls.above(row):
            place = self._place(above)
            depth += bool(self.boundary[above])
            if asks or place is None:
                continue
            if place.text in vocabulary.ASKING_FRAMES or not place.path.startswith("torch/"):
                asking, asks = place, True
        return asking, depth

    def site(self, row: int) -> str | None:
        """``file:line`` of the function outside torch that asks, its own line."""
        places = filter(None, map(self._place, self.calls.above(row)))
        own = next((place for place in places if not place.path.startswith("torch/")), None)
        return f"{own.path}:{own.line}" if own else None

    def variant(self, row: int) -> Variant | None:
        """The variant of the checkpoint; ``None`` where nothing shows it."""
        place = self._place(row)
        if place is None or place.path != pytorch.CHECKPOINT_FILE:
            return "non-reentrant" if self._is_hook(row) else "reentrant"
        shows: dict[str, Variant] = {
            **dict.fromkeys(pytorch.GENERATORS, "non-reentrant"),
            "forward": "reentrant",
        }
        inside = map(self._place, range(row + 1, row + 1 + int(self.calls.size[row])))
        own = (one for one in inside if one is not None and one.path == pytorch.CHECKPOINT_FILE)
        return next((shows[one.function] for one in own if one.function in shows), None)
