"""Ways to damage the events of a trace, seeded; what each does is its name.

A way takes the events of a trace (dictionaries, in file order), a strength between 0 and 1 (the
share that is damaged, where there is one), and a source of chance; it gives the damaged events.
Those with an interval alone are damaged.
"""

from collections.abc import Callable
from random import Random
from typing import Any

Event = dict[str, Any]
Way = Callable[[list[Event], float, Random], list[Event]]

_ENGINE = "autograd::engine::evaluate_function"
_SEQUENCE = "Sequence number"


def _some(change: Callable[[Event, Random], Event]) -> Way:
    """The way that changes so large a share of the events, drawn one by one."""

    def way(events: list[Event], strength: float, chance: Random) -> list[Event]:
        return [
            change(event, chance) if _timed(event) and chance.random() < strength else event
            for event in events
        ]

    return way


def _dropping(unwanted: Callable[[Event], bool]) -> Way:
    """The way that drops so large a share of the events that ``unwanted`` names."""

    def way(events: list[Event], strength: float, chance: Random) -> list[Event]:
        return [
            event
            for event in events
            if not (_timed(event) and unwanted(event) and chance.random() < strength)
        ]

    return way


def _without(field: str) -> Way:
    return _some(lambda event, _: {key: value for key, value in event.items() if key != field})


def _with_args(change: Callable[[Event, Random], Event]) -> Way:
    def changed(event: Event, chance: Random) -> Event:
        return event | {"args": change(event.get("args", {}), chance)}

    return _some(changed)


def _timed(event: Event) -> bool:
    return event.get("ph") == "X"


def _operator(event: Event) -> bool:
    return event.get("cat") in ("cpu_op", "Operator")


def _name(event: Event) -> str:
    return str(event.get("name", ""))


def _scrambled_threads(events: list[Event], strength: float, chance: Random) -> list[Event]:
    threads = [event["tid"] for event in events if _timed(event) and "tid" in event]
    other = _some(lambda event, chance: event | {"tid": chance.choice([*threads[:3], 1, 2, 3])})
    return other(events, strength, chance)


def _shuffled(events: list[Event], strength: float, chance: Random) -> list[Event]:
    order = sorted(range(len(events)), key=lambda at: at + chance.random() * strength * len(events))
    return [events[at] for at in order]


def _written_twice(events: list[Event], strength: float, chance: Random) -> list[Event]:
    return [
        event
        for event in events
        for _ in range(2 if _timed(event) and chance.random() < strength else 1)
    ]


