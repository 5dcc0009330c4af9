"""Two results side by side: gone, new and kept findings and checkpoints, and the step times.

A :class:`Comparison` is plain data of the schema ``recompute-scan-comparison/1``, described by
:func:`json_schema`. Units are as in the result.

An obstacle makes any difference of the two meaningless: another device, another model, steps that
were timed in another way. A caution is worth knowing, and the reader decides.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from recompute_scan.intervals import is_sure, too_wide
from recompute_scan.result import MEASURED, Result, Verdict, make_schema, write_document

# Families of operators with a number that the model sets; wrappers add some of the others.
_MODEL_KINDS = ("gemm", "conv", "attention", "norm", "embedding")
# Counts and FLOPs of a forward pass that differ by no more are of the same work.
_SAME_WORK = 0.01


def _doubts(
    before: Result, after: Result, sources: tuple[str | None, str | None]
) -> tuple[list[str], list[str], bool | None]:
    """Obstacles, cautions, and whether both do the same work; ``None`` where that is not known.

    ``sources`` are the sources of their step times.
    """
    hard, soft = _devices(before, after)
    difference = _other_work(before, after)
    if difference:
        hard.append(difference)
    elif difference is None:
        soft.append("These recordings do not show whether both do the same forward work.")
    if None not in sources and (sources[0] == "trace") != (sources[1] == "trace"):
        hard.append(
            "One step was timed without the profiler and the other taken from a trace, which "
            "the profiler slows down: their times cannot be compared."
        )
    elif sources == ("trace", "trace"):
        soft.append(
            "Both step times are from traces: the profiler slows both down, not always alike."
        )
    if difference == "" and None in _forward_flops(before, after):
        soft.append(
            "The sizes of inputs and weights are not in both recordings, and the calls alone "
            "do not show whether they are the same."
        )
    hard += _settings(before, after, ("world_size", "threads"))
    soft += _settings(before, after, ("target", "torch"))
    return hard, soft, None if difference is None else not difference


def _settings(before: Result, after: Result, names: tuple[str, ...]) -> list[str]:
    one, other = before.environment, after.environment
    words = {"world_size": "number of ranks", "target": "script"}
    return [
        f"They differ in {words.get(name, name)}: {one[name]} and {other[name]}."
        for name in names
        if name in one and name in other and one[name] != other[name]
    ]


def _devices(before: Result, after: Result) -> tuple[list[str], list[str]]:
    """Obstacles and cautions from what the two ran on."""
    kinds = _ran_on(before), _ran_on(after)
    names = _device_name(before), _device_name(after)
    if None not in kinds and kinds[0] != kinds[1]:
        gpu = names[0] if kinds[0] == "gpu" else names[1]
        return [f"One ran on the CPU and the other on a GPU{f' ({gpu})' if gpu else ''}."], []
    costs = before.cost, after.cost
    soft = []
    if costs[0] and costs[1] and costs[0].device != costs[1].device:
        soft.append("One step is limited by the CPU and the other by the GPU.")
    if names[0] and names[1]:
        kind = "processors" if kinds[0] == "cpu" else "GPUs"
        same = names[0] == names[1]
        return [] if same else [f"They ran on different {kind}: {names[0]} and {names[1]}."], soft
    if kinds == ("cpu", "cpu"):
        soft.append(
            "Not both recordings name their processor: on different ones, step times cannot be "
            "compared."
        )
    return _settings(before, after, ("platform",)), soft


def _ran_on(result: Result) -> str | None:
    environment = result.environment
    if "gpu" in environment or environment.get("device") == "cuda":
        return "gpu"
    return "cpu" if environment.get("device") == "cpu" else None


def _device_name(result: Result) -> str | None:
    """Of the GPU, or of the processor where there is none."""
    environment = result.environment
    if _ran_on(result) == "cpu":
        return environment.get("processor")
    # "8 x NAME": how many the host has says nothing of the run.
    return environment.get("device_name") or environment.get("gpu", "").rpartition(" x ")[2] or None


def _other_work(before: Result, after: Result) -> str | None:
    """How the forward passes differ; empty where they don't, ``None`` where it is not known."""
    results = before, after
    if any(
        r.verdict == "inconclusive" or r.evidence_level in ("kernels", "hooks") for r in results
    ):
        return None
    one, other = _model_work(before), _model_work(after)
    differing = [
        f"{kind} {one.get(kind, 0):.4g} and {other.get(kind, 0):.4g}"
        for kind in _MODEL_KINDS
        if not _alike(one.get(kind, 0), other.get(kind, 0))
    ]
    if differing:
        return f"Their forward passes do different work, in calls per step: {', '.join(differing)}."
    first, second = _forward_flops(before, after)
    if first and second and not _alike(first, second):
        return (
            "Their forward passes make the same calls on inputs or weights of other sizes: "
            f"{first:.3g} and {second:.3g} floating-point operations per step."
        )
    return ""


