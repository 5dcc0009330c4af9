"""TRL's trainers, whose configurations checkpoint by default.

``gradient_checkpointing`` is true in ``trl/trainer/base_config.py``; the ``Trainer`` below them
switches it on.
"""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.frameworks import huggingface

MECHANISM = replace(
    huggingface.TRAINER,
    name="trl-trainer",
    title="TRL's gradient_checkpointing",
    remove=(
        "pass gradient_checkpointing=False to the TRL configuration (SFTConfig and others), which "
        "has it on by default"
    ),
    renames=(),
    docs="https://huggingface.co/docs/trl/main/en/reducing_memory_usage",
    packages=("transformers", "trl"),
    checked="read (trl 1.16.0)",
    variants=(
        "SFT: non-reentrant (set below transformers 5.0)",
        "SFT with PEFT and ZeRO-3: reentrant, forced",
    ),
    switched_by=("trl/*:*",),
    commands=("trl sft", "trl dpo", "trl grpo", "trl kto", "trl reward"),
    on_by_default=True,
)
