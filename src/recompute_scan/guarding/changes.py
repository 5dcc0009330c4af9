"""What the guard tells: what has changed, where, since which step; and what is usual, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from recompute_scan.errors import InputError
from recompute_scan.files import content, write_whole

_FORMAT = "recompute-scan-guard/1"
Kind = Literal["doubled", "off", "on", "variant", "random-state", "repeated", "lost", "unfaithful"]


class WatchedPart(Struct, frozen=True, order=True):
    """One checkpoint around a module, by what it costs and keeps.

    Attributes:
        variant: ``reentrant`` or ``non-reentrant``.
        keeps_random: Whether recomputes draw the forward's random numbers.
        nested: Whether another checkpoint is around it, whose recompute runs it too.
        repeated: Whether one forward was recomputed several times.
    """

    variant: str
    keeps_random: bool = True
    nested: bool = False
    repeated: bool = False


# All checkpoints of one module whose recomputes ran in a step, sorted; empty where none did.
Parts = tuple[WatchedPart, ...]


class Change(Struct, frozen=True):
    """One thing that is not what it was.

    Attributes:
        kind: What has changed. ``doubled``: recomputed more often; ``off``: no longer, though
            trained; ``on``: recomputed, and was trained without; ``variant``: by the other variant;
            ``random-state``: random numbers are no longer, or again, restored; ``repeated``: one
            forward is recomputed several times; ``lost``: no longer, and its weights get no
            gradient; ``unfaithful``: a recompute is another computation than its forward.
        step: The first step that shows it, from 1.
        told: The step after which it is told.
        modules: Qualified names, or those of functions, of the regions.
        sites: ``file:line`` that calls each, where known.
        before: Recomputes per forward before.
        after: Recomputes per forward now.
        text: All of it in a sentence or two.
        slower: Median step time since, over that before; ``None`` where unknown.
        memory: Memory in use now, over that before; ``None`` where unknown.
    """

    kind: Kind
    step: int
    told: int
    modules: tuple[str, ...]
    sites: tuple[str, ...]
    before: int
    after: int
    text: str
    slower: float | None = None
    memory: float | None = None


def count(parts: Parts) -> int:
    """Recomputes per forward."""
    return sum(1 + one.nested for one in parts)


def kind_of(before: Parts, after: Parts) -> Kind:
    """What has become of a module's checkpoints; both are not the same."""
    if not after:
        return "off"
    if not before:
        return "on"
    if count(after) != count(before):
        return "doubled" if count(after) > count(before) else "off"
    if [one.variant for one in after] != [one.variant for one in before]:
        return "variant"
    if [one.keeps_random for one in after] != [one.keeps_random for one in before]:
        return "random-state"
    return "repeated" if _repeated(before) != _repeated(after) else "doubled"


def _repeated(parts: Parts) -> list[bool]:
    return [one.repeated for one in parts]


_SAID = {
    "doubled": "recomputed {after} times per forward, {before} before: a second checkpoint is on",
    "off": "recomputed {after} times per forward, {before} before: a checkpoint is off",
    "on": "recomputed now, and was trained without a checkpoint before",
    "variant": "checkpointed by the other variant ({variants})",
    "random-state": "{random}",
    "repeated": "{repeated}",
    "lost": "no longer recomputed, and its weights get no gradient",
    "unfaithful": "recomputed as another computation than its forward: {detail}",
}


def sentence(
    kind: Kind,
    step: int,
    modules: tuple[str, ...],
    sites: tuple[str, ...],
    before: Parts,
    after: Parts,
    detail: str = "",
) -> str:
    """What a person reads of a change."""
    first = modules[0] or "a function"
    who = first if len(modules) == 1 else f"{first} and {len(modules) - 1} more"
    verb = "is" if len(modules) == 1 else "are"
    said = _SAID[kind].format(
        before=count(before),
        after=count(after),
        variants=", ".join(sorted({one.variant for one in after})) or "none",
        random="recomputed with the forward's random numbers restored"
        if all(one.keeps_random for one in after)
        else "recomputed without the forward's random numbers: dropout is another one",
        repeated="recomputed several times for one forward: backward runs more than once"
        if any(one.repeated for one in after)
        else "recomputed once for each forward again",
        detail=detail,
    )
    where = f" ({', '.join(sites[:2])})" if any(sites) else ""
    return f"Since step {step}, {who} {verb} {said}{where}."


class Stored(Struct, frozen=True):
    """What a guard has learned.

    Attributes:
        modules: Checkpoints of each module that is recomputed, by qualified name.
        format: ``recompute-scan-guard/1``.
        torch: Version that it was learned with.
        steps: Steps that the guard has seen, over all runs.
        trained: Modules that had gradients when the first steps were over.
    """

    modules: dict[str, tuple[WatchedPart, ...]]
    format: str = _FORMAT
    torch: str = ""
    steps: int = 0
    trained: tuple[str, ...] = ()


def read_stored(path: Path) -> Stored:
    """What a file has.

    Raises:
        InputError: It cannot be read, or is no such file (``E351``).
    """
    try:
        stored = msgspec.json.decode(content(path), type=Stored)
    except OSError as error:
        raise InputError("E351", f"Cannot read {path}.", why=error.strerror) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _no_baseline(path, str(error)) from None
    if stored.format != _FORMAT:
        raise _no_baseline(path, f"its format is {stored.format!r}, not {_FORMAT!r}")
    return stored


def _no_baseline(path: Path, why: str) -> InputError:
    return InputError(
        "E351",
        f"{path} is no baseline of the guard.",
        why=why,
        hint="leave it out once; guard(baseline=…) writes it when the training ends",
    )


def write_stored(path: Path, stored: Stored) -> None:
    """Write it, whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(stored)) + b"\n")
