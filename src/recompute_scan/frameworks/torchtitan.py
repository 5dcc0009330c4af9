"""torchtitan's policies: ``FullAC``, ``SelectiveAC`` and ``MemoryBudgetAC``.

``torchtitan/distributed/activation_checkpoint.py`` wraps each block with early stop off, so that
a second non-reentrant checkpoint around a block would double it.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.base import Setting, SettingSwitch

MECHANISM = replace(
    pytorch.WRAPPER,
    name="torchtitan",
    title="torchtitan's activation checkpointing",
    keep=70,
    keep_sharded=110,
    remove="take activation checkpointing out of the trainer's configuration",
    docs="https://github.com/pytorch/torchtitan/tree/main/docs",
    packages=("torchtitan",),
    checked="ran here (torchtitan 0.3.0: FullAC); read (the others)",
    variants=("0.3: non-reentrant, early stop off",),
    caution="Look whether the configuration is shared with other jobs.",
    switched_by=("torchtitan/distributed/activation_checkpoint.py:*",),
    edits=(),
)


def switched_on(path: tuple[str, ...], setting: Setting) -> Iterator[SettingSwitch]:
    """What its section ``[activation_checkpoint]`` asks for."""
    if path == ("activation_checkpoint", "mode") and setting.value in ("full", "selective"):
        which = (
            "each TransformerBlock" if setting.value == "full" else "TransformerBlocks, selectively"
        )
        yield SettingSwitch("torchtitan", which, "non-reentrant")
