"""The answer in a few sentences and numbers, and the commands that come next.

People paste the commands of a report, and a script's name may come from somebody else's result: a
name that a shell would read more into is never repeated.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import astuple, replace

from recompute_scan.files import HOME, is_run
from recompute_scan.report import words
from recompute_scan.report.blocks import analysed, of_memory_alone
from recompute_scan.report.templating import lines
from recompute_scan.result import MEASURED, Breakdown, Cost, Finding, Result
from recompute_scan.result.fidelity import is_open
from recompute_scan.result.patch import fixes
from recompute_scan.result.recompute import DOUBLED
from recompute_scan.result.run_record import NextCommand, Purpose
from recompute_scan.units import (
    UNKNOWN,
    about,
    is_before,
    ms,
    pct,
    plural,
    rounded,
    share,
    span,
    times,
)

TOO_WIDE = "The step times vary too much to rely on"
_TYPICAL = "typical: 1.00 without checkpoints, 1.33 with one recompute a layer, 1.67 with two"


class KeyNumber(Struct, frozen=True):
    """One of the three numbers of the full answer; ``alarming`` only where it shows waste."""

    label: str
    value: str
    note: str
    alarming: bool = False


class StepAfter(Struct, frozen=True):
    """A step now and after the fix, in ms, with the range it may lie in: measured or predicted.

    A step of 100 instead of 134.5 takes 25.7 % less time and gives 34.5 % more throughput.
    """

    now_ms: float
    after_ms: float
    low_ms: float
    high_ms: float
    measured: bool

    @property
    def less_time(self) -> float:
        """The saving as a share of today's step."""
        return (self.now_ms - self.after_ms) / self.now_ms


def shortest_answer(result: Result) -> str:
    """The answer in one word: the verdict, that it is a plan or of memory, how the run failed."""
    if result.plan is not None and result.crash is None:
        return "plan"
    if of_memory_alone(result):
        return "memory"
    return words.KIND_WORDS[result.crash.kind] if result.crash else result.verdict


def step_after(result: Result) -> StepAfter | None:
    """The step after the fix: as measured where that gave an answer, else as predicted."""
    verified, cost = result.verified, result.cost
    if verified is not None and verified.outcome in MEASURED:
        before, after = verified.before_step_ms, verified.after
        if before and after and after.step_ms and after.step_low_ms and after.step_high_ms:
            low, high = after.step_low_ms, after.step_high_ms
            return StepAfter(before, after.step_ms, low, high, measured=True)
    return None if cost is None else _predicted(cost, cost.step_ms)


def _predicted(cost: Cost, now_ms: float, scale: float = 1.0) -> StepAfter:
    """The prediction for a step that takes ``scale`` times as long as the recorded one."""
    times = (cost.predicted_step_ms, cost.predicted_low_ms, cost.predicted_high_ms)
    after, low, high = (scale * time for time in times)
    return StepAfter(now_ms, after, low, high, measured=False)


def predicted_beside(result: Result) -> StepAfter | None:
    """The prediction, for comparison with the measurement.

    A prediction is a share of the step. The step that is measured later, unchanged, is seldom to
    the digit the one that it was made from, and may be of a slower hour: it is applied to that,
    unless the measurement says nothing.
    """
    verified, cost = result.verified, result.cost
    if verified is None or cost is None or not verified.before_step_ms or cost.step_ms <= 0:
        return None
    before = verified.before_step_ms if verified.outcome in MEASURED else cost.step_ms
    return _predicted(cost, before, before / cost.step_ms)


def saving(result: Result) -> StepAfter | None:
    """The step after the fix, where the verdict says that work is redundant and the fix saves
    time.
    """
    step = step_after(result)
    if result.verdict != "doubled" or step is None or not 0 < step.after_ms < step.now_ms:
        return None
    return step


