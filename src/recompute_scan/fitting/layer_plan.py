"""The plan of a live training: from its first steps to an arrangement within a budget.

The measurements take the form of a rehearsal, so that the planner of ``recompute-scan plan`` finds
the arrangement. A step that recomputes everything is timed whole; without checkpoints it would take
less by the times of the layers' recomputes and of torch's work around these, which is measured in
the forward pass and counts once more for the backward pass.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct
from torch import nn

from recompute_scan.cost.arrangement import KEEP, OFFLOAD, PART, RECOMPUTE, SELECTIVE, Choices
from recompute_scan.cost.plan import Planner, Wish
from recompute_scan.errors import InputError, RunError
from recompute_scan.files import content
from recompute_scan.fitting.layer_switch import STEP, Layer, Look, Switch
from recompute_scan.record.launch import has_process_group
from recompute_scan.record.modules import root_modules
from recompute_scan.record.rehearsal import free_bytes, weight_bytes
from recompute_scan.result import ActivationPlan
from recompute_scan.result.run_record import (
    ArmMeasured,
    Candidate,
    Rehearsal,
    Way,
    parts_of,
    whole_places,
)

Times = Mapping[Way, Mapping[tuple[int, str], float]]
SOLVER_S = 1.0
# Each arm counts as one that was measured often enough to be compared.
_STEPS = 8
# The share of a whole checkpoint that a selective one takes until it is measured.
_GUESS = 0.5
# Of a GPU's memory, what is not allocated in the steps so far.
_TRIAL_SHARE = 0.97


class Decision(Struct, frozen=True):
    """An arrangement for all ranks.

    Attributes:
        choices: One for each layer and part.
        plan: The same for people, with what it is predicted to take.
        fits: Whether it keeps the limit; else it takes the least memory.
    """

    choices: tuple[int, ...]
    plan: ActivationPlan
    fits: bool


class Measured(Struct, frozen=True):
    """The first steps of one rank.

    Attributes:
        rehearsal: Storages, runs and levels of the step that was looked at.
        total: Bytes that the GPU has, or ``None``.
        apart: Bytes that torch's allocator holds unused on it.
    """

    rehearsal: Rehearsal
    total: int | None
    apart: int = 0


def measured(
    switch: Switch, look: Look, times: Times, cuda: bool, allocated: int | None
) -> Measured:
    """Measurements of this rank, from the look and the times."""
    fixed = {layer.place for layer in switch.layers if layer.fixed}
    candidates = tuple(_candidate(layer, times) for layer in switch.layers)
    safe = times["recompute"][STEP]
    whole = sum(candidates[place].again_ms for place in whole_places(candidates))
    keep = max(0.1 * safe, safe - whole)
    steps: dict[Way, float] = {"today": safe, "recompute": safe, "keep": keep}
    if switch.met:
        steps["selective"] = keep + sum(one.selective_ms for one in candidates)
    if len(parts_of(candidates)) < len(candidates):
        steps["parts"] = keep + sum(one.again_ms for one in candidates if one.part_of >= 0)
    rehearsal = Rehearsal(
        rank=dist.get_rank() if has_process_group() else 0,
        device="cuda" if cuda else "cpu",
        candidates=candidates,
        runs=look.module_runs(switch.runs, fixed),
        storages=look.storages(),
        arms=tuple(
            ArmMeasured(way, (ms,) * _STEPS, look.peak, allocated) for way, ms in steps.items()
        ),
        free_bytes=free_bytes("cuda", allocated or 0) if cuda else free_bytes("cpu", 0),
        operators=tuple(switch.met),
        levels=tuple(look.allocated),
        fullest=tuple(look.fullest),
    )
    if not cuda:
        return Measured(rehearsal, None)
    reserved = torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()
    return Measured(rehearsal, int(torch.cuda.mem_get_info()[1]), max(0, reserved))


def _candidate(layer: Layer, times: Times) -> Candidate:
    place, one = layer.place, layer.chosen
    own = times.get("parts" if layer.is_part else "recompute", {})
    inner = own.get((place, "inner"), 0.0)
    around = max(0.0, own.get((place, "whole"), 0.0) - inner)
    again = own.get((place, "again"), 0.0) + 2 * around
    partly = times.get("selective", {})
    selective = _GUESS * again
    if (place, "again") in partly:
        selective = max(0.0, partly[place, "whole"] - inner) + partly[place, "again"] + around
    selective = 0.0 if layer.is_part else selective
    weights = weight_bytes(one.module)
    return Candidate(one.name, one.class_name, True, again, selective, weights, one.part_of)


def planner_of(ranks: Sequence[Measured], wish: Wish, lowered: float) -> Planner:
    """A planner with the limit in bytes; a share is of the GPU's memory, or on a CPU of the bytes
    saved if nothing is recomputed.
    """
    planner = Planner([one.rehearsal for one in ranks], wish)
    if wish.kind == "time":
        return planner
    if ranks[0].total is None:
        model = planner.arrangements
        most = model.peak(model.nothing)
        free = min((one.rehearsal.free_bytes or 0) for one in ranks) // len(ranks)
        amount = wish.budget(0 if wish.kind == "free" else most, free)
    else:
        has = min((one.total or 0) - one.apart for one in ranks)
        today = max(one.rehearsal.arms[0].allocated_bytes or 0 for one in ranks)
        free = min((one.rehearsal.free_bytes or 0) - one.apart for one in ranks)
        asked = wish.budget(today if wish.kind == "free" else has, free)
        amount = min(asked or has, today + max(0, free))
    planner.limit_to(Wish("bytes", lowered * (amount or 0), wish.text))
    return planner


def decide(ranks: Sequence[Measured], wish: Wish, lowered: float) -> Decision:
    """The best arrangement within the limit, else the one of least memory."""
    planner = planner_of(ranks, wish, lowered)
    fits = True
    try:
        chosen = planner.best(limit_s=SOLVER_S)
    except RunError:
        chosen, fits = planner.arrangements.everything, False
    return Decision(tuple(chosen.tolist()), planner.plan(chosen, curve=False), fits)


def trial(one: Measured, wish: Wish, way: Way, lowered: float) -> Choices | None:
    """As many layers this way as fit, the first of every class among them; ``None`` for none."""
    planner = planner_of([one], wish, lowered)
    model, parts = planner.arrangements, parts_of(one.rehearsal.candidates)
    met: dict[str, int] = {}
    order = []
    for place in parts:
        kind = model.candidates[place].module_class
        met[kind] = met.get(kind, 0) + 1
        order.append((met[kind], place))
    able = [
        place
        for _, place in sorted(order)
        if (way == "selective" and SELECTIVE in model.options(place))
        or (way == "parts" and not model.parts.isdisjoint(parts[place]))
    ]

    def with_first(number: int) -> Choices:
        tried = model.everything.copy()
        for place in able[:number]:
            tried[place] = SELECTIVE if way == "selective" else KEEP
            if way == "parts":
                tried[[n for n in parts[place] if n in model.parts]] = PART
        return model.followed(tried)

    limit = math.inf if wish.kind == "time" else (planner.budget or 0) * _TRIAL_SHARE
    # Each more takes more, so the most that fit are found by halving.
    most = bisect_right(range(1, len(able) + 1), limit, key=lambda n: model.peak(with_first(n)))
    return with_first(most) if most else None


def group_of(model: nn.Module) -> Any:
    """The processes that train this model together; ``None`` where it is this one alone."""
    if not has_process_group() or dist.get_world_size() == 1:
        return None
    for root in root_modules():
        for module in root.modules():
            group = getattr(module, "process_group", None)
            if isinstance(group, dist.ProcessGroup) and any(
                part is model for part in module.modules()
            ):
                return group if dist.get_world_size(group) > 1 else None
    for weight in model.parameters():
        mesh = getattr(weight, "device_mesh", None)
        if mesh is not None:
            if mesh.size() == dist.get_world_size():
                return dist.group.WORLD
            return mesh.get_group() if mesh.ndim == 1 and mesh.size() > 1 else None
    return None


def gathered(value: Any, group: Any) -> list[Any]:
    """The value of every rank of the group, in the order of ranks."""
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def from_first(value: Any, group: Any) -> Any:
    """The value of the group's first rank."""
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


