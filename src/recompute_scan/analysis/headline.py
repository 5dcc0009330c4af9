"""The headline: the verdict in one sentence, and a second one where the trained model changes.

Results without a trace, and those by hooks, get theirs in :mod:`recompute_scan.analysis.ranks`.
"""

from __future__ import annotations

from recompute_scan.result import DOUBLED_LEAD, MEASURED, Result, Verdict
from recompute_scan.result.recompute import unit_of
from recompute_scan.result.run_record import each_pass
from recompute_scan.units import ms, plural, rounded

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
        also = f" The trained model also changes: {', '.join(sure)}{perhaps}."
    elif open_:
        also = f" The trained model may also change: {', '.join(open_)}."
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
    if result.verdict == "full" and not level:
        part = (result.recomputed_share or 1.0) < _HALF
        which = _share(result) if part else "Every checkpointed block runs its forward"
        return f"{which} once more in {where}."
    if result.verdict == "partial" and not level and result.by_design and not _in_blocks(result):
        return (
            f"{_functions(result)} again in the gradient of another function, by the model's own "
            "design; no checkpoint recomputes anything."
        )
    if free:
        rest = "" if level else "; no checkpoint recomputes anything"
        return (
            f"The compiler runs {plural(free, 'cheap operator')} again inside its backward "
            f"graphs, for free{rest}."
        )
    if (sentence := _SENTENCES.get((level, result.verdict))) is not None:
        return sentence.format(highest)
    if result.verdict == "partial":
        return f"{_share(result)} once more in {where}."
    doubled = [r for r in result.regions if r.recompute_runs_per_backward >= 2]
    # A checkpoint around several blocks recomputes once what is no block of the report.
    share, mean = result.recomputed_share or 1.0, result.mean_recompute or highest
    most = mean - share >= _HALF * share * (highest - 1)
    in_part = bool(doubled) and all(region.in_part for region in doubled)
    which, verb = "every block" if in_part or (doubled and most) else "some code", "runs its"
    if 0 < len(doubled) < len(result.regions):
        which = f"{len(doubled)} of {len(result.regions)} {unit_of(result.regions)}"
        verb = "run their"
    if in_part:
        verb = verb.replace(" ", " a part of ")
    return (
        f"{DOUBLED_LEAD}{which} {verb} forward {highest:g} more times in each backward "
        f"pass{_gain(result)}."
    )


def _share(result: Result) -> str:
    return f"{100 * (result.recomputed_share or 0.0):.0f} % of the forward work runs"


def _in_blocks(result: Result) -> bool:
    return any(region.recompute_runs_per_backward for region in result.regions)


def _functions(result: Result) -> str:
    found = [each.function for each in result.by_design]
    more = f" and {plural(len(found) - 1, 'other function')}" if len(found) > 1 else ""
    return f"{found[0]}{more} {'run' if more else 'runs'}"


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