def fix_sentence(result: Result) -> str | None:
    """The effect of the fix on a step, in the one pair of numbers that every rendering gives.

    ``None`` where nothing is saved. No percentage where its digits would say nothing.
    """
    step = saving(result)
    if step is None:
        return None
    took = f"{ms(step.after_ms)} instead of {ms(step.now_ms)}"
    took += ", measured" if step.measured else ""
    said = f"With the fix a step takes {'' if step.measured else 'about '}{took}"
    if _is_rough(result):
        return f"{said}: {about(step.less_time)} less time."
    more = 100 * (step.now_ms / step.after_ms - 1)
    return f"{said}: {pct(100 * step.less_time)} less time, {pct(more)} more throughput."


def pair_sentence(result: Result) -> str | None:
    """The step now and with the fix, without numbers that the headline and the bars have."""
    step = saving(result)
    if step is None:
        return None
    after = f"{'' if step.measured else 'about '}{ms(step.after_ms)}"
    return f"A step takes {ms(step.now_ms)}; with the fix it takes {after}."


def step_sentence(result: Result) -> str:
    """A step now and with the fix, or how much of it is recomputes; empty where that is not known.

    One pair of numbers: the headline has the share that a fix saves.
    """
    step, cost = step_after(result), result.cost
    if step is None or cost is None or result.verdict == "inconclusive":
        return ""
    shown = _shown_rank(result)
    whose = "A" if len(result.ranks) < 2 or shown is None else f"On rank {shown} a"
    said = f"{whose} step takes {ms(step.now_ms)}"
    if saving(result) is not None:
        with_fix = f"{ms(step.after_ms)}, measured."
        if not step.measured:
            with_fix = f"about {ms(step.after_ms)} (likely {span(step.low_ms, step.high_ms)})."
        said += f", with the fix {with_fix}"
    elif result.verdict == "doubled":
        after = f"with the fix {span(step.low_ms, step.high_ms)}: {words.NOT_CERTAIN}"
        after = after if _may_save(step) else "and no saving is predicted"
        said += "." if result.verified else f", {after}."
    else:
        spent = cost.breakdown.recompute + cost.breakdown.redundant
        whole = total(cost.breakdown)
        note = words.first_true(result, words.SHARE_NOTE)
        planned = any(one.purpose == "plan" for one in result.next_steps)  # which says the share
        tells = result.verdict != "none" and spent > 0 and whole > 0
        tells = tells and not (planned and words.by_checkpoints(result))
        part = rounded(100 * spent / max(whole, 1e-9), _is_rough(result, times=True))
        said += f"; {part} of it is {note}." if tells else "."
    if not step.measured and cost.step_source != "timed":
        said += " The profiler slows these steps down."
    varies = _is_rough(result, times=True) and words.NOT_CERTAIN not in said
    return said + f" {TOO_WIDE}." * varies


def _may_save(step: StepAfter) -> bool:
    """Whether the step with the fix may be shorter or longer, as far as that is known."""
    return step.low_ms < step.now_ms < step.high_ms


def _is_rough(result: Result, *, times: bool = False) -> bool:
    """Whether the saving, measured or predicted, is known too roughly for digits; with ``times``,
    whether a prediction is so because the step times vary.
    """
    if result.verified is not None and result.verified.outcome in MEASURED:
        return result.verified.saving_is_rough
    cost = result.cost
    return cost is not None and (cost.times_vary if times else cost.saving_is_rough)


def what_was_measured(result: Result) -> tuple[str, ...]:
    """Script or trace, device, ranks, torch and date, as far as they are known."""
    facts = result.environment
    device = facts.get("device_name") or facts.get("gpu")
    if device is None and facts.get("device") == "cpu":
        device = "CPU"
    known = facts.get("world_size", "")
    ranks = max(int(known) if re.fullmatch(r"[0-9]{1,7}", known) else 0, len(result.ranks))
    return tuple(
        part
        for part in (
            facts.get("target") or next((rank.trace for rank in result.ranks), None),
            device,
            plural(ranks, "rank") if ranks else None,
            f"torch {facts['torch']}" if "torch" in facts else None,
            facts.get("recorded"),
        )
        if part
    )


def total(breakdown: Breakdown) -> float:
    """The whole of a breakdown, in ms."""
    return float(sum(astuple(breakdown)))


