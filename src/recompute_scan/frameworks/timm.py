"""timm's ``set_grad_checkpointing``.

Its models ask through ``checkpoint`` and ``checkpoint_seq`` in ``timm/models/_manipulate.py``.
"""

from __future__ import annotations

from recompute_scan.frameworks.base import Edit, Mechanism

MECHANISM = Mechanism(
    name="timm",
    title="timm's set_grad_checkpointing",
    keep=50,
    why_keep="it is the model's own, and knows its blocks",
    remove="call model.set_grad_checkpointing(False), or leave the call out",
    docs="https://huggingface.co/docs/timm/index",
    checked="ran here (timm 1.0.31)",
    variants=("1.0: non-reentrant; reentrant with TIMM_REENTRANT_CKPT=1",),
    caution="Look whether the model is used elsewhere with the same switch.",
    asks=("timm/models/*:*", "timm/layers/*:*"),
    switches=("timm.models:*.set_grad_checkpointing",),
    edits=(Edit("set_grad_checkpointing", "delete"),),
)
