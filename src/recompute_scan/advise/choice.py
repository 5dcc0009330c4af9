"""Which of several checkpoints around one block to keep, and how to take the other out.

That is a sentence in the words of the line and of the installed version, and a diff that
`git apply` and `patch` take. The statement on the line is found by parsing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from recompute_scan.annotations import COMPILED, COUNTS_RUNS, EARLY_STOP_OFF, IN_PARTS
from recompute_scan.cost.memory import Levels
from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.base import (
    CHECKPOINT_DOCS,
    FEWER,
    Edit,
    Mechanism,
    is_configuration,
    opposite,
)
from recompute_scan.frameworks.registry import find_mechanism
from recompute_scan.result import Checkpoint, Fix
from recompute_scan.result.patch import changes_diff
from recompute_scan.result.run_record import Source, file_of_site
from recompute_scan.units import is_before

_LINE = re.compile(r".+:\d+", re.DOTALL)


class RunFacts(Struct, frozen=True):
    """A run as far as it is known.

    Attributes:
        versions: Installed versions by the distribution's name, possibly with other facts.
        sharded: Whether FSDP is at work in the trace.
        levels: What either of two levels of checkpoints keeps out of memory, where that is known.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    sharded: bool = False
    levels: Levels | None = None

    def has(self, package: str, since: str) -> bool | None:
        """Whether the package is of this version or newer; ``None`` where that is not known."""
        before = is_before(self.versions.get(package, ""), since)
        return None if before is None else not before


UNKNOWN_RUN = RunFacts()

# A fix that needs a look, without a diff.
review = partial(Fix, disposition="review", diff=None)
NOT_READ = "The file of that line could not be read, so there is no diff to check."


def mechanism_of(checkpoint: Checkpoint) -> Mechanism | None:
    """The mechanism that switched the checkpoint on, or a function of the project."""
    own = pytorch.OWN if checkpoint.mechanism is None and checkpoint.function else None
    return find_mechanism(checkpoint.mechanism) or own


def title_of(checkpoint: Checkpoint) -> str:
    """The name of the checkpoint for people; says so where it is unknown."""
    mechanism = mechanism_of(checkpoint)
    text = mechanism.title if mechanism else checkpoint.mechanism
    text = text or "a checkpoint of unknown origin"
    return f"{text} (`{checkpoint.function}`)" if checkpoint.function else text


def place(site: str | None) -> str:
    """Where it was asked for, to follow a noun: `` at train.py:3``; empty where that is unknown."""
    if not site:
        return ""
    return f" at {site}" if _LINE.fullmatch(site) else f" by {site}"


def removal(mechanism: Mechanism, site: str | None, source: Source | None, run: RunFacts) -> str:
    """How to take it out, with the place, one sentence without the full stop."""
    if site and not _LINE.fullmatch(site):
        if _is_variable(site):
            return f"unset {site}"
        if mechanism.on_by_default:
            given = f"{site} false" if site.startswith("-") else f"{site}=false"
            return f"pass {given} on the command line: by default it is on"
        return f"leave {site} out of the command line"
    statement = source.statement if source else ""
    settings = (edit for edit in mechanism.edits if edit.how in ("keyword", "entry"))
    setting = next((edit for edit in settings if _names(statement, edit.name)), None)
    if _in_configuration(site):
        return f"{f'set {setting.name} to false' if setting else 'switch it off'}{place(site)}"
    if setting is not None:
        return f"set {setting.name}={setting.value}{place(site)}"
    return f"{worded(mechanism.remove, mechanism, run, statement)}{place(site)}"


def worded(text: str, mechanism: Mechanism, run: RunFacts, statement: str = "") -> str:
    """The text in the words of the statement, else of the installed version, else of both."""
    for rename in mechanism.renames:
        if rename.old in text and not _names(statement, rename.old):
            new = run.has(rename.package, rename.since)
            if new or _names(statement, rename.new):
                text = text.replace(rename.old, rename.new)
            elif new is None:
                text = f"{text} ({rename.new} from {rename.package} {rename.since})"
    return text


