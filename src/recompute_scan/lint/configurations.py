"""What a configuration file alone shows. Each fact was read in the framework's own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recompute_scan.frameworks import accelerate, known, llamafactory
from recompute_scan.frameworks.configuration import RUN, Flaw, Setting, Values, truthy
from recompute_scan.lint.said import Found, Pinned

ONE_SETTING = "Keep one: delete gradient_checkpointing, or FSDP's activation_checkpointing."
REFUSES = "The Trainer of transformers raises a ValueError where both are on."
_OWN = (("gradient_checkpointing",), ("activation_checkpointing",))


def settings_findings(
    file: str, settings: Sequence[Setting], pinned: Pinned, calls: frozenset[str]
) -> Iterator[Found]:
    """What a configuration file alone shows; ``pinned`` is what is pinned beside it, ``calls``
    tell which frameworks' functions some script calls.
    """
    values = {setting.path: setting for setting in settings}
    if not llamafactory.is_its_own(settings):
        yield from _trainer(file, values, settings, pinned)
    for flaw in known.flaws(values):
        if not calls.intersection(flaw.unless):
            yield found_flaw(file, flaw)


def found_flaw(file: str, flaw: Flaw) -> Found:
    """What a framework knows of its own settings, as a finding in this file."""
    return Found(file, flaw.line, flaw.code, flaw.title, flaw.why, flaw.fix, flaw.edit)


def _trainer(
    file: str, values: Values, settings: Sequence[Setting], pinned: Pinned
) -> Iterator[Found]:
    own = next((values[path] for path in _OWN if path in values), None)
    fsdp = values.get(("fsdp_config", "activation_checkpointing")) or accelerate.wrapper_of(
        settings
    )
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
