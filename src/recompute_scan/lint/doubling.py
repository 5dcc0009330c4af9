"""From switches in files to findings, each counted or read in the framework's code.

``tests/lint/truths.py`` holds the counts: a non-reentrant wrapper around a layer that the
model checkpoints too costs one recompute where the model's own is non-reentrant, and two where
either is reentrant, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from recompute_scan.frameworks import huggingface, parallel, registry, trainers
from recompute_scan.frameworks.base import RUN, Flaw, Setting, Values, truthy
from recompute_scan.lint.library_calls import Script
from recompute_scan.lint.rules import CheckpointSwitch, Found, Pinned

ONE_SETTING = "Keep one: delete the training argument, or FSDP's activation_checkpointing."
REFUSES = "The Trainer of transformers raises a ValueError where both are on."
_OWN = (("gradient_checkpointing",), ("activation_checkpointing",))

_ONE = "Keep one of the two: delete the model's own switch, or the wrapper."


def script_findings(
    file: str, script: Script, pinned: Pinned, calls: frozenset[str]
) -> Iterator[Found]:
    """The findings of one script; ``calls`` are frameworks' functions that some script calls."""
    for section in script.sections:
        for flaw in parallel.flaws({setting.path: setting for setting in section}):
            if calls.isdisjoint(flaw.unless):
                yield found_flaw(file, flaw)
    yield from pairs(file, script, pinned)
    for line in script.no_rng:
        yield Found(
            file,
            line,
            "RS605",
            "preserve_rng_state=False: gradients are wrong where a layer draws random numbers",
            "The recompute draws new numbers, so a dropout's mask differs from its forward.",
            "Leave preserve_rng_state out, unless no layer draws random numbers.",
        )
    for line in script.two_policies:
        yield found_flaw(file, trainers.lightning_refuses(line))
    for line, keywords in script.arguments:
        config = keywords.get("fsdp_config")
        if (
            asks(keywords)
            and keywords.get("fsdp")
            and isinstance(config, dict)
            and config.get("activation_checkpointing") is True
        ):
            code = "RS604" if pinned.refuses else "RS602"
            own = next(name for (name,) in _OWN if keywords.get(name) is True)
            title = f"{own} and FSDP's activation_checkpointing are both on"
            why = REFUSES if pinned.refuses else f"Before transformers 4.33 both worked. {RUN}"
            yield Found(file, line, code, title, why, ONE_SETTING)


def asks(keywords: dict[str, Any]) -> bool:
    """Whether Trainer arguments switch the model's own on, by the older name or the newer."""
    return any(keywords.get(name) is True for (name,) in _OWN)


def settings_findings(
    file: str, settings: Sequence[Setting], pinned: Pinned, calls: frozenset[str]
) -> Iterator[Found]:
    """The findings of one configuration; ``calls`` are frameworks' functions that some script
    calls.
    """
    values = {setting.path: setting for setting in settings}
    if not trainers.is_llama_factory(settings):
        yield from _trainer(file, values, settings, pinned)
    for flaw in registry.flaws(values):
        if calls.isdisjoint(flaw.unless):
            yield found_flaw(file, flaw)


def found_flaw(file: str, flaw: Flaw) -> Found:
    """A framework's flaw in its settings, as a finding in this file."""
    return Found(file, flaw.line, flaw.code, flaw.title, flaw.why, flaw.fix, flaw.edit)


def pairs(
    file: str, script: Script, pinned: Pinned, wrappers: Sequence[CheckpointSwitch] = ()
) -> Iterator[Found]:
    """The findings on two switches for the same layers; ``wrappers`` are put around the script's
    model by other files.
    """
    switches = (*script.switches, *wrappers)
    found: set[int] = set()
    for wrapper in switches:
        for model in switches:
            if (wrapper.kind, model.kind) != ("wrapper", "model") or model.line in found:
                continue
            if not _meet(script, wrapper, model) or _exclusive(script, wrapper, model):
                continue
            if model.subject in script.disabled or _replaced(script, wrapper, model):
                continue
            found.add(model.line)
            yield _pair(file, script, wrapper, model, pinned)


