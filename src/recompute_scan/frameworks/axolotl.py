"""axolotl's ``gradient_checkpointing`` and ``activation_offloading``.

The configuration goes to the ``Trainer``, for adapters to the model in ``axolotl/loaders/``;
offloading puts torch's wrapper around the layers or swaps in functions of its own.
"""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.frameworks import huggingface, pytorch

MECHANISM = replace(
    huggingface.BASE,
    name="axolotl",
    title="axolotl's gradient_checkpointing",
    keep=60,
    remove="set gradient_checkpointing: false in axolotl's YAML file",
    renames=(),
    docs="https://docs.axolotl.ai/docs/gradient_checkpointing.html",
    checked="read (axolotl 0.19.0)",
    variants=(
        "supervised, all layers trained: reentrant by its default",
        "reinforcement learning: non-reentrant by its default",
    ),
    asks=(*huggingface.BASE.asks, *pytorch.WRAPPER.asks, "axolotl/*:*"),
    switched_by=("axolotl/*:*",),
    functions=("CPU_Offloaded_Gradient_Checkpointer", "HiddenStatesOffloadCheckpoint", "Disco"),
    edits=(),
)
