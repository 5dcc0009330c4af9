"""RS311 to RS313, RS321 to RS324: what a step does not need, as ``run --work`` watched it."""

from __future__ import annotations

from functools import partial

from recompute_scan.advise.choice import place
from recompute_scan.findings.base import Evidence, NotApplicable, Rule
from recompute_scan.result import Finding
from recompute_scan.result.watched_step import Kept, KeptKind, WatchedStep, Work, WorkKind
from recompute_scan.units import ms, pct, plural, size, span


def _watched(evidence: Evidence) -> WatchedStep:
    watched = evidence.watched
    if watched is None:
        raise NotApplicable("Only `run --work` watches how a step's results are used.")
    if watched.untold is not None:
        raise NotApplicable(watched.untold)
    return watched


def _kept_rule(code: str, name: str, kind: KeptKind) -> Rule:
    @partial(Rule, code, name, needs="run")
    def rule(evidence: Evidence) -> list[Finding]:
        """One finding for each place that keeps memory of this kind."""
        watched = _watched(evidence)
        return [_kept(rule, evidence, watched, one) for one in watched.kept if one.kind == kind]

    return rule


def _kept(rule: Rule, evidence: Evidence, watched: WatchedStep, one: Kept) -> Finding:
    much, layers = size(one.bytes), plural(one.layers, "layer")
    title, detail = {
        "between": (
            f"{much} between checkpointed parts of {layers} ({one.module_class}) stay in memory",
            f"The parts of each {one.module_class} are checkpointed and the layer is not. So each "
            "input of a part is kept for the backward pass. A checkpoint around the whole layer "
            f"would keep one input per layer, not {one.tensors // max(one.layers, 1)} results."
            " Its recompute then needs the memory of a whole layer at once, so with "
            "few layers the peak can rise: `recompute-scan plan` measures both.",
        ),
        "after-backward": (
            f"{much} are alive after the backward pass that read them last",
            "No operator reads them any more, but something refers to them: a reference cycle, "
            "which only the garbage collector breaks, a list, an attribute, a retained graph or a "
            "saved-tensor hook that returns its tensor undetached. Drop the reference before the "
            "next step. In an autograd function, save tensors with ctx.save_for_backward instead "
            "of ctx attributes.",
        ),
        "never-read": (
            f"{much} are alive during the backward pass, which never reads them",
            "A variable, a list or a policy that keeps results refers to them. Delete the "
            "reference before the backward pass, or keep less: the memory is then free for the "
            "recomputes and gradients. This adds no work.",
        ),
    }[one.kind]
    called = "; a part is called" if one.kind == "between" else ", the largest made"
    held = (f"held by {one.holder}",) if one.holder else ()
    return rule.finding(
        evidence,
        title=title,
        detail=detail,
        evidence=(
            f"{plural(one.tensors, 'tensor')}{called}{place(one.line)}",
            *held,
            f"the step's own tensors took at most {size(watched.peak_bytes)}, in the "
            f"{watched.peak_in} pass",
        ),
    )


def _work_rule(code: str, name: str, *kinds: WorkKind) -> Rule:
    @partial(Rule, code, name, needs="run", severity="warning")
    def rule(evidence: Evidence) -> list[Finding]:
        """One finding for each place that asks for work of this kind."""
        watched = _watched(evidence)
        if watched.hidden is not None and "repeated" not in kinds:
            raise NotApplicable(watched.hidden)
        return [_work(rule, evidence, one) for one in watched.work if one.kind in kinds]

    return rule