def _forward_flops(before: Result, after: Result) -> tuple[float | None, float | None]:
    """``None`` where they are not known, or where not the same operators are counted."""
    one, other = before.flops, after.flops
    if one is None or other is None or one.uncounted != other.uncounted:
        return None, None
    return one.forward_per_step, other.forward_per_step


def _model_work(result: Result) -> dict[str, float]:
    """Forward calls per step by kind: which kernel attention takes does not change the model."""
    found: dict[str, float] = {}
    for family in result.families:
        found[family.kind] = found.get(family.kind, 0.0) + family.forward_per_step
    return found


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME_WORK * max(one, other)


SCHEMA = "recompute-scan-comparison/1"


class Side(Struct, frozen=True):
    """The compared part of one result. ``name`` is as the person called it.

    ``step_ms`` is the median of ``steps``, with its interval of 95 %: of steps timed without the
    profiler, of recorded ones, or ``measured`` by `--verify` (the unchanged script), as the
    headline says then. The recomputes' times are of that step too.
    """

    name: str
    verdict: Verdict
    headline: str
    recompute_per_backward: float | None
    mean_recompute: float | None
    step_ms: float | None
    step_source: Literal["timed", "trace", "measured"] | None
    recompute_ms: float | None
    redundant_recompute_ms: float | None
    step_low_ms: float | None = None
    step_high_ms: float | None = None
    steps: int = 0


class FamilyCalls(Struct, frozen=True):
    """One family of operators: calls per step on both sides, ``None`` where it does not occur."""

    family: str
    forward_before: float | None
    forward_after: float | None
    recomputed_before: float | None
    recomputed_after: float | None


class Switch(Struct, frozen=True):
    """Checkpoints of one mechanism, variant and call site, and around how many blocks they stand.

    ``call_site`` is from the run after, where it still has one.
    """

    mechanism: str | None
    variant: str | None
    call_site: str | None
    blocks_before: int
    blocks_after: int


class Mark(Struct, frozen=True):
    """A finding, by its code and its title."""

    code: str
    name: str
    title: str


class Comparison(Struct, frozen=True):
    """The differences between two runs.

    ``time_change_pct`` is of the step before (-25.6 where 185.07 follows 248.88), and
    ``throughput_change_pct`` of the throughput before (+34.5 there): two views of one change,
    never to be mixed. Both are ``None`` where ``obstacles`` says why the step times cannot be
    compared at all; ``warnings`` begins with these. ``difference`` says what the spread of the
    steps leaves of the change: ``sure`` where the intervals lie apart, ``direction`` where they
    do and one is too wide for a percentage, ``none`` where they overlap; ``None`` where steps
    are too few. Checkpoints are matched by mechanism and variant, call sites of the same
    ones in order, since lines move when a script is changed; a finding by its code.
    """

    tool_version: str
    before: Side
    after: Side
    time_change_pct: float | None
    throughput_change_pct: float | None
    calls: tuple[FamilyCalls, ...]
    checkpoints_gone: tuple[Switch, ...]
    checkpoints_new: tuple[Switch, ...]
    checkpoints_kept: tuple[Switch, ...]
    findings_gone: tuple[Mark, ...]
    findings_new: tuple[Mark, ...]
    findings_kept: tuple[Mark, ...]
    warnings: tuple[str, ...]
    obstacles: tuple[str, ...] = ()
    same_forward_work: bool | None = None
    difference: Literal["sure", "direction", "none"] | None = None
    schema: str = field(default=SCHEMA)


def compare(
    before: Result, after: Result, names: tuple[str, str] = ("before", "after")
) -> Comparison:
    """The comparison of two results; ``names`` are what to call them."""
    sides = _side(names[0], before), _side(names[1], after)
    obstacles, cautions, same_work = _doubts(
        before, after, (sides[0].step_source, sides[1].step_source)
    )
    was, now = (None if obstacles else side.step_ms for side in sides)
    switches = _switches(before, after)
    gone, new, kept = _findings(before, after)
    return Comparison(
        tool_version=after.tool_version,
        before=sides[0],
        after=sides[1],
        time_change_pct=100 * (now / was - 1) if was and now else None,
        throughput_change_pct=100 * (was / now - 1) if was and now else None,
        calls=_calls(before, after),
        checkpoints_gone=tuple(switch for switch in switches if not switch.blocks_after),
        checkpoints_new=tuple(switch for switch in switches if not switch.blocks_before),
        checkpoints_kept=tuple(s for s in switches if s.blocks_before and s.blocks_after),
        findings_gone=gone,
        findings_new=new,
        findings_kept=kept,
        warnings=(*obstacles, *cautions),
        obstacles=tuple(obstacles),
        same_forward_work=same_work,
        difference=None if obstacles else _difference(*sides),
    )