def why_no_diff(mechanism: Mechanism, site: str | None, source: Source | None) -> str:
    """Why there is no diff to check, one sentence."""
    if not site:
        return "The line to change was not found, so there is no diff to check."
    if not _LINE.fullmatch(site):
        where = "in the environment" if _is_variable(site) else "on the command line"
        return f"It was switched on {where}, so there is no line to change."
    if _in_configuration(site):
        return "It was switched on in a configuration file, which other jobs may share."
    if source is None:
        return NOT_READ
    if source.installed:
        return "That line is in an installed package: change it in the package's source."
    if not source.whole_lines:
        return "The statement shares its line with others, so there is no diff to check."
    if mechanism.caution and not mechanism.edits:
        return mechanism.caution
    return "The fix does not edit the statement on that line, so there is no diff to check."


def _names(statement: str, name: str) -> bool:
    return bool(re.search(rf"\b{re.escape(name)}\b", statement))


def _is_variable(site: str) -> bool:
    return site.isupper() and site.isidentifier()


def _in_configuration(site: str | None) -> bool:
    return bool(site and _LINE.fullmatch(site) and is_configuration(file_of_site(site)))


def leave_out(mechanism: Mechanism | None, run: RunFacts) -> str:
    """How to leave out single layers, in the words for the installed version.

    They have ``{layers}`` and ``{title}`` in them.
    """
    if mechanism is None:
        return FEWER
    old = (b for b in mechanism.fewer_before if run.has(b.package, b.version) is False)
    return next((before.words for before in old), mechanism.fewer)


# A non-reentrant checkpoint outweighs a reentrant one that is worth so much more, and no more.
_NON_REENTRANT = 8
# Which of them to keep first, by what they are around.
_EXTENT = {"block": 2, "several": 1, "part": 0}
_FEEDS = (
    "The removed switch also made the model's inputs ask for gradients. Where embeddings are "
    "frozen, the reentrant checkpoint that stays needs that: call enable_input_require_grads()."
)
# The identity of a switch: the mechanism and the line that set it.
Switch = tuple[str | None, str | None]


def advise_removal(
    checkpoints: Sequence[Checkpoint],
    sources: Mapping[str, Source],
    alone: Collection[Switch] = (),
    run: RunFacts = UNKNOWN_RUN,
) -> Fix | None:
    """The fix for a block with two or more checkpoints; ``None`` where fewer are known.

    Of two levels, one around several others, the one stays without which the peak would grow more.
    Where that is not known, one around single blocks stays, rather than one around several at
    once, which holds all that these save while it recomputes them, or one around parts. Of such
    alike a function that goes through its block part by part stays, which holds no more than one
    of these, then one inside compiled code, or else the mechanism that costs least; of two of like
    worth the non-reentrant one, which checks what it recomputes and stops early. Switching one to
    another variant is never advised: reentrant hides faults, and both still run.

    Args:
        checkpoints: All checkpoints around the block, outermost first.
        sources: Source statements by call site, from the run's own run record.
        alone: Switches that elsewhere are the only checkpoint of a block, which would lose it.
        run: What else is known of the run.
    """
    if len(checkpoints) < 2:
        return None
    kept, dropped = keep_and_drop(checkpoints, alone, sharded=run.sharded, levels=run.levels)
    mechanism = mechanism_of(dropped)
    if mechanism is None or (mechanism_of(kept) is None and kept.mechanism is None):
        keep = _which(kept, dropped)
        if IN_PARTS in kept.options and kept.around == dropped.around:
            keep = _keep(kept, checkpoints, run)
        other = f"the other one, {title_of(dropped)}" if mechanism else "the other one"
        return review(
            summary="Two checkpoints enclose each block: keep only one of them.",
            keep=keep,
            remove=f"{other}; record with `recompute-scan run` to see which line it is",
            docs=CHECKPOINT_DOCS,
            reason="It is not known which line asked for which checkpoint.",
        )
    others = _others(kept, dropped, checkpoints)
    lost = any(switch_of(one) in alone for one in (dropped, *others))
    shared = len({one.call_site for one in (kept, dropped, *others)}) < 2 + len(others)
    fix = take_out(dropped, mechanism, sources, () if shared else others, lost=lost, run=run)
    if shared and others:  # a line that asks for one that stays, too
        fix = _with_risk(fix, _go_as_well(others))
    alike = mechanism_of(kept) is mechanism and kept.function == dropped.function
    if alike and (fix.diff is None or kept.call_site == dropped.call_site):
        fix = _applied_once(kept, dropped, mechanism, run)
        fix = _with_risk(fix, _go_as_well(others)) if others else fix
        return _with_memory(fix, kept, dropped, run.levels)
    if mechanism.feeds_inputs and kept.variant == "reentrant":
        fix = _with_risk(fix, _FEEDS)
    summary = f"Keep {title_of(kept)}; {fix.summary}"
    fix = replace(fix, summary=summary, keep=_keep(kept, checkpoints, run))
    return _with_memory(fix, kept, dropped, run.levels)