def key_numbers(result: Result) -> tuple[KeyNumber, KeyNumber, KeyNumber]:
    """Recomputes per layer, share of the step, step time after: in that order."""
    return (_recomputes(result), _share(result), _step_after(result))


def _recomputes(result: Result) -> KeyNumber:
    note = words.first_true(result, words.RECOMPUTES_NOTE)
    value = times(result.recompute_per_backward)
    return KeyNumber("Recomputes per layer", value, note, result.verdict == "doubled")


def _share(result: Result) -> KeyNumber:
    label = "Share of the step"
    verified, found = result.verified, saving(result)
    if verified is not None and verified.outcome == "helps":
        note = f"saved by the fix (measured{' roughly' * verified.saving_is_rough})"
        part = rounded(verified.saving_pct, verified.saving_is_rough)
        return KeyNumber(label, part, note, True)
    if found is not None:
        note = "saved by the fix (predicted)"
        return KeyNumber(label, rounded(100 * found.less_time, _is_rough(result)), note, True)
    doubled, parts = result.verdict == "doubled", result.cost.breakdown if result.cost else None
    whole = total(parts) if parts else 0.0
    if parts is None or whole <= 0 or result.verdict == "inconclusive":
        return KeyNumber(label, UNKNOWN, words.first_true(result, words.UNKNOWN_NOTE), doubled)
    if doubled:
        note = "spent on redundant recomputes"
        return KeyNumber(label, share(parts.redundant / whole), note, True)
    note = words.first_true(result, words.SHARE_NOTE)
    return KeyNumber(label, share((parts.recompute + parts.redundant) / whole), note)


def _step_after(result: Result) -> KeyNumber:
    label = "Step time" if result.verdict in ("none", "partial", "full") else "Step time after"
    step = step_after(result)
    if step is None:
        note = "the trace gave no step time"
        if result.compiled is not None and result.verdict != "inconclusive":
            note = "the compiler's graphs have no times; --verify measures a fix"
        return KeyNumber(label, UNKNOWN, note)
    if step.measured:
        predicted = predicted_beside(result)
        note = f"measured with the fix applied; {ms(step.now_ms)} now"
        note += f"; {ms(predicted.after_ms)} was predicted" if predicted else ""
        return KeyNumber(label, ms(step.after_ms), note)
    if saving(result) is not None:
        note = f"{ms(step.now_ms)} now; likely {span(step.low_ms, step.high_ms)} after the fix"
        return KeyNumber(label, ms(step.after_ms), note)
    if result.verdict == "inconclusive":
        return KeyNumber(label, UNKNOWN, f"{ms(step.now_ms)} now")
    if result.verdict == "doubled" and _may_save(step):
        within = span(step.low_ms, step.high_ms)
        return KeyNumber(label, within, f"{ms(step.now_ms)} now; {words.NOT_CERTAIN}")
    return KeyNumber(label, ms(step.now_ms), words.first_true(result, words.STEP_NOTE))


def attention_sentence(result: Result) -> str | None:
    """How often attention ran; its gradient only where that is an operator of attention's own."""
    calls = result.attention
    if calls is None or result.verdict == "inconclusive":
        return None
    said = f"Attention ran {plural(calls.forward_per_step, 'time')} per step in the forward pass"
    if calls.recomputed_per_step:
        said += f" and {plural(calls.recomputed_per_step, 'time')} again in the backward pass"
    if calls.backward_per_step:
        said += f"; its gradient ran {plural(calls.backward_per_step, 'time')}"
    return f"{said}."


def ratio_row(result: Result) -> tuple[str, str] | None:
    """HFU over MFU as a number and a note to compare it with; ``None`` where it is not known."""
    flops = result.flops
    if flops is None or flops.hfu_over_mfu is None:
        return None
    reached = ""
    if flops.hfu is not None and flops.mfu is not None:
        reached = f"HFU {share(flops.hfu)}, MFU {share(flops.mfu)} of the peak; "
    return times(flops.hfu_over_mfu), reached + _TYPICAL


def rank_words(result: Result) -> str:
    """``3 doubled, 1 full``: the ranks' own verdicts, the commonest first."""
    counts = Counter(rank.verdict for rank in result.ranks)
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())


