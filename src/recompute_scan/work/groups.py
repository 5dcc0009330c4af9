"""Operators of a step that it could do without, repeated and unread ones, and memory that it keeps
longer than anything needs it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.result.watched_step import Kept, KeptKind, Needs, Work, WorkKind
from recompute_scan.work.ledger import BackwardPass, Ledger, Line, Memory, ModuleCall, Operation

# Less is not worth a change: of the step, in all, and for each operator.
SHARE, LEAST_MS, LEAST_OPERATOR_MS = 0.01, 0.2, 0.02


class Group(Struct, frozen=True):
    """Operations that one change of the program would take out.

    Attributes:
        places: The operations.
        calls: The module calls that they make up.
        line: Where the program asks for them.
    """

    places: tuple[int, ...]
    calls: tuple[ModuleCall, ...]
    line: Line | None


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
        if work.share < SHARE or work.ms < max(LEAST_MS, LEAST_OPERATOR_MS * work.operators):
            small += work.ms
        elif group.line is None or ledger.is_installed(group.line[0]):
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
    for group in _groups(ledger, stays.keys(), most=True):
        nodes = {operations[place].node for place in group.places} & evaluated
        place = group.places[0]
        work = _work("repeated", ledger, group, total, more_ms=sum(behind[one] for one in nodes))
        same_as = ledger.site(_asked(ledger, stays[place], group))
        needs = _needs(ledger, place, stays[place])
        found.append((group, replace(work, same_as=same_as, needs=needs)))
    return found


def _needs(ledger: Ledger, place: int, kept: int) -> Needs:
    """How the result of one operation can take the place of another's."""
    trained = ledger.is_trained(ledger.operations[kept])
    if not ledger.is_trained(ledger.operations[place]):
        return "detach" if trained else ""
    node = ledger.operations[kept].node
    freed = any(kept < run.first <= place and node in run.nodes for run in ledger.passes)
    return "retain-graph" if freed else ""


def _asked(ledger: Ledger, place: int, group: Group) -> Line | None:
    """Where the program asks for an operation, as far out as for the group that repeats it."""
    operation = ledger.operations[place]
    if group.calls:
        wanted = group.calls[0].class_name
        for call in ledger.calls_from(operation.call):
            if call.class_name == wanted:
                return _line_of(ledger, call)
    return operation.line


