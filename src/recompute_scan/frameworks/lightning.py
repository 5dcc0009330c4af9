"""Lightning's and Fabric's ``FSDPStrategy``.

``_setup_activation_checkpointing`` in ``lightning/fabric/strategies/fsdp.py`` applies torch's
wrapper, unless a ``CheckpointWrapper`` is there already; it does not look at the model's flags.
``DeepSpeedStrategy``'s settings only configure DeepSpeed's own function and turn nothing on.
"""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.frameworks import fsdp
from recompute_scan.frameworks.mechanism import Edit

MECHANISM = replace(
    fsdp.BASE,
    name="lightning-fsdp",
    title="Lightning's activation_checkpointing_policy",
    keep=70,
    keep_sharded=110,
    remove="leave activation_checkpointing_policy out of FSDPStrategy(…)",
    docs="https://lightning.ai/docs/pytorch/stable/advanced/model_parallel/fsdp.html",
    packages=("lightning", "pytorch-lightning"),
    checked="ran here (lightning 2.6.6: its set-up function; the strategy needs a GPU)",
    variants=("lightning 2.x: non-reentrant (explicit below torch 2.2)",),
    caution="Look whether the strategy is shared with other jobs.",
    switched_by=(
        "lightning/fabric/strategies/fsdp.py:*",
        "lightning_fabric/strategies/fsdp.py:*",
        "lightning/pytorch/strategies/fsdp.py:*",
        "pytorch_lightning/strategies/fsdp.py:*",
    ),
    settings=(
        "lightning.fabric.strategies.fsdp:FSDPStrategy.__init__",
        "lightning.pytorch.strategies.fsdp:FSDPStrategy.__init__",
        "lightning_fabric.strategies.fsdp:FSDPStrategy.__init__",
        "pytorch_lightning.strategies.fsdp:FSDPStrategy.__init__",
    ),
    edits=(
        Edit("*", "keyword", "activation_checkpointing_policy", "None"),
        Edit("*", "keyword", "activation_checkpointing", "None"),
    ),
)
