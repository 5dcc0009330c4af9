"""unsloth's checkpointing, which replaces torch's functions for the whole process.

``unsloth_zoo/gradient_checkpointing.py`` puts its own in the place of
``torch.utils.checkpoint.checkpoint`` and ``CheckpointFunction``.
"""

from __future__ import annotations

from recompute_scan.frameworks.base import Edit, Mechanism

_MODULE = "unsloth_zoo.gradient_checkpointing"

MECHANISM = Mechanism(
    name="unsloth",
    title="unsloth's own checkpointing (use_gradient_checkpointing)",
    keep=120,
    why_keep="its kernels count on it, and it moves what it saves to the host",
    remove="pass use_gradient_checkpointing=False to FastLanguageModel.get_peft_model(…)",
    docs="https://unsloth.ai/docs",
    checked="read (unsloth_zoo 2026.10.9)",
    variants=("its own, reentrant",),
    caution="It replaces torch's functions: other checkpoints of the process use it too.",
    functions=(
        "UnslothCheckpointFunction",
        "Unsloth_Gradient_Checkpointer",
        "Unsloth_Offloaded_Gradient_Checkpointer",
    ),
    holding=("unsloth_zoo/gradient_checkpointing.py:unsloth_checkpoint",),
    asks=("unsloth_zoo/gradient_checkpointing.py:*",),
    watched=(
        f"{_MODULE}:UnslothCheckpointFunction",
        f"{_MODULE}:Unsloth_Gradient_Checkpointer",
        f"{_MODULE}:Unsloth_Offloaded_Gradient_Checkpointer",
    ),
    backward=r"gradient_checkpointing\.py:backward$",
    edits=(Edit("get_peft_model", "keyword", "use_gradient_checkpointing"),),
)
