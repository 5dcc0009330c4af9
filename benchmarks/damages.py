"""Ways to damage the events of a trace, seeded; what each does is its name.

A way takes the events of a trace (dictionaries, in file order), a strength between 0 and 1 (the
share that is damaged, where there is one), and a source of chance; it gives the damaged events.
Those with an interval alone are damaged.
"""

from __future__ import annotations

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


def _without_a_stretch(events: list[Event], strength: float, chance: Random) -> list[Event]:
    begin, end = _stretch(events, min(strength, 0.8), chance)
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


def _stretch(events: list[Event], share: float, chance: Random) -> tuple[float, float]:
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
    "middle cut out": _without_a_stretch,
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
LATER: dict[str, Way] = {}
WAYS = KNOWN | LATER
