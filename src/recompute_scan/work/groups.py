"""Operators of a step that it could do without, repeated and unread ones, and memory that it keeps
longer than anything needs it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.result.watched_step import Kept, KeptKind, Reuse, Work, WorkKind
from recompute_scan.work.ledger import (
    BackwardPass,
    Ledger,
    Line,
    LineTree,
    Memory,
    ModuleCall,
    Operation,
    Phase,
)

# Less is not worth a change: a share of the step, and a time that a step's own variation hides.
SHARE, LEAST_MS = 0.01, 0.2


class Group(Struct, frozen=True):
    """Operations that one change of the program would take out.

    Attributes:
        places: The operations.
        calls: The module calls that they make up.
        line: Where the program asks for them.
        same_as: Where it asks for the operations that these repeat.
    """

    places: tuple[int, ...]
    calls: tuple[ModuleCall, ...]
    line: Line | None
    same_as: Line | None = None


class Found(Struct, frozen=True):
    """The waste of one step: groups above the floor, and the time of the others."""

    work: tuple[Work, ...]
    small_ms: float
    library_ms: float


def waste_of(ledger: Ledger) -> Found:
    """The operators of the first step that it could do without, most time first."""
    total = sum(one.ms for one in ledger.first_step) or 1.0
    repeated = _repeated(ledger, total)
    covered = {place for group, _ in repeated for place in group.places}
    rows = _repeated_rows(ledger, total, covered)
    covered |= {place for group, _ in rows for place in group.places}
    unread, tails_ms = _unread(ledger, total, covered)
    found = [*repeated, *rows, *unread]
    listed, small, library = [], tails_ms, 0.0
    for group, work in found:
        if work.share < SHARE or work.ms < LEAST_MS:
            small += work.ms
        elif group.line is None or ledger.installed[group.line[0]]:
            library += work.ms
        else:
            listed.append(work)
    listed.sort(key=lambda work: -work.ms)
    return Found(tuple(listed), small, library)


# Repeated


def _repeated(ledger: Ledger, total: float) -> list[tuple[Group, Work]]:
    """The operators that compute once more what the step has computed.

    Of those with one result the first stays that a backward pass goes through, else the first.
    """
    operations = ledger.operations
    alike: dict[int, list[int]] = {}
    for place, one in enumerate(ledger.first_step):
        if one.repeats is not None:
            alike.setdefault(one.repeats, [one.repeats]).append(place)
    stays: dict[int, int] = {}
    for first, places in alike.items():
        trained = (place for place in places if ledger.is_trained(operations[place]))
        kept = next(trained, first)
        stays.update((place, kept) for place in places if place != kept)
    evaluated, behind = ledger.evaluated, _backward_ms(ledger)
    found = []
    for group in _groups(ledger, stays.keys(), kept=stays):
        nodes = {operations[place].node for place in group.places} & evaluated
        work = _work("repeated", ledger, group, total, more_ms=sum(behind[one] for one in nodes))
        needs = _needs(ledger, group.places[0], stays[group.places[0]])
        found.append((group, replace(work, needs=needs)))
    return found


def _needs(ledger: Ledger, place: int, kept: int) -> Reuse:
    """How the result of one operation can take the place of another's."""
    trained = ledger.is_trained(ledger.operations[kept])
    if not ledger.is_trained(ledger.operations[place]):
        return "detach" if trained else ""
    node = ledger.operations[kept].node
    freed = any(kept < run.first <= place and node in run.nodes for run in ledger.passes)
    return "retain-graph" if freed else ""


