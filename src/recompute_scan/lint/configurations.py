"""What a configuration file alone shows. Each fact was read in the framework's own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recompute_scan.frameworks import known
from recompute_scan.frameworks.configuration import Flaw, Setting, Values, truthy
from recompute_scan.lint.said import Found, Pinned, Variant

ONE_SETTING = "Keep one: delete gradient_checkpointing, or FSDP's activation_checkpointing."
RUN = "`recompute-scan run` counts what happens."
REFUSES = "The Trainer of transformers raises a ValueError where both are on."
_PLUGIN = (("fsdp_config", "fsdp_activation_checkpointing"), ("fsdp_activation_checkpointing",))
_OWN = (("gradient_checkpointing",), ("activation_checkpointing",))


def settings_findings(
    file: str, settings: Sequence[Setting], pinned: Pinned, calls: frozenset[str]
) -> Iterator[Found]:
    """What a configuration file alone shows; ``pinned`` is what is pinned beside it, ``calls``
    tell which frameworks' functions some script calls.
    """
    values = {setting.path: setting for setting in settings}
    yield from _random_numbers(file, values, settings)
    if is_llama_factory(settings):
        yield from _llama_factory(file, values)
    else:
        yield from _trainer(file, values, settings, pinned)
    for flaw in known.flaws(values):
        if not calls.intersection(flaw.unless):
            yield found_flaw(file, flaw)


def found_flaw(file: str, flaw: Flaw) -> Found:
    """What a framework knows of its own settings, as a finding in this file."""
    return Found(file, flaw.line, flaw.code, flaw.title, flaw.why, flaw.fix, flaw.edit)


def wrapper_of(settings: Sequence[Setting]) -> Setting | None:
    """The setting by which accelerate's FSDP plugin wraps layers, where it is on."""
    return next((s for s in settings if s.path in _PLUGIN and truthy(s.value)), None)


def is_fsdp(settings: Sequence[Setting]) -> bool:
    """Whether accelerate's configuration asks for FSDP."""
    kind = value_of(settings, "distributed_type")
    return kind is not None and str(kind).upper() == "FSDP"


def is_fsdp2(settings: Sequence[Setting]) -> bool:
    """Whether it asks for version 2 of it."""
    return any(s.path[-1:] == ("fsdp_version",) and str(s.value) == "2" for s in settings)


def wraps_layers(settings: Sequence[Setting]) -> bool:
    """Whether the plugin wraps decoder layers whole: by a class that is named, or the model's."""
    policy = value_of(settings, "fsdp_config", "fsdp_auto_wrap_policy")
    kind = value_of(settings, "fsdp_config", "fsdp_transformer_layer_cls_to_wrap")
    by_class = policy is not None and str(policy).upper() == "TRANSFORMER_BASED_WRAP"
    return by_class and (kind is None or str(kind).strip().endswith(("Layer", "Block")))


def value_of(settings: Sequence[Setting], *path: str) -> object:
    """The value at a path, or ``None``."""
    return next((s.value for s in settings if s.path == path), None)


def is_llama_factory(settings: Sequence[Setting]) -> bool:
    """Whether these are LLaMA-Factory's arguments."""
    roots = {s.path[0] for s in settings if len(s.path) == 1}
    return {"stage", "finetuning_type"} <= roots


def llama_factory_variant(settings: Sequence[Setting], *, fsdp2: bool) -> Variant | None:
    """Its own switch, which is on unless told otherwise; ``None`` where it is off.

    ``prepare_model_for_training`` in its ``model_utils/checkpointing.py``: reentrant by default,
    never under FSDP 2.
    """
    if truthy(value_of(settings, "disable_gradient_checkpointing")):
        return None
    if truthy(value_of(settings, "use_unsloth_gc")) or truthy(value_of(settings, "use_unsloth")):
        return "unknown"
    chosen = value_of(settings, "use_reentrant_gc")
    return "non-reentrant" if fsdp2 or (chosen is not None and not truthy(chosen)) else "reentrant"


def factory_finding(file: str, line: int, own: Variant, *, certain: bool, where: str) -> Found:
    """Its own switch, with FSDP's wrapper around the same layers."""
    if own == "reentrant":
        code, title = ("RS601", "checkpointed twice") if certain else ("RS602", "may double")
        why = "LLaMA-Factory's own switch is reentrant, and the Trainer does not see it."
    elif own == "non-reentrant":
        code, title = "RS603", "two switches for one recompute"
        why = "Both are non-reentrant, and the inner one finds its work done."
    else:
        code, title, why = (
            "RS602",
            "may be checkpointed twice",
            f"Unsloth's own was not read. {RUN}",
        )
    return Found(
        file,
        line,
        code,
        f"{title}: by LLaMA-Factory, which switches it on by default, and by {where}",
        why,
        "Turn FSDP's activation_checkpointing off, or set disable_gradient_checkpointing: true.",
        "off",
    )


def _llama_factory(file: str, values: Values) -> Iterator[Found]:
    wrapper = values.get(("fsdp_config", "activation_checkpointing"))
    fsdp = values.get(("fsdp",))
    own = llama_factory_variant(list(values.values()), fsdp2=is_fsdp2(list(values.values())))
    if own and fsdp and fsdp.value and wrapper and truthy(wrapper.value):
        whole = "auto_wrap" in str(fsdp.value) or any(
            path[-1] == "transformer_layer_cls_to_wrap" for path in values if path
        )
        yield factory_finding(file, wrapper.line, own, certain=whole, where="FSDP's wrapper, here")


def _random_numbers(file: str, values: Values, settings: Sequence[Setting]) -> Iterator[Found]:
    plugin = wrapper_of(settings)
    if plugin and is_fsdp2(settings) and is_fsdp(settings):
        yield Found(
            file,
            plugin.line,
            "RS605",
            "accelerate's FSDP 2 wraps layers with preserve_rng_state=False",
            "Recomputes draw random numbers of their own: gradients change where a layer has "
            "dropout. Read in accelerate 1.15.",
            "Set dropout to 0, or use gradient_checkpointing instead.",
        )


def _trainer(
    file: str, values: Values, settings: Sequence[Setting], pinned: Pinned
) -> Iterator[Found]:
    own = next((values[path] for path in _OWN if path in values), None)
    fsdp = values.get(("fsdp_config", "activation_checkpointing")) or wrapper_of(settings)
    if own and fsdp and truthy(own.value) and truthy(fsdp.value):
        certain = pinned.refuses and ("output_dir",) in values and ("base_model",) not in values
        certain = certain and bool(("fsdp",) in values and values["fsdp",].value)
        yield Found(
            file,
            own.line,
            "RS604" if certain else "RS602",
            f"{'both are' if certain else 'may fail or double: both are'} on: this, and FSDP's "
            f"activation_checkpointing in line {fsdp.line}",
            REFUSES if certain else f"{REFUSES} Other trainers may checkpoint twice. {RUN}",
            ONE_SETTING,
            "off",
        )
