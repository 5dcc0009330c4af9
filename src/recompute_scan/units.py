"""Numbers with their units, as a person reads them.

Unknown values read "not known", never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

UNKNOWN = "not known"

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# The units behind a number, a space between them.
UNITS = frozenset({"%", "ms", "s", "µs", "TFLOP", "TFLOP/s", *_BYTE_UNITS})

_PARTS = {
    1 / 20: "a twentieth",
    1 / 10: "a tenth",
    1 / 7: "a seventh",
    1 / 5: "a fifth",
    1 / 4: "a quarter",
    1 / 3: "a third",
    2 / 5: "two fifths",
    1 / 2: "half",
    2 / 3: "two thirds",
    3 / 4: "three quarters",
    9 / 10: "nine tenths",
}
_LEAST_PART = 0.04


def ms(value: float | None) -> str:
    """``512.3 ms``, ``2.35 s``: three to four significant digits, in seconds from one on."""
    if not _known(value):
        return UNKNOWN
    size = abs(value)
    if size >= 999.95:
        return f"{value / 1000:,.2f} s" if size < 99_995 else f"{value / 1000:,.0f} s"
    if size >= 10 or value == 0:
        return f"{value:.1f} ms"
    return f"{value:.2f} ms" if size >= 0.1 else f"{value:.3f} ms"


def span(low: float | None, high: float | None, word: str = "to") -> str:
    """``71.1 to 363.4 ms``, ``950.0 ms to 1.02 s``: the unit once where both have the same."""
    first, last = ms(low), ms(high)
    if UNKNOWN in (first, last):
        return UNKNOWN
    if first == last and low != high:
        assert low is not None and high is not None
        return f"{low:,.2f} {word} {high:,.2f} ms"
    number, _, unit = first.rpartition(" ")
    return f"{number if last.endswith(f' {unit}') else first} {word} {last}"


def pct(value: float | None) -> str:
    """``17.3 %`` from 17.3."""
    return f"{value:.1f} %" if _known(value) else UNKNOWN


def share(value: float | None) -> str:
    """``17.3 %`` from 0.173."""
    return pct(None if value is None else 100 * value)


def about(value: float) -> str:
    """``about a fifth`` from 0.186: the nearest common part, for a figure that carries no digits.

    Args:
        value: From 0 to 1.
    """
    nearest = min(_PARTS, key=lambda part: abs(math.log(part / max(value, 1e-9))))
    return f"about {_PARTS[nearest]}" if value >= _LEAST_PART else "a small part"


def rounded(percent: float | None, rough: bool) -> str:
    """``18.6 %``, or ``about a fifth`` of a figure that carries no digits."""
    return about(percent / 100) if rough and percent is not None else pct(percent)


def times(value: float | None) -> str:
    """``2.0``, ``1.5``, ``1.97``: a count or mean with no more digits than it has."""
    if not _known(value):
        return UNKNOWN
    text = f"{value:,.2f}"
    return text[:-1] if text.endswith("0") else text


def count(value: float | None) -> str:
    """``32`` or ``32.5``: calls in one step."""
    if not _known(value):
        return UNKNOWN
    return f"{value:,.0f}" if float(value).is_integer() else times(value)


def plural(number: float, word: str) -> str:
    """``1 block``, ``8 blocks``, ``1.5 recomputes``."""
    return f"{count(number)} {word}{'' if number == 1 else 's'}"


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of numbers that follow each other."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def first_few(names: Sequence[str], most: int) -> str:
    """``a, b and 3 more``: names, at most so many of them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def is_before(version: str, release: str) -> bool | None:
    """Is the version older than a release, or ``None`` where it is no version?

    A nightly counts as the release that it leads to.
    """
    from packaging.version import Version  # noqa: PLC0415 - few commands compare versions

    try:
        return Version(Version(version).base_version) < Version(release)
    except ValueError:
        return None


def size(value: float | None) -> str:
    """``812.4 MiB`` from bytes."""
    if not _known(value):
        return UNKNOWN
    power = 0
    while abs(value) >= 1024 and power < len(_BYTE_UNITS) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.1f} {_BYTE_UNITS[power]}" if power else f"{value:.0f} B"


def _known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