def _repeated_rows(
    ledger: Ledger, total: float, covered: Collection[int]
) -> list[tuple[Group, Work]]:
    """Forwards without gradients that share rows with one with gradients, or with an earlier one.

    Only where each row is computed from itself, in the same way: both run the same operators with
    the same constants, nothing is drawn, and nothing outside is written. A forward with adapters
    off is another one.
    """
    operations = ledger.operations

    def ran(call: ModuleCall) -> list[tuple[str, int]]:
        inside = operations[call.first : call.last]
        return [(one.name, one.settings) for one in inside if one.counts]

    def is_pure(call: ModuleCall) -> bool:
        inside = operations[call.first : call.last]
        return not any(one.draws or any(m.outside for m in one.writes) for one in inside)

    end = ledger.first_step_ends
    calls = [call for call in ledger.calls if call.rows and call.first < end and is_pure(call)]
    shared: dict[tuple[Line | None, Line | None, bool], list[tuple[ModuleCall, int]]]
    shared = defaultdict(list)
    for call in calls:
        others = [
            one
            for one in calls
            if (one.module, one.weights) == (call.module, call.weights)
            and (one.trained or one.first < call.first)
            # Equal rows may be a coincidence, as behind an adapter that begins at zero.
            and not call.sources.isdisjoint(one.sources)
            and ran(one) == ran(call)
        ]
        both = Counter(call.rows) & Counter(row for one in others for row in one.rows)
        if both and not call.trained:
            other = max(others, key=lambda one: one.trained)
            here, there = _parting(ledger, call, other)
            shared[here, there, other.trained].append((call, both.total()))
    found = []
    for (here, there, trained), same in shared.items():
        parts = {
            place: both / len(call.rows)
            for call, both in same
            for place in range(call.first, call.last)
            if operations[place].counts and place not in covered
        }
        whole = sum(operations[place].ms for place in parts) or 1.0
        part = sum(operations[place].ms * share for place, share in parts.items()) / whole
        group = Group(tuple(parts), tuple(call for call, _ in same), here, there)
        work = _work("repeated-rows", ledger, group, total, part=part)
        rows, of_rows = sum(both for _, both in same), sum(len(call.rows) for call, _ in same)
        needs: Reuse = "detach" if trained else ""
        found.append((group, replace(work, needs=needs, rows=rows, of_rows=of_rows)))
    return found


def _parting(ledger: Ledger, *calls: ModuleCall) -> list[Line | None]:
    """The outermost lines at which the ways to two calls differ, in the program's own files."""
    ways = [ledger.path(call)[::-1] for call in calls]
    apart = _apart(*ways)
    lines = [ledger.own_line(call) for call in calls]
    for index, way in enumerate(ways if apart is not None else ()):
        own = (line for line in way[apart:] if not ledger.installed[line[0]])
        lines[index] = next(own, lines[index])
    return lines


# Unread


def _unread(
    ledger: Ledger, total: float, covered: Collection[int]
) -> tuple[list[tuple[Group, Work]], float]:
    """Operators with unread results, and the time of those that must stay.

    A recompute that stops early can leave nothing out: its unread results come before others that
    are read.
    """
    if ledger.hidden is not None:
        return [], 0.0
    live = _live(ledger)
    # The first forward operation of each node.
    each = [*enumerate(ledger.operations)]
    makers = {one.node: place for place, one in reversed(each) if one.node >= 0}

    def maker(place: int) -> int:
        return makers.get(ledger.operations[place].behind, place)

    half = _half_unread(ledger, live, maker)
    dead = [
        place
        for place, one in enumerate(ledger.first_step)
        if (place not in live or place in half)
        and place not in covered
        and one.counts
        and not (one.writes or one.draws)
    ]
    of_phase: dict[str, list[int]] = defaultdict(list)
    for place in dead:
        one = ledger.operations[place]
        early = one.phase == "recompute" and not one.in_function
        of_phase["tail" if early else one.phase].append(place)
    tails_ms = sum(ledger.operations[place].ms for place in of_phase["tail"])
    kinds: dict[WorkKind, list[Group]] = {
        "unread": _groups(ledger, of_phase["forward"], besides=covered),
        "unread-recompute": _groups(ledger, of_phase["recompute"], "recompute"),
        "unread-gradient": _groups(ledger, of_phase["backward"], "backward", maker=maker),
    }
    found = [
        (one, _work(kind, ledger, one, total, half=half))
        for kind, some in kinds.items()
        for one in some
    ]
    return found, tails_ms


