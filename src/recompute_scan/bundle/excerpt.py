"""What of a trace goes into an archive: the rows that prove its verdict, as Kineto's JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct

from recompute_scan.bundle.clean import CATEGORIES
from recompute_scan.model import StepSpan
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.recompute.roles import Role
from recompute_scan.trace import Kind, Trace
from recompute_scan.trace.columns import Bool, Int64

_AT_ONCE = 20_000


class Cut(Struct, frozen=True):
    """How much of each trace goes in.

    Attributes:
        steps: Number of complete steps; ``None`` for the whole recording.
        inner: Whether operators that others called go in.
        blocks: Number of blocks with their recomputes; ``None`` for all that the steps hold.
        share: Share of the recording's time, for one without a complete step.
        all_ranks: Whether every rank's trace goes in, or only the one that the verdict is of.
    """

    steps: int | None
    inner: bool = True
    blocks: int | None = None
    share: float = 1.0
    all_ranks: bool = True

    def dropped(self, complete: int, ranks: int) -> list[str]:
        """What is left out, one phrase each; ``complete`` steps and ``ranks`` were there."""
        found = []
        if self.steps is not None and self.steps < complete:
            found.append(f"{complete - self.steps} of {complete} complete steps")
        if not self.all_ranks and ranks > 1:
            found.append(f"the traces of {ranks - 1} of {ranks} ranks")
        if not self.inner:
            found.append("operators called by other operators")
        if self.share < 1:
            found.append(f"all but the first {self.share:.2%} of the recording")
        if self.blocks is not None:
            found.append(f"all but {self.blocks} of the blocks and what belongs to them")
        return found


def smaller_and_smaller(complete: int, blocks: int, ranks: int) -> Iterator[Cut]:
    """Cuts to try one after the other until one fits.

    Args:
        complete: Most complete steps of any trace.
        blocks: Blocks in one step.
        ranks: Number of traces.
    """
    if not complete:
        yield Cut(None)
        for halvings in range(1, 20):
            yield Cut(None, share=0.5**halvings)
            yield Cut(None, share=0.5**halvings, all_ranks=False)
        return
    steps = complete
    while steps:
        yield Cut(steps)
        steps //= 2
    if ranks > 1:
        yield Cut(1, all_ranks=False)
    yield Cut(1, inner=False, all_ranks=False)
    while blocks > 1:
        blocks //= 2
        yield Cut(1, inner=False, blocks=blocks, all_ranks=False)


def rows_of(facts: RecomputeFacts, cut: Cut) -> Int64:
    """Rows of the trace that go in, in file order."""
    if cut.steps is None or not facts.complete.any():
        start = facts.trace.ts
        end = start.min() + cut.share * (start.max() - start.min())
        rows: Int64 = np.flatnonzero(start <= end)
        return rows
    spans = _spans(facts, cut.steps)
    begin, end = spans[0].start, spans[-1].end
    calls, kernels = facts.calls, facts.kernels
    host = (calls.start >= begin) & (calls.start < end)
    if cut.blocks is not None:
        host &= _belonging(facts, cut.blocks, begin, end)
    if not cut.inner:
        host &= _outline(facts)
    launched = kernels.launch >= 0
    mine = launched & host[kernels.launch]
    if cut.blocks is None:
        # What still ran when the first step began kept the device busy in it.
        running = (kernels.end > begin) & (kernels.start < end)
        mine |= running
        host[kernels.launch[running & launched]] = True
    return np.sort(np.concatenate((calls.event[host], kernels.event[mine])))


def _spans(facts: RecomputeFacts, most: int) -> list[StepSpan]:
    """From the first to the last of ``most`` complete steps, the middle ones."""
    complete = np.flatnonzero(facts.complete)
    first = max(0, (len(complete) - most) // 2)
    chosen = complete[first : first + most]
    return list(facts.steps[int(chosen[0]) : int(chosen[-1]) + 1])


def _outline(facts: RecomputeFacts) -> Bool:
    """The calls by which roles, counts and times are told, without what is inside them."""
    calls, structure = facts.calls, facts.structure
    keep: Bool = structure.role != Role.INNER
    launches = np.zeros(len(calls), np.bool_)
    launches[facts.kernels.launch[facts.kernels.launch >= 0]] = True
    attention = np.array(
        [words.family_of(name)[1] == "attention" for name in calls.names], np.bool_
    )
    # An operator without a number of its own has that of the first inside it.
    top = np.maximum(structure.top, 0)
    lends = (calls.sequence >= 0) & (structure.top >= 0) & (calls.sequence[top] < 0)
    within = calls.kind == Kind.OP
    keep |= launches | (within & (attention[calls.name] | lends))
    return keep


def _belonging(facts: RecomputeFacts, blocks: int, begin: int, end: int) -> Bool:
    """Calls of some blocks: forward, recomputes, backward, and all that these are in."""
    calls, structure, counts = facts.calls, facts.structure, facts.counts
    layers = facts.layers
    most = max((counts.highest(layer[0].places) for layer in layers), default=0.0)
    worst = [layer for layer in layers if counts.highest(layer[0].places) == most]
    first = max(0, (len(worst) - blocks) // 2)
    forward = np.concatenate(
        [counts.rows[block.places] for layer in worst[first : first + blocks] for block in layer]
        or [counts.rows[:0]]
    )
    here = (calls.start[forward] >= begin) & (calls.start[forward] < end)
    forward = forward[here]
    chosen = np.zeros(len(calls), np.bool_)
    chosen[forward] = True
    numbers = structure.number[forward]
    numbers = numbers[numbers >= 0]
    for recompute in facts.alignment.recomputes:
        again = recompute.again[np.isin(recompute.original, forward)]
        chosen[again] = True
    engines = structure.rows(Role.BACKWARD)
    chosen[engines[np.isin(structure.number[engines], numbers)]] = True
    inside = facts.calls.within(np.flatnonzero(chosen))
    for row in np.flatnonzero(chosen):
        above = int(calls.parent[row])
        while above >= 0 and not inside[above]:
            inside[above] = True
            above = int(calls.parent[above])
    return inside


def trace_json(trace: Trace, rows: Int64) -> Iterator[bytes]:
    """The document in pieces. Times are µs from the first row's start, exact to the ns.

    Args:
        trace: As :func:`recompute_scan.bundle.clean.clean_trace` makes it.
        rows: The rows to write, in order.
    """
    yield (json.dumps(_head(trace))[:-1] + ', "traceEvents": [\n').encode()
    yield ",\n".join(_process_rows(trace, rows)).encode()
    names = [json.dumps(name) for name in trace.names]
    args = [_shapes(text) for text in trace.signatures]
    places = [f'"pid":{pid},"tid":{tid}' for pid, tid in trace.threads]
    start = int(trace.ts[rows].min()) if len(rows) else 0
    for first in range(0, len(rows), _AT_ONCE):
        part = rows[first : first + _AT_ONCE]
        columns = (
            trace.kind[part], trace.name[part], trace.thread[part], trace.ts[part] - start,
            trace.dur[part], trace.sequence[part], trace.correlation[part], trace.stream[part],
            trace.dims[part],
        )  # fmt: skip
        lines = []
        for kind, name, thread, ts, dur, sequence, correlation, stream, dims in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            fields = args[dims]
            if sequence >= 0:
                fields += f',"Sequence number":{sequence}'
            if correlation >= 0:
                fields += f',"correlation":{correlation}'
            if stream >= 0:
                fields += f',"stream":{stream}'
            lines.append(
                f'{{"ph":"X","cat":"{_CATEGORY[kind]}","name":{names[name]},{places[thread]},'
                f'"ts":{_us(ts)},"dur":{_us(dur)},"args":{{{fields[1:]}}}}}'
            )
        yield (",\n" + ",\n".join(lines)).encode()
    yield b"\n]}\n"


_CATEGORY = {int(kind): text for kind, text in CATEGORIES.items()}


def _us(ns: int) -> str:
    whole, rest = divmod(ns, 1000)
    return f"{whole}.{rest:03d}" if rest else str(whole)


def _head(trace: Trace) -> dict[str, Any]:
    head: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms", **trace.metadata}
    if trace.rank is not None:
        head["distributedInfo"] = {**head.get("distributedInfo", {}), "rank": trace.rank}
    return head


def _process_rows(trace: Trace, rows: Int64) -> Iterator[str]:
    """What viewers show beside the tracks."""
    shown = set()
    for code in np.unique(trace.thread[rows]).tolist():
        pid, tid = trace.threads[code]
        mine = trace.kind[rows][trace.thread[rows] == code]
        device = int(mine[0]) in (Kind.KERNEL, Kind.COPY)
        if pid not in shown:
            shown.add(pid)
            yield _meta("process_name", pid, 0, "device" if device else "host")
        yield _meta("thread_name", pid, int(tid), f"{'queue' if device else 'thread'} {tid}")
    if not shown:
        yield _meta("process_name", "1", 0, "host")


def _meta(name: str, pid: str, tid: int, text: str) -> str:
    event = {"ph": "M", "name": name, "pid": int(pid), "tid": tid, "ts": 0, "args": {"name": text}}
    return json.dumps(event, separators=(",", ":"))


def _shapes(signature: str) -> str:
    if not signature:
        return ""
    dims, kinds, values = json.loads(signature)
    fields = (("Input Dims", dims), ("Input type", kinds), ("Concrete Inputs", values))
    return "".join(
        f',"{field}":{json.dumps(value, separators=(",", ":"))}'
        for field, value in fields
        if value is not None
    )
