"""PEFT's preparation of quantised models.

``prepare_model_for_kbit_training`` in ``peft/utils/other.py`` enables the model's checkpointing
by default, for a quantised model; the ``Trainer`` cannot see that. Without arguments of the
user's it passes on an empty dictionary, so that torch's default holds and not that of transformers.
"""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.frameworks import huggingface
from recompute_scan.frameworks.base import Edit

MECHANISM = replace(
    huggingface.BASE,
    name="peft-kbit",
    title="PEFT's prepare_model_for_kbit_training",
    keep=40,
    remove="pass use_gradient_checkpointing=False to prepare_model_for_kbit_training(…)",
    docs="https://huggingface.co/docs/peft/developer_guides/quantization",
    packages=("transformers", "peft"),
    checked="ran here (peft 0.21.2, transformers 5.23.0)",
    variants=(
        "reentrant (transformers 5.23 too), unless gradient_checkpointing_kwargs says otherwise",
    ),
    switched_by=("peft/utils/other.py:prepare_model_for_kbit_training",),
    edits=(
        Edit(
            "prepare_model_for_kbit_training",
            "keyword",
            "use_gradient_checkpointing",
            add=True,
        ),
    ),
)
