"""How much of a file may be taken in: bounds against bombs, each liftable by an option."""

from __future__ import annotations

from msgspec import Struct

from recompute_scan.errors import InputError


class Limits(Struct, frozen=True):
    """Bounds on one trace. A file beyond one of them is refused with its code, not cut.

    Attributes:
        inflated_bytes: Bytes that a compressed file may inflate to (``E310``).
        ratio: Inflated bytes for each compressed one, looked at once more than
            ``ratio_from`` bytes came out (``E311``). Traces stay below 20; one repeated
            character reaches 1000.
        ratio_from: See ``ratio``.
        depth: How deep values may be nested (``E312``). Traces need 6.
        events: Events kept (``E313``); each takes 49 bytes of memory.
        distinct: Distinct names, and distinct input shapes (``E314``).
        event_bytes: Size of one event, or of what is before the first (``E315``).
        members: Files in an archive (``E316``).
        name_chars: Longer names are cut, and counted as ``names_shortened``.
    """

    inflated_bytes: int = 64 * 2**30
    ratio: int = 250
    ratio_from: int = 16 * 2**20
    depth: int = 500
    events: int = 200_000_000
    distinct: int = 5_000_000
    event_bytes: int = 64 * 2**20
    members: int = 10_000
    name_chars: int = 20_000


DEFAULT_LIMITS = Limits()


def refuse_size(source: str, limit: int) -> InputError:
    """``E310``: the file inflates to more than it may."""
    return _refuse(
        "E310", f"{source} inflates to more than {_size(limit)}.", "--max-inflated-bytes"
    )


def refuse_ratio(source: str, limit: int) -> InputError:
    """``E311``: the file inflates as no trace does."""
    return _refuse(
        "E311",
        f"{source} inflates more than {limit} times, as no trace does.",
        "--max-ratio",
        why="it looks like a file made to fill the memory",
    )


def refuse_depth(source: str, limit: int) -> InputError:
    """``E312``: values nested too deep."""
    return _refuse("E312", f"{source} nests values more than {limit} deep.", "--max-depth")


def refuse_events(source: str, limit: int) -> InputError:
    """``E313``: too many events."""
    return _refuse("E313", f"{source} holds more than {limit:,} events.", "--max-events")


def refuse_distinct(source: str, limit: int, what: str) -> InputError:
    """``E314``: too many distinct names or shapes."""
    return _refuse("E314", f"{source} holds more than {limit:,} {what}.", "--max-distinct")


def refuse_event_size(source: str, limit: int) -> InputError:
    """``E315``: one event, or what is before the first, is too long."""
    return _refuse(
        "E315",
        f"{source} goes on for {_size(limit)} without an event's end.",
        "--max-event-bytes",
        why="it is no trace, or one of its strings was never closed",
    )


def refuse_members(source: str, limit: int) -> InputError:
    """``E316``: too many files in an archive."""
    return _refuse("E316", f"{source} holds more than {limit:,} files.", "--max-members")


def _refuse(code: str, what: str, option: str, why: str | None = None) -> InputError:
    return InputError(code, what, why=why, hint=f"if it is right, lift the limit with {option}")


def _size(number: int) -> str:
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if number >= size:
            return f"{number // size} {unit}"
    return f"{number} bytes"
