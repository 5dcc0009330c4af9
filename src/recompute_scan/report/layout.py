"""The measurements of `run --verify`, in a few sentences for every rendering."""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.report.summary import predicted_beside
from recompute_scan.report.templating import visible
from recompute_scan.result import (
    Arm,
    Gradients,
    Losses,
    MemoryPlan,
    Result,
    Verified,
    WithPlan,
)
from recompute_scan.units import UNKNOWN, ms, pct, plural, size, span

_MOST_NAMED = 3


def measured_title(result: Result) -> str:
    """The section's title."""
    tried = result.verified is not None and result.verified.after is not None
    return "Measured with the fix applied" if tried else "Measured"


def measured_sentences(result: Result) -> list[str]:
    """Sentences on the step, the losses, the prediction, and how it was measured."""
    verified = result.verified
    if verified is None:
        return []
    found = [_outcome(verified)]
    if verified.gradients is not None:
        found.append(_gradients(verified.gradients))
    if verified.gradients_with_fix is not None and verified.after is not None:
        found.append(_gradients_with_fix(verified.gradients_with_fix))
    if verified.after is not None and verified.after.status == "measured":
        found.append(_losses(verified.losses))
        found += _against_prediction(result, verified)
        if (grew := verified.memory_grew_bytes) is not None:
            peaks = f"{size(verified.after_peak_bytes)}; {size(verified.before_peak_bytes)} before"
            found.append(f"Memory grew: with the fix the peak is {size(grew)} higher ({peaks}).")
    if verified.with_plan is not None:
        found.append(_plan(result, verified, verified.with_plan))
    if verified.without_checkpointing is not None:
        found.append(_without(verified, verified.without_checkpointing))
    if verified.after or plan_arm(verified) or verified.without_checkpointing:
        found.append(_how(verified))
    return found


def _gradients(gradients: Gradients) -> str:
    """Whether the script trains what it would train without its checkpoints."""
    all_of_them = f"After the first step all {gradients.compared} gradients and buffers"
    worst, in_parts = _worst(gradients), ""
    if gradients.in_parts is not None:
        in_parts = (
            "Without any checkpoint the script ran out of memory, so several runs each took out "
            f"some of the checkpoints of {plural(gradients.in_parts, 'block')}. "
        )
    said = {
        "equal": f"{all_of_them} are equal to the last bit with and without the script's "
        "checkpoints.",
        "rounding": f"{all_of_them} are equal up to rounding with and without the script's "
        f"checkpoints{worst}.",
        "different": "The script's checkpoints change what is trained: after the first step, "
        f"gradients or buffers differ from those without checkpoints{worst}.",
        "not-repeatable": "It is not known whether the script's checkpoints change gradients: the "
        "script gives different gradients in each run.",
        "not-seen": "Gradients could not be compared with those without checkpoints: the script "
        "did not make a first step without them, or its gradients were gone by then.",
    }
    return in_parts + said[gradients.status]


def _gradients_with_fix(gradients: Gradients) -> str:
    worst = _worst(gradients)
    return {
        "equal": "With the fix the gradients of the first step stay equal to the last bit.",
        "rounding": "With the fix the gradients of the first step stay equal up to rounding"
        f"{worst}.",
        "different": f"With the fix gradients of the first step change{worst}.",
        "not-repeatable": "With the fix the gradients of the first step differ, and the unchanged "
        f"script's also differ from run to run{worst}.",
        "not-seen": "The gradients with the fix could not be compared.",
    }[gradients.status]


def _worst(gradients: Gradients) -> str:
    """The worst few by name, in brackets."""
    named = [
        f"{visible(one.name, 80)} "
        + ("is missing in one" if one.distance is None else f"{one.distance:.2g} of its norm")
        for one in gradients.worst[:_MOST_NAMED]
    ]
    return f" (furthest off: {', '.join(named)})" if named else ""


def plan_arm(verified: Verified) -> Arm | None:
    """The run with the plan of RS301; ``None`` where it was not run."""
    return verified.with_plan.arm if verified.with_plan else None