def _go_as_well(others: Sequence[Checkpoint]) -> str:
    named = " and ".join(f"{title_of(one)}{place(one.call_site)}" for one in others)
    return f"Take out {named} as well."


def _with_risk(fix: Fix, risk: str) -> Fix:
    return replace(fix, disposition="review", reason=" ".join(filter(None, (fix.reason, risk))))


def _others(
    kept: Checkpoint, dropped: Checkpoint, checkpoints: Sequence[Checkpoint]
) -> list[Checkpoint]:
    """All that has to go as well, so that each part of the block keeps one checkpoint; empty where
    it is not known which lines asked for them, or where one line asked for one function twice.
    """
    found = [
        one
        for one in checkpoints
        if one not in (kept, dropped) and not one.around == kept.around == "part"
    ]
    calls = [(one.call_site, one.function) for one in (kept, dropped, *found)]
    known = None not in dict(calls) and all(mechanism_of(one) for one in found)
    return found if known and len(set(calls)) == len(calls) else []


def _with_memory(fix: Fix, kept: Checkpoint, dropped: Checkpoint, levels: Levels | None) -> Fix:
    """The fix, with what its removal costs in memory, where they differ in extent.

    Results stay the same, but a peak that grows can end a training.
    """
    if kept.around == dropped.around:
        return fix
    outer = dropped.depth < kept.depth
    mine, other = (levels.without_inner, levels.without_outer) if levels else (0, 0)
    if outer:
        mine, other = other, mine
    which, rest = ("outer", "inner") if outer else ("inner", "outer")
    # The estimate is right up to a factor, and says which is less where they are far apart.
    if other < 2 * max(mine, 1):
        memory = (
            "The checkpoints differ in extent, and which of them saves more memory is not known: "
            "`--verify` measures the peak with and without the fix."
        )
    elif mine:
        memory = (
            "By the shapes in the trace, removing "
            f"the {which} checkpoints raises the peak less than removing the {rest} ones. "
            "`--verify` measures it."
        )
    else:
        memory = (
            "The checkpoints differ in extent: by the shapes in the trace the peak does "
            f"not grow without the {which} ones."
        )
        if fix.reason is None:
            return replace(fix, keep=f"{fix.keep} {memory}")
    return _with_risk(fix, memory)


def keep_and_drop(
    checkpoints: Sequence[Checkpoint],
    alone: Collection[Switch] = (),
    *,
    sharded: bool = False,
    levels: Levels | None = None,
) -> tuple[Checkpoint, Checkpoint]:
    """Of two or more checkpoints the one to keep, and the first to take out.

    Where it is not known what switched one of them on, only their variants are compared. Of two
    levels the one goes without which the peak grows less, where that is known.
    """
    around = _EXTENT
    if levels is not None:
        outward = levels.without_inner < levels.without_outer
        order = ("part", "block", "several") if outward else ("several", "block", "part")
        around = {extent: place for place, extent in enumerate(order)}
    known = all(mechanism_of(each) is not None for each in checkpoints)

    def preference(checkpoint: Checkpoint) -> tuple[bool, int, bool, bool, bool, int, bool, int]:
        return (
            not sharded and _feeds_inputs(checkpoint, checkpoints),
            around[checkpoint.around],
            IN_PARTS in checkpoint.options,
            switch_of(checkpoint) in alone,
            COMPILED in checkpoint.options,
            _worth(checkpoint, checkpoints, sharded) if known else 0,
            checkpoint.variant == "non-reentrant",
            -checkpoint.depth,
        )

    kept, dropped, *_ = sorted(checkpoints, key=preference, reverse=True)
    return kept, dropped


def kept(
    checkpoints: Sequence[Checkpoint], *, sharded: bool = False, levels: Levels | None = None
) -> Checkpoint:
    """The one that stays of one or more checkpoints around a block."""
    if len(checkpoints) == 1:
        return checkpoints[0]
    return keep_and_drop(checkpoints, sharded=sharded, levels=levels)[0]