def ranks_sentence(result: Result) -> str | None:
    """How many ranks there are, whether they agree, and which rank's numbers the page shows.

    ``None`` for a single rank.
    """
    if len(result.ranks) < 2:
        return None
    alike = len({rank.verdict for rank in result.ranks}) == 1
    which = f", all {result.ranks[0].verdict}." if alike else f" that differ: {rank_words(result)}."
    said = f"{plural(len(result.ranks), 'rank')}{which}"
    shown = _shown_rank(result)
    if shown is None:
        return said
    worst = "" if alike else ", the first with the worst verdict"
    return f"{said} The numbers of this page are from rank {shown}{worst}."


def _shown_rank(result: Result) -> int | None:
    """The rank that the result is from: the first with the worst verdict."""
    return next((one.rank for one in result.ranks if one.verdict == result.verdict), None)


_PLAIN_SCRIPT = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./@%+-]{0,300}\.py")
_OWN = "train.py"
_WHOLE_STEP = (
    "Record at least one whole training step, forward and backward pass, with operator events on. "
    "This does so with your script unchanged; in torch.profiler code of your own, keep "
    "ProfilerActivity.CPU among the activities and let the schedule record two whole steps."
)
_NO_MORE = (
    "The recording has whole steps with an annotation around each checkpointed call, so another "
    "one would say no more. The cost of checkpointing can be measured all the same: this command "
    "runs the script with it and without."
)
_RANGES = (
    "Record at least one whole training step, forward and backward pass, with a range for each "
    "operator: this option makes them. An nsys without it needs the loop inside "
    "torch.autograd.profiler.emit_nvtx(record_shapes=True), which is what the option does. "
    "recompute-scan run needs no nsys."
)
_NSYS = "nsys profile --trace=cuda,nvtx --pytorch=autograd-shapes-nvtx python"
_GRAPHS = (
    "The recomputes of compiled code are in the graphs of torch.compile, not in the trace. "
    "recompute-scan run keeps them, on torch 2.10 and newer."
)
# Since this version graphs name checkpoints (https://github.com/pytorch/pytorch/pull/167735).
_NAMED_SINCE = "2.10"
_OLD = (
    "The graphs of torch.compile do not name checkpoints before torch 2.10. Record with torch 2.10 "
    "or newer. If that is not possible, record without the compiler: checkpoints nest in the "
    "same way, and each of them can be counted."
)
_UNREADABLE = (
    "The graphs of torch.compile are not here, as where the script calls logging.disable(), or do "
    "not show it. Without the compiler checkpoints nest in the same way, and each of them can be "
    "counted."
)


class ToRecord(Struct, frozen=True):
    """The recording that gives an answer where a trace gives none, and its command."""

    why: str
    command: str


def script_of(result: Result) -> str | None:
    """The script that was recorded; ``None`` where it is not known or not plain."""
    target = result.environment.get("target", "")
    return target if _PLAIN_SCRIPT.fullmatch(target) else None


def recorded_into(result: Result, suffix: str = "") -> str:
    """The folder that `run` records the script into unless it is given another."""
    return f"{HOME}/{Path(script_of(result) or _OWN).stem}{suffix}"


def lack_sentence(result: Result, commands: Sequence[NextCommand]) -> str:
    """The rest of commands that are made from the result alone; empty if each is whole."""
    script = script_of(result)
    lacks = script is not None and any(one.text.endswith(f" {script}") for one in commands)
    return words.OWN_ARGUMENTS * lacks


def fix_is_measurable(result: Result) -> bool:
    """Whether ``--verify`` has a fix to try: one that takes out a checkpoint which costs time."""
    return any(
        finding.fix is not None
        and finding.fix.removes is not None
        and (finding.saving_ms or (finding.code == DOUBLED and finding.saving_ms is None))
        for finding in result.findings
    )


def processes(result: Result) -> list[str]:
    """The option of `run` that starts the ranks again; none for one rank or several machines."""
    here, every = (result.environment.get(name, "") for name in ("local_world_size", "world_size"))
    several = here == every != "1" and re.fullmatch(r"[1-9][0-9]{0,3}", here)
    return ["--nproc-per-node", here] if several else []


