"""Which layers to recompute within a limit: the plan, its proof, and the curve it lies on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from recompute_scan.report.blocks import Page, Section, known, ranges
from recompute_scan.report.figures import CurveDrawing, curve_drawing
from recompute_scan.report.summary import what_was_measured
from recompute_scan.report.templating import markdown_prose, visible
from recompute_scan.result import ActivationPlan, PlannedModule, PlanOutcome, PlanPoint, Result
from recompute_scan.units import first_few, ms, pct, plural, size

_OUTCOMES: dict[PlanOutcome, str] = {
    "helps": "Proven: within the limit, and faster than the unchanged script.",
    "fits": "Proven: it keeps the limit.",
    "no-gain": "Rejected: it is no faster than the unchanged script, so leave the script as it is.",
    "slower": "Rejected: it is slower than the unchanged script, so leave the script as it is.",
    "unclear": "Not proven: it fits, but the step times vary too much to show whether it is "
    "faster, so leave the script as it is. To find out, raise --timing-steps on an otherwise idle "
    "machine.",
    "does-not-fit": "Rejected: with it the script exceeds the limit.",
    "failed": "Rejected: the script failed with it.",
    "not-tried": "It was not measured (--no-verify).",
}
_RAN_OUT = "Rejected: the script ran out of memory with it."
_AS_TODAY = "The script already does this."
_FIT = "recompute_scan.fit"
_PROVEN: tuple[PlanOutcome, ...] = ("helps", "fits")
_MOST_MODULES, _MOST_CODE = 60, 4


def _memory_words(plan: ActivationPlan) -> str:
    return "saved for backward" if plan.device == "cpu" else "allocated"


def _limit(plan: ActivationPlan) -> str:
    if plan.limit_ms is not None:
        return f"a step of {ms(plan.limit_ms)}"
    return f"{size(plan.budget_bytes)} {_memory_words(plan)}"


def _headline(plan: ActivationPlan) -> str:
    on = [one for one in plan.modules if one.recompute]
    partly = sum(one.selective for one in on)
    layers = plural(len(plan.modules), "layer")
    said = f"checkpoint {len(on) or 'none'} of {layers}"
    if len(on) == len(plan.modules):
        said = f"checkpoint all {layers}"
    if in_part := [one.parts for one in plan.modules if one.parts]:
        what = visible(" and ".join(in_part[0]), 60) if len(set(in_part)) == 1 else "parts"
        number = "all" if len(in_part) == len(plan.modules) else f"{len(in_part)} of"
        alone = f"checkpoint {what} of {number} {layers}"
        said = f"checkpoint {len(on)} of {layers}, {what} of {len(in_part)} more" if on else alone
    if partly:
        said += f", {'all' if partly == len(on) else partly} selectively"
    offloaded = sum(one.offloaded for one in plan.modules)
    return f"{said}, offload {offloaded}" if offloaded else said


def _today(one: PlannedModule) -> str:
    if one.checkpointed:
        return "recompute"
    return _in_part(one.parts_today) if one.parts_today else "keep"


def _done(one: PlannedModule) -> str:
    if one.parts:
        return _in_part(one.parts)
    if one.recompute:
        return "recompute selectively" if one.selective else "recompute"
    return "offload" if one.offloaded else "keep"


def _in_part(parts: Sequence[str]) -> str:
    return f"recompute {' and '.join(parts)}"


def _names(names: Sequence[str], most: int = 4) -> str:
    """The names of modules, runs of numbers in one list together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        stem, _, last = name.rpartition(".")
        groups.setdefault(stem if last.isdigit() else name, []).append(last)
    said = [
        f"{stem}.{lasts[0]}"
        if len(lasts) == 1 and lasts[0].isdigit()
        else f"{stem}[{ranges(sorted(map(int, lasts)), len(lasts))}]"
        if lasts[0].isdigit()
        else stem
        for stem, lasts in groups.items()
    ]
    return visible(first_few(said, most), 300)


def _outcome(plan: ActivationPlan) -> str:
    """The outcome of the measurement; without one, memory did not suffice for the plan."""
    ran_out = plan.proof.outcome == "does-not-fit" and plan.proof.peak_bytes is None
    return _RAN_OUT if ran_out else _OUTCOMES[plan.proof.outcome]


def _in_short(plan: ActivationPlan) -> str:
    """The first words of the outcome."""
    if plan.as_today:
        return "as today"
    word, colon, _ = _OUTCOMES[plan.proof.outcome].partition(":")
    return word.lower() if colon else "not measured"


def _proven(plan: ActivationPlan) -> bool:
    """Whether the plan was measured to be worth it, or changes nothing."""
    return plan.proof.outcome in _PROVEN or plan.as_today


def _to_set(plan: ActivationPlan) -> bool:
    """Whether the setting is shown: of a plan that was measured and not proven it is not."""
    return _proven(plan) or plan.proof.outcome == "not-tried"