def _half_unread(ledger: Ledger, live: Collection[int], maker: Callable[[int], int]) -> set[int]:
    """Places of convolutions' backward operators with one unread gradient: weight's or input's.

    Each of the two takes as many multiplications as the convolution itself. By itself, each took
    from 17 to 107 % of the operator's time on a CPU. A package that asks for its input's gradient
    (transformers' wav2vec2) cannot be changed.
    """
    operations = ledger.operations
    read = {memory for place in live for memory in operations[place].reads}

    def spares(place: int) -> bool:
        unread = [
            not (one in read or one.read_from_outside or one.died is None)
            for one in operations[place].makes[:2]
        ]
        path = ledger.path(operations[maker(place)])
        own = bool(path) and not ledger.installed[path[0][0]]
        return len(unread) == 2 and (unread[1] or (unread[0] and own))

    return {place for place in live if operations[place].gives_two and spares(place)}


def _live(ledger: Ledger) -> set[int]:
    """Places of the operations that have an effect."""

    def is_seen(one: Operation) -> bool:
        kept = any(m.died is None or m.read_from_outside for m in (*one.makes, *one.writes))
        # Its node passes the gradient on, whether or not anybody reads its result.
        passes = one.phase == "forward" and (
            one.node in ledger.evaluated or (one.in_function and ledger.is_trained(one))
        )
        return one.needed or kept or passes or not (one.makes or one.writes)

    waiting = [place for place, one in enumerate(ledger.operations) if is_seen(one)]
    live: set[int] = set()
    while waiting:
        place = waiting.pop()
        if place in live:
            continue
        live.add(place)
        for memory in ledger.operations[place].reads:
            waiting += [one for one in memory.writers if one < place and one not in live]
    return live


def _backward_ms(ledger: Ledger) -> defaultdict[int, float]:
    """Time of the backward pass in the first step, by the node that it belongs to."""
    found: defaultdict[int, float] = defaultdict(float)
    for one in ledger.first_step:
        if one.phase == "backward" and one.behind >= 0:
            found[one.behind] += one.ms
    return found


# Groups


def _groups(
    ledger: Ledger,
    chosen: Collection[int],
    phase: Phase = "forward",
    *,
    kept: Mapping[int, int] | None = None,
    besides: Collection[int] = (),
    maker: Callable[[int], int] | None = None,
) -> list[Group]:
    """Operations of one phase, each with the outermost line that runs no others.

    Where a line runs others too, with the innermost line, and by the class of their modules. A
    package's line gives way to the program's below it, or else around it if that runs few others.

    Args:
        ledger: Both steps.
        chosen: Places of the operations.
        phase: Where they run.
        kept: The operation that each repeats. A line may run that, too.
        besides: Places of others that a line may run.
        maker: Place of the forward operation of a backward one. The program's line around counts.
    """
    operations, lines = ledger.operations, ledger.lines
    node_of = _nodes(ledger, phase, maker)
    whole, updating = _whole_calls(ledger, chosen) if phase == "forward" else ({}, set())
    chosen = sorted((node_of.keys() & chosen) - updating)
    pairs = [(place, (kept or {}).get(place, place)) for place in chosen]
    same_way = (other for place, other in pairs if node_of.get(other) == node_of[place])
    run = {*chosen, *same_way, *(node_of.keys() & besides)}
    every, part = lines.sums(node_of.values()), lines.sums(node_of[place] for place in run)
    # A recompute runs below the line that begins the backward pass.
    outermost = lines.outermost(every, part) if phase != "recompute" else [0] * len(every)
    found: dict[tuple[Line | None, str], list[int]] = defaultdict(list)
    same_as: dict[tuple[Line | None, str], Line | None] = {}
    for place, other in pairs:
        leaf = node_of[place]
        way, its_way = lines.way(leaf), lines.way(node_of.get(other, leaf))
        called = lines.of_call(whole[place]) if place in whole else leaf
        at = min(way.index(one) for one in (outermost[leaf] or leaf, called) if one in way)
        its = max(len(its_way) - (len(way) - at), 0)
        mixed = not (maker or outermost[leaf])
        name = _class_of(ledger, whole.get(place, operations[place].call)) if mixed else ""
        apart = _apart(way, its_way)
        if apart is not None:
            its, here = max(its, apart), way[apart]
            if lines.line[here] != lines.line[its_way[apart]] and 2 * part[here] >= every[here]:
                at, its, name = apart, apart, ""
        own = _own(lines, way, at)
        some, all_of = part[way[own]], every[way[own]]
        mostly = some == all_of or (place in whole and (not kept or 2 * some >= all_of))
        if own > at or maker or mostly:
            at, its = own, its if own == at else _own(lines, its_way, its)
        key = lines.line[way[at]], name
        found[key].append(place)
        same_as.setdefault(key, lines.line[its_way[its]] if kept else None)
    sizes = Counter(whole[place] for place in chosen if place in whole)
    return [
        Group(tuple(same), _made_up(ledger, same, whole, sizes), key[0], same_as[key])
        for key, same in found.items()
    ]


