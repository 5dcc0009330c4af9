"""How sure an answer is, by written rules (``docs/design.md``), why no surer, and the verdict
in one sentence.
"""

from __future__ import annotations

from recompute_scan.recompute.study import RecomputeFacts, disagreeing_steps
from recompute_scan.result import DOUBLED_LEAD, MEASURED, Level, Result, Verdict
from recompute_scan.result.recompute import unit_of
from recompute_scan.result.run_record import each_pass
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.health import lost_evidence, sentences
from recompute_scan.units import ms, plural, rounded

_DOUBTFUL_SHARE = 0.02
_DOUBTFUL_NUMBER = 3
_MANY_UNLAUNCHED = 0.3
# Calls with a guessed place among the others, as shares of all calls: their times are equal to, or
# cross, the times of another call. Measured on traces cut to whole microseconds: up to 0.14 % and
# every answer right on hosts as fast as today's; the first wrong answer at 0.35 %, and over 2.5 %
# where a file's order was lost. No call crosses another in any recording of ours (torch 2.1 to
# 2.14).
_SOME_GUESSED, _MANY_GUESSED = 0.002, 0.02


def confidence(facts: RecomputeFacts, *, one_count: bool = False) -> Level:
    """How sure the counts are, by written rules (``docs/design.md``).

    ``one_count``: the plain count saw no counted operator.
    """
    attention = facts.attention if facts.level == "kernels" else None
    guessed, marks = guesses_places(facts, _MANY_GUESSED), facts.annotations
    if facts.judgement.by_marks:
        return "low" if guessed else "medium"
    unlaunched = facts.work.unlaunched > _MANY_UNLAUNCHED * max(1, len(facts.kernels.event))
    apart = annotations_disagree(facts) and marks and marks.disagreeing > marks.recomputed
    unsure = guessed or unlaunched or apart
    if facts.judgement.verdict == "inconclusive" or unsure:
        return "low"
    if attention is not None:
        told = attention.by_thread and attention.steps_marked and not disagreeing_steps(facts)
        return "medium" if told else "low"
    lost = lost_evidence(facts.trace.health)
    alone = facts.plain.agrees is not True or one_count
    doubtful = annotations_disagree(facts) or facts.complete_count < 2 or disagreeing_steps(facts)
    return "medium" if lost or doubtful or alone or guesses_places(facts) else "high"


def guesses_places(facts: RecomputeFacts, most: float = _SOME_GUESSED) -> bool:
    """Is the place of more than this share of the calls a guess?"""
    return facts.calls.guessed + facts.calls.overruns > most * len(facts.calls)


def annotations_disagree(facts: RecomputeFacts) -> bool:
    """Do the run wrapper's annotations and the operators differ by more than a stray few?"""
    marks = facts.annotations
    return marks is not None and marks.disagreeing > max(
        _DOUBTFUL_NUMBER, _DOUBTFUL_SHARE * marks.recomputed
    )


def doubts(facts: RecomputeFacts) -> tuple[str, ...]:
    """Doubts about the evidence for the reader, one sentence each."""
    found = list(sentences(facts.trace.health, len(facts.trace)))
    if guesses_places(facts):
        found.extend(_guesses(facts.calls))
    if facts.framed:
        found.append(
            "Checkpoint call sites come from Python frames. So each line is the first line of the "
            "function that calls the checkpoint, and the setting that switched it on is unknown."
        )
    if facts.attention is not None and facts.level == "kernels":
        found.extend(facts.attention.notes)
    if differing := disagreeing_steps(facts):
        said = ", ".join(
            f"{step} ({'not known' if runs is None else f'{runs:g}'})"
            for step, runs in differing.items()
        )
        found.append(f"Steps that differ in how often work runs again (in brackets): {said}.")
    if facts.judgement.by_marks:
        # The operators could not give it.
        names = ", ".join(facts.judgement.differing)
        which = f" (of {names})" if names else ""
        found.append(
            f"Not all calls{which} in the recomputes could be matched with the calls of the "
            "forward pass that they repeat, so operators alone do not show how often work ran "
            "again. The annotations that the recording put around each checkpointed call gave the "
            "count; the cost of the recomputes is not known."
        )
    elif facts.annotations is not None and annotations_disagree(facts):
        found.append(
            f"The annotations of the recorded checkpoints and the operators disagree on "
            f"{facts.annotations.disagreeing} of {facts.annotations.recomputed} recomputed "
            "operators; the counts come from the operators."
        )
    if not facts.judgement.by_marks:
        found.extend(_plain_doubts(facts))
    if unlaunched := facts.work.unlaunched:
        every = len(facts.kernels.event)
        found.append(
            "No device activity has a record of its launch, so none belongs to an operator."
            if unlaunched == every
            else f"{unlaunched} of {every} device activities have no record of their launch and "
            f"belong to no operator{_why_unlaunched(facts)}."
        )
    return tuple(found)