def _measured(plan: ActivationPlan) -> tuple[PlanPoint, PlanPoint] | None:
    """Today's script and the plan, each with the step and the bytes that were measured."""
    proof = plan.proof
    if proof.step_ms is None or not proof.today_step_ms or proof.peak_bytes is None:
        return None
    before = plan.today.peak_bytes if proof.today_bytes is None else proof.today_bytes
    return (
        replace(plan.today, step_ms=proof.today_step_ms, peak_bytes=before),
        replace(plan.plan, step_ms=proof.step_ms, peak_bytes=proof.peak_bytes),
    )


def _gain(plan: ActivationPlan) -> str:
    """The change against today, measured where it was."""
    if plan.as_today:
        return "nothing changes"
    measured = _measured(plan)
    today, then = measured or (plan.today, plan.plan)
    faster = 100 * (today.step_ms - then.step_ms) / today.step_ms if today.step_ms > 0 else 0.0
    more = then.peak_bytes - today.peak_bytes
    time = f"{pct(abs(faster))} {'less' if faster >= 0 else 'more'} time per step"
    if plan.proof.outcome == "unclear":
        time = "no sure change of the step time"
    memory = (
        f"{size(abs(more))} {'more' if more > 0 else 'less'} memory" if more else "the same memory"
    )
    return f"{time}, {memory}, {'measured' if measured else 'predicted'}"


def _as_today(plan: ActivationPlan) -> str:
    # It changes nothing while plans are tried.
    fitted = any(_FIT in step for step in plan.setting)
    return f"Without {_FIT} the script does this." if fitted else _AS_TODAY


def _proof_words(plan: ActivationPlan) -> str:
    proof = plan.proof
    if plan.as_today:
        return _as_today(plan)
    if proof.step_ms is None or proof.predicted_step_ms is None:
        return _outcome(plan)
    return (
        f"{_OUTCOMES[proof.outcome]} Measured in turn with the unchanged script "
        f"({ms(proof.today_step_ms)}): {ms(proof.step_ms)}, predicted "
        f"{ms(proof.predicted_step_ms)}; "
        f"{size(proof.peak_bytes)} {_memory_words(plan)}, predicted {size(proof.predicted_bytes)}."
    )


def _points(plan: ActivationPlan) -> list[tuple[str, PlanPoint, PlanPoint | None]]:
    """Name, predicted and measured point of each row of the table."""
    today, then = _measured(plan) or (None, None)
    return [
        ("Today", plan.today, today),
        ("Plan", plan.plan, then),
        ("Least memory", plan.least, None),
        ("Nothing recomputed", plan.most, None),
    ]


def _drawing(plan: ActivationPlan) -> CurveDrawing:
    """The curve with today's script and the plan on it."""
    _, then = _measured(plan) or (plan.today, plan.plan)
    marks = [
        *((one, "curve", _said("", one)) for one in plan.curve),
        (plan.today, "today", _said("Today: ", plan.today)),
        (then, "plan", _said("Plan: ", then)),
    ]
    return curve_drawing(plan.curve, marks, plan.budget_bytes)


def _said(name: str, point: PlanPoint) -> str:
    again = _recomputed(point, " recomputed")
    return f"{name}{ms(point.step_ms)}, {size(point.peak_bytes)}{again and ', '}{again}"


def _recomputed(point: PlanPoint, word: str = "") -> str:
    """How many modules are recomputed, and how; nothing of today's."""
    if point.recomputed is None:
        return ""
    said = f"{point.recomputed}{word or ' whole' * bool(point.in_part)}"
    said += f", {point.selective} selectively" if point.selective else ""
    said += f", {point.in_part} in part" if point.in_part else ""
    return f"{said}, {point.offloaded} offloaded" if point.offloaded else said


def _beside(result: Result) -> ActivationPlan:
    """The result's plan with its predicted steps as the same shares of today's step as measured.

    The machine may be slower, or faster, while the plan is proven than while it was recorded.
    """
    plan = known(result.plan)
    predicted = plan.proof.predicted_step_ms
    if not predicted or plan.plan.step_ms <= 0:
        return plan
    scale = predicted / plan.plan.step_ms

    def scaled(point: PlanPoint) -> PlanPoint:
        return replace(point, step_ms=scale * point.step_ms)

    points = {name: scaled(getattr(plan, name)) for name in ("today", "plan", "least", "most")}
    return replace(plan, curve=tuple(map(scaled, plan.curve)), **points)


def _text(page: Page, result: Result) -> None:
    plan = _beside(result)
    page.title(_lead(plan))
    _table(page, plan, _points(plan))
    _by_module(page, plan)
    page.title("Proof")
    page.prose(_proof_words(plan))
    for remark in plan.remarks:
        page.prose(remark)
    if _to_set(plan):
        page.title(_setting_title(plan))
        for words in plan.setting:
            page.prose(words)
        for line in plan.code.splitlines():
            page.verbatim(visible(line, 4096) if line else "", "    " if line else "")
    page.title("Step time against memory")
    for point in plan.curve:
        again = _recomputed(point, " recomputed")
        page.row(f"  {size(point.peak_bytes)}", f"{ms(point.step_ms):>9}", again)