def _nodes(ledger: Ledger, phase: Phase, maker: Callable[[int], int] | None) -> dict[int, int]:
    """Where in the tree of lines the operations of one phase that count are called."""
    operations = ledger.operations
    return {
        place: ledger.lines.of(operations[maker(place) if maker else place])
        for place, one in enumerate(ledger.first_step)
        if one.phase == phase and one.counts and not one.writes
    }


def _apart(way: Sequence[object], other: Sequence[object]) -> int | None:
    """The first place at which two ways differ; ``None`` where one goes no further."""
    both = zip(way, other, strict=False)
    return next((n for n, (a, b) in enumerate(both) if a != b), None)


def _own(lines: LineTree, way: Sequence[int], at: int) -> int:
    """The first place on a way, from this one inward, with a line of the program; or else the
    last before it, or this one.
    """
    inward = (n for n in range(at, len(way)) if lines.is_own(way[n]))
    outward = (n for n in range(at - 1, -1, -1) if lines.is_own(way[n]))
    return next(inward, next(outward, at))


def _whole_calls(ledger: Ledger, chosen: Collection[int]) -> tuple[dict[int, int], set[int]]:
    """The outermost module call of the forward that each of these makes up with others, and those
    that stay: a call may run only to update something outside, such as running statistics.
    """
    end = ledger.first_step_ends
    chosen = set(chosen)
    counted = [one.counts and not one.writes for one in ledger.first_step]
    all_of = [0, *accumulate(counted)]
    chosen_of = [0, *accumulate(place in chosen for place in range(end))]
    whole: dict[int, int] = {}
    updating: set[int] = set()
    reach = 0
    for index, call in enumerate(ledger.calls):  # those around come before those inside
        if call.first >= end or call.last > end or call.phase != "forward" or call.first < reach:
            continue
        places = range(call.first, call.last)
        # A gather of weights is no update.
        updates = not call.trained and any(
            memory.outside
            for one in ledger.operations[call.first : call.last]
            for memory in (() if one.name.startswith("fsdp.") else one.writes)
        )
        inside = all_of[call.last] - all_of[call.first]
        if updates:
            updating.update(places)
        elif inside and inside == chosen_of[call.last] - chosen_of[call.first]:
            whole |= dict.fromkeys(places, index)
        else:
            continue
        reach = call.last
    return whole, updating


def _made_up(
    ledger: Ledger, places: Sequence[int], whole: Mapping[int, int], sizes: Mapping[int, int]
) -> tuple[ModuleCall, ...]:
    """The module calls that these operations make up, where all are of one class."""
    calls = Counter(whole[place] for place in places if place in whole)
    same = len({_class_of(ledger, one) for one in calls}) == 1
    if not same or calls.total() < len(places) or any(sizes[one] > calls[one] for one in calls):
        return ()
    return tuple(ledger.calls[one] for one in calls)


def _class_of(ledger: Ledger, call: int | None) -> str:
    return ledger.calls[call].class_name if call is not None else ""


def _work(
    kind: WorkKind,
    ledger: Ledger,
    group: Group,
    total: float,
    *,
    more_ms: float = 0.0,
    part: float = 1.0,
    half: Collection[int] = (),
) -> Work:
    times = {place: part * ledger.operations[place].ms for place in group.places}
    whole = sum(times.values()) + more_ms
    halves = sum(ms for place, ms in times.items() if place in half)
    # The time between operators is shared out by their time or number: the larger share counts.
    # A step may also wait for data, which is no operator's time: hence twice their own at most.
    share = max(whole / total, part * len(group.places) / ledger.first_step_ends)
    most = min(share * (ledger.step_ms or 0.0), 2 * whole)
    calls = group.calls or tuple(
        ledger.calls[one]
        for one in dict.fromkeys(ledger.operations[place].call for place in group.places)
        if one is not None
    )
    names, kinds = ({getattr(call, one) for call in calls} for one in ("name", "class_name"))
    return Work(
        kind=kind,
        operators=len(group.places),
        ms=whole - halves / 2,
        share=(whole - halves / 2) / total,
        # The variant of a checkpoint that leaves the tail out takes time as well.
        least_ms=whole - halves if kind != "unread-recompute" else 0.0,
        most_ms=max(whole, most) if ledger.step_ms is not None else None,
        line=ledger.site(group.line),
        same_as=ledger.site(group.same_as),
        module=names.pop() if len(names) == 1 else "",
        module_class=kinds.pop() if len(kinds) == 1 else "",
        calls=len(group.calls),
    )


