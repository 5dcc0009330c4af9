"""fairscale's ``checkpoint_wrapper``.

``fairscale/nn/checkpoint/checkpoint_activations.py`` puts a partial of ``_checkpointed_forward``
in the place of the module's ``forward``; class and name stay what they were.
"""

from __future__ import annotations

from recompute_scan.frameworks.base import Edit, Mechanism

MECHANISM = Mechanism(
    name="fairscale-wrapper",
    title="fairscale's checkpoint_wrapper",
    keep=35,
    why_keep="it is the code's own choice of what to checkpoint",
    remove="delete fairscale's checkpoint_wrapper(…) call",
    docs="https://fairscale.readthedocs.io/en/stable/api/nn/checkpoint/checkpoint_activations.html",
    checked="ran here (fairscale 0.4.13)",
    variants=("0.4: its own, reentrant",),
    caution="It also patches batch normalisation, so that a recompute does not count twice.",
    holding=("fairscale/nn/checkpoint/checkpoint_activations.py:_checkpointed_forward",),
    asks=("fairscale/nn/checkpoint/checkpoint_activations.py:*",),
    watched=("fairscale.nn.checkpoint.checkpoint_activations:CheckpointFunction",),
    backward=r"checkpoint_activations\.py:backward$",
    sharding="fairscale",
    gathering="fairscale/",
    switches=("fairscale.nn.checkpoint.checkpoint_activations:checkpoint_wrapper",),
    edits=(Edit("checkpoint_wrapper", "unwrap"),),
)
