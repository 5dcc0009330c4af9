"""Every sentence of terminal, page, Markdown and issue, with the condition that makes it true.

``python -m tests.report.sentences`` prints them. Those of ``report.words`` have theirs with them;
of the others, which hold numbers, it is here, said a second time and apart from the code that
prints them. ``GENERAL`` are definitions, and sentences on the page itself: true of any result.
"""

# mypy: disable-error-code="union-attr, operator"
# A part that a condition asks for may be missing: then it does not hold.

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from recompute_scan import report
from recompute_scan.bundle import pack
from recompute_scan.report import words
from recompute_scan.result import MEASURED, Result
from recompute_scan.result.compare import Comparison

Condition = Callable[[Result], object]
ROOT = Path(report.__file__).parent
# What prints something else than a result: a comparison, a log, a figure for a notebook.
# What `bundle` says of its archive; `tests/share` holds them.
_ON_ARCHIVES = (" stay out.", " stays out.", " in the original", "No archive that proves")
_OTHERS = {"render.py", "compare.html", "finding_words.py", "sheet.py"}
# What a comparison says, and when.
COMPARED: dict[str, Callable[[Comparison], object]] = {
    "The step times cannot be compared.": lambda c: c.obstacles,
    "The step times cannot be compared: one is unknown": lambda c: (
        not c.obstacles and None in (c.before.step_ms, c.after.step_ms)
    ),
    "The median step takes as long as before": lambda c: (
        not c.obstacles and abs(c.time_change_pct or 0.0) < 0.05
    ),
    "{}; step times: {}": lambda c: c.difference is not None,
    "which lies within the spread of the step times": lambda c: (
        c.before.step_low_ms <= c.after.step_high_ms
        and c.after.step_low_ms <= c.before.step_high_ms
    ),
    "A step takes {} time than before": lambda c: (
        c.before.step_high_ms < c.after.step_low_ms or c.after.step_high_ms < c.before.step_low_ms
    ),
    "With fewer than six steps on a side": lambda c: min(c.before.steps, c.after.steps) < 6,
    "{}: {} {} time, {} {} throughput": lambda c: (
        c.difference in (None, "sure") and abs(c.time_change_pct or 0.0) >= 0.05
    ),
    "Both bars have one scale": lambda c: (
        not c.obstacles and None not in (c.before.recompute_ms, c.after.recompute_ms)
    ),
    "Redundant recomputes are hatched": lambda c: (
        c.before.redundant_recompute_ms or c.after.redundant_recompute_ms
    ),
    "Neither side has a finding or a checkpoint": lambda c: (
        not (
            *c.findings_gone,
            *c.findings_new,
            *c.findings_kept,
            *c.checkpoints_gone,
            *c.checkpoints_new,
            *c.checkpoints_kept,
        )
    ),
    "The table below holds the numbers": lambda _: True,
    "Written by recompute-scan": lambda _: True,
}


def outcome(*names: str) -> Condition:
    """What verifying the fix came to."""
    return lambda r: r.verified is not None and r.verified.outcome in names


def fixed(status: str) -> Condition:
    """How the gradients with the fix compare, where it was applied."""
    return lambda r: (
        r.verified and r.verified.after and r.verified.gradients_with_fix.status == status
    )


def bare(status: str) -> Condition:
    """How the gradients without checkpoints compare."""
    return lambda r: r.verified and r.verified.gradients and r.verified.gradients.status == status


def losses(status: str) -> Condition:
    """How the losses with the fix compare, where it was applied."""
    return lambda r: r.verified and r.verified.after and r.verified.losses.status == status


def without(status: str) -> Condition:
    """How the run without checkpoints ended."""
    return lambda r: r.verified and (r.verified.without_checkpointing or _NONE).status == status


def proof(*outcomes: str) -> Condition:
    """What proving the plan came to."""
    return lambda r: r.plan is not None and r.plan.proof.outcome in outcomes


class _NONE:
    status = ""


def _saves(r: Result) -> object:
    measured = r.verified is not None and r.verified.outcome in MEASURED
    saved = r.verified.saving_ms if measured and r.verified else None
    predicted = r.cost.step_ms - r.cost.predicted_step_ms if r.cost else 0.0
    return r.verdict == "doubled" and (saved if saved is not None else predicted) > 0


def _lanes(r: Result) -> list[list[str]]:
    lanes = r.proof.lanes if r.proof else ()
    return [[op.name for op in lane.ops] for lane in lanes if lane.kind != "backward"]


