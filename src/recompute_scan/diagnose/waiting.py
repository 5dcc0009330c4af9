"""Ranks that wait for each other: told from where they stand, or from what NCCL's watchdog says."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recompute_scan.crash import Frame, RankEnd
from recompute_scan.diagnose.logs import Timeout
from recompute_scan.diagnose.places import user_frame
from recompute_scan.diagnose.saving import SAVING
from recompute_scan.diagnose.signature import Signature

_NOTHING = re.compile(r"(?!)")

_SAVE_MORE = """\
```diff
-if rank == 0:
-    fabric.save("checkpoint.ckpt", state)
+fabric.save("checkpoint.ckpt", state)
 fabric.barrier()
```

`recompute-scan run` recognises it while it happens: when no rank has made progress for
`--timeout` seconds, it takes every rank's Python stacks, names the line where each of them
stands, and ends the run with status 124. The stacks are kept in `where-rank<N>.txt`, with those
of `py-spy dump --native` where py-spy is installed, and torch's flight recorder in
`flight-rank<N>.json` where it records.

In a log there is less to see. NCCL's watchdog gives up after its timeout; if a line shortly
before speaks of saving, this is the likely cause, and different operations or sizes on different
ranks confirm it.
"""

SAVE_HANG = Signature(
    code="RS204",
    name="save-hang",
    cause_name="guarded-save",
    error="",
    message=_NOTHING,
    title="Ranks wait for each other while saving: one saves, and the others are elsewhere",
    cause=(
        "Saving a sharded model is work for all ranks: each gives its pieces. Here the ranks are "
        "at different places, as they are when the save stands under `if rank == 0` (or "
        "is_main_process) while the others go on to a barrier or to the next step."
    ),
    fix=(
        "Call the save on every rank, and guard only the writing of what is already gathered. A "
        "sharded state dict needs no gathering. Where all ranks do save and the gathering takes "
        "longer than the process group waits, raise that timeout."
    ),
    more=_SAVE_MORE,
    keep="the save, called by all ranks",
    remove="the guard by rank round it",
    versions="FSDP, DeepSpeed ZeRO-3, Fabric, accelerate; all versions.",
    sources=(
        "https://github.com/Lightning-AI/pytorch-lightning/issues/19780",
        "https://github.com/huggingface/accelerate/issues/2000",
        "https://github.com/pytorch/pytorch/issues/122903",
    ),
    checked="reproduced",
)
DIVERGED = Signature(
    code="RS210",
    name="diverged-ranks",
    cause_name="different-places",
    error="",
    message=_NOTHING,
    title="Ranks wait for each other at different places",
    cause=(
        "Every rank must call the same collectives in the same order. Some took another way: a "
        "branch by rank, data that ends earlier on one rank, an exception that was caught on one."
    ),
    fix="Make all ranks take the same way up to the two places named here.",
    versions="Not tied to a version.",
    sources=("https://docs.pytorch.org/docs/stable/distributed.html",),
    checked="reproduced",
)
TIMED_OUT = Signature(
    code="RS209",
    name="collective-timeout",
    cause_name="slow",
    error="",
    message=_NOTHING,
    title="A collective did not finish within the process group's timeout",
    cause=(
        "All ranks that are heard of wait in the same collective, so that one of the others died "
        "or was slow: the first error of any rank, if there is one above, is the cause."
    ),
    fix=(
        "Look for the rank that is missing here. If it was only slow (loading, saving, "
        "compiling), pass a longer timeout to init_process_group."
    ),
    versions="Not tied to a version.",
    sources=("https://docs.pytorch.org/docs/stable/distributed.html",),
)
NO_PROGRESS = Signature(
    code="RS211",
    name="no-progress",
    cause_name="waiting",
    error="",
    message=_NOTHING,
    title="The run made no progress for as long as it was given",
    cause="All ranks stood at the same place, and the watchdog ended the run.",
    fix=(
        "Look at the place named here. If the work there is only long, give it more time with "
        "`--timeout`, or `--timeout 0` to wait for ever."
    ),
    versions="Not tied to a version.",
    sources=("https://docs.python.org/3/library/faulthandler.html",),
    checked="reproduced",
)


def of_ranks(ranks: Sequence[RankEnd]) -> tuple[Signature, tuple[str, ...]]:
    """Why these ranks make no progress, and the evidence: where each of them stands.

    A save hang is one where the ranks stand at different places of the user's code and one of
    them is saving.
    """
    evidence = tuple(_standing(one) for one in sorted(ranks, key=lambda one: one.rank or 0))
    # Where the others have ended well, one that still waits is as good as at another place.
    places = {one.place if one.ending == "hung" else one.ending for one in ranks}
    if len(places) < 2:
        return NO_PROGRESS, evidence
    if any(is_saving(one.stack) for one in ranks if one.ending == "hung"):
        return SAVE_HANG, evidence
    return DIVERGED, evidence


def is_saving(stack: Sequence[Frame]) -> bool:
    """Does the stack stand in a function that saves?"""
    return any(SAVING.search(f"{frame.file}:{frame.function}") for frame in stack)


def of_timeouts(
    timeouts: Sequence[Timeout], saving: tuple[int, str] | None
) -> tuple[Signature, tuple[str, ...]]:
    """Why collectives timed out, and the evidence, from the watchdog's own lines."""
    evidence = tuple(
        f"rank {one.rank}: {one.operation}"
        + (f", number {one.sequence}" if one.sequence is not None else "")
        + (f", {one.elements} elements" if one.elements is not None else "")
        + f" (line {one.line})"
        for one in timeouts
    )
    apart = len({(one.operation, one.elements) for one in timeouts}) > 1
    if saving is not None:
        said = f"line {saving[0]}, shortly before, speaks of saving: {saving[1]}"
        return SAVE_HANG, (*evidence, said)
    return (DIVERGED if apart else TIMED_OUT), evidence


def _standing(one: RankEnd) -> str:
    if one.ending == "ended":
        return f"rank {one.rank}: has ended"
    inner = one.stack[-1] if one.stack else None
    frame = user_frame(one.stack)
    where = one.place or "a place that is not known"
    text = f"rank {one.rank}: at {where}"
    if frame is not None and frame.source:
        text += f" ({frame.source})"
    if inner is not None and inner is not frame:
        text += f", waiting in {inner.function} ({inner.file}:{inner.line})"
    return text
