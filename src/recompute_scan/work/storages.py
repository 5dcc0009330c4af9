"""Memory of a step that was kept longer than anything needed it, and the moment of the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from recompute_scan.result.watched_step import Kept, KeptKind
from recompute_scan.work.ledger import BackwardPass, Ledger, Line, Memory, ModuleCall

# Less is not worth a change: a share of the most that is alive at a moment, and bytes.
SHARE, LEAST_BYTES = 0.03, 1 << 19


def kept_of(ledger: Ledger) -> tuple[Kept, ...]:
    """Memory of the first step that was kept longer than it was needed, largest first."""
    peak, _ = peak_of(ledger)
    floor = max(SHARE * peak, LEAST_BYTES)
    found = [*_between(ledger), *_after_backward(ledger), *_never_read(ledger)]
    return tuple(sorted((one for one in found if one.bytes >= floor), key=lambda one: -one.bytes))


def peak_of(ledger: Ledger) -> tuple[int, int]:
    """The most bytes that the first step's own memory took, and the operation at that moment."""
    end = ledger.first_step_ends
    changes: dict[int, int] = defaultdict(int)
    for memory in ledger.memories:
        if not memory.outside and memory.born < end:
            changes[memory.born] += memory.bytes
            if memory.died is not None:
                changes[memory.died] -= memory.bytes
    alive = most = place = 0
    for moment in sorted(changes):
        alive += changes[moment]
        if alive > most and moment < end:
            most, place = alive, moment
    return most, place


def _forwards(ledger: Ledger) -> list[tuple[int, BackwardPass]]:
    """The outermost backward passes of the first step, each with the begin of its forward."""
    found, begin = [], 0
    for one in ledger.passes:
        if not one.nested and one.last <= ledger.first_step_ends:
            found.append((begin, one))
            begin = one.last
    return found


def _held(ledger: Ledger) -> list[Memory]:
    """Memory that the forward made and that is alive as its backward pass begins."""
    held = []
    for begin, run in _forwards(ledger):
        held += [
            one
            for one in ledger.memories
            if begin <= one.born < run.first
            and not one.outside
            and one.made_in == "forward"
            and one.writers
            and (one.died is None or one.died > run.first)
        ]
    return held


def _never_read(ledger: Ledger) -> list[Kept]:
    """Memory that is alive during a backward pass and read neither in it nor later."""
    end = ledger.first_step_ends
    unread = [
        one
        for one in _held(ledger)
        if not one.read_in_backward and one.died is not None and one.last_read < end
    ]
    passes = [run for _, run in _forwards(ledger)]
    behind = [
        one
        for one in unread
        if not any(run.first <= one.last_read for run in passes if one.born < run.first)
        and not one.read_from_outside
    ]
    return _by_line(ledger, "never-read", behind)


def _after_backward(ledger: Ledger) -> list[Kept]:
    """Memory that a recompute made and that is alive as its backward pass ends."""
    late = []
    for _, run in _forwards(ledger):
        late += [
            one
            for one in ledger.memories
            if run.first <= one.born < run.last
            and one.made_in == "recompute"
            and not one.outside
            and one.last_read < run.last
            and (one.died is None or one.died > run.last)
        ]
    held = max(ledger.holders.items(), key=lambda item: item[1], default=None)
    holder = ""
    if held is not None:
        (what, line), _ = held
        holder = f"{what} at {ledger.site(line)}" if line is not None else what
    return _by_line(ledger, "after-backward", late, holder=holder)


def _between(ledger: Ledger) -> list[Kept]:
    """Results between the checkpointed parts of layers that are not checkpointed themselves."""
    calls = ledger.calls
    inner: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        if call.parent is not None:
            inner[call.parent].append(index)
    recomputed = {
        call.module
        for call in calls
        if call.phase == "recompute"
        and (call.parent is None or calls[call.parent].phase != "recompute")
    }

    def part(index: int) -> str | None:
        """The class of a recomputed module, or of one in wrappers; ``None`` of others."""
        while calls[index].module not in recomputed:
            inside = inner[index]
            if len(inside) != 1:
                return None
            index = inside[0]
        return calls[index].class_name

    held = sorted(_held(ledger), key=lambda one: one.born)
    layers: dict[str, list[tuple[ModuleCall, list[Memory]]]] = defaultdict(list)
    for index, call in enumerate(calls):
        if call.phase != "forward" or call.module in recomputed or call.last > ledger.steps[-1]:
            continue
        parts = [name for one in inner[index] if (name := part(one)) is not None]
        # A list of equal layers has results between them as well: those are a checkpoint's inputs.
        if 2 * len(parts) <= len(inner[index]) or len(set(parts)) < 2:
            continue
        inside = [one for one in held if call.first <= one.born < call.last]
        if len(inside) > 1:
            layers[call.class_name].append((calls[inner[index][0]], inside[:-1]))
    found = []
    for class_name, same in layers.items():
        memories = [one for _, inside in same for one in inside]
        found.append(
            Kept(
                kind="between",
                bytes=sum(one.bytes for one in memories),
                tensors=len(memories),
                line=ledger.site(ledger.own_line(same[0][0].line, same[0][0].parent)),
                module_class=class_name,
                layers=len(same),
            )
        )
    return found


def _own_line(ledger: Ledger, memory: Memory) -> Line | None:
    return ledger.own_line(memory.line, memory.call)


def _by_line(
    ledger: Ledger, kind: KeptKind, memories: Sequence[Memory], *, holder: str | None = None
) -> list[Kept]:
    """One entry for each line that made some of the memory; one for all, where it has a holder."""
    lines: dict[Line | None, list[Memory]] = defaultdict(list)
    for one in memories:
        if holder is not None or one.line is not None:
            line = _own_line(ledger, one)
            lines[line if holder is None else None].append(one)
    return [
        Kept(
            kind=kind,
            bytes=sum(one.bytes for one in same),
            tensors=len(same),
            line=ledger.site(_own_line(ledger, max(same, key=lambda one: one.bytes))),
            holder=holder or "",
        )
        for same in lines.values()
    ]