def _no_verdict(r: Result) -> object:
    return r.verdict == "inconclusive"


def _compared(r: Result) -> object:
    return r.fidelity is not None and r.fidelity.compared


def _plan_arm(r: Result) -> object:
    return r.verified is not None and r.verified.with_plan is not None


CONDITIONS: dict[str, Condition] = {
    "of one step took {}: {} in recompute": lambda r: r.watched is not None and r.watched.operators,
    "The step's own tensors took at most": lambda r: bool(r.watched.work or r.watched.kept),
    "were kept after their last use": lambda r: any(one.bytes for one in r.watched.kept),
    "in small pieces and": lambda r: (
        r.watched.small_ms + r.watched.library_ms >= 0.01 * r.watched.ms
    ),
    "Unread results could not be found": lambda r: r.watched.hidden is not None,
    "the script ran out of memory with it": lambda r: (
        (r.plan.proof.outcome, r.plan.proof.peak_bytes) == ("does-not-fit", None)
    ),
    "The profiler slows these steps down": lambda r: r.cost.step_source == "trace",
    "a saving is not certain": lambda r: r.verdict == "doubled" and not _saves(r),
    "no saving is predicted": lambda r: r.verdict == "doubled" and not _saves(r),
    "The recording has whole steps with an annotation": _no_verdict,
    "HFU is {} times MFU": lambda r: r.flops.hfu_over_mfu is not None,
    "Of a step of {}, {} are {}": lambda r: r.cost.recompute_ms > 0,
    "The same operators run in every lane": lambda r: len(set(map(tuple, _lanes(r)))) == 1,
    "in the first lane, {} run again": lambda r: len(set(map(tuple, _lanes(r)))) > 1,
    "that redundant recomputes take": _saves,
    "The redundant recomputes take": _saves,
    "are redundant recomputes of work": _saves,
    "no recompute was counted in it": lambda r: r.cost.recompute_ms == 0,
    "With the fix a step takes": _saves,
    "with the fix it takes": _saves,
    "less time, {} more throughput": _saves,
    # what to record
    "Record at least one whole training step": _no_verdict,
    "The recomputes of compiled code are in the graphs": lambda r: (
        _no_verdict(r) and r.environment.get("torch_compile") != "used"
    ),
    "The graphs of torch.compile do not name checkpoints": _no_verdict,
    "The graphs of torch.compile are not here": lambda r: (
        _no_verdict(r) and r.environment.get("torch_compile") == "used"
    ),
    # verified
    "Without any checkpoint the script ran out of memory, so": lambda r: (
        r.verified.gradients.in_parts is not None
    ),
    "are equal to the last bit with and without": bare("equal"),
    "are equal up to rounding with and without": bare("rounding"),
    "It is not known whether the script's checkpoints change gradients": bare("not-repeatable"),
    "Gradients could not be compared with those without": bare("not-seen"),
    "The script's checkpoints change what is trained": bare("different"),
    "gradients of the first step stay equal to the last bit": fixed("equal"),
    "With the fix gradients of the first step change": fixed("different"),
    "gradients of the first step stay equal up to rounding": fixed("rounding"),
    "With the fix the gradients of the first step differ, and": fixed("not-repeatable"),
    "The gradients with the fix could not be compared": fixed("not-seen"),
    "There was no fix to try": outcome("not-tried"),
    "Memory grew: with the fix": lambda r: (
        r.verified.after_peak_bytes > r.verified.before_peak_bytes
    ),
    "The fix could not be applied in memory": outcome("not-applied"),
    "The script did not run to its end with the fix": outcome("failed"),
    "With the fix applied the losses differ": outcome("losses-differ"),
    "The step times vary too much to say what the fix saves": outcome("unclear"),
    "The fix does not help measurably": outcome("no-gain"),
    "The fix does not help: a step": outcome("slower"),
    "The fix helps, but the step times vary": outcome("helps"),
    "The fix saves {}": outcome("helps"),
    "No loss was seen: backward() was never called": losses("not-seen"),
    "does not give the same losses twice": losses("not-repeatable"),
    "The script sets no seed;": lambda r: r.verified.losses.seeded_by_script is False,
    "Losses differ by up to": losses("different"),
    "some losses are not numbers": losses("different"),
    "With the fix {} equal to the last bit": losses("equal"),
    "A step was predicted to take": lambda r: r.verified.after_step_ms and r.cost,
    "The measured step is outside that range": lambda r: r.verified.after_step_ms and r.cost,
    "The measured step is in that range": lambda r: r.verified.after_step_ms and r.cost,
    "nothing was measured: not all of their": lambda r: r.verified.with_plan.arm is None,
    "the script ran out of memory: the plan does not fit": _plan_arm,
    "the script did not run to its end.": _plan_arm,
    "Its losses equal the unchanged script's": _plan_arm,
    "Some of its losses are not numbers": _plan_arm,
    "and the unchanged script's own by up to": _plan_arm,
    "Without checkpoints the script does not fit": without("out-of-memory"),
    "Without any checkpoint the script did not run": without("failed"),
    "Without any checkpoint the script ran to its end, but": without("measured"),
    ", in runs that varied": without("measured"),
    ": no less than {}": without("measured"),
    "{} less time than {}": without("measured"),
    "with the fix switched on and off from step to step": lambda r: r.verified.pairs,
    "timed in each run, without the profiler": lambda r: r.verified.before,
    # blocks, call sites, compiled code
    "of block left out": lambda r: len(r.regions) > 1,
    "left code to Python": lambda r: r.compiled is not None,
    "the backward graphs run {} again": lambda r: r.compiled.graphs,
    ": these are fused with what needs": lambda r: any(one.free for one in r.compiled.graphs),
    "No compiled code has a backward pass": lambda r: not r.compiled.graphs,
    "Not known: the compiler's graphs for": lambda r: r.compiled.unknown and not r.compiled.graphs,
    "The graphs for {} are missing": lambda r: r.compiled.unknown and r.compiled.graphs,
    "Read from the forward and backward graphs": lambda r: r.compiled.graphs,
    # the device
    "of its peak with {} (HFU)": lambda r: r.flops.hfu is not None,
    "Peak for the number types that ran: {}": lambda r: r.flops.peak_tflops is not None,
    ", with no redundant recompute": lambda r: r.memory is not None and r.memory.plans,
    "The recorded step's parts were scaled": lambda r: r.verified.outcome in MEASURED,
    "Start it on as many processes as before": lambda r: len(r.ranks) > 1,
    "were allocated in the recorded step": lambda r: r.memory.peak_allocated_bytes is not None,
    "out of memory in each micro-batch": lambda r: r.memory.regions,
    "Not counted, because a formula or shapes are missing": lambda r: r.flops.uncounted,
    "The device's peak is unknown": lambda r: r.flops.hfu is None,
    "Matrix products, convolutions and attention, a": lambda r: r.flops is not None,
    "The dashed line is what may be allocated": lambda r: r.memory.budget_bytes is not None,
    "What fits: {}": lambda r: r.memory.chosen is not None,
    "The large point is the fastest plan": lambda r: r.memory.chosen is not None,
    "Over all recorded steps. Every kernel": lambda r: r.hta is not None,
    "Beside its figures, what recompute-scan counts": lambda r: r.hta is not None,
    "were in use at the peak, of": lambda r: r.snapshots,
    "It has no history": lambda r: any(not one.events for one in r.snapshots),
    # plans
    "The script already does this": lambda r: r.plan.as_today,
    "the script does this": lambda r: (
        r.plan.as_today and any("recompute_scan.fit" in step for step in r.plan.setting)
    ),
    "Proven: within the limit, and faster": proof("helps"),
    "Proven: it keeps the limit.": proof("fits"),
    "Rejected: it is no faster": proof("no-gain"),
    "Rejected: it is slower": proof("slower"),
    "Not proven: it fits, but": proof("unclear"),
    "Rejected: with it the script exceeds": proof("does-not-fit"),
    "Rejected: the script failed": proof("failed"),
    "It was not measured (--no-verify)": proof("not-tried"),
    "Setting to change": lambda r: r.plan.as_today or proof("helps", "fits")(r),
    "Setting to try; it was not measured": proof("not-tried"),
    "Keep what you have: the plan for": proof(
        "no-gain", "slower", "unclear", "does-not-fit", "failed"
    ),
    "Measured in turn with the unchanged script": lambda r: r.plan.proof.step_ms is not None,
    "To keep to {}": lambda r: r.plan is not None,
    "The fastest arrangement for each amount of memory": lambda r: r.plan is not None,
    ". Today's may lie above the curve": lambda r: r.plan is not None,
    "The dashed line is the limit": lambda r: r.plan.budget_bytes is not None,
    # by design, policies, the same computation
    "again per step in the gradients of": lambda r: r.by_design,
    "runs its own block once more without gradients": lambda r: r.by_design,
    "runs its own block once more in {}": lambda r: any(one.with_gradients for one in r.by_design),
    "Record fewer steps": lambda r: r.evidence_level == "hooks",
    "as chunked losses and fused activations do": lambda r: r.by_design,
    "was asked {} in {}": lambda r: r.policies.policies,
    "Named in the policy, but matching no call": lambda r: r.policies.policies,
    "No policy was asked in the recorded step": lambda r: not r.policies.policies,
    "Keeping the random state in all": lambda r: r.fidelity.keeping_ms is not None,
    "each recompute was compared with its forward: each": _compared,
    # cost and proof
    "median of {}": lambda r: r.cost is not None,
    "how far step times vary is not known": lambda r: r.cost.steps == 1,
    "on a machine that does nothing else": lambda r: r.cost is not None,
    "how much of it repeats forward work is not": lambda r: r.cost is not None and _no_verdict(r),
    "redundant among them": lambda r: r.cost is not None,
    "Collectives that recomputes repeat": lambda r: r.cost.repeated_collectives_ms is not None,
    "The line under the second bar": _saves,
    "The runs of {} in step": lambda r: r.proof is not None,
    "and the backward pass ran no operator of it again": lambda r: len(_lanes(r)) < 2,
    "of them once more in the backward pass": lambda r: len(_lanes(r)) == 2,
    "times in the backward pass ({} of them)": lambda r: len(_lanes(r)) > 2,
    "one recompute is needed, the rest is redundant": lambda r: len(_lanes(r)) > 2,
    "Each lane is one run of": lambda r: r.proof is not None,
    "The tables below hold the numbers": lambda r: r.proof is not None,
    "shortest operators are not drawn": lambda r: r.proof is not None,
    "more recomputes are not drawn here": lambda r: r.proof is not None,
    "names them all": lambda r: r.proof is not None,
    "were recorded under the profiler": lambda r: r.proof is not None,
    "Attention ran {}": lambda r: r.attention is not None,
    # ranks, findings, checks
    "The numbers of this page are from rank": lambda r: len(r.ranks) > 1,
    ", the first with the worst verdict": lambda r: len({one.verdict for one in r.ranks}) > 1,
    "that differ: {}": lambda r: len({one.verdict for one in r.ranks}) > 1,
    ", all {}": lambda r: len({one.verdict for one in r.ranks}) == 1,
    "All ranks of a step wait for the slowest": lambda r: len(r.ranks) > 1,
    "share a row above": lambda r: len(r.ranks) > 1,
    "more groups of ranks are in the result's JSON": lambda r: len(r.ranks) > 1,
    "further ranks are only in the result's JSON": lambda r: len(r.ranks) > 1,
    "Savings of different findings, and the memory": lambda r: len(r.findings) > 1,
    "The whole diff": lambda r: any(one.fix and one.fix.diff for one in r.findings),
    "The fix was tried in memory": lambda r: r.verified is not None and r.verified.after,
    "After the fix the verdict should read": lambda r: (
        _saves(r)
        and r.recompute_per_backward == 2
        and any(f.fix and f.fix.removes for f in r.findings)
    ),
    "Measure the fix; nothing is edited": lambda r: any(
        f.fix and f.fix.removes for f in r.findings
    ),
    "See the fix.": lambda r: any(f.fix and f.fix.diff for f in r.findings),
    "Apply the fix; --revert undoes it": lambda r: any(f.fix and f.fix.diff for f in r.findings),
    "Change it and record again": lambda r: (
        r.verdict == "doubled" or any(f.fix for f in r.findings)
    ),
    "Compare gradients with and without checkpoints; nothing": lambda r: (
        r.fidelity is not None or any(f.wrong_gradients for f in r.findings)
    ),
    "of the step to save memory. Do you need that memory": lambda r: (
        r.cost is not None and r.cost.breakdown.recompute > 0
    ),
    "If memory runs short, see which layers to checkpoint": lambda r: r.verdict == "none",
    "Add the script's own arguments": lambda r: "target" in r.environment,
    "Put your own script and its arguments": lambda r: r.crash is None,
    "Not known: the trace does not say": lambda r: not r.environment,
    "steps; the rest are in the result's JSON": lambda r: len(r.steps) > 200,
    "more arrangements are in the result's JSON": lambda r: r.regions,
    "further ones are only in the result's JSON": lambda r: len(r.regions) > 1,
    "Not known: only a trace that": lambda r: (
        not any(one.call_site for region in r.regions for one in region.checkpoints)
    ),
}
# Definitions, instructions, and sentences on the page itself.
GENERAL = (
    "{}, {}, {} confidence",
    "Confidence: {}. Evidence",
    "How to read this page",
    "Every number is also in a table",
    "Paste the Markdown into an issue",
    "Written by recompute-scan",
    "Operators that only a forward pass has, counted",
    "Operators nest on each thread by time",
    "One optimizer step. With gradient accumulation",
    "Throwing away what the forward pass",
    "One checkpointed call, or a part",
    "One more run of a block's forward pass",
    "The recomputes beyond the first. They take time",
    "The two variants of torch.utils.checkpoint",
    "annotated: the checkpointed calls are annotated",
    "The result itself is too large",
    "Everything on this page comes from",
    "Perfetto: opens ui.perfetto.dev",
    "Touch or hover over an operator",
    "See which layers need a checkpoint",
    "Compare the two",
    "Read about this failure",
    "What did you expect instead",
    "The archive gives the verdict, the counts",
    "The archive holds no lines of the script",
    "With the script: `recompute-scan run SCRIPT`",
    "The tables hold the numbers",
    "The table below holds the numbers",
    "more are in the result",
)