def take_out(
    dropped: Checkpoint,
    mechanism: Mechanism,
    sources: Mapping[str, Source],
    others: Sequence[Checkpoint] = (),
    *,
    lost: bool = False,
    run: RunFacts = UNKNOWN_RUN,
) -> Fix:
    """The fix that takes one checkpoint out.

    Others of the same block go as well, where one diff can. It is ``lost`` to blocks that have only
    this checkpoint.
    """
    gone = [(dropped, mechanism), *((one, mechanism_of(one) or mechanism) for one in others)]
    changes = [change for one, how in gone if (change := _changed(one, how, sources)) is not None]
    if others and (
        len(changes) < len(gone) or len({file_of_site(site) for site, *_ in changes}) > 1
    ):
        fix = take_out(dropped, mechanism, sources, lost=lost, run=run)
        return _with_risk(fix, _go_as_well(others))
    site = dropped.call_site
    source = sources.get(site or "")
    diff = changes_diff(changes) if changes else None
    more = "".join(
        f" and{place(one.call_site)}"
        if how is mechanism
        else f", and {removal(how, one.call_site, sources.get(one.call_site or ''), run)}"
        for one, how in gone[1:]
    )
    risks = [_reason(one, how, lost=lost) for one, how in gone]
    missing = why_no_diff(mechanism, site, source) if not diff or _in_configuration(site) else None
    reason = " ".join(dict.fromkeys(one for one in (*risks, missing) if one)) or None
    return Fix(
        summary=f"{removal(mechanism, site, source, run)}{more}.",
        disposition="review" if reason else "safe",
        diff=diff,
        keep="",
        remove=" and ".join(f"{title_of(one)}{place(one.call_site)}" for one, _ in gone),
        docs=mechanism.docs,
        removes=dropped,
        reason=reason,
        removes_too=tuple(others),
    )


def _changed(
    dropped: Checkpoint, mechanism: Mechanism, sources: Mapping[str, Source]
) -> tuple[str, Source, list[str]] | None:
    """The statement that asked for it, with its new lines; ``None`` where none are known."""
    site = dropped.call_site
    source = sources.get(site or "")
    if site is None or source is None:
        return None
    new = (turned_off if _in_configuration(site) else edited)(source, mechanism.edits)
    return None if new is None else (site, source, new)


def switch_of(checkpoint: Checkpoint) -> Switch:
    """Which switch turned this checkpoint on."""
    return checkpoint.mechanism, checkpoint.call_site


def _worth(checkpoint: Checkpoint, checkpoints: Sequence[Checkpoint], sharded: bool) -> int:
    """How much speaks for keeping it here."""
    mechanism = mechanism_of(checkpoint)
    if mechanism is None:
        return 0
    if _fits_fsdp(checkpoint, checkpoints, sharded):
        return mechanism.keep_sharded
    return mechanism.keep + _NON_REENTRANT * (checkpoint.variant == "non-reentrant")


def _feeds_inputs(checkpoint: Checkpoint, checkpoints: Sequence[Checkpoint]) -> bool:
    """Would only reentrant ones stay without it, with no input that asks for a gradient?"""
    mechanism = mechanism_of(checkpoint)
    others = (one for one in checkpoints if one is not checkpoint)
    return (
        mechanism is not None
        and mechanism.feeds_inputs
        and all(one.variant == "reentrant" for one in others)
    )


def _fits_fsdp(checkpoint: Checkpoint, checkpoints: Sequence[Checkpoint], sharded: bool) -> bool:
    """Is it made for FSDP's units, and the only one inside them, or one that checks itself?"""
    mechanism = mechanism_of(checkpoint)
    innermost = checkpoint.depth >= max(each.depth for each in checkpoints)
    made_for_it = mechanism is not None and mechanism.keep_sharded > 0
    return sharded and made_for_it and (innermost or checkpoint.variant == "non-reentrant")