def _work(rule: Rule, evidence: Evidence, one: Work) -> Finding:
    calls = plural(one.calls, "call") + f" of {one.module_class}"
    what = calls if one.calls else plural(one.operators, "operator")
    s = "s" * ((one.calls or one.operators) == 1)
    took = f"{pct(100 * one.share)} of the operators' time, {ms(one.ms)}"
    least = one.least_ms
    much = f"likely {span(least, one.most_ms)}" if least else f"at most {ms(one.most_ms)}"
    saves = f" A step without this work takes {much} less." if one.most_ms is not None else ""
    # A convolution's operator computes two gradients.
    mixed = one.kind == "unread-gradient" and least < one.ms
    others = ", among others," if mixed else ""
    again = one.same_as == one.line
    there = (
        "that line has computed before" if again else f"the step computes{place(one.same_as)} too"
    )
    title, detail = {
        "repeated": (
            f"{what}{place(one.line)} compute{s} what {there}",
            f"Weights and inputs are the same, so every bit of the results is. {_reuse(one)}",
        ),
        "repeated-rows": (
            f"{what}{place(one.line)} compute{s} {one.of_rows} rows, and {_other(one)} computes "
            f"{one.rows} of them too{place(one.same_as)}",
            "The rows, the weights and all other arguments are the same, nothing is drawn at "
            "random, and nothing is updated. Where each row is computed on its own (no batch "
            "statistics, no capacity limits), the results are the same. Take the rows from "
            f"{_other(one)}'s result{', detached' * (one.needs == 'detach')}.",
        ),
        "unread": (
            f"Nothing reads what {what}{place(one.line)} compute{s}",
            "No operator and no part of the program reads the results, in this step or the next "
            "one, and no gradient flows through them. Leave them out, or compute them in the "
            "steps that use them.",
        ),
        "unread-gradient": (
            f"{what} of the backward pass compute{s}{others} gradients that nothing reads",
            "The gradients belong to operators of the code line in the evidence. They are dropped "
            "before an optimizer or any other operator reads them. Set requires_grad_(False) on "
            "that line's weights or inputs for this pass, or name the inputs that need a gradient: "
            "backward(inputs=...). First make reentrant checkpoints non-reentrant: their weights "
            "get no gradient unless an input needs one. Other gradients stay the same.",
        ),
        "unread-recompute": (
            f"Nothing reads the results of {what} in reentrant recomputes",
            "A reentrant checkpoint runs its whole function again, and the last operators' "
            "results are not needed for the backward pass. With use_reentrant=False a recompute "
            "stops where nothing more is needed. That variant's saved-tensor hooks take time, so "
            "measure the step.",
        ),
    }[one.kind]
    same = (f"the same as{place(one.same_as)}",) if one.same_as else ()
    inside = f" in {one.module or one.module_class}" if one.module or one.module_class else ""
    return rule.finding(
        evidence,
        title=title,
        detail=detail + saves,
        evidence=(f"{plural(one.operators, 'operator')}{inside}{place(one.line)}", *same, took),
        saving_ms=least or None,
        saving_pct=100 * (least / evidence.cost.step_ms if least and evidence.cost else one.share),
    )


def _other(one: Work) -> str:
    return "the training forward" if one.needs == "detach" else "an earlier forward"


def _reuse(one: Work) -> str:
    """How to use the other result, and at which price."""
    return {
        "detach": "Use the detached result of the forward with gradients. It takes no more memory, "
        "and you can remove the forward without gradients.",
        "retain-graph": "A backward pass has freed the first result's graph by then. To use it "
        "again takes one backward pass of both losses together, or retain_graph=True, which keeps "
        "the graph's memory longer.",
        "": "Keep the first result in a variable and use it again.",
    }[one.needs]


RS311 = _kept_rule("RS311", "between-checkpoints", "between")
RS312 = _kept_rule("RS312", "alive-after-backward", "after-backward")
RS313 = _kept_rule("RS313", "never-read", "never-read")
RS321 = _work_rule("RS321", "repeated-work", "repeated", "repeated-rows")
RS322 = _work_rule("RS322", "unread-work", "unread")
RS323 = _work_rule("RS323", "unread-gradients", "unread-gradient")
RS324 = _work_rule("RS324", "recompute-tail", "unread-recompute")