def strings(path: Path) -> Iterator[str]:
    """What a module or template says; of a text with values in it, ``{}`` for each."""
    source = path.read_text("utf-8")
    if path.suffix == ".html":
        text = re.sub(r"\{#.*?#\}|\{%.*?%\}", "\n", source, flags=re.DOTALL)
        text = re.sub(r"\{\{.*?\}\}", "{}", text, flags=re.DOTALL)
        text = re.sub(r"<(?!/?(?:strong|em|code|a)\b)[^>]*>", "\n", text)
        yield from re.sub(r"<[^>]*>", "", text).split("\n")
        return
    tree = ast.parse(source)
    parts: set[int] = set()
    helps: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            helps.update(map(id, ast.walk(node.body[0])) if ast.get_docstring(node) else ())
        if isinstance(node, ast.keyword) and node.arg == "help":
            helps.update(map(id, ast.walk(node.value)))
    for node in ast.walk(tree):
        if id(node) in parts | helps:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )


def all_strings() -> Iterator[str]:
    """Every text of the report and the issue, on one line."""
    yield from (said for _, said in _with_files())


def _with_files() -> Iterator[tuple[str, str]]:
    files = [*ROOT.rglob("*.py"), *ROOT.rglob("*.html"), Path(inspect.getfile(pack))]
    for path in sorted(files):
        if path.name not in _OTHERS:
            yield from ((path.name, " ".join(text.split())) for text in strings(path))