def predicted_plan(result: Result) -> MemoryPlan | None:
    """RS301's plan, its step as the same share of the unchanged one as measured; that stays as
    predicted where the times vary too much.
    """
    verified, cost, memory = result.verified, result.cost, result.memory
    if memory is None or memory.chosen is None:
        return None
    plan = memory.plans[memory.chosen]
    before = verified.before_step_ms if verified and verified.outcome != "unclear" else None
    scale = before / cost.step_ms if before and cost and cost.step_ms > 0 else 1.0
    return replace(plan, step_ms=scale * plan.step_ms)


def _outcome(verified: Verified) -> str:
    after, outcome = verified.after, verified.outcome
    if after is None and outcome not in ("not-tried", "not-applied"):
        outcome = "failed"
    likely = f"likely {span(verified.saving_low_ms, verified.saving_high_ms)}"
    saves = (
        f"The fix saves {ms(verified.saving_ms)} per step ({likely}): "
        f"{pct(verified.saving_pct)} less time, {pct(verified.more_time_pct)} more throughput."
    )
    if verified.saving_is_rough:
        saves = (
            f"The fix helps, but the step times vary too much to say how much: it saves {likely} "
            "per step. Measure again on a quiet machine, or with more --timing-steps."
        )
    return {
        "helps": saves,
        "slower": "The fix does not help: a step takes "
        f"{ms(-(verified.saving_ms or 0.0))} longer with it.",
        "no-gain": "The fix does not help measurably: it saves "
        f"{ms(verified.saving_ms)} ({likely}).",
        "unclear": f"The step times vary too much to say what the fix saves ({likely} per step). "
        "Measure again on a quiet machine, or with more --timing-steps. Until then, use the "
        "prediction.",
        "losses-differ": "With the fix applied the losses differ from those without it, so it "
        "changes more than the time: find out why before you apply it.",
        "failed": f"The script did not run to its end with the fix applied.{_why(after)}",
        "not-applied": "The fix could not be applied in memory: no call of the checkpoint that it "
        "takes out goes through torch.utils.checkpoint, so what it does was not measured.",
        "not-tried": "There was no fix to try: no finding of a known saving names a checkpoint to "
        "take out.",
    }[outcome]


def _why(arm: Arm | None) -> str:
    return f" {arm.message}" if arm and arm.message else ""


def _losses(losses: Losses) -> str:
    if losses.status == "not-seen":
        return "No loss was seen: backward() was never called on a one-element tensor."
    if losses.status == "not-repeatable":
        return (
            "The unchanged script does not give the same losses twice (they differ by up to "
            f"{_number(losses.repeat_difference)}), so they do not show whether the fix changes "
            f"them. With the fix they differ by up to {_number(losses.largest_difference)}."
        )
    seed = ""
    if losses.seeded_by_script is False:
        seed = " The script sets no seed; every run was given the same one."
    if losses.status == "different":
        own = ""
        if losses.repeat_difference:
            own = (
                ", where the unchanged script's differ by up to "
                f"{_number(losses.repeat_difference)} from run to run"
            )
        if losses.largest_difference is None:
            return f"With the fix some losses are not numbers{own}.{seed}"
        return f"Losses differ by up to {_number(losses.largest_difference)}{own}.{seed}"
    which = "the one loss is" if losses.compared == 1 else f"all {losses.compared} losses are"
    return f"With the fix {which} equal to the last bit.{seed}"


def _against_prediction(result: Result, verified: Verified) -> list[str]:
    predicted, after = predicted_beside(result), verified.after_step_ms
    if predicted is None or after is None or verified.outcome == "unclear":
        return []
    cost = result.cost
    assert cost is not None
    likely = span(predicted.low_ms, predicted.high_ms)
    less = 100 * (1 - cost.predicted_step_ms / cost.step_ms)
    made = (
        f"A step was predicted to take {pct(abs(less))} {'less' if less >= 0 else 'more'} time: "
        f"{ms(predicted.after_ms)} (likely {likely}) instead of the {ms(predicted.now_ms)} "
        "measured unchanged."
    )
    if predicted.low_ms <= after <= predicted.high_ms:
        return [f"{made} The measured step is in that range."]
    return [f"{made} The measured step is outside that range; the measurement counts."]