# Memory

# Less is not worth a change: a share of the most that is alive at a moment, and bytes.
KEPT_SHARE, LEAST_BYTES = 0.03, 1 << 19


def kept_of(ledger: Ledger) -> tuple[Kept, ...]:
    """Memory of the first step that was kept longer than it was needed, largest first."""
    peak, _ = peak_of(ledger)
    floor = max(KEPT_SHARE * peak, LEAST_BYTES)
    found = [*_between(ledger), *_after_backward(ledger), *_never_read(ledger)]
    return tuple(sorted((one for one in found if one.bytes >= floor), key=lambda one: -one.bytes))


def peak_of(ledger: Ledger, step: int = 0) -> tuple[int, int]:
    """The most bytes that the watched steps' own memory took, and the operation at that moment.

    Args:
        ledger: Both steps.
        step: In which of them. The second has the first one's memory too, while it lives.
    """
    begins, ends = [*ledger.steps, len(ledger.operations)][step : step + 2]
    changes: dict[int, int] = defaultdict(int)
    for memory in ledger.memories:
        if not memory.outside and memory.born < ends:
            changes[memory.born] += memory.bytes
            if memory.died is not None:
                changes[memory.died] -= memory.bytes
    alive = most = place = 0
    for moment in sorted(changes):
        alive += changes[moment]
        if alive > most and begins <= moment < ends:
            most, place = alive, moment
    return most, place


def _passes(ledger: Ledger) -> list[BackwardPass]:
    """The outermost backward passes of the first step."""
    end = ledger.first_step_ends
    return [one for one in ledger.passes if not one.nested and one.last <= end]


def _held(ledger: Ledger) -> list[tuple[Memory, BackwardPass]]:
    """Memory that the forward made and that is alive as its backward pass begins, which is next."""
    held, begin = [], 0
    for run in _passes(ledger):
        held += [
            (one, run)
            for one in ledger.memories
            if begin <= one.born < run.first
            and not one.outside
            and one.made_in == "forward"
            and one.writers
            and (one.died is None or one.died > run.first)
        ]
        begin = run.last
    return held


def _never_read(ledger: Ledger) -> list[Kept]:
    """Memory that is alive during a backward pass and read neither in it nor later.

    Autograd keeps some results for their sizes alone (``gather``), which no line can change. They
    die in the pass. In a checkpoint autograd keeps none, but a policy may.
    """
    passes, recomputed = _passes(ledger), _recomputed(ledger)

    def of_checkpoint(one: Memory) -> bool:
        return any(call.module in recomputed for call in ledger.calls_from(one.call))

    unread = [
        one
        for one, run in _held(ledger)
        if not (one.read_in_backward or one.read_from_outside or one.died is None)
        and one.last_read < min(ledger.first_step_ends, run.first)
        and (of_checkpoint(one) or not any(p.first < one.died < p.last for p in passes))
    ]
    return _kept_by_line(ledger, "never-read", unread)


def _after_backward(ledger: Ledger) -> list[Kept]:
    """Memory that a recompute made and that is alive as its backward pass ends; and memory that a
    backward pass read last and that is alive at the next step's peak.

    Memory that outlives both steps may be read later.
    """
    end, (_, moment) = ledger.first_step_ends, peak_of(ledger, 1)
    outlived = [
        one
        for one, _ in _held(ledger)
        if one.read_in_backward
        and not one.read_from_outside
        and max(one.last_read, *one.writers) < end
        and one.died is not None
        and one.died > moment
    ]
    late = [
        one
        for run in _passes(ledger)
        for one in ledger.memories
        if run.first <= one.born < run.last
        and one.made_in == "recompute"
        and not one.outside
        and one.last_read < run.last
        and (one.died is None or one.died > run.last)
    ]
    what, line = max(ledger.holders, key=ledger.holders.__getitem__, default=("", None))
    holder = f"{what} at {ledger.site(line)}" if line is not None else what
    return [
        *_kept_by_line(ledger, "after-backward", late, holder=holder),
        *_kept_by_line(ledger, "after-backward", outlived),
    ]