def _moved_thread(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """One thread's clock goes wrong, by up to the length of the trace."""
    threads = sorted({str(event.get("tid")) for event in events if _operator(event)})
    if not threads:
        return events
    moved, by = chance.choice(threads), strength * _length(events) * chance.choice((-1, 1))
    return [
        event | {"ts": float(event["ts"]) + by}
        if "ts" in event and str(event.get("tid")) == moved
        else event
        for event in events
    ]


def _without_a_section(events: list[Event], strength: float, chance: Random) -> list[Event]:
    begin, end = _section(events, min(strength, 0.8), chance)
    return [e for e in events if not (_timed(e) and begin <= float(e.get("ts", 0)) < end)]


def _swapped_starts(events: list[Event], strength: float, chance: Random) -> list[Event]:
    events = list(events)
    timed = [at for at, event in enumerate(events) if _timed(event)]
    for _ in range(int(strength * len(timed) / 2)):
        one, two = chance.choice(timed), chance.choice(timed)
        first, second = events[one], events[two]
        events[one], events[two] = first | {"ts": second["ts"]}, second | {"ts": first["ts"]}
    return events


def _short_names(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """Every name is cut to so many characters, as a column of fixed width would."""
    most = int(60 - 55 * strength)
    return [event | {"name": _name(event)[:most]} if _timed(event) else event for event in events]


def _after_itself(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """The same trace once more behind it, overlapping by the strength."""
    later = (1 - strength) * _length(events)
    again = [event | {"ts": float(event["ts"]) + later} for event in events if "ts" in event]
    return events + again


def _step_without_forward(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """Of one step, the operators before its first backward operator are dropped."""
    steps = [event for event in events if _name(event).startswith("ProfilerStep#")]
    if not steps:
        return events
    step = chance.choice(steps)
    begin, end = step["ts"], step["ts"] + step["dur"]
    engines = [
        event["ts"]
        for event in events
        if _name(event).startswith(_ENGINE) and begin <= event["ts"] < end
    ]
    first = min(engines, default=end)
    way = _dropping(lambda event: _operator(event) and begin <= event["ts"] < first)
    return way(events, strength, chance)


def _renamed(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """So large a share of the names of operators means nothing any more, everywhere alike."""
    names = sorted({_name(event) for event in events if _operator(event)})
    new = {name: f"op_{at}" for at, name in enumerate(names) if chance.random() < strength}
    return [e | {"name": new.get(_name(e), _name(e))} if _operator(e) else e for e in events]


def _coarse_times(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """Times in whole units of 1 to 1000 µs."""
    unit = 10 ** round(3 * strength)

    def coarse(event: Event) -> Event:
        times = {key: float(event[key]) // unit * unit for key in ("ts", "dur") if key in event}
        return event | times

    return [coarse(event) if _timed(event) else event for event in events]


def _as_text(event: Event, chance: Random) -> Event:
    field = chance.choice(("ts", "dur", "pid", "tid"))
    return event | {field: str(event.get(field))}


def _scaled(event: Event, chance: Random) -> Event:
    return event | {"dur": event.get("dur", 0) * chance.choice((0.1, 0.5, 2, 10))}


def _one_thread(events: list[Event], strength: float, chance: Random) -> list[Event]:
    return [event | {"tid": 1} if _operator(event) else event for event in events]


def _length(events: list[Event]) -> float:
    starts = [float(event["ts"]) for event in events if _operator(event)]
    return max(starts) - min(starts) if starts else 0.0


def _section(events: list[Event], share: float, chance: Random) -> tuple[float, float]:
    first = min(float(event["ts"]) for event in events if _operator(event))
    length = _length(events)
    begin = first + length * chance.random() * (1 - share)
    return begin, begin + share * length


KNOWN: dict[str, Way] = {
    "events dropped": _dropping(lambda event: True),
    "operators dropped": _dropping(_operator),
    "start missing": _without("ts"),
    "duration missing": _without("dur"),
    "name missing": _without("name"),
    "thread missing": _without("tid"),
    "process missing": _without("pid"),
    "category missing": _without("cat"),
    "arguments missing": _without("args"),
    "sequence number missing": _with_args(
        lambda args, _: {key: value for key, value in args.items() if key != _SEQUENCE}
    ),
    "sequence number negative": _with_args(
        lambda args, chance: args | {_SEQUENCE: -chance.randrange(2, 10_000)}
    ),
    "sequence number huge": _with_args(
        lambda args, chance: args | {_SEQUENCE: 2**40 + chance.randrange(10_000)}
    ),
    "sequence number of chance": _with_args(
        lambda args, chance: args | {_SEQUENCE: chance.randrange(10_000)}
    ),
    "threads scrambled": _scrambled_threads,
    "all on one thread": _one_thread,
    "shuffled": _shuffled,
    "written twice": _written_twice,
    "one clock wrong": _moved_thread,
    "middle cut out": _without_a_section,
    "starts swapped": _swapped_starts,
    "names cut": _short_names,
    "once more behind itself": _after_itself,
    "engine ranges dropped": _dropping(lambda event: _name(event).startswith(_ENGINE)),
    "nodes dropped": _dropping(
        lambda event: "Backward" in _name(event) and not _name(event).startswith(_ENGINE)
    ),
    "checkpoint functions dropped": _dropping(lambda event: "CheckpointFunction" in _name(event)),
    "one step without forward": _step_without_forward,
    "names lost their meaning": _renamed,
    "times coarse": _coarse_times,
    "numbers as text": _some(_as_text),
    "duration negative": _some(lambda event, _: event | {"dur": -event.get("dur", 0)}),
    "duration zero": _some(lambda event, _: event | {"dur": 0}),
    "duration wrong": _some(_scaled),
}


# From here on: written when the rules that see damage stood, and those were not changed for them.


def _short_ones_dropped(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """What a viewer that leaves out short events would save: the shorter share of them is gone."""
    lengths = sorted(float(event.get("dur", 0)) for event in events if _operator(event))
    if not lengths:
        return events
    least = lengths[min(len(lengths) - 1, int(strength * len(lengths)))]
    return [e for e in events if not _operator(e) or float(e.get("dur", 0)) > least]


def _deep_ones_dropped(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """Only the outermost calls are left; how many levels, the strength says."""
    most = round(6 * (1 - strength)) + 1
    still_open: dict[Any, list[float]] = {}
    kept = []
    for event in sorted(events, key=lambda e: (float(e.get("ts", 0)), -float(e.get("dur", 0)))):
        if not _operator(event):
            kept.append(event)
            continue
        ends = still_open.setdefault(event.get("tid"), [])
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        ends.append(event["ts"] + event["dur"])
        if len(ends) <= most:
            kept.append(event)
    return kept


def _each_nth(events: list[Event], strength: float, chance: Random) -> list[Event]:
    step = max(2, round(1 / strength))
    return [event for at, event in enumerate(events) if not _timed(event) or at % step]


def _jittered(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """Each start and end moves by up to 100 µs."""
    most = 100 * strength**2

    def moved(event: Event) -> Event:
        return event | {
            "ts": float(event["ts"]) + chance.uniform(-most, most),
            "dur": max(0.0, float(event["dur"]) + chance.uniform(-most, most)),
        }

    return [moved(event) if _operator(event) else event for event in events]


def _thread_renamed_midway(events: list[Event], strength: float, chance: Random) -> list[Event]:
    begin, end = _section(events, strength, chance)
    return [
        event | {"tid": 77} if _operator(event) and begin <= float(event["ts"]) < end else event
        for event in events
    ]


def _names_exchanged(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """So large a share of the operators take each other's names, each by itself."""
    at = [place for place, event in enumerate(events) if _operator(event)]
    chosen = [place for place in at if chance.random() < strength]
    names = [events[place]["name"] for place in chosen]
    chance.shuffle(names)
    events = list(events)
    for place, name in zip(chosen, names, strict=True):
        events[place] = events[place] | {"name": name}
    return events


def _numbers_wrap(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """Sequence numbers in so few bits that they repeat."""
    most = 2 ** round(12 - 8 * strength)

    def wrapped(event: Event) -> Event:
        args = event.get("args", {})
        if _SEQUENCE not in args:
            return event
        return event | {"args": args | {_SEQUENCE: int(args[_SEQUENCE]) % most}}

    return [wrapped(event) if _operator(event) else event for event in events]


def _numbers_off(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """In a section, sequence numbers are off by a few."""
    begin, end = _section(events, strength, chance)
    by = chance.choice((-7, -1, 1, 3, 50))

    def off(event: Event) -> Event:
        args = event.get("args", {})
        if _SEQUENCE not in args or not begin <= float(event["ts"]) < end:
            return event
        return event | {"args": args | {_SEQUENCE: int(args[_SEQUENCE]) + by}}

    return [off(event) if _operator(event) else event for event in events]


def _numbers_exchanged(events: list[Event], strength: float, chance: Random) -> list[Event]:
    at = [p for p, e in enumerate(events) if _SEQUENCE in e.get("args", {})]
    chosen = [place for place in at if chance.random() < strength]
    numbers = [events[place]["args"][_SEQUENCE] for place in chosen]
    chance.shuffle(numbers)
    events = list(events)
    for place, number in zip(chosen, numbers, strict=True):
        args = events[place]["args"] | {_SEQUENCE: number}
        events[place] = events[place] | {"args": args}
    return events


def _without_shapes(event: Event, chance: Random) -> Event:
    args = {key: x for key, x in event.get("args", {}).items() if not key.startswith("Input")}
    return event | {"args": args}


def _other_shapes(event: Event, chance: Random) -> Event:
    args = event.get("args", {})
    if "Input Dims" not in args:
        return event
    return event | {"args": args | {"Input Dims": [[chance.randrange(1, 9)]]}}


def _slower_clock(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """From some moment on the clock runs slower, or faster."""
    begin, _ = _section(events, 0.5, chance)
    rate = 1 + strength * chance.choice((-0.9, 4))

    def slowed(event: Event) -> Event:
        start = float(event["ts"])
        return event if start < begin else event | {"ts": begin + (start - begin) * rate}

    return [slowed(event) if "ts" in event else event for event in events]


def _clock_jumps(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """At some moment the clock goes back."""
    begin, _ = _section(events, 0.5, chance)
    by = strength * _length(events) / 4
    return [
        event | {"ts": float(event["ts"]) - by}
        if "ts" in event and float(event["ts"]) >= begin
        else event
        for event in events
    ]


def _backwards(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """Time runs backwards."""
    last = max(float(event.get("ts", 0)) + float(event.get("dur", 0)) for event in events)
    return [
        event | {"ts": last - float(event["ts"]) - float(event.get("dur", 0))}
        if "ts" in event
        else event
        for event in events
    ]


def _relabelled(event: Event, chance: Random) -> Event:
    return event | {"cat": chance.choice(("user_annotation", "cuda_runtime", "cpu_op", "new"))}


def _ends_dropped(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """The file's last events are gone, as if the profiler's buffer had been full."""
    return events[: max(1, int(len(events) * (1 - strength * 0.9)))]


def _begins_dropped(events: list[Event], strength: float, chance: Random) -> list[Event]:
    return events[int(len(events) * strength * 0.9) :]


def _with_noise(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """Events that nobody recorded stand among the others."""
    timed = [event for event in events if _operator(event)]
    if not timed:
        return events
    new = []
    for _ in range(int(strength * len(timed))):
        one, other = chance.choice(timed), chance.choice(timed)
        new.append(one | {"ts": other["ts"] + chance.random(), "dur": chance.random() * 10})
    return events + new


def _two_ranks(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """A second rank's events in the same file, a little later, in a process of its own."""
    return events + [
        event | {"pid": 99_999, "ts": float(event["ts"]) + 1000 * strength}
        for event in events
        if "ts" in event
    ]


def _ranges_emptied(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """All that stands in so large a share of the engine's ranges is gone."""
    emptied = [
        (event.get("tid"), event["ts"], event["ts"] + event["dur"])
        for event in events
        if _name(event).startswith(_ENGINE) and chance.random() < strength
    ]
    emptied.sort(key=lambda one: one[1])
    kept = []
    for event in events:
        if _operator(event) and not _name(event).startswith(_ENGINE):
            start = event["ts"]
            if any(tid == event.get("tid") and b < start < e for tid, b, e in emptied):
                continue
        kept.append(event)
    return kept


def _one_kind_dropped(events: list[Event], strength: float, chance: Random) -> list[Event]:
    """All operators of a few names are gone, with nothing left of them."""
    names = sorted({_name(event) for event in events if _operator(event)})
    gone = set(chance.sample(names, max(1, int(strength * 0.3 * len(names)))))
    return [event for event in events if not (_operator(event) and _name(event) in gone)]


LATER: dict[str, Way] = {
    "short events dropped": _short_ones_dropped,
    "deep events dropped": _deep_ones_dropped,
    "every nth dropped": _each_nth,
    "names of a few dropped": _one_kind_dropped,
    "engine ranges emptied": _ranges_emptied,
    "step annotations dropped": _dropping(lambda event: _name(event).startswith("ProfilerStep")),
    "end dropped": _ends_dropped,
    "begin dropped": _begins_dropped,
    "noise among them": _with_noise,
    "times jitter": _jittered,
    "clock changes its rate": _slower_clock,
    "clock goes back once": _clock_jumps,
    "time backwards": _backwards,
    "thread renamed midway": _thread_renamed_midway,
    "two ranks in one file": _two_ranks,
    "names exchanged": _names_exchanged,
    "names in lower case": _some(lambda event, _: event | {"name": _name(event).lower()}),
    "names without their space": _some(
        lambda event, _: event | {"name": _name(event).rpartition("::")[2]}
    ),
    "categories of chance": _some(_relabelled),
    "numbers wrap around": _numbers_wrap,
    "numbers off by a few": _numbers_off,
    "numbers exchanged": _numbers_exchanged,
    "shapes missing": _some(_without_shapes),
    "shapes of chance": _some(_other_shapes),
    "arguments empty": _some(lambda event, _: event | {"args": {}}),
    "arguments of another": _with_args(lambda args, chance: {"External id": chance.randrange(99)}),
    "duration of chance": _some(lambda event, chance: event | {"dur": chance.uniform(0, 1000)}),
    "process of chance": _some(lambda event, chance: event | {"pid": chance.randrange(3)}),
    "start null": _some(lambda event, _: event | {"ts": None}),
    "name a number": _some(lambda event, chance: event | {"name": chance.randrange(9)}),
}
WAYS = KNOWN | LATER
