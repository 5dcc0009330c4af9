"""What a rehearsal leaves: step times with modules recomputed and kept in turn, and what is saved.

Written by ``record/arrange/`` as ``rehearsal-rank<N>.json`` into the run's folder, read by the
plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.errors import InputError
from recompute_scan.files import content, write_whole

Way = Literal["today", "keep", "recompute", "parts", "selective", "offload", "chosen"]


class ArmWanted(Struct, frozen=True):
    """One arrangement of checkpoints that a rehearsal switches to.

    Attributes:
        way: ``today`` leaves the script's own; ``keep`` has none, ``recompute`` one around every
            module that can have one, ``parts`` one around every part of these instead,
            ``selective`` one around the modules that keeps the results of heavy operators;
            ``offload`` has none, and copies what these modules save to the host; ``chosen`` does
            what is named.
        recomputed: Names of modules, for ``chosen``.
        selective: Those whose checkpoints keep such results.
        operators: The heavy ones, where that has been found out.
        offloaded: Names of modules whose saved tensors go to the host, for ``chosen``.
    """

    way: Way
    recomputed: tuple[str, ...] = ()
    selective: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()


class Candidate(Struct, frozen=True):
    """A module that can have a checkpoint of its own.

    Attributes:
        module: Name below the model.
        module_class: Its class.
        checkpointed: Whether the script checkpoints it.
        again_ms: What its recomputes take in a step; the median over steps in which everything
            is recomputed, or every part is.
        selective_ms: Likewise, where the results of heavy operators are kept.
        weight_bytes: Of all its weights, sharded ones as this rank has them between steps.
        part_of: Place of the candidate that it is a part of, -1 for none. Parts come after all
            others, and are recomputed alone or with the whole.
    """

    module: str
    module_class: str
    checkpointed: bool
    again_ms: float
    selective_ms: float = 0.0
    weight_bytes: int = 0
    part_of: int = -1


class ModuleRun(Struct, frozen=True):
    """One forward run of a candidate in the step that was looked at, without checkpoints.

    Attributes:
        candidate: Its place among the candidates.
        begin: When it began; all moments are numbers of events, ascending.
        backward: When its backward pass began to let go of what it had saved.
        part_of: Place of the run that it is a part of, -1 for none.
    """

    candidate: int
    begin: int
    backward: int
    part_of: int = -1


class Hold(Struct, frozen=True):
    """Something that keeps one storage in memory until the backward pass needs it.

    Attributes:
        run: Place of the innermost module's run among all; -1 where it is outside of them.
        kind: ``saved`` by an operator; ``input`` of the run, which a checkpoint would keep;
            ``heavy``, the result of an operator that a selective one would keep.
        begin: From this moment on.
        end: Until before this moment.
    """

    run: int
    kind: Literal["saved", "input", "heavy"]
    begin: int
    end: int


class Storage(Struct, frozen=True):
    """Memory that the step saved for its backward pass: bytes, and what holds them."""

    size: int
    holds: tuple[Hold, ...]


class ArmMeasured(Struct, frozen=True):
    """What one arrangement was measured to take.

    Attributes:
        way: Which one.
        steps_ms: Step times, in order; those at one place of several arms follow each other.
        saved_bytes: Most that was saved for the backward pass at once, what a recompute makes
            again included; ``None`` where it was not looked at.
        allocated_bytes: Most that torch allocated on the GPU; ``None`` on a CPU.
    """

    way: Way
    steps_ms: tuple[float, ...]
    saved_bytes: int | None
    allocated_bytes: int | None = None


class Rehearsal(Struct, frozen=True):
    """What one rank's rehearsal has shown.

    Attributes:
        rank: Global rank, 0-based.
        device: What was timed.
        candidates: Modules that can have checkpoints, in the order in which they ran; then their
            parts.
        runs: Their runs in one step, in order.
        storages: What that step saved without checkpoints.
        arms: The arrangements, as they were asked for.
        free_bytes: What the machine had free behind the last step, or the GPU beside today's
            arrangement, whatever torch's cache holds; ``None`` where that is not known.
        remarks: What the person should know, one sentence each.
        operators: The heavy ones that were met, ``aten.mm.default``.
    """

    rank: int
    device: Literal["cpu", "cuda"]
    candidates: tuple[Candidate, ...]
    runs: tuple[ModuleRun, ...]
    storages: tuple[Storage, ...]
    arms: tuple[ArmMeasured, ...]
    free_bytes: int | None = None
    remarks: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()

    def whole_run(self, run: int) -> int:
        """The run that this one is, or is a part of; -1 of none."""
        return run if run < 0 or self.runs[run].part_of < 0 else self.runs[run].part_of

    def joined(self, other: Rehearsal) -> Rehearsal:
        """This one with the step times of another of the same modules too."""
        both = list(zip(self.candidates, other.candidates, strict=False))
        if len(self.candidates) != len(other.candidates) or any(
            one.module != again.module for one, again in both
        ):
            return self
        arms = {arm.way: arm.steps_ms for arm in other.arms}
        return replace(
            self,
            candidates=tuple(
                replace(
                    one,
                    again_ms=(one.again_ms + again.again_ms) / 2,
                    selective_ms=(one.selective_ms + again.selective_ms) / 2,
                )
                for one, again in both
            ),
            arms=tuple(
                replace(arm, steps_ms=arm.steps_ms + arms.get(arm.way, ())) for arm in self.arms
            ),
        )


def usual_ms(times: Sequence[float]) -> float:
    """The median of the faster half, which other work on the machine slowed least; 0 of none."""
    return median(sorted(times)[: (len(times) + 1) // 2] or [0.0])


def fixed_places(ranks: Sequence[Rehearsal]) -> frozenset[int]:
    """Places of candidates that some rank saw no backward pass of, so that none recomputes them."""
    moved = (frozenset(run.candidate for run in one.runs if run.backward >= 0) for one in ranks)
    return frozenset(range(len(ranks[0].candidates))) - frozenset.intersection(*moved)


def whole_places(candidates: Sequence[Candidate]) -> list[int]:
    """Places of those that are no part of another."""
    return [place for place, one in enumerate(candidates) if one.part_of < 0]


def parts_of(candidates: Sequence[Candidate]) -> dict[int, list[int]]:
    """Places of each one's parts, by its own place."""
    found: dict[int, list[int]] = {place: [] for place in whole_places(candidates)}
    for place, one in enumerate(candidates):
        if one.part_of >= 0:
            found[one.part_of].append(place)
    return found


def _name(rank: int | str) -> str:
    return f"rehearsal-rank{rank}.json"


def write_rehearsal(folder: Path, rehearsal: Rehearsal) -> None:
    """Write it into the run's folder; the file appears whole or not at all."""
    write_whole(folder / _name(rehearsal.rank), msgspec.json.encode(rehearsal))


def read_rehearsals(folder: Path) -> tuple[Rehearsal, ...]:
    """What the ranks of a run have left, by rank.

    Raises:
        InputError: One of the files is none of this version (``E306``).
    """
    found = []
    for path in folder.glob(_name("*")):
        try:
            found.append(msgspec.json.decode(content(path), type=Rehearsal))
        except (OSError, UnicodeDecodeError, RecursionError, msgspec.MsgspecError) as error:
            raise InputError("E306", f"Cannot use {path.name}.", why=str(error)) from None
    return tuple(sorted(found, key=lambda one: one.rank))