def run_command(result: Result, output: str = "", *, verify: bool = False) -> str:
    """The command that records the script again, without the script's own arguments."""
    words = [
        *["--verify"] * verify,
        *processes(result),
        "--steps 5",
        *[f"-o {output}"] * bool(output),
    ]
    return f"recompute-scan run {' '.join(words)} {script_of(result) or _OWN}"


def gradients_are_open(result: Result) -> bool:
    """Whether something says that gradients may be wrong, and they have not been compared."""
    if result.verified is not None and result.verified.gradients is not None:
        return False
    suspected = any(one.wrong_gradients and one.confidence != "high" for one in result.findings)
    return suspected or (result.fidelity is not None and is_open(result.fidelity))


_WHAT: dict[Purpose, str] = {
    "see": "See the fix.",
    "measure": "Measure the fix; nothing is edited.",
    "compare-gradients": "Compare gradients with and without checkpoints; nothing is edited.",
    "apply": "Apply the fix; --revert undoes it.",
    "record": "Change it and record again.",
    "compare": "Compare the two.",
    "plan": "See which layers need a checkpoint.",
    "explain": "Read about this failure.",
}
_FINDING = re.compile(r"RS\d{3}")


def with_next_steps(
    result: Result, after: Sequence[NextCommand] | None = None, folder: str = ""
) -> Result:
    """The result with the commands that come next; the list is the same wherever it is shown.

    Args:
        result: The result; next steps that it names itself are not repeated.
        after: Commands of the run that it is from, in full; ``None`` where only the result is
            known: its commands leave the script's own arguments out.
        folder: The folder or file that the result is read from; empty where that is not known.
    """
    if after is None:
        after = commands_of(result, folder)
    there = {one.purpose: one.text for one in after}
    steps = []
    for purpose in _purposes(result, can_fix="apply" in there):
        text = _own_command(result, purpose) or there.get(purpose)
        if text is not None:
            steps.append(NextCommand(purpose, text, _why(result, purpose)))
    return replace(result, next_steps=tuple(steps))


def _purposes(result: Result, *, can_fix: bool) -> list[Purpose]:
    if result.crash is not None:
        return ["explain"]
    if result.plan is not None:
        return []
    known = analysed(result)
    if known and (result.verdict == "inconclusive" or _was_too_short(result)):
        return ["record"]
    first: list[Purpose] = []
    if gradients_are_open(result):
        first = ["compare-gradients"]
    elif fix_is_measurable(result) and result.verified is None:
        first = ["measure"]
    if can_fix and fixes(result):
        return ["see", *first, "apply"]
    if not known:
        return first
    if result.verdict == "doubled" or any(one.fix for one in result.findings):
        return [*first, "record", "compare"]
    saves = any(one.saving_ms for one in result.findings)
    return [*first, "explain", "plan"] if saves else [*first, "plan"]


def foremost(result: Result) -> Finding | None:
    """One that changes the trained model, else the one that saves most time; of equals the first of
    the most severe.
    """
    severity = ("info", "warning", "error").index
    return max(
        result.findings,
        key=lambda one: (one.wrong_gradients, one.saving_ms or 0.0, severity(one.severity)),
        default=None,
    )


def _why(result: Result, purpose: Purpose) -> str:
    """The purpose of the command, in a sentence."""
    if purpose == "record" and _was_too_short(result):
        return result.warnings[-1] if result.warnings else "Record fewer steps."
    if purpose == "explain" and result.crash is None and (one := foremost(result)):
        return f"{one.title}."
    return _buys_memory(result) if purpose == "plan" else _WHAT[purpose]


def _was_too_short(result: Result) -> bool:
    """Whether hooks alone have counted: no step was left to profile."""
    return result.evidence_level == "hooks" and not result.steps


