"""The checkpoints around compiled code, by the stacks of its compilation, and those in it, by line.

A trace shows how often a compiled call ran again as a whole. Where there is none, torch's
structured trace still tells who called the code when it was compiled: calls of the checkpoint
function among them are checkpoints around it.

The graphs name the line that calls torch's checkpoint, by its whole path. A recorded run knows
lines of the user's own code by shorter names, and where a library's checkpoints were switched on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, takewhile

from msgspec.structs import replace

from recompute_scan.compiled.structured import CompileFrame, Record
from recompute_scan.frameworks.known import recognise
from recompute_scan.result import Checkpoint, Region, Variant
from recompute_scan.run_info import SwitchedOn

_CHECKPOINT = ("torch/utils/checkpoint.py", "checkpoint")
# Its decorator, which keeps the compiler out of it: nothing else that has one calls models.
_DISABLED = ("torch/_compile.py", "inner")
_DISABLES = ("torch/_dynamo/eval_frame.py", "_fn")
# What the reentrant variant calls: `apply` is no Python code from torch 2.14 on.
_REENTRANT = ("torch/autograd/function.py", "apply"), ("torch/utils/checkpoint.py", "forward")
_FILES = tuple(file for file, _ in _REENTRANT)
_BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")


def checkpoints_around(records: Iterable[Record]) -> Mapping[str, tuple[Checkpoint, ...]]:
    """By ``frame/version`` the checkpoints around the first call, outermost first.

    Code whose stack is not known is not among them. What is compiled in the backward pass, because
    a reentrant checkpoint ran it without gradients before, has those of that first run.
    """
    found: dict[str, tuple[Checkpoint, ...]] = {}
    first: dict[str, tuple[Checkpoint, ...]] = {}
    for record in records:
        key, stack = record.compile_id, record.stack
        if key is None or not stack:
            continue
        frame = key.partition("/")[0]
        if any(_is(one, _BACKWARD) for one in stack):
            if frame in first:
                found[key] = first[frame]
        else:
            found[key] = first[frame] = _around(stack)
    return found


def reruns(checkpoints: Sequence[Checkpoint]) -> int:
    """How often what all of these are around runs again in one backward pass.

    Early stop makes one of non-reentrant checkpoints that are directly around one another
    (docs/how-it-works.md, "Doubling is not nesting").
    """
    runs = groupby(one.variant for one in checkpoints)
    return sum(1 if variant == "non-reentrant" else len(list(same)) for variant, same in runs)


def _around(stack: Sequence[CompileFrame]) -> tuple[Checkpoint, ...]:
    found: list[Checkpoint] = []
    for place, frame in enumerate(stack):
        if not _is(frame, _DISABLED) or not place:
            continue
        # The code's own frame is the last; torch leaves frames between out where they are few.
        inside = [one for one in stack[place + 1 : -1] if not _is(one, _DISABLES)]
        if inside and not _is(inside[0], _CHECKPOINT):
            continue
        asked = stack[place - 1]
        torchs = takewhile(lambda one: one.file.endswith(_FILES), inside)
        entered = any(_is(one, where) for one in torchs for where in _REENTRANT)
        variant: Variant = "reentrant" if entered else "non-reentrant"
        found.append(
            Checkpoint(
                depth=len(found),
                variant=variant,
                mechanism=recognise(f"{asked.file}:{asked.function}").name,
                call_site=f"{asked.file}:{asked.line}",
            )
        )
    return tuple(found)


def _is(frame: CompileFrame, place: tuple[str, str]) -> bool:
    return frame.function == place[1] and frame.file.endswith(place[0])


def with_call_sites(
    regions: Sequence[Region], known: Collection[str], switched_on: Sequence[SwitchedOn]
) -> tuple[Region, ...]:
    """The regions, with the call sites that a run record has for their compiled checkpoints.

    Args:
        regions: The blocks.
        known: Call sites that the run record knows.
        switched_on: What was switched on, and where.
    """

    def sited(checkpoint: Checkpoint) -> Checkpoint:
        site = checkpoint.call_site
        if site is None or site in known:
            return checkpoint
        switches = {one.site for one in switched_on if one.mechanism == checkpoint.mechanism}
        same = [*switches] or [one for one in known if site.endswith(f"/{one}")]
        return replace(checkpoint, call_site=same[0]) if len(same) == 1 and same[0] else checkpoint

    return tuple(
        replace(region, checkpoints=tuple(map(sited, region.checkpoints))) for region in regions
    )
