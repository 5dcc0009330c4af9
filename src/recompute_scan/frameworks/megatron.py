"""Megatron-core's recomputation.

``megatron/core/tensor_parallel/random.py``: ``checkpoint`` for granularity ``full``, and
``CheckpointWithoutOutput``, recomputed by a gradient hook, for parts of ``selective``. With FP8 it
calls Transformer Engine's instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from recompute_scan.frameworks.base import Mechanism, Setting, SettingSwitch, truthy
from recompute_scan.frameworks.detect import Signature

# A gradient hook starts its recompute (``discard_output_and_register_recompute``).
_SELECTIVE = "CheckpointWithoutOutputFunction"

MECHANISM = Mechanism(
    name="megatron-recompute",
    title="Megatron-core's recompute_granularity",
    keep=80,
    why_keep="it knows the parallel layout and keeps the random states of all ranks",
    remove="leave --recompute-granularity out, or choose selective with fewer --recompute-modules",
    docs="https://docs.nvidia.com/megatron-core/developer-guide/latest/index.html",
    checked="ran here (megatron-core 0.16.1: its functions; their callers were read)",
    variants=("0.16: its own, reentrant",),
    caution="The setting is one for all ranks and stages; memory must suffice on each.",
    functions=(_SELECTIVE,),
    holding=("megatron/core/tensor_parallel/random.py:checkpoint",),
    asks=("megatron/core/tensor_parallel/random.py:*",),
    backward=r"tensor_parallel/random\.py:backward$",
    watched=("megatron.core.tensor_parallel.random:CheckpointFunction",),
)


def signatures() -> tuple[Signature, ...]:
    """Failures that are its own; the messages are those of 0.16.1."""
    return (
        Signature(
            code="RS131",
            name="checkpointing-not-switched-on",
            cause_name="settings",
            error="ValueError|AssertionError",
            message=re.compile(
                r"^Invalid activation recompute method\.|^Invalid choices for recompute_modules: "
                r"|^(?:When u|U)sing recompute_gran\w+: |^recompute_method: .{1,40} must be "
                r"|^recompute_num_layers must be |^recompute layer id must be between "
                r"|^(?:moe_act|mla_up_proj) in recompute_modules is only supported "
                r"|^shared_experts recompute cannot work |^CPU offloading does not work when "
                r"activation recomputation|^Do not set --moe-layer-recompute with full"
                r"|^Delayed scaling does not support moe_act and layernorm recompute"
                r"|^distribute_saved_activations: .{1,40} must be false"
            ),
            title="Megatron refuses this combination of recompute settings",
            cause=(
                "Granularity full needs recompute_method (uniform or block) and "
                "recompute_num_layers. Selective takes neither, but recompute_modules. The message "
                "names the conflict."
            ),
            fix=(
                "Set --recompute-granularity full with --recompute-method and "
                "--recompute-num-layers, or selective with --recompute-modules. With Primus before "
                "pull request 965, use recompute_layer_ids or multi-token prediction, not both."
            ),
            versions="Megatron-core, all versions; the names of modules change between them.",
            sources=(
                "https://github.com/AMD-AGI/Primus/pull/965",
                "https://docs.nvidia.com/megatron-core/developer-guide/latest/index.html",
            ),
        ),
    )


def switched_on(path: tuple[str, ...], setting: Setting) -> Iterator[SettingSwitch]:
    """What ``--recompute-granularity`` asks for, on a command line or in a file of arguments."""
    name = path[-1].lstrip("-").replace("-", "_") if path else ""
    if name == "recompute_granularity" and setting.value in ("full", "selective"):
        which = "whole layers" if setting.value == "full" else "parts of each layer"
        yield SettingSwitch("Megatron-core", which, "reentrant")
    elif name == "recompute_activations" and truthy(setting.value):
        yield SettingSwitch("Megatron-core", "parts of each layer", "reentrant")
