"""Megatron-core's recomputation.

``megatron/core/tensor_parallel/random.py``: ``checkpoint`` for granularity ``full``, and
``CheckpointWithoutOutput``, recomputed by a gradient hook, for parts of ``selective``. With FP8 it
calls Transformer Engine's instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from recompute_scan.frameworks.configuration import Setting, SettingSwitch, truthy
from recompute_scan.frameworks.mechanism import Mechanism

# A gradient hook starts its recompute (``discard_output_and_register_recompute``).
_SELECTIVE = "CheckpointWithoutOutputFunction"

MECHANISM = Mechanism(
    name="megatron-recompute",
    title="Megatron-core's recompute_granularity",
    keep=80,
    why_keep="it knows the parallel layout and keeps the random states of all ranks",
    remove="leave --recompute-granularity out, or choose selective with fewer --recompute-modules",
    docs="https://docs.nvidia.com/megatron-core/developer-guide/latest/index.html",
    checked="ran here (megatron-core 0.16.1: its functions; what calls them was read)",
    variants=("0.16: its own, reentrant",),
    caution="The setting is one for all ranks and stages; memory must suffice on each.",
    functions=(_SELECTIVE,),
    holding=("megatron/core/tensor_parallel/random.py:checkpoint",),
    asks=("megatron/core/tensor_parallel/random.py:*",),
    backward=r"tensor_parallel/random\.py:backward$",
    watched=("megatron.core.tensor_parallel.random:CheckpointFunction",),
)


def switched_on(path: tuple[str, ...], setting: Setting) -> Iterator[SettingSwitch]:
    """What ``--recompute-granularity`` asks for, on a command line or in a file of arguments."""
    name = path[-1].lstrip("-").replace("-", "_") if path else ""
    if name == "recompute_granularity" and setting.value in ("full", "selective"):
        which = "whole layers" if setting.value == "full" else "parts of each layer"
        yield SettingSwitch("Megatron-core", which, "reentrant")
    elif name == "recompute_activations" and truthy(setting.value):
        yield SettingSwitch("Megatron-core", "parts of each layer", "reentrant")