def answer_text(page: Page, result: Result) -> list[list[str]]:
    """The plan in groups of lines: what came of it, what it changes, and the setting."""
    plan = _beside(result)
    page.prose(_lead(plan), "", most=2, bold=True)
    page.prose(_as_today(plan) if plan.as_today else _outcome(plan), most=3)
    groups = [page.taken()]
    _table(page, plan, _points(plan)[:2])
    groups.append(page.taken())
    if not _to_set(plan):
        return groups
    lines = [line for line in plan.code.splitlines() if line.strip()]
    if not lines:
        _by_module(page, plan, most=1)
    if plan.setting or lines:
        page.prose(" ".join((f"{_setting_title(plan)}.", *plan.setting)), most=2)
    for line in lines[:_MOST_CODE]:
        page.verbatim(visible(line, 4096), "    ")
    if len(lines) > _MOST_CODE:
        page.prose(f"and {plural(len(lines) - _MOST_CODE, 'more line')} (-v or the page)", "    ")
    return [*groups, page.taken()]


def _lead(plan: ActivationPlan) -> str:
    return f"Plan for {_limit(plan)}: {_headline(plan)}" if _to_set(plan) else _title(plan)


def _table(
    page: Page, plan: ActivationPlan, points: list[tuple[str, PlanPoint, PlanPoint | None]]
) -> None:
    """Step and memory as predicted and, where that was done, as measured, and what changes."""

    def cells(point: PlanPoint | None) -> str:
        return f"{ms(point.step_ms):>11}{size(point.peak_bytes):>12}" if point else ""

    head = f"{'measured':>23}" if _measured(plan) else ""
    page.written.append(f"  {f'({_memory_words(plan)})':<20}{'predicted':>23}{head}")
    for name, predicted, measured in points:
        line = f"  {name:<20}{cells(predicted)}{cells(measured)}"
        proven = name == "Plan" and _proven(plan)
        page.written.append(page.style(line, fg="green", bold=True) if proven else line)
    page.prose(f"Against today: {_gain(plan)}.")


def _by_module(page: Page, plan: ActivationPlan, most: int | None = None) -> None:
    done = [(_done(one), one.module) for one in plan.modules]
    if len({how for how, _ in done}) > 1 or any(one.parts for one in plan.modules):
        for how in sorted({how for how, _ in done}, key=lambda how: (how == "keep", how)):
            names = [name for known, name in done if known == how]
            page.prose(f"{how[0].upper()}{visible(how[1:])}: {_names(names)}", most=most)


def _setting_title(plan: ActivationPlan) -> str:
    return "Setting to change" if _proven(plan) else "Setting to try; it was not measured"


def _title(plan: ActivationPlan) -> str:
    if not _to_set(plan):
        return f"Keep what you have: the plan for {_limit(plan)} is not proven."
    said = _headline(plan)
    return f"{said[0].upper()}{said[1:]}: {_gain(plan)}."


def _html(result: Result) -> Mapping[str, Any]:
    plan = _beside(result)
    return {
        "plan": plan,
        "measured": what_was_measured(result),
        "in_short": _in_short(plan),
        "title": _title(plan),
        "lead": f"Limit: {_limit(plan)}. {_proof_words(plan)}",
        "proven": _proven(plan),
        "to_set": _to_set(plan),
        "setting_title": _setting_title(plan),
        "measured_steps": _measured(plan) is not None,
        "drawing": _drawing(plan),
        "rows": [(one, _today(one), _done(one)) for one in plan.modules[:_MOST_MODULES]],
        "left_out": max(0, len(plan.modules) - _MOST_MODULES),
        "memory_words": _memory_words(plan),
        "curve": [(point, _recomputed(point)) for point in plan.curve],
        "points": [(*each, _recomputed(each[1])) for each in _points(plan)],
    }


def _markdown(result: Result) -> str:
    plan = _beside(result)
    what = _headline(plan) if _to_set(plan) else "keep what you have"
    said = f"To keep to {_limit(plan)}: {what}. {_gain(plan)}. {_proof_words(plan)}"
    return markdown_prose(said)


PLANNED_CHECKPOINTS = Section(
    anchor="plan",
    title="The plan: recompute or keep",
    template="planned_checkpoints.html",
    present=lambda result: result.plan is not None,
    html=_html,
    text=_text,
    markdown=_markdown,
    link="Plan",
    help=(
        "The plan: recompute or keep",
        "shows how long a step takes for how much memory, with today's script and the plan on the "
        "curve, what the plan was measured to do, and the setting that makes it.",
    ),
)