def _applied_once(
    kept: Checkpoint, dropped: Checkpoint, mechanism: Mechanism, run: RunFacts
) -> Fix:
    """The fix for one mechanism that is applied twice: to switch it off would take out both."""
    name, site = title_of(dropped), dropped.call_site
    together = kept.call_site == site
    remove = f"the second application of {name}{place(site)}"
    reason = "The line may also do other work that must stay."
    if dropped.module_class and mechanism.fewer != FEWER:
        layers = f"each {dropped.module_class}"
        how = leave_out(mechanism, run).format(layers=layers, title=name)
        summary = f"Apply {name} once, {kept.extent}: {how}{place(site)}"
        remove = f"its checkpoints {dropped.extent}"
        reason = "That line switches both on, so it stays." if together else reason
    elif kept.around != dropped.around:
        keep = f"keep it {kept.extent}{place(kept.call_site)}"
        summary = f"Apply {name} once: {keep}, leave it out {dropped.extent}{place(site)}"
        reason = "A change of that line may remove both." if together else reason
    elif together:
        summary = f"Apply {name} once: both of its checkpoints come from {site or 'one place'}"
        reason = "A change of that line removes both, unless that line makes the second call."
    else:
        summary = f"Apply {name} once: keep it{place(kept.call_site)}, leave it out{place(site)}"
    return review(
        summary=f"{summary}.",
        keep=f"{name}, applied once.",
        remove=remove,
        docs=mechanism.docs,
        removes=dropped,
        reason=reason,
    )


def _reason(dropped: Checkpoint, mechanism: Mechanism, *, lost: bool) -> str | None:
    """Why the fix needs a look; ``None`` where it cannot change the results of training."""
    if lost:
        return "Other blocks have only this checkpoint, and would need more memory without it."
    if COUNTS_RUNS in dropped.options:
        return (
            "Modules in the block update running statistics in each run. After the fix they run "
            "less often, as without checkpointing."
        )
    return mechanism.caution


def _which(kept: Checkpoint, dropped: Checkpoint) -> str:
    """How the one that stays differs from the other, where lines and settings are unknown."""
    if kept.around != dropped.around:
        text = f"the checkpoint {kept.extent}"
    elif kept.variant is None or dropped.variant is None:
        return "the non-reentrant checkpoint, where there is one"
    elif kept.variant != dropped.variant:
        text = f"the {kept.variant} checkpoint"
    else:
        text = "the outer one" if kept.depth < dropped.depth else "the inner one"
    return f"{text}, {title_of(kept)}" if mechanism_of(kept) else text


def _keep(kept: Checkpoint, checkpoints: Sequence[Checkpoint], run: RunFacts) -> str:
    """The checkpoint that stays, and the reasons that hold in this run."""
    mechanism = mechanism_of(kept)
    reasons = []
    if _fits_fsdp(kept, checkpoints, run.sharded):
        reasons.append("inside the FSDP unit its recompute needs no second all-gather")
    if _feeds_inputs(kept, checkpoints):
        reasons.append(
            "its switch makes the model's inputs ask for gradients, which a reentrant "
            "checkpoint around frozen parts needs"
        )
    if IN_PARTS in kept.options:
        reasons.append("it runs the block part by part, and holds what one part saves at a time")
    if COMPILED in kept.options:
        reasons.append("the compiler makes its recompute a part of the backward graph")
    if kept.variant == "non-reentrant" and any(c.variant == "reentrant" for c in checkpoints):
        early = "" if EARLY_STOP_OFF in kept.options else " and stops early"
        reasons.append(f"being non-reentrant it checks the recomputed tensors{early}")
    levels = run.levels
    inner = levels is None or levels.without_inner >= levels.without_outer
    if any(c.around == "several" for c in checkpoints) and kept.around == "block" and inner:
        reasons.append("its recomputes hold one block at a time")
    if not reasons:
        reasons.append(mechanism.why_keep if mechanism else "it is enough alone")
    return f"{title_of(kept)}: {', and '.join(reasons)}."


# Keywords of `torch.utils.checkpoint.checkpoint` itself; all others go to the function.
_CHECKPOINT_KEYWORDS = frozenset(
    "context_fn debug determinism_check early_stop preserve_rng_state use_reentrant".split()
)


def edited(source: Source, edits: Iterable[Edit]) -> list[str] | None:
    """The lines that take the statement's place, by the first edit that fits.

    An empty list deletes it. ``None`` where no edit fits, or where the statement shares its
    lines with others or belongs to an installed library: nothing is guessed.
    """
    if source.installed or not source.whole_lines:
        return None
    lines = source.text.split("\n")[source.begin - source.first : source.end - source.first + 1]
    # Numbers of lines that the text does not have, or an end of line that only Python counts.
    if not lines or any("\r" in line for line in lines):
        return None
    found = map(_Statement(lines, source.alone).changed, edits)
    return next((new for new in found if new is not None), None)


