"""How two calls of one operator differ: in their results, in what they got, and why, as far as
that tells.
"""

from __future__ import annotations

from typing import Any

from recompute_scan.faithful import DifferenceKind
from recompute_scan.fidelity.fingerprint import Fingerprint
from recompute_scan.fidelity.tape import Outside, TapeEntry

Prints = tuple[Fingerprint | None, ...]


def cause_between(twin: TapeEntry, entry: TapeEntry) -> tuple[DifferenceKind, dict[str, Any]]:
    """Why two calls of one operator have different results, as far as their arguments tell."""
    types = other_in(twin, entry, "dtype")
    if types is not None:
        return "type", types
    if twin.drawing and entry.drawing and twin.drawing.before != entry.drawing.before:
        return "random", {"generator": entry.drawing.generator}
    if changed_inputs(twin, entry):
        return "input", {}
    before, after = ([str(one) for one in call.numbers] for call in (twin, entry))
    if before != after:
        changed = (pair for pair in zip(before, after, strict=False) if pair[0] != pair[1])
        one, other = next(changed, (None, None))
        return "argument", {"forward": one, "recompute": other} if one is not None else {}
    shapes = other_in(twin, entry, "shape")
    if shapes is not None:
        return "shape", shapes
    return "value", {}


def changed_inputs(twin: TapeEntry, entry: TapeEntry) -> list[Fingerprint]:
    """What the recompute's call got from outside the region that the forward's did not."""
    if not twin.outside:
        return []
    after = {one.place: one for one in entry.outside}
    pairs = ((before, after.get(before.place)) for before in twin.outside)
    return [
        now.print
        for before, now in pairs
        if now is not None and now.print is not None and not same_from_outside(before, now)
    ]


def other_in(twin: TapeEntry, entry: TapeEntry, what: str) -> dict[str, str] | None:
    for one, other in zip(twin.prints, entry.prints, strict=False):
        if one is None or other is None:
            continue
        before, after = getattr(one, what), getattr(other, what)
        if before != after:
            return {"forward": _plain(before), "recompute": _plain(after)}
    return None


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")


def same_from_outside(before: Outside, now: Outside) -> bool:
    if before.print is None or now.print is None:
        return True  # not known to differ
    return not differ(before.print, now.print)


def differ(one: Fingerprint | None, other: Fingerprint | None) -> bool:
    """Are both known, and further apart than rounding explains?"""
    if one is None or other is None or one.same_bits(other):
        return False
    if one.dtype != other.dtype or not (one.dtype.is_floating_point or one.dtype.is_complex):
        return True
    distance = one.distance(other)
    return distance is None or distance > one.rounding()


def apart_by(before: Prints, now: Prints) -> str | None:
    """``None`` for the same bits, ``rounding``, or ``altogether``."""
    if len(before) != len(now):
        return "altogether"
    apart: str | None = None
    for one, other in zip(before, now, strict=True):
        if one is not None and other is not None and not one.same_bits(other):
            if differ(one, other):
                return "altogether"
            apart = "rounding"
    return apart