def _own_command(result: Result, purpose: Purpose) -> str | None:
    """The command that follows from the result alone, whatever the run was."""
    if purpose == "explain":
        first = None if result.crash else foremost(result)
        codes = (one.code for one in ([first] if first else result.findings))
        code = next(filter(_FINDING.fullmatch, codes), None)
        return f"recompute-scan explain {code}" if code else None
    if purpose == "record" and result.verdict == "inconclusive":
        return how_to_record(result).command
    if purpose == "record" and _was_too_short(result):
        return run_command(result).replace("--steps 5", "--quick")
    return None


def commands_of(result: Result, folder: str) -> list[NextCommand]:
    """The commands, as far as they follow from the result and the folder that it is read from."""
    before = shlex.quote(folder) if folder else recorded_into(result)
    a_file = bool(Path(folder).suffix)
    after = recorded_into(result, "-after")
    after = shlex.quote(f"{folder}-after") if folder and not a_file else after
    own = bool(folder) and is_run(Path(folder), alone=True)  # the next run gets another folder
    after = shlex.quote(str(Path(folder).parent)) if own else after
    measure = run_command(result, verify=True)
    gradients = measure.replace("--verify", "--verify --without-checkpointing", 1)
    found: dict[Purpose, str] = {
        "measure": measure,
        "compare-gradients": gradients if script_of(result) else "",
        "see": f"recompute-scan fix {before}" * bool(folder),
        "apply": f"recompute-scan fix {before} --apply" * bool(folder),
        "record": run_command(result, "" if own else after),
        "compare": f"recompute-scan compare {before} {after}",
        "plan": f"recompute-scan plan {script_of(result)}" if script_of(result) else "",
    }
    alone = len(result.ranks) < 2
    return [
        NextCommand(purpose, text)
        for purpose, text in found.items()
        if text and (alone or purpose != "plan")
    ]


def _buys_memory(result: Result) -> str:
    """Why to plan, in a sentence."""
    parts = result.cost.breakdown if result.cost else None
    whole = total(parts) if parts else 0.0
    if result.verdict == "none":
        return "If memory runs short, see which layers to checkpoint."
    if parts is None or whole <= 0 or not parts.recompute or not words.by_checkpoints(result):
        return _WHAT["plan"]
    taken = rounded(100 * parts.recompute / whole, _is_rough(result, times=True))
    return f"Recomputes take {taken} of the step to save memory. Do you need that memory?"


def how_to_record(result: Result) -> ToRecord:
    """The recording that gives an answer where this trace has none."""
    if "compiled" in (result.reason or ""):
        if result.environment.get("torch_compile") != "used":  # not recorded by `run`
            return ToRecord(_GRAPHS, run_command(result))
        old = is_before(result.environment.get("torch", ""), _NAMED_SINCE)
        why = _OLD if old else _UNREADABLE
        return ToRecord(why, f"TORCH_COMPILE_DISABLE=1 {run_command(result)}")
    if result.environment.get("profiler", "").startswith("Nsight Systems"):
        return ToRecord(_RANGES, f"{_NSYS} {script_of(result) or _OWN}")
    if result.evidence_level == "annotated" and any(step.complete for step in result.steps):
        words = ["run --verify --without-checkpointing", *processes(result)]
        return ToRecord(_NO_MORE, f"recompute-scan {' '.join(words)} {script_of(result) or _OWN}")
    if _was_too_short(result) and result.warnings:
        # `run` has done what the advice says; its last word says what was in the way.
        return ToRecord(result.warnings[-1], run_command(result))
    return ToRecord(_WHOLE_STEP, run_command(result))


class DiffLine(Struct, frozen=True):
    """One line of a diff: ``kind`` is ``add``, ``del``, ``hunk``, ``file`` or ``same``."""

    kind: str
    text: str


def diff_lines(diff: str) -> list[DiffLine]:
    """The lines with their kinds; the text itself is not changed."""
    return [DiffLine(_kind(line), line) for line in lines(diff.rstrip("\n"))]


def _kind(line: str) -> str:
    if line.startswith(("+++", "---", "diff ", "index ")):
        return "file"
    if line.startswith("@@"):
        return "hunk"
    return {"+": "add", "-": "del"}.get(line[:1], "same")