def turned_off(source: Source, edits: Iterable[Edit]) -> list[str] | None:
    """The line of a configuration file with its setting off.

    ``None`` where the line does not have one setting of the mechanism that is switched on.
    """
    names = "|".join(re.escape(edit.name) for edit in edits if edit.name and edit.value == "False")
    (line,) = source.text.split("\n")[source.begin - source.first :][:1] or [""]
    entry = rf"""(?:^|[\s{{,.])["']?(?:{names})["']?\s*[:=]\s*["']?(\w+)(?![\w.])"""
    found = list(re.finditer(entry, line))
    off = opposite(found[0][1]) if len(found) == 1 else None
    if source.installed or not names or off is None:
        return None
    return [f"{line[: found[0].start(1)]}{off}{line[found[0].end(1) :]}"]


class _Statement:
    def __init__(self, lines: list[str], alone: bool) -> None:
        self._lines = [line.encode() for line in lines]
        self._indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
        self._alone = alone
        # A block around it makes an indented statement one that can be parsed alone.
        opening = "if 1:\n" if self._indent else ""
        self._offset = 2 if opening else 1
        body: list[ast.stmt] = []
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            body = ast.parse(opening + "\n".join(lines)).body
        if opening and body and isinstance(body[0], ast.If):
            body = body[0].body
        self._tree = body[0] if len(body) == 1 else None

    def changed(self, edit: Edit) -> list[str] | None:
        if self._tree is None:
            return None
        calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call)]
        if edit.how in ("keyword", "entry"):
            return self._with_value(edit, calls)
        named = [call for call in calls if _name(call) == edit.call]
        if len(named) != 1:
            return None
        (call,) = named
        whole = isinstance(self._tree, ast.Expr) and self._tree.value is call
        if edit.how == "delete":
            return ([f"{self._indent}pass"] if self._alone else []) if whole else None
        if whole or not call.args or any(isinstance(arg, ast.Starred) for arg in call.args[:1]):
            return None  # an unused result: a plain call has no effect to keep
        if edit.how == "unwrap":
            return self._replaced(call, self._text(call.args[0]))
        return self._replaced(call, self._plain_call(call))

    def _plain_call(self, call: ast.Call) -> str:
        function, *args = call.args
        text = self._text(function)
        if not isinstance(function, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
            text = f"({text})"
        kept = [word for word in call.keywords if word.arg not in _CHECKPOINT_KEYWORDS]
        words = [
            f"{w.arg}={self._text(w.value)}" if w.arg else f"**{self._text(w.value)}" for w in kept
        ]
        return f"{text}({', '.join([*map(self._text, args), *words])})"

    def _with_value(self, edit: Edit, calls: list[ast.Call]) -> list[str] | None:
        if edit.call != "*":
            calls = [call for call in calls if _name(call) == edit.call]
        values = [
            value
            for call in calls
            for value in (
                _entries(call, edit.name)
                if edit.how == "entry"
                else [word.value for word in call.keywords if word.arg == edit.name]
            )
        ]
        if len(values) == 1:
            return self._replaced(values[0], edit.value)
        if values or not edit.add or len(calls) != 1:
            return None
        (call,) = calls
        inside = [*call.args, *(word.value for word in call.keywords)]
        if not inside or any(word.arg is None for word in call.keywords):
            return None
        last = max(inside, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))
        return self._replaced(last, f"{self._text(last)}, {edit.name}={edit.value}")

    def _text(self, node: ast.expr) -> str:
        first, begin, last, end = self._span(node)
        if first == last:
            return self._lines[first][begin:end].decode()
        middle = self._lines[first + 1 : last]
        return b"\n".join([self._lines[first][begin:], *middle, self._lines[last][:end]]).decode()

    def _replaced(self, node: ast.expr, text: str) -> list[str]:
        first, begin, last, end = self._span(node)
        joined = self._lines[first][:begin] + text.encode() + self._lines[last][end:]
        lines = [*self._lines[:first], *joined.split(b"\n"), *self._lines[last + 1 :]]
        return [line.decode() for line in lines]

    def _span(self, node: ast.expr) -> tuple[int, int, int, int]:
        """First line and byte, last line and byte, within the statement."""
        last = node.end_lineno or node.lineno
        end = node.end_col_offset or node.col_offset
        return node.lineno - self._offset, node.col_offset, last - self._offset, end


def _name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _entries(call: ast.Call, name: str) -> list[ast.expr]:
    return [
        value
        for word in call.keywords
        if isinstance(word.value, ast.Dict)
        for key, value in zip(word.value.keys, word.value.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == name
    ]
