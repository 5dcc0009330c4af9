"""Which checkpoints files switch on, on which layers and by which variant, doubled or not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from recompute_scan.frameworks import accelerate, known, llamafactory
from recompute_scan.frameworks.configuration import Setting, Variant, truthy, value_of
from recompute_scan.lint.doubling import asks
from recompute_scan.lint.launches import Launch
from recompute_scan.lint.python import Script
from recompute_scan.lint.said import Pinned

_OWN = "the layers that the model's own switch covers"
_REENTRANT = re.compile(r"use_reentrant[\"']?\s*[:=]\s*[\"']?(\w+)")
_WRAPPED = ("fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap")


class SwitchInFile(Struct, frozen=True, order=True):
    """One switch that is on.

    Attributes:
        file: Where.
        line: Where in it.
        by: What switches it on.
        layers: What is checkpointed, in words.
        variant: Which of torch's two; ``default`` where it is the library's, which changed with its
            versions, ``unknown`` where the file does not say.
        conditional: Whether conditions, loops or early ends of a script decide on it.
    """

    file: str
    line: int
    by: str
    layers: str
    variant: Variant
    conditional: bool = False


def on_in_script(file: str, script: Script, pinned: Pinned) -> Iterator[SwitchInFile]:
    """Those of a script."""
    for switch in script.switches:
        subject = switch.subject or "the model"
        if switch.kind == "model":
            by, layers = "the model's own switch", f"{_OWN}, in {subject}"
        else:
            by = "a checkpoint wrapper"
            chosen = f"each {switch.around}" if switch.around else "what is chosen"
            layers = f"{chosen} in {subject}"
        variant = _known(switch.variant, pinned)
        yield SwitchInFile(file, switch.line, by, layers, variant, bool(switch.branch))
    for call in script.direct:
        inside = ".".join(part.partition(":")[0] for part in call.scope)
        layers = f"{call.subject}{f' in {inside}' if inside else ''}"
        conditional = bool(call.branch)
        by = "torch.utils.checkpoint"
        yield SwitchInFile(file, call.line, by, layers[:200], call.variant, conditional)
    for line, keywords in script.arguments:
        if asks(keywords):
            given = keywords.get("gradient_checkpointing_kwargs")
            variant = _by_kwargs(given.get("use_reentrant") if isinstance(given, dict) else None)
            yield SwitchInFile(file, line, "Trainer arguments", _OWN, _known(variant, pinned))
        config = keywords.get("fsdp_config")
        if isinstance(config, dict) and config.get("activation_checkpointing") is True:
            layers = "the layers that FSDP wraps"
            yield SwitchInFile(file, line, "FSDP's wrapper", layers, "non-reentrant")


def on_in_settings(
    file: str, settings: Sequence[Setting], pinned: Pinned
) -> Iterator[SwitchInFile]:
    """Those of a configuration file."""
    values = {setting.path: setting for setting in settings}
    wrapper = values.get(("fsdp_config", "activation_checkpointing")) or accelerate.wrapper_of(
        settings
    )
    if wrapper is not None and truthy(wrapper.value):
        named = next((s.value for s in settings if s.path[-1] in _WRAPPED if s.path), None)
        layers = f"each {named}" if named else "the layers that FSDP wraps"
        yield SwitchInFile(file, wrapper.line, "FSDP's wrapper", layers, "non-reentrant")
    if llamafactory.is_its_own(settings):
        own = llamafactory.own_variant(settings, fsdp2=accelerate.is_fsdp2(settings))
        if own is not None:
            yield SwitchInFile(file, values["stage",].line, "LLaMA-Factory, by default", _OWN, own)
    elif (own_switch := values.get(("gradient_checkpointing",))) and truthy(own_switch.value):
        variant = _by_kwargs(value_of(settings, "gradient_checkpointing_kwargs", "use_reentrant"))
        by = "gradient_checkpointing"
        yield SwitchInFile(file, own_switch.line, by, _OWN, _known(variant, pinned))
    for path, setting in values.items():
        for switch in known.switched_on(path, setting):
            yield SwitchInFile(file, setting.line, switch.by, switch.layers, switch.variant)


def on_in_launch(file: str, launch: Launch, pinned: Pinned) -> Iterator[SwitchInFile]:
    """Those of one launch command."""
    own = launch.get("gradient_checkpointing") or launch.get("activation_checkpointing")
    if own is not None and truthy(own.value):
        kwargs = launch.get("gradient_checkpointing_kwargs")
        chosen = launch.get("use_reentrant")
        given: object = chosen.value if chosen else None
        if kwargs is not None:
            said = _REENTRANT.search(str(kwargs.value))
            given = said[1] if said else None
        by = f"--{own.path[0]}"
        yield SwitchInFile(file, launch.line, by, _OWN, _known(_by_kwargs(given), pinned))
    plugin = launch.get("fsdp_activation_checkpointing")
    if plugin is not None and truthy(plugin.value) and launch.get("use_fsdp") is not None:
        layers = "the layers that FSDP wraps"
        yield SwitchInFile(file, launch.line, "FSDP's wrapper", layers, "non-reentrant")
    for setting in (*launch.settings, *launch.overrides):
        path = tuple(part for name in setting.path for part in name.split("."))
        for switch in known.switched_on(path, setting):
            yield SwitchInFile(file, launch.line, switch.by, switch.layers, switch.variant)


def _by_kwargs(reentrant: object) -> Variant:
    if reentrant is None:
        return "default"
    return "reentrant" if truthy(reentrant) else "non-reentrant"


def _known(variant: Variant, pinned: Pinned) -> Variant:
    return pinned.default if variant == "default" else variant
