"""What each recommended change of a checkpoint does to gradients, in sentences."""

from __future__ import annotations

RANDOM_STATE = (
    "preserve_rng_state=False changes gradients wherever the block draws random numbers in "
    "training, as dropout does: its recompute draws others. Take it only where nothing in the "
    "block draws any."
)
NON_REENTRANT = (
    "Gradients stay as they are, except that the weights of a block none of whose inputs asks for "
    "one get theirs, which they did not through the reentrant variant."
)
REENTRANT = (
    "The reentrant variant does not see whether the recompute is the same computation: a block "
    "that is not goes on with wrong gradients. And where no input of a block asks for one, its "
    "weights get none."
)
CHECKPOINTED = (
    "A checkpoint leaves gradients as they are where its block computes the same twice. It keeps "
    "torch's random state, and not Python's or NumPy's; running statistics (BatchNorm) are updated "
    "once more by each recompute."
)