def _why_unlaunched(facts: RecomputeFacts) -> str:
    """The known reason why there is none, for the end of a sentence."""
    queued = facts.work.queued
    if queued == facts.work.unlaunched:
        return ": recording began while the GPU still had a queue"
    return f"; {queued} of them were launched before recording began" if queued else ""


def _guesses(calls: Calls) -> list[str]:
    """Why the place of some calls is a guess."""
    found = []
    if calls.guessed:
        found.append(
            "Times are whole microseconds, so for "
            f"{calls.guessed} of {len(calls)} calls the parent call is a guess."
        )
    if calls.overruns:
        found.append(
            f"{calls.overruns} of {len(calls)} calls end after the call in which they began. That "
            "cannot happen: times or threads in the trace are wrong."
        )
    return found


def _plain_doubts(facts: RecomputeFacts) -> list[str]:
    """Why the plain count lowers the confidence, where it does."""
    if facts.level == "kernels" or facts.judgement.verdict == "inconclusive":
        return []
    if facts.plain.agrees is None:
        return [
            "No operator in the trace belongs to a forward pass by its name alone, so no "
            "second count checks the first."
        ]
    differing = [tally for tally in facts.plain.tallies if not tally.agrees]
    if not differing:
        return []
    tally = differing[0]
    hooks = f", {tally.hooked} of them run by gradient hooks" if tally.hooked else ""
    return [
        f"The plain count differs: {tally.inside} calls of {tally.name} are inside the backward "
        f"pass{hooks}, and the answer explains {tally.again}."
    ]


# Smaller savings, in % of a step, are not reported.
_WORTH_SAYING = 0.5
# Of the forward work: where less ran again, most of a model is in no block that recomputes.
_HALF = 0.5


def headline(result: Result) -> str:
    """The verdict in one sentence, with the number that matters most: measured, else predicted.

    A second one follows where recomputes change the trained model, in gradients or buffers.
    """
    wrong = [finding for finding in result.findings if finding.wrong_gradients]
    sure = dict.fromkeys(one.code for one in wrong if one.confidence == "high")
    open_ = dict.fromkeys(one.code for one in wrong if one.code not in sure)
    also = ""
    if sure:
        perhaps = f", and perhaps {', '.join(open_)}" if open_ else ""
        also = f" The trained model changes, too: {', '.join(sure)}{perhaps}."
    elif open_:
        also = f" The trained model may change, too: {', '.join(open_)}."
    return _of_ranks(result, _headline(result)) + also


def _of_ranks(result: Result, said: str) -> str:
    """The sentence with the ranks that it is true of, where ranks differ.

    It comes from the first rank with the worst verdict.
    """
    worst = [rank for rank in result.ranks if rank.verdict == result.verdict]
    counts = {
        (rank.verdict, None if each is None else round(each, 2))
        for rank in result.ranks
        for each in [rank.recomputes_per_block]
    }
    if len(counts) < 2 or not worst:
        return said
    shown = f"on rank {worst[0].rank}, {_decapitalised(said.removeprefix(DOUBLED_LEAD))}"
    every = plural(len(result.ranks), "rank")
    of = f"all {every}" if len(worst) == len(result.ranks) else f"{len(worst)} of {every}"
    if said.startswith(DOUBLED_LEAD):
        return f"Checkpointing is doubled on {of}: {shown}"
    if result.verdict == "inconclusive":
        return f"{shown[0].upper()}{shown[1:]}"
    return f"{said.rstrip('.')}, on {of}."