def _plan(result: Result, verified: Verified, plan: WithPlan) -> str:
    arm = plan.arm
    which = f"With the plan of RS301 ({plural(len(plan.modules), 'layer')} without checkpoints)"
    if arm is None:
        return (
            f"{which} nothing was measured: not all of their checkpoints can be switched off "
            "during a run."
        )
    if arm.status == "out-of-memory":
        return f"{which} the script ran out of memory: the plan does not fit.{_why(arm)}"
    if arm.status == "failed":
        return f"{which} the script did not run to its end.{_why(arm)}"
    predicted = predicted_plan(result)
    said = f"{which} a step takes {ms(arm.step_ms)}"
    if verified.pairs:  # then the plan's steps are of runs that varied too much to be compared
        said += " (in runs that varied)"
    said += f", predicted {ms(predicted.step_ms)}" if predicted else ""
    if arm.peak_allocated_bytes is not None:
        said += f"; at most {size(arm.peak_allocated_bytes)} are allocated"
        said += f", predicted {size(predicted.peak_bytes)}" if predicted else ""
    return f"{said}. {_plan_losses(plan.losses)}"


def _plan_losses(losses: Losses) -> str:
    if losses.status == "not-seen":
        return "No loss was seen."
    if losses.status == "equal":
        return "Its losses equal the unchanged script's, to the last bit."
    if losses.largest_difference is None:
        return "Some of its losses are not numbers."
    most = _number(losses.largest_difference)
    by = f"Its losses differ from the unchanged script's by up to {most}"
    if not losses.repeat_difference:
        return f"{by}."
    return (
        f"{by}, and the unchanged script's own by up to "
        f"{_number(losses.repeat_difference)} from run to run."
    )


def _without(verified: Verified, arm: Arm) -> str:
    if arm.status == "out-of-memory":
        return f"Without checkpoints the script does not fit into memory.{_why(arm)}"
    if arm.status == "failed":
        return f"Without any checkpoint the script did not run to its end.{_why(arm)}"
    best = verified.after_step_ms or verified.before_step_ms
    if best is None or arm.step_ms is None:
        return "Without any checkpoint the script ran to its end, but no step could be timed."
    fits = "Without checkpoints the script fits into memory, and a step takes"
    if verified.pairs:  # then these steps are of runs that varied too much to be compared
        return f"{fits} {ms(arm.step_ms)}, in runs that varied."
    less = 100 * (best - arm.step_ms) / best
    than = "with the fix" if verified.after_step_ms else "today"
    if less <= 0:
        return f"{fits} {ms(arm.step_ms)}: no less than {than}."
    return f"{fits} {ms(arm.step_ms)}: {pct(less)} less time than {than}."


def _how(verified: Verified) -> str:
    order = ["unchanged"]
    order += ["with the fix"] if verified.after else []
    rounds = verified.before.runs
    more = ""
    others = [
        ("with the plan", plan_arm(verified)),
        ("without checkpoints", verified.without_checkpointing),
    ]
    for way, arm in others:
        if arm and (arm.status != "measured" or arm.runs == rounds):
            order.append(way)
        elif arm:
            more += f", and {plural(arm.runs, 'time')} {way}"
    ran = (
        f"The same command ran {plural(rounds, 'time')} each way, in turn ({', '.join(order)})"
        f"{more}"
    )
    if verified.pairs:
        again = plural(verified.switching_runs, "time") if verified.switching_runs > 1 else "once"
        return (
            f"{ran}; and, because the times varied, {again} with the fix switched on and off from "
            f"step to step. The step times of both are from these {verified.pairs} pairs of "
            "neighbouring steps, without the profiler."
        )
    each = verified.before.timed_steps // rounds if rounds else 0
    return f"{ran}, {plural(each, 'step')} timed in each run, without the profiler."


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}"