def _recomputed(ledger: Ledger) -> dict[int, int]:
    """The outermost modules that run in recomputes, each with the number of its last recompute.

    Between two recomputes the backward pass goes on.
    """
    done = [0, *accumulate(one.phase == "backward" for one in ledger.operations)]
    return {
        call.module: done[call.first]
        for call in ledger.calls
        if call.phase == "recompute"
        and (call.call is None or ledger.calls[call.call].phase != "recompute")
    }


def _between(ledger: Ledger) -> list[Kept]:
    """Results between the checkpointed parts of layers that are not checkpointed themselves."""
    calls = ledger.calls
    inner: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        if call.call is not None:
            inner[call.call].append(index)
    recomputed = _recomputed(ledger)

    def part(index: int) -> int | None:
        """The call of a recomputed module, or of one in wrappers; ``None`` of others."""
        while calls[index].module not in recomputed:
            inside = inner[index]
            if len(inside) != 1:
                return None
            index = inside[0]
        return index

    def kinds(parts: list[int]) -> set[str]:
        """The parts' classes, or, in equal wrappers, those in the wrappers."""
        found = {calls[one].class_name for one in parts}
        wrapped = [inner[one][0] for one in parts if len(inner[one]) == 1]
        whole = len(found) > 1 or len(wrapped) < len(parts)
        return found if whole else {calls[one].class_name for one in wrapped}

    held = sorted((one for one, _ in _held(ledger)), key=lambda one: one.born)
    layers: dict[str, list[tuple[ModuleCall, list[Memory]]]] = defaultdict(list)
    for index, call in enumerate(calls):
        if call.phase != "forward" or call.module in recomputed or call.last > ledger.steps[-1]:
            continue
        parts = [found for one in inner[index] if (found := part(one)) is not None]
        # A list of equal layers has results between them as well: those are a checkpoint's inputs.
        if 2 * len(parts) <= len(inner[index]) or len(kinds(parts)) < 2:
            continue
        if len({recomputed[calls[one].module] for one in parts}) < 2:
            continue  # one recompute runs them all: the layer is checkpointed
        inside = [one for one in held if call.first <= one.born < call.last]
        if len(inside) > 1:
            layers[call.class_name].append((calls[inner[index][0]], inside[:-1]))
    kept = []
    for class_name, same in layers.items():
        # The only one of its class is the model: a checkpoint around it would save nothing.
        if len({calls[first.call].module for first, _ in same if first.call is not None}) < 2:
            continue
        memories = [one for _, inside in same for one in inside]
        # In the layer's own forward, not in a function that all parts are checkpointed by.
        first = same[0][0]
        own = (line for line, _ in reversed(first.frames) if not ledger.installed[line[0]])
        kept.append(
            Kept(
                kind="between",
                bytes=sum(one.bytes for one in memories),
                tensors=len(memories),
                line=ledger.site(next(own, ledger.own_line(first))),
                module_class=class_name,
                layers=len(same),
            )
        )
    return kept


def _kept_by_line(
    ledger: Ledger, kind: KeptKind, memories: Sequence[Memory], *, holder: str | None = None
) -> list[Kept]:
    """One entry for each line that made some of the memory; one for all, where it has a holder."""

    def line_of(memory: Memory) -> Line | None:
        return ledger.own_line(memory)

    lines: dict[Line | None, list[Memory]] = defaultdict(list)
    for one in memories:
        line = line_of(one) if holder is None else None
        if holder is not None or line is not None:
            lines[line].append(one)
    return [
        Kept(
            kind=kind,
            bytes=sum(one.bytes for one in same),
            tensors=len(same),
            line=ledger.site(line_of(max(same, key=lambda one: one.bytes))),
            holder=holder or "",
        )
        for same in lines.values()
    ]
