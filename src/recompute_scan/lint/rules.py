"""From what files say to findings. What each says was counted or read in the framework's code.

The counts are those of ``tests/lint/truths.py``: a non-reentrant wrapper around a layer that the
model checkpoints too costs one recompute where the model's own is non-reentrant, and two where
either is reentrant, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recompute_scan.lint.facts import Found, Setting, Switch, Variant
from recompute_scan.lint.python import Script
from recompute_scan.lint.settings import truthy
from recompute_scan.lint.shell import Launch

_ONE = "Keep one of the two: delete the model's own switch, or the wrapper."
_ONE_SETTING = "Keep one: delete gradient_checkpointing, or FSDP's activation_checkpointing."
_RUN = "`recompute-scan run` counts what happens."
_REFUSES = "The Trainer of transformers raises a ValueError where both are on."
_PLUGIN = (("fsdp_config", "fsdp_activation_checkpointing"), ("fsdp_activation_checkpointing",))


def script_findings(file: str, script: Script, model_default: Variant) -> Iterator[Found]:
    """What a script alone shows; ``model_default`` is what the pinned transformers does."""
    yield from _pairs(file, script, model_default)
    for line in script.no_rng:
        yield Found(
            file,
            line,
            "RS605",
            "preserve_rng_state=False: gradients change where a layer draws random numbers",
            "The recompute draws numbers of its own, so a dropout's mask differs from its forward.",
            "Leave preserve_rng_state out, unless no layer draws random numbers.",
        )
    for line, keywords in script.arguments:
        config = keywords.get("fsdp_config")
        if (
            keywords.get("gradient_checkpointing") is True
            and keywords.get("fsdp")
            and isinstance(config, dict)
            and config.get("activation_checkpointing") is True
        ):
            yield Found(
                file,
                line,
                "RS604",
                "gradient_checkpointing and FSDP's activation_checkpointing are both on",
                _REFUSES,
                _ONE_SETTING,
            )


def _pairs(file: str, script: Script, model_default: Variant) -> Iterator[Found]:
    told: set[int] = set()
    for wrapper in script.switches:
        for model in script.switches:
            if (wrapper.kind, model.kind) != ("wrapper", "model") or model.line in told:
                continue
            if wrapper.subject != model.subject or _exclusive(wrapper, model):
                continue
            if model.subject in script.disabled or _replaced(script, wrapper, model):
                continue
            told.add(model.line)
            yield _pair(file, script, wrapper, model, model_default)


def _pair(
    file: str, script: Script, wrapper: Switch, model: Switch, model_default: Variant
) -> Found:
    own = model_default if model.variant == "default" else model.variant
    variants = (wrapper.variant, own)
    where = f"line {wrapper.line} wraps the layers of {wrapper.subject}"
    together = _together(script, wrapper, model)
    if "reentrant" in variants and together:
        return Found(
            file,
            model.line,
            "RS601",
            f"checkpointed twice: here, and {where}",
            "One of the two is reentrant, so each layer's forward runs twice in the backward pass.",
            _ONE,
        )
    if variants == ("non-reentrant", "non-reentrant") and not script.early_stop_off:
        return Found(
            file,
            model.line,
            "RS603",
            f"two switches for one recompute: here, and {where}",
            "Both are non-reentrant, and the inner one finds its work done: one recompute today. "
            "It doubles as soon as either becomes reentrant.",
            _ONE,
        )
    if "reentrant" in variants:
        doubt = "if both run for the same layers"
    elif script.early_stop_off:
        doubt = "where early stop is off"
    elif own == "default" and wrapper.variant == "non-reentrant":
        doubt = "if transformers is older than 5, whose default is reentrant"
    else:
        doubt = "if either is reentrant"
    return Found(
        file,
        model.line,
        "RS602",
        f"may be checkpointed twice, {doubt}: here, and {where}",
        f"The file alone does not tell. {_RUN}",
        _ONE,
    )


def _together(script: Script, wrapper: Switch, model: Switch) -> bool:
    """Whether one runs wherever the other does, for the same layers."""
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


def _replaced(script: Script, wrapper: Switch, model: Switch) -> bool:
    """Whether another object has the name by the time of the second."""
    first, last = sorted((wrapper.line, model.line))
    return wrapper.scope == model.scope and any(
        name == wrapper.subject and first <= line <= last and always
        for name, line, always in script.rebound
    )


def _exclusive(one: Switch, other: Switch) -> bool:
    """Whether they are in different arms of one condition."""
    arms = dict(one.branch)
    return one.scope == other.scope and any(
        arms.get(node, arm) != arm for node, arm in other.branch
    )


def settings_findings(
    file: str, settings: Sequence[Setting], *, deepspeed_checkpointing: bool
) -> Iterator[Found]:
    """What a configuration file alone shows."""
    values = {setting.path: setting for setting in settings}
    plugin = wrapper_of(settings)
    version = values.get(("fsdp_config", "fsdp_version"))
    if plugin and version and str(version.value) == "2" and _is_fsdp(values):
        yield Found(
            file,
            plugin.line,
            "RS605",
            "accelerate's FSDP 2 wraps layers with preserve_rng_state=False",
            "Recomputes draw random numbers of their own: gradients change where a layer has "
            "dropout. Read in accelerate 1.15.",
            "Set dropout to 0, or use gradient_checkpointing instead.",
        )
    own = values.get(("gradient_checkpointing",))
    fsdp = values.get(("fsdp_config", "activation_checkpointing")) or plugin
    if own and fsdp and truthy(own.value) and truthy(fsdp.value):
        certain = ("output_dir",) in values and bool((values.get(("fsdp",)) or own).value)
        certain = certain and ("fsdp",) in values and ("base_model",) not in values
        yield Found(
            file,
            own.line,
            "RS604" if certain else "RS602",
            f"{'both are' if certain else 'may fail or double: both are'} on: this, and FSDP's "
            f"activation_checkpointing in line {fsdp.line}",
            _REFUSES if certain else f"{_REFUSES} Other trainers may checkpoint twice. {_RUN}",
            _ONE_SETTING,
        )
    asked = [s for s in settings if s.path[:1] == ("activation_checkpointing",) and s.value is True]
    if asked and not deepspeed_checkpointing and _is_deepspeed(values):
        yield Found(
            file,
            asked[0].line,
            "RS606",
            "activation_checkpointing switches nothing on alone",
            "DeepSpeed reads this section when a model calls deepspeed.checkpointing; no script "
            "among these does.",
            "Delete the section, or switch checkpointing on in the model.",
        )


def launch_findings(
    file: str, launch: Launch, config: Sequence[Setting], script: Script | None
) -> Iterator[Found]:
    """What one launch command shows, with the files that it names."""
    plugin = launch.get("fsdp_activation_checkpointing")
    wrapped = truthy(plugin.value) if plugin else wrapper_of(config) is not None
    fsdp = launch.get("use_fsdp") is not None or _is_fsdp({s.path: s for s in config})
    own = launch.get("gradient_checkpointing")
    if not (wrapped and fsdp):
        return
    if own is not None and truthy(own.value):
        certain = script is not None and script.parses
        yield Found(
            file,
            launch.line,
            "RS604" if certain else "RS602",
            f"{'both are' if certain else 'may fail or double: both are'} on: "
            "--gradient_checkpointing and FSDP's activation_checkpointing",
            _REFUSES if certain else f"{_REFUSES} Other trainers may checkpoint twice. {_RUN}",
            _ONE_SETTING,
        )
    elif own is None and script is not None and script.trl:
        yield Found(
            file,
            launch.line,
            "RS602",
            "may fail: FSDP's activation_checkpointing is on, and TRL's default is on too",
            f"TRL's arguments have gradient_checkpointing=True unless told otherwise. {_REFUSES}",
            "Add --gradient_checkpointing False, or delete FSDP's activation_checkpointing.",
        )


def wrapper_of(settings: Sequence[Setting]) -> Setting | None:
    """The setting by which accelerate's FSDP plugin wraps layers, where it is on."""
    return next((s for s in settings if s.path in _PLUGIN and truthy(s.value)), None)


def _is_fsdp(values: dict[tuple[str, ...], Setting]) -> bool:
    kind = values.get(("distributed_type",))
    return kind is not None and str(kind.value).upper() == "FSDP"


def _is_deepspeed(values: dict[tuple[str, ...], Setting]) -> bool:
    roots = {path[0] for path in values if path}
    return bool(roots & {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"})
