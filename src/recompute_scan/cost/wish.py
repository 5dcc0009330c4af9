"""What a plan is to keep to: an amount of memory, a share of today's, what is free, or a time."""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from recompute_scan.errors import UsageError

_AMOUNT = re.compile(
    r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?)(?P<binary>i?)B?", re.IGNORECASE
)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
# Kept free of what is there: other programs, fragmentation, steps larger than the rehearsed one.
_RESERVE = 0.10


class Wish(Struct, frozen=True):
    """The limit that was asked for.

    Attributes:
        kind: ``bytes``, ``share`` (of what today's arrangement takes), ``free`` or ``time``.
        amount: Bytes, a share, or ms; 0 for ``free``.
        text: As it was written.
    """

    kind: Literal["bytes", "share", "free", "time"]
    amount: float
    text: str

    def budget(self, today: int, free: int | None) -> int | None:
        """Bytes that may be taken; ``None`` where that is not limited, or not known.

        Args:
            today: What today's arrangement takes.
            free: What is free beside it.
        """
        if self.kind == "bytes":
            return round(self.amount)
        if self.kind == "share":
            return round(self.amount * today)
        if self.kind == "free" and free is not None:
            return today + round((1 - _RESERVE) * free)
        return None


def read_wish(memory: str | None, step_time_ms: float | None) -> Wish:
    """The limit that these options give; without either, the memory that today's takes.

    Args:
        memory: ``60GB``, ``512 MiB``, ``80%`` or ``free``.
        step_time_ms: Longest step, ms.

    Raises:
        UsageError: Both are given, or the text is none of these (``E232``).
    """
    if memory is not None and step_time_ms is not None:
        raise UsageError(
            "E232",
            "A plan keeps to one limit: --memory or --step-time.",
            hint="leave one of them out; the curve shows the other",
        )
    if step_time_ms is not None:
        return Wish("time", step_time_ms, f"--step-time {step_time_ms:g}")
    text = (memory or "100%").strip()
    said = f"--memory {text}"
    if text.lower() == "free":
        return Wish("free", 0.0, said)
    if text.endswith("%") and re.fullmatch(r"\d+(\.\d+)?", text[:-1].strip()):
        return Wish("share", float(text[:-1]) / 100, said)
    found = _AMOUNT.fullmatch(text)
    if found is None or (not found["unit"] and found["binary"]):
        raise UsageError(
            "E232",
            f"--memory {text} is no amount of memory.",
            hint="60GB, 512MiB, 80% (of what it takes today) or free",
        )
    base = 1024 if found["binary"] else 1000
    return Wish("bytes", float(found["number"]) * base ** _POWERS[found["unit"].upper()], said)
