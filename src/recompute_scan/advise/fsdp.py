"""PyTorch FSDP's checkpoint wrapper.

``torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py``: non-reentrant by default
since torch 2.2, reentrant before.
"""

from recompute_scan.advise.mechanism import Mechanism

MECHANISM = Mechanism(
    name="fsdp-wrapper",
    title="FSDP's checkpoint wrapper",
    keep=100,
    why_keep=(
        "the wrapper stands inside the FSDP unit, so its replay needs no second all-gather, and "
        "being non-reentrant it checks the recomputed tensors and stops early"
    ),
    remove="delete the apply_activation_checkpointing(…) or checkpoint_wrapper(…) call",
    removable_call=True,
    caution=None,
    docs="https://docs.pytorch.org/docs/stable/fsdp.html",
)
