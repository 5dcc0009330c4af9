"""PyTorch's own checkpoint functions, called from the user's code or a library's.

``torch/utils/checkpoint.py`` and ``torch/distributed/_composable/checkpoint_activation.py``.
"""

from recompute_scan.advise.mechanism import Mechanism

_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"

COMPOSABLE = Mechanism(
    name="composable-checkpoint",
    title="PyTorch's composable checkpoint",
    keep=90,
    why_keep="it is non-reentrant and leaves the module's class and names as they are",
    remove="delete the checkpoint(module) call",
    removable_call=True,
    caution=None,
    docs=_DOCS,
)
SEQUENTIAL = Mechanism(
    name="checkpoint-sequential",
    title="torch.utils.checkpoint.checkpoint_sequential",
    keep=40,
    why_keep="it checkpoints whole segments and is the code's own choice",
    remove="run the modules one after the other instead of through checkpoint_sequential(…)",
    removable_call=False,
    caution=None,
    docs=_DOCS,
)
DIRECT = Mechanism(
    name="torch-checkpoint",
    title="torch.utils.checkpoint.checkpoint",
    keep=30,
    why_keep="it is the code's own choice of what to checkpoint",
    remove="call the function itself: checkpoint(f, x, …) becomes f(x)",
    removable_call=False,
    caution=None,
    docs=_DOCS,
)
