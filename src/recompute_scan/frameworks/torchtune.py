"""torchtune's recipes.

``set_activation_checkpointing`` in ``torchtune/training/memory.py``, or the selective wrapper in
``torchtune/training/activations.py``; a recipe applies one of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.base import Edit, Flaw, Setting, SettingSwitch, Values, truthy

MECHANISM = replace(
    pytorch.WRAPPER,
    name="torchtune",
    title="torchtune's enable_activation_checkpointing",
    keep=70,
    keep_sharded=110,
    remove="set enable_activation_checkpointing: false in the recipe, and leave ac_mode out",
    docs="https://docs.pytorch.org/torchtune/stable/tutorials/memory_optimizations.html",
    checked="ran here (torchtune 0.6.1: set_activation_checkpointing); read (recipes)",
    variants=("0.6: non-reentrant",),
    caution="Look whether the recipe is shared with other jobs.",
    switched_by=("torchtune/training/*:*",),
    edits=(Edit("set_activation_checkpointing", "delete"),),
)


def flaws(values: Values) -> Iterator[Flaw]:
    """What ``recipes/full_finetune_distributed.py`` leaves out or refuses."""
    if not any(
        path[-1:] == ("_component_",) and str(setting.value).startswith("torchtune.")
        for path, setting in values.items()
    ):
        return
    whole = values.get(("enable_activation_checkpointing",))
    mode = values.get(("ac_mode",))
    offload = values.get(("enable_activation_offloading",))
    if whole and truthy(whole.value) and mode and mode.value not in (None, "None", ""):
        yield Flaw(
            mode.line,
            "RS606",
            "nothing is checkpointed: ac_mode and enable_activation_checkpointing exclude each "
            f"other, and line {whole.line} is on",
            "torchtune's distributed recipe applies each only where the other is off.",
            "Keep one of the two.",
        )
    if offload and truthy(offload.value) and not (whole and truthy(whole.value)):
        yield Flaw(
            offload.line,
            "RS604",
            "enable_activation_offloading needs enable_activation_checkpointing",
            "torchtune's recipes raise a RuntimeError.",
            "SettingSwitch both on, or this one off.",
            "off",
        )


def switched_on(path: tuple[str, ...], setting: Setting) -> Iterator[SettingSwitch]:
    """What its recipes read."""
    if path == ("enable_activation_checkpointing",) and truthy(setting.value):
        yield SettingSwitch("torchtune", "each TransformerSelfAttentionLayer", "non-reentrant")