# Headlines that are the same for every result of a verdict, by the evidence: attention's kernels
# alone, the compiler's graphs alone, or operators.
_SENTENCES: dict[tuple[str, Verdict], str] = {
    ("", "none"): "No forward work runs again in the backward pass: nothing is recomputed.",
    ("kernels", "none"): "No attention forward runs again in the backward pass; nothing else could "
    "be seen.",
    ("kernels", "full"): "Every attention forward runs once more in the backward pass: "
    "checkpointed once.",
    ("kernels", "partial"): "Some attention forwards run once more in the backward pass.",
    ("kernels", "doubled"): f"{DOUBLED_LEAD}attention's forward runs {{:g}} more times in each "
    "backward pass.",
    ("graphs", "none"): "No compiled code runs forward work again in its backward pass.",
    ("graphs", "full"): "All checkpointed compiled code runs its forward once more in the backward "
    "pass.",
    ("graphs", "partial"): "Some compiled work runs once more in the backward pass.",
    ("graphs", "doubled"): f"{DOUBLED_LEAD}compiled code runs its forward {{:g}} more times in "
    "each backward pass.",
}


def _headline(result: Result) -> str:
    highest = result.recompute_per_backward or 0.0
    if result.verdict == "inconclusive":
        what = "These logs" if result.evidence_level == "graphs" else "This trace"
        return f"{what} cannot answer: {_decapitalised(result.reason or 'no reason known')}"
    if result.evidence_level == "hooks":
        return result.headline
    level = result.evidence_level if result.evidence_level in ("kernels", "graphs") else ""
    free = _free_operators(result) if result.verdict == "partial" and level != "kernels" else 0
    passes = max((region.backward_passes for region in result.regions), default=1.0)
    where = each_pass(passes) if passes >= 2 else "the backward pass"
    if result.verdict == "partial" and not level and result.by_design and not _in_blocks(result):
        first, *others = [each.function for each in result.by_design]
        more = f" and {plural(len(others), 'other function')} run" if others else " runs"
        return (
            f"{first}{more} again in the gradient of another function, by the model's own "
            "design; no checkpoint recomputes anything."
        )
    if free:
        rest = "" if level else "; no checkpoint recomputes anything"
        return (
            f"The compiler runs {plural(free, 'cheap operator')} again inside its backward "
            f"graphs, for free{rest}."
        )
    if result.verdict == "full" and not level and (result.recomputed_share or 1.0) >= _HALF:
        return f"Every checkpointed block runs its forward once more in {where}."
    if (sentence := _SENTENCES.get((level, result.verdict))) is not None:
        return sentence.format(highest)
    if result.verdict != "doubled":
        share = 100 * (result.recomputed_share or 0.0)
        return f"{share:.0f} % of the forward work runs once more in {where}."
    doubled = [r for r in result.regions if r.recompute_runs_per_backward >= 2]
    which, verb = "every block" if doubled else "some code", "runs its"
    if 0 < len(doubled) < len(result.regions):
        which = f"{len(doubled)} of {len(result.regions)} {unit_of(result.regions)}"
        verb = "run their"
    if doubled and all(region.in_part for region in doubled):
        verb = verb.replace(" ", " a part of ")
    return (
        f"{DOUBLED_LEAD}{which} {verb} forward {highest:g} more times in each backward "
        f"pass{_gain(result)}."
    )


def _in_blocks(result: Result) -> bool:
    return any(region.recompute_runs_per_backward for region in result.regions)


def _free_operators(result: Result) -> int:
    """How many operators compiled code runs again, where that is free and all there is."""
    graphs = result.compiled.graphs if result.compiled is not None else ()
    blocks = _in_blocks(result)
    free = sum(graph.free for graph in graphs)
    return 0 if blocks or free < sum(graph.recomputed for graph in graphs) else free


def _gain(result: Result) -> str:
    verified = result.verified
    if verified is None or verified.outcome not in MEASURED:
        cost = result.cost
        if cost is None or cost.saving_pct < _WORTH_SAYING:
            return ""
        # A percentage where the step times carry one, else a share in words.
        return f" and {rounded(cost.saving_pct, cost.saving_is_rough)} of the step is wasted"
    if verified.outcome == "losses-differ":
        return "; the fix was tried, and it changes the losses"
    before, after = ms(verified.before_step_ms), ms(verified.after_step_ms)
    if verified.outcome == "helps":
        wasted = rounded(verified.saving_pct, verified.saving_is_rough)
        return f" and {wasted} of the step is wasted, measured"
    if verified.outcome == "slower":
        return f"; the fix was tried, and a step takes {after} instead of {before}"
    return f"; the fix was tried, and a step takes as long as before ({before})"


def _decapitalised(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