def sentences() -> Iterator[tuple[str, str]]:
    """The file and text of every whole sentence that the report and the issue print."""
    for file, said in _with_files():
        if any(phrase in said for phrase in _ON_ARCHIVES):
            continue
        if len(said.split()) >= 5 and re.search(r"\w{3}.*\.(?:\{\}|\*|$| )", said):
            yield file, said


def of_comparisons() -> Iterator[str]:
    """Every whole sentence that a comparison prints."""
    for path in (ROOT / "render.py", ROOT / "templates/compare.html"):
        for text in strings(path):
            said = " ".join(text.split())
            if len(said.split()) >= 5 and re.search(r"\w{3}.*\.(?:\{\}|\*|$| )", said):
                yield said


def known(said: str) -> str | None:
    """What makes the sentence true, as text; ``None`` where nobody has said."""
    for one in words.FIXED:
        if said in one.text or one.text in said:
            return source_of(one.true)
    for phrase, condition in CONDITIONS.items():
        if phrase in said:
            return source_of(condition)
    return "any result" if any(phrase in said for phrase in GENERAL) else None


def source_of(condition: Condition) -> str:
    """The condition as it is written."""
    if condition.__name__ != "<lambda>":
        return f"{condition.__qualname__.partition('.')[0].strip('_')}: {condition.__doc__ or ''}"
    lines = " ".join(inspect.getsource(condition).split())
    return lines[lines.index("lambda") :].removeprefix("lambda ").rstrip(",)( ")


def main() -> None:
    """Print the table."""
    for file, said in sentences():
        print(f"{file}: {said}\n    where {known(said)}")


if __name__ == "__main__":
    main()
