"""What rehearsals say of every arrangement of checkpoints.

A step takes what one without checkpoints takes (``cost/arm_times.py``), and what recomputing
everything takes more, shared out by the recomputes' own times, which are measured where they run;
likewise for selective ones, and for parts, of which each has a checkpoint to pay for. Where the
steps vary too much to say that they take more, those times themselves are added. What offloading
everything takes more, if it does for certain, is shared out by the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan.cost.arm_times import arm_times, shared_out
from recompute_scan.cost.arrangement import Arrangements
from recompute_scan.cost.moments import KEEP, OFFLOAD, RECOMPUTE, SELECTIVE, moments
from recompute_scan.rehearsal import Rehearsal, Way, fixed_places, whole_places

# Recomputes of selective checkpoints, and of parts, have to take less than this share of whole
# ones.
_WORTH = 0.9

# The arrangements that a rehearsal measures for a plan; the last only where a device has memory of
# its own.
WAYS: tuple[Way, ...] = ("today", "keep", "recompute", "parts", "selective")
WAYS_ON_DEVICE: tuple[Way, ...] = (*WAYS, "offload")


def arrangements(*ranks: Rehearsal) -> Arrangements:
    """What the rehearsals say of every arrangement; all of :data:`WAYS` were among their own, but
    for selective checkpoints and parts, which can be missing.

    Args:
        ranks: What each rank has shown, of the same modules. Every one has to have the memory, and
            a step takes what the slowest takes.
    """
    times, fixed = arm_times(ranks), fixed_places(ranks)
    candidates = ranks[0].candidates
    modules = whole_places(candidates)
    each = list(zip(*(one.candidates for one in ranks), strict=True))

    def shared(way: Way, alone: Sequence[float]) -> tuple[float, ...]:
        others = {n for n, one in enumerate(candidates) if (one.part_of < 0) == (way == "parts")}
        longer, sure = times.ms[way] - times.ms["keep"], way in times.surely_longer
        return shared_out(longer, candidates, alone, fixed | others, sure=sure)

    alone = [max(one.again_ms for one in same) for same in each]
    again_ms = shared("recompute", alone)
    if "parts" in times.ms:
        again_ms = tuple(map(max, again_ms, shared("parts", alone)))
    selective_ms: tuple[float | None, ...] = ()
    if "selective" in times.ms:
        partly = shared("selective", [max(one.selective_ms for one in same) for same in each])
        # It never holds less, and needs a policy.
        selective_ms = tuple(
            ms if ms < _WORTH * whole else None for ms, whole in zip(partly, again_ms, strict=True)
        )
    choices = {KEEP, RECOMPUTE}
    if any(selective_ms[place] is not None for place in modules[: len(selective_ms)]):
        choices.add(SELECTIVE)
    offload_ms: tuple[float, ...] = ()
    # Where steps vary too much to say what copies take, they would come out free.
    measured = all(any(arm.way == "offload" for arm in one.arms) for one in ranks)
    if measured and "offload" in times.surely_longer:
        choices.add(OFFLOAD)
        sizes = [max(_copied_bytes(one, n) for one in ranks) for n in range(len(candidates))]
        whole = sum(sizes[n] for n in modules if n not in fixed)
        longer = max(0.0, times.ms["offload"] - times.ms["keep"])
        offload_ms = tuple(longer * size / max(1, whole) for size in sizes)
    parts = frozenset(
        place
        for place, one in enumerate(candidates)
        if one.part_of >= 0
        and not {place, one.part_of} & fixed
        and 0 < again_ms[place] < _WORTH * again_ms[one.part_of]
        and not any(_runs_elsewhere(rank, place) for rank in ranks)
    )
    return Arrangements(
        candidates=candidates,
        moments=moments(ranks, fixed, frozenset(choices), parts),
        again_ms=again_ms,
        keep_ms=times.ms["keep"],
        today_ms=times.ms["today"],
        fixed=fixed,
        selective_ms=selective_ms,
        offload_ms=offload_ms,
        parts=parts,
    )


def _runs_elsewhere(rehearsal: Rehearsal, part: int) -> bool:
    """Does a part run outside its module too?"""
    around = [run.part_of for run in rehearsal.runs if run.candidate == part]
    module = rehearsal.candidates[part].part_of
    return any(run < 0 or rehearsal.runs[run].candidate != module for run in around)


def _copied_bytes(rehearsal: Rehearsal, candidate: int) -> int:
    """Bytes that offloading a module copies, about: what it saves, and its weights."""
    return saved_bytes(rehearsal, candidate) + rehearsal.candidates[candidate].weight_bytes


def saved_bytes(rehearsal: Rehearsal, candidate: int) -> int:
    """Bytes that one run's operators save, each storage once; the largest run's."""
    sizes: dict[int, int] = {}
    for storage in rehearsal.storages:
        saved = {hold.run for hold in storage.holds if hold.kind == "saved"}
        for run in saved.union(map(rehearsal.whole_run, saved)):
            sizes[run] = sizes.get(run, 0) + storage.size
    runs = (n for n, run in enumerate(rehearsal.runs) if run.candidate == candidate)
    return max((sizes.get(run, 0) for run in runs), default=0)
