"""What stands in the way of comparing the step times of two results.

An obstacle makes any difference of the two meaningless: another device, another model, steps that
were timed in another way. A caution is worth knowing, and the reader decides.
"""

from __future__ import annotations

from msgspec import Struct

from recompute_scan.result import Result

# Families of operators whose number a model sets; of the others, wrappers add some of their own.
_MODEL_KINDS = ("gemm", "conv", "attention", "norm", "embedding")
# Counts and FLOPs of a forward pass that differ by no more are of the same work.
_SAME_WORK = 0.01


class Doubts(Struct, frozen=True):
    """Whole sentences; ``same_work`` is ``None`` where that cannot be told."""

    obstacles: tuple[str, ...]
    cautions: tuple[str, ...]
    same_work: bool | None


def doubts(before: Result, after: Result, sources: tuple[str | None, str | None]) -> Doubts:
    """Why the two may not be comparable; ``sources`` are those of their step times."""
    hard, soft = _devices(before, after)
    difference = _other_work(before, after)
    if difference:
        hard.append(difference)
    elif difference is None:
        soft.append("Whether both do the same forward work cannot be told from these recordings.")
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
            "The sizes of inputs and weights are not in both recordings: that they are the same "
            "cannot be told from the calls alone."
        )
    hard += _settings(before, after, ("world_size", "threads"))
    soft += _settings(before, after, ("target", "torch"))
    return Doubts(tuple(hard), tuple(soft), None if difference is None else not difference)


def _settings(before: Result, after: Result, names: tuple[str, ...]) -> list[str]:
    one, other = before.environment, after.environment
    return [
        f"They differ in {name}: {one[name]} and {other[name]}."
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
    """How the forward passes differ; empty where they don't, ``None`` where it cannot be told."""
    results = before, after
    if any(r.verdict == "inconclusive" or r.evidence_level == "kernels" for r in results):
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