def _pair(
    file: str, script: Script, wrapper: CheckpointSwitch, model: CheckpointSwitch, pinned: Pinned
) -> Found:
    own = pinned.default if model.variant == "default" else model.variant
    by = f" ({pinned.source})" if model.variant == "default" and pinned.source else ""
    variants = (wrapper.variant, own)
    where = wrapper.where or f"line {wrapper.line} wraps the layers of {wrapper.subject}"
    together = _together(script, wrapper, model)
    edit: Literal["", "delete"] = "delete"
    both = variants == ("non-reentrant", "non-reentrant")
    if "reentrant" in variants and together:
        code, title = "RS601", "checkpointed twice"
        why = (
            f"One of the two is reentrant{by}, so each layer's forward runs twice in the backward "
            "pass."
        )
    elif both and not script.early_stop_off and wrapper.certain:
        code, title = "RS603", "two switches for one recompute"
        why = (
            f"Both are non-reentrant{by}, and the outer recompute stops at the inner one. So "
            "each layer is recomputed once today, and twice as soon as either becomes reentrant."
        )
    else:
        if "reentrant" in variants:
            doubt = "if both run for the same layers"
        elif script.early_stop_off:
            doubt = "where early stop is off"
        elif own == "default" and wrapper.variant == "non-reentrant":
            doubt = "if transformers is older than 5, which is reentrant by default"
        elif both:
            doubt = "if both run and the wrapped module is part of a layer"
        else:
            doubt = "if either is reentrant"
        code, title, edit = "RS602", f"may be checkpointed twice, {doubt}", ""
        why = f"The file alone does not show it. {RUN}"
    return Found(file, model.line, code, f"{title}: here, and {where}", why, _ONE, edit)


def _meet(script: Script, wrapper: CheckpointSwitch, model: CheckpointSwitch) -> bool:
    """Whether the two are for the same layers, as far as their names show."""
    if wrapper.subject == "*":
        return bool(model.scope) and model.scope[0] in script.modules
    return wrapper.subject == model.subject


def _together(script: Script, wrapper: CheckpointSwitch, model: CheckpointSwitch) -> bool:
    """Whether one runs wherever the other does, for the same layers."""
    if wrapper.subject == "*":
        # The model's own code, run by whoever wraps it.
        alone = len(script.modules) == 1
        plain = not (wrapper.branch or model.branch or script.disabled)
        return alone and plain and wrapper.certain and model.certain
    first, last = sorted((wrapper.line, model.line))
    return (
        wrapper.certain
        and model.certain
        and not script.disabled
        and wrapper.scope == model.scope
        and wrapper.branch == model.branch
        and not any(first <= line <= last for line in script.leaves)
        and not any(
            name == wrapper.subject and first <= line <= last for name, line, _ in script.rebound
        )
    )


def _replaced(script: Script, wrapper: CheckpointSwitch, model: CheckpointSwitch) -> bool:
    """Whether another object has the name by the time of the second."""
    first, last = sorted((wrapper.line, model.line))
    return wrapper.scope == model.scope and any(
        name == wrapper.subject and first <= line <= last and always
        for name, line, always in script.rebound
    )


def _exclusive(script: Script, one: CheckpointSwitch, other: CheckpointSwitch) -> bool:
    """Whether the script sees to it that not both run: by the arms of one condition, or by leaving
    where the conditions of both are true.
    """
    if one.scope != other.scope:
        return False
    arms = dict(one.branch)
    if any(arms.get(node, arm) != arm for node, arm in other.branch):
        return True
    own, others = _conditions(script, one), _conditions(script, other)
    return any(
        scope == one.scope and line < max(one.line, other.line) and refused <= own | others
        for line, scope, refused in script.refused
        if refused & own and refused & others
    )


def _conditions(script: Script, switch: CheckpointSwitch) -> set[str]:
    """The conditions that are true where the switch is reached, as written."""
    return {
        script.tests[node] for node, arm in switch.branch if arm == "body" and node in script.tests
    }


def _trainer(
    file: str, values: Values, settings: Sequence[Setting], pinned: Pinned
) -> Iterator[Found]:
    own = next((values[path] for path in _OWN if path in values), None)
    fsdp = huggingface.any_wrapper_of(settings)
    if own and fsdp and truthy(own.value) and truthy(fsdp.value):
        certain = pinned.refuses and ("output_dir",) in values and ("base_model",) not in values
        certain = certain and bool(("fsdp",) in values and values["fsdp",].value)
        which = f"this, and FSDP's activation_checkpointing on line {fsdp.line}"
        yield replace(both_on(file, own.line, which, certain=certain), edit="off")


def both_on(file: str, line: int, which: str, *, certain: bool) -> Found:
    """Both switches of the Trainer are on; it refuses them where ``certain``."""
    code, title = (
        ("RS604", "both are on") if certain else ("RS602", "may fail or double: both are on")
    )
    why = REFUSES if certain else f"{REFUSES} Other trainers may checkpoint twice. {RUN}"
    return Found(file, line, code, f"{title}: {which}", why, ONE_SETTING)