def _repeated_rows(
    ledger: Ledger, total: float, covered: Collection[int]
) -> list[tuple[Group, Work]]:
    """Forwards without gradients that share rows with a forward with gradients.

    Only where each row is computed from itself: nothing is drawn, and nothing outside is written.
    """
    end = ledger.first_step_ends
    calls = [call for call in ledger.calls if call.rows and call.first < end]
    trained = [call for call in calls if call.trained]
    found = []
    for call in calls:
        places = range(call.first, call.last)
        inside = [ledger.operations[place] for place in places]
        if call in trained or any(place in covered for place in places):
            continue
        if any(one.draws or any(m.outside for m in one.writes) for one in inside):
            continue
        others = [
            one
            for one in trained
            if (one.module, one.weights) == (call.module, call.weights)
            # Equal rows may be a coincidence, as behind an adapter that begins at zero.
            and not call.sources.isdisjoint(one.sources)
        ]
        have: Counter[int] = Counter()
        for other in others:
            have.update(other.rows)
        both = sum((Counter(call.rows) & have).values())
        if not both:
            continue
        group = Group(
            tuple(place for place in places if ledger.operations[place].counts),
            (call,),
            _line_of(ledger, call),
        )
        work = _work("repeated-rows", ledger, group, total, part=both / len(call.rows))
        same_as = ledger.site(_line_of(ledger, others[0]))
        rows = {"rows": both, "of_rows": len(call.rows)}
        found.append((group, replace(work, same_as=same_as, needs="detach", **rows)))
    return found


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
    dead = [
        place
        for place, one in enumerate(ledger.first_step)
        if place not in live
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
    # The first forward operation of each node.
    each = [*enumerate(ledger.operations)]
    makers = {one.node: place for place, one in reversed(each) if one.node >= 0}

    def maker(place: int) -> int:
        return makers.get(ledger.operations[place].behind, place)

    kinds: dict[WorkKind, list[Group]] = {
        "unread": _groups(ledger, of_phase["forward"]),
        "unread-recompute": _by_line(ledger, of_phase["recompute"], lambda place: place),
        "unread-gradient": _by_line(ledger, of_phase["backward"], maker, own=True),
    }
    found = [(one, _work(kind, ledger, one, total)) for kind, some in kinds.items() for one in some]
    return found, tails_ms


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


def _groups(ledger: Ledger, chosen: Collection[int], *, most: bool = False) -> list[Group]:
    """Operations of the forward, put together to the largest module calls that they make up.

    Calls of one class from one line are one group, and so are single operators of one line. With
    ``most``, a package's call has the program's line only where that runs most of its call again.
    """
    end = ledger.first_step_ends
    chosen = set(chosen)
    counted = [one.counts and not one.writes for one in ledger.first_step]
    all_of = [0, *accumulate(counted)]
    chosen_of = [0, *accumulate(place in chosen for place in range(end))]

    def line_of(call: ModuleCall) -> Line | None:
        for whole in (call, *ledger.calls_from(call.parent)):
            if whole.line is not None and not ledger.is_installed(whole.line[0]):
                break
        every, part = (of[min(whole.last, end)] - of[whole.first] for of in (all_of, chosen_of))
        return call.line if most and 2 * part < every else whole.line

    taken: set[int] = set()
    calls: dict[tuple[str, Line | None], list[ModuleCall]] = defaultdict(list)
    reach = 0
    for call in ledger.calls:  # those around come before those inside
        if call.first >= end or call.last > end or call.phase != "forward" or call.first < reach:
            continue
        inside = all_of[call.last] - all_of[call.first]
        whole = inside and inside == chosen_of[call.last] - chosen_of[call.first]
        # A call may run only to update something outside, such as running statistics. A gather
        # of weights is no update.
        updating = not call.trained and any(
            memory.outside
            for one in ledger.operations[call.first : call.last]
            for memory in (() if one.name.startswith("fsdp.") else one.writes)
        )
        if whole and not updating:
            calls[call.class_name, line_of(call)].append(call)
        if whole or updating:
            taken.update(range(call.first, call.last))
            reach = call.last
    found = [
        Group(
            tuple(
                place for call in same for place in range(call.first, call.last) if place in chosen
            ),
            tuple(same),
            line,
        )
        for (_, line), same in calls.items()
    ]
    return found + _by_line(ledger, sorted(chosen - taken), lambda place: place)


def _by_line(
    ledger: Ledger, places: Iterable[int], forward_of: Callable[[int], int], *, own: bool = False
) -> list[Group]:
    """Single operations by the line of their forward operation, and its module's class.

    With ``own``, by the program's line that calls a package, instead of the package's.
    """
    found: dict[tuple[Line | None, str], list[int]] = defaultdict(list)
    for place in places:
        one = ledger.operations[forward_of(place)]
        around = ledger.calls[one.call].class_name if one.call is not None else ""
        line = ledger.own_line(one.line, one.call) if own else one.line
        found[line, "" if own else around].append(place)
    return [Group(tuple(same), (), line) for (line, _), same in found.items()]


def _line_of(ledger: Ledger, call: ModuleCall) -> Line | None:
    """Where a module is called: the program's line, where the call is a package's."""
    return ledger.own_line(call.line, call.parent)


def _work(
    kind: WorkKind,
    ledger: Ledger,
    group: Group,
    total: float,
    *,
    more_ms: float = 0.0,
    part: float = 1.0,
) -> Work:
    took = part * sum(ledger.operations[place].ms for place in group.places) + more_ms
    # The time between operators is shared out by their time or number: the larger share counts.
    most = max(took / total, part * len(group.places) / len(ledger.first_step))
    around = ledger.operations[group.places[0]].call
    call = group.calls[0] if group.calls else None if around is None else ledger.calls[around]
    return Work(
        kind=kind,
        operators=len(group.places),
        ms=took,
        share=took / total,
        most_ms=max(took, most * ledger.step_ms) if ledger.step_ms is not None else None,
        line=ledger.site(group.line),
        module=call.name if call is not None else "",
        module_class=call.class_name if call is not None else "",
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
    """Memory that a recompute made and that is alive as its backward pass ends."""
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
    return _kept_by_line(ledger, "after-backward", late, holder=holder)


def _recomputed(ledger: Ledger) -> set[int]:
    """The outermost modules that run in recomputes."""
    return {
        call.module
        for call in ledger.calls
        if call.phase == "recompute"
        and (call.parent is None or ledger.calls[call.parent].phase != "recompute")
    }


def _between(ledger: Ledger) -> list[Kept]:
    """Results between the checkpointed parts of layers that are not checkpointed themselves."""
    calls = ledger.calls
    inner: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        if call.parent is not None:
            inner[call.parent].append(index)
    recomputed = _recomputed(ledger)

    def part(index: int) -> str | None:
        """The class of a recomputed module, or of one in wrappers; ``None`` of others."""
        while calls[index].module not in recomputed:
            inside = inner[index]
            if len(inside) != 1:
                return None
            index = inside[0]
        return calls[index].class_name

    held = sorted((one for one, _ in _held(ledger)), key=lambda one: one.born)
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


def _kept_by_line(
    ledger: Ledger, kind: KeptKind, memories: Sequence[Memory], *, holder: str | None = None
) -> list[Kept]:
    """One entry for each line that made some of the memory; one for all, where it has a holder."""

    def line_of(memory: Memory) -> Line | None:
        return ledger.own_line(memory.line, memory.call)

    lines: dict[Line | None, list[Memory]] = defaultdict(list)
    for one in memories:
        if holder is not None or one.line is not None:
            lines[line_of(one) if holder is None else None].append(one)
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
