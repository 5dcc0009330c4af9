"""The count that anyone can redo, in words: forward operators by name, beside the answer."""

from __future__ import annotations

from recompute_scan.result import CrossCheck, PlainCount, Result
from recompute_scan.units import count, plural

COLUMNS = (
    "Operator",
    "Outside the backward pass",
    "Inside it",
    "By gradient hooks",
    "Recomputed, as the answer says",
)
HOW = (
    "Operators that only a forward pass has, counted over the whole trace by name and time alone. "
    "An operator is inside the backward pass if it starts within a range of the autograd engine on "
    "its thread. Work without gradients is left out, except for that of autograd functions."
)
_AGREES = {True: "agrees", False: "differs", None: "nothing to count"}


def plain_count_row(result: Result) -> tuple[str, str] | None:
    """Does the plain count agree, and the numbers of its most telling operator."""
    check = result.cross_check
    if check is None:
        return None
    shown = _shown(check)
    if shown is None:
        return _AGREES[check.agrees], "no operator that only a forward pass has"
    name = shown.name.removeprefix("aten::")
    # A checkpoint of a single operator stops as soon as that has its inputs again.
    began = check.agrees and result.verdict == "none" and shown.inside > shown.in_hooks
    return (
        _AGREES[check.agrees],
        f"{plural(shown.inside, 'call')} of {name} inside the backward pass"
        f"{', none of which was run to its end,' if began else ''} and "
        f"{count(shown.outside)} outside, in the whole trace",
    )


def plain_count_table(result: Result) -> list[tuple[str, ...]]:
    """One row per operator, in the order of :data:`COLUMNS`."""
    return [
        (
            row.name,
            *(count(number) for number in (row.outside, row.inside, row.in_hooks, row.matched)),
        )
        for row in (result.cross_check.counts if result.cross_check else ())
    ]


def _shown(check: CrossCheck) -> PlainCount | None:
    """The first operator that differs, else the first."""
    first = next(iter(check.counts), None)
    if check.agrees is False:
        return next((row for row in check.counts if row.inside != row.matched), first)
    return first
