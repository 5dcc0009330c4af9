"""Names of blocks, from the module frames of a trace with Python stacks.

``torch.profiler`` with ``with_stack=True`` or ``with_modules=True`` records each call of a module
as a frame called ``nn.Module: CLASS_N``; N numbers the instances of that class.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from recompute_scan.model import Calls
from recompute_scan.recompute.blocks import Block
from recompute_scan.recompute.counts import Counts
from recompute_scan.trace.columns import Int64, Kind, Trace

_MODULE = re.compile(r"nn\.Module: ((\w+)_\d+)$")
# Times written as absolute float microseconds are off by up to a quarter of one.
_SLACK_NS = 1000


def name_blocks(
    trace: Trace, calls: Calls, counts: Counts, blocks: Sequence[Block]
) -> tuple[Block, ...]:
    """The blocks, each with the module whose call holds all of it and nothing of another block.

    Of several such modules, one inside the other, the innermost names it. Blocks that have a
    name keep it; where the trace has no module frames, all stay as they are.
    """
    frames = _module_frames(trace)
    if not len(frames):
        return tuple(blocks)
    first = calls.start[counts.rows[[block.span.first for block in blocks]]]
    last = calls.end[counts.rows[[block.span.last for block in blocks]]]
    thread = calls.thread[counts.rows[[block.span.first for block in blocks]]]
    named = []
    for place, block in enumerate(blocks):
        mine = frames[
            (trace.thread[frames] == thread[place])
            & (trace.ts[frames] <= first[place] + _SLACK_NS)
            & (trace.ts[frames] + trace.dur[frames] >= last[place] - _SLACK_NS)
        ]
        if block.span.module is not None or not len(mine):
            named.append(block)
            continue
        frame = mine[np.argmin(trace.dur[mine])]
        begin, end = trace.ts[frame], trace.ts[frame] + trace.dur[frame]
        held = (thread == thread[place]) & (first >= begin - _SLACK_NS) & (last <= end + _SLACK_NS)
        found = _MODULE.match(trace.names[trace.name[frame]])
        if found is None or np.count_nonzero(held) > 1:
            named.append(block)
            continue
        span = replace(block.span, module=found[1], module_class=found[2])
        named.append(replace(block, span=span))
    return tuple(named)


def _module_frames(trace: Trace) -> Int64:
    rows = np.flatnonzero(trace.kind == Kind.PYTHON)
    is_module = np.array([bool(_MODULE.match(name)) for name in trace.names] or [False], np.bool_)
    return rows[is_module[trace.name[rows]]]