def to_json(comparison: Comparison) -> str:
    """The comparison as JSON text, ``schema`` first."""
    return write_document(comparison)


def json_schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) of the document that :func:`to_json` writes."""
    return make_schema(Comparison, "recompute-scan comparison", SCHEMA)


def _side(name: str, result: Result) -> Side:
    cost, verified = result.cost, result.verified
    side = Side(
        name,
        result.verdict,
        result.headline,
        result.recompute_per_backward,
        result.mean_recompute,
        # The others are as the cost has them by the same names.
        **{one: getattr(cost, one, None) for one in Side.__struct_fields__[5:-1]},
        steps=cost.steps if cost else 0,
    )
    if verified is None or verified.outcome not in MEASURED or not verified.before_step_ms:
        return side
    # The headline is of this step then; of a slower hour, the recomputes took longer with it.
    scale = verified.before_step_ms / cost.step_ms if cost and cost.step_ms > 0 else None
    return replace(
        side,
        step_ms=verified.before_step_ms,
        step_source="measured",
        recompute_ms=scale * cost.recompute_ms if cost and scale else None,
        redundant_recompute_ms=scale * cost.redundant_recompute_ms if cost and scale else None,
        step_low_ms=verified.before.step_low_ms,
        step_high_ms=verified.before.step_high_ms,
        steps=verified.before.timed_steps,
    )


def _difference(before: Side, after: Side) -> Literal["sure", "direction", "none"] | None:
    spans = [_span(before), _span(after)]
    if spans[0] is None or spans[1] is None:
        return None
    (_, *one), (_, *other) = spans[0], spans[1]
    if one[0] <= other[1] and other[0] <= one[1]:
        return "none"
    if not (is_sure(before.steps) and is_sure(after.steps)):
        return None
    return "direction" if too_wide(*spans[0]) or too_wide(*spans[1]) else "sure"


def _span(side: Side) -> tuple[float, float, float] | None:
    if side.step_ms is None or side.step_low_ms is None or side.step_high_ms is None:
        return None
    return side.step_ms, side.step_low_ms, side.step_high_ms


def _calls(before: Result, after: Result) -> tuple[FamilyCalls, ...]:
    """The families with counts that differ, in the order of the result before, then the others."""
    was = {family.family: family for family in before.families}
    now = {family.family: family for family in after.families}
    rows = []
    for name in dict.fromkeys([*was, *now]):
        one, other = was.get(name), now.get(name)
        counts = ("forward_per_step", "recomputed_per_step")
        numbers = (getattr(side, count, None) for count in counts for side in (one, other))
        row = FamilyCalls(name, *numbers)
        if (row.forward_before, row.recomputed_before) != (row.forward_after, row.recomputed_after):
            rows.append(row)
    return tuple(rows)


def _switches(before: Result, after: Result) -> list[Switch]:
    was, now = _sites(before), _sites(after)
    return [
        Switch(
            mechanism=key[0],
            variant=key[1],
            call_site=(now.get(key) or was[key])[0],
            blocks_before=was.get(key, (None, 0))[1],
            blocks_after=now.get(key, (None, 0))[1],
        )
        for key in dict.fromkeys([*was, *now])
    ]


def _sites(result: Result) -> dict[tuple[str | None, str | None, int], tuple[str | None, int]]:
    """Call site and number of blocks of each checkpoint, by mechanism, variant, and number
    among the call sites of these.
    """
    blocks = Counter(
        site
        for region in result.regions
        for site in dict.fromkeys((c.mechanism, c.variant, c.call_site) for c in region.checkpoints)
    )
    found: dict[tuple[str | None, str | None, int], tuple[str | None, int]] = {}
    seen: Counter[tuple[str | None, str | None]] = Counter()
    for (mechanism, variant, site), number in blocks.items():
        found[mechanism, variant, seen[mechanism, variant]] = site, number
        seen[mechanism, variant] += 1
    return found


def _findings(
    before: Result, after: Result
) -> tuple[tuple[Mark, ...], tuple[Mark, ...], tuple[Mark, ...]]:
    """The findings only in the first, only in the second, and in both (as the second has them)."""
    was, now = ({one.code for one in result.findings} for result in (before, after))

    def marks(result: Result, codes: set[str]) -> tuple[Mark, ...]:
        return tuple(Mark(f.code, f.name, f.title) for f in result.findings if f.code in codes)

    return marks(before, was - now), marks(after, now - was), marks(after, was & now)
