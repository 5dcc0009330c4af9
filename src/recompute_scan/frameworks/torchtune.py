"""torchtune's recipes.

``set_activation_checkpointing`` in ``torchtune/training/memory.py``, or the selective wrapper in
``torchtune/training/activations.py``; a recipe applies one of them.
"""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.frameworks import fsdp
from recompute_scan.frameworks.mechanism import Edit

MECHANISM = replace(
    fsdp.BASE,
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
