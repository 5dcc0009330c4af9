"""The pages of failures, written from what the analyser knows of their causes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from recompute_scan.diagnose.outcome import HANGS, IN_RUNS, SIGNATURES
from recompute_scan.frameworks.detect import Signature

_UNTOUCHED = "Yes"
_COSTS = {
    "error": "The run stops",
    "warning": "Training goes on, but can be slower",
    "info": "None by itself: it is a warning",
}
_WAITS = "The run waits until a timeout ends it"
_WAITING = frozenset({"RS204", "RS209", "RS210", "RS211", "RS214"})
# Where one code has causes of several kinds.
_SYMPTOMS = {
    "RS108": "A selective checkpoint fails",
    "RS111": "DDP saw the gradient of one parameter twice in one backward pass",
    "RS112": "DDP met other gradients than it expected",
    "RS114": "FSDP stops in a state that it did not expect",
    "RS122": "Recording a CUDA graph fails in a checkpoint",
    "RS124": "A checkpoint was called without saying which variant is meant",
    "RS125": "A library warns about checkpointing under FSDP",
    "RS130": "A reentrant checkpoint meets a limit of its variant",
    "RS131": "Checkpointing cannot be switched on or run",
    "RS132": "torch.compile, torch.func or an export refuses a checkpoint",
    "RS133": "A recompute of FP8 layers lacks its FP8 state",
    "RS209": "A collective or barrier timed out",
}
_ANY_VERSION = "Not tied to a version."
_START = 60


def causes_of(code: str) -> list[Signature]:
    """Return the causes of one failure in the order of its page, the general one last."""
    causes = [one for one in (*SIGNATURES, *IN_RUNS) if one.code == code]
    return [*causes, *(one for one in reversed(HANGS) if one.code == code)]


def failure_page(code: str, examples: Sequence[str | None]) -> str:
    """Return the page of a failure as Markdown.

    Args:
        code: Code of the failure.
        examples: What a log says, for each cause in the order of :func:`causes_of`.
    """
    causes = causes_of(code)
    general = causes[-1]
    parts = [f"# {code} {general.name}", _box(causes)]
    if len(causes) == 1:
        parts += [*_log(examples[0]), "## Cause", _wrapped(general.cause)]
        parts += [general.more.strip()] if general.more else []
        more = _first(general.fix)[1]
        parts += ["## Fix", _wrapped(more)] if more else []
        parts += ["## Sources", _wrapped(_versions(general))]
    else:
        shown: set[str] = set()
        warnings = {one.gradients for one in causes}
        above: Signature | None = None
        for one, example in zip(causes, examples, strict=True):
            start = (example or "")[:_START]
            known = None if start in shown else example
            parts += _cause(one, known, above, alike=len(warnings) == 1)
            shown.add(start)
            above = one
        parts.append("## Sources")
    sources = dict.fromkeys(address for one in causes for address in one.sources)
    parts.append(",\n".join(f"<{address}>" for address in sources))
    return "\n\n".join(parts) + "\n"


def _box(causes: Sequence[Signature]) -> str:
    """Symptom, cost, safety and fix of a failure as a table."""
    general = causes[-1]
    fix = _marked(_first(general.fix)[0])
    warnings = {one.gradients for one in causes}
    safe = next(iter(warnings)) or _UNTOUCHED
    if len(warnings) > 1:
        safe = "Yes, unless a cause below says otherwise"
    cost = _WAITS if general.code in _WAITING else _COSTS[general.severity]
    if {"error", "info"} <= {one.severity for one in causes}:
        cost = "The run stops, or training goes on, perhaps slower or wrong"
    symptom = _SYMPTOMS.get(general.code, general.title)
    if general.code in _SYMPTOMS and len({one.fix for one in causes}) > 1:
        fix = "Depends on the cause below"
    rows = (("Symptom", symptom), ("Cost", cost), ("Safe?", safe), ("Fix", fix))
    lines = [f"| {name} | {text.rstrip('.')} |" for name, text in rows]
    return "\n".join([lines[0], "| --- | --- |", *lines[1:]])


def _first(text: str) -> tuple[str, str]:
    """The first sentence, and the rest."""
    first, *rest = re.split(r"(?<=\.) (?=[A-Z])", text, maxsplit=1)
    return first, "".join(rest)


def _cause(
    one: Signature, example: str | None, above: Signature | None, *, alike: bool
) -> list[str]:
    """One of several causes of a failure; ``alike`` if their fixes have one warning.

    A fix or warning of the cause directly ``above`` is not printed again.
    """
    parts = [f"## {one.title}", *_log(example)]
    same_fix = above is not None and above.fix == one.fix
    same_safety = above is not None and above.gradients == one.gradients
    fix = "As above." if same_fix else one.fix
    parts += [_wrapped(one.cause), _wrapped(f"**Fix.** {fix}")]
    parts += [one.more.strip()] if one.more else []
    if one.gradients and not alike:
        parts.append(_wrapped(f"**Safe?** {'As above.' if same_safety else one.gradients}"))
    return [*parts, f"*{_wrapped(_versions(one))}*"]


def _log(example: str | None) -> list[str]:
    return [] if example is None else [f"```text\n{example}\n```"]


def _versions(one: Signature) -> str:
    """The versions, where it is tied to some, and whether it was reproduced."""
    reproduced = one.checked == "reproduced"
    if one.versions == _ANY_VERSION:
        return "Reproduced." if reproduced else "Reported."
    return f"{one.versions}{' Reproduced.' if reproduced else ''}"


def _wrapped(text: str) -> str:
    lines = textwrap.wrap(_marked(text), 100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _marked(text: str) -> str:
    return text if "`" in text else " ".join(map(_as_code, text.split(" ")))


def _as_code(word: str) -> str:
    """A word that is code (a name with an underscore, a call, an assignment) marked as such."""
    if not re.search(r"_|\(\)|=", word) or word.startswith("http"):
        return word
    before = "(" if word.startswith("(") else ""
    core = word.removeprefix("(").rstrip(".,;:").removesuffix("'s")
    if core.count(")") > core.count("("):
        core = core[:-1]
    return f"{before}`{core}`{word[len(before) + len(core) :]}"