def read_plan(path: Path) -> ActivationPlan:
    """A plan that :meth:`Fitted.save` wrote, or that a ``result.json`` of ``plan`` has.

    Raises:
        InputError: It is neither (``E306``).
    """
    try:
        data = content(path)
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(data, type=ActivationPlan)
        return msgspec.json.decode(data, type=_WithPlan).plan
    except (OSError, UnicodeDecodeError, RecursionError, msgspec.MsgspecError) as error:
        raise InputError("E306", f"Cannot use {path.name}.", why=str(error)) from None


class _WithPlan(Struct):
    plan: ActivationPlan


def choices_of(plan: ActivationPlan, layers: Iterable[Layer]) -> tuple[int, ...] | None:
    """The plan's choice for each layer; ``None`` where it is of another model."""
    named = {one.module: one for one in plan.modules}
    alone = {name for one in plan.modules for name in one.names_of_parts(one.parts)}
    found: list[int] = []
    for layer in layers:
        name = layer.chosen.name
        if layer.is_part:
            found.append(PART if name in alone else KEEP)
            continue
        if name not in named:
            return None
        one = named[name]
        how = SELECTIVE if one.selective else RECOMPUTE if one.recompute else KEEP
        found.append(OFFLOAD if one.offloaded else how)
    return tuple(found)
