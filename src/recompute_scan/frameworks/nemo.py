"""NeMo Automodel; NeMo's Megatron models go by Megatron-core's settings.

``nemo_automodel/components/distributed/`` chooses the model's own checkpointing, the wrapper
around layers, or the wrapper around parts of them, and never two.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from recompute_scan.frameworks import huggingface, pytorch
from recompute_scan.frameworks.base import Flaw, Setting, SettingSwitch, Values, truthy

MECHANISM = replace(
    pytorch.WRAPPER,
    name="nemo-automodel",
    title="NeMo Automodel's activation_checkpointing",
    keep=70,
    keep_sharded=110,
    remove="set distributed.activation_checkpointing: false in the recipe",
    docs="https://docs.nvidia.com/nemo/automodel/latest/index.html",
    checked="read (nemo-automodel 0.7.0)",
    variants=("0.7: non-reentrant",),
    caution="Look whether the recipe is shared with other jobs.",
    asks=(*pytorch.WRAPPER.asks, *huggingface.BASE.asks),
    switched_by=("nemo_automodel/components/*:*",),
    edits=(),
)

_GRANULARITY = ("activations_checkpoint_granularity",)


def flaws(values: Values) -> Iterator[Flaw]:
    """What NeMo's ``ParallelTransformer`` refuses."""
    for path, setting in values.items():
        if path[-1:] != _GRANULARITY or setting.value != "full":
            continue
        method = values.get((*path[:-1], "activations_checkpoint_method"))
        if method is None or method.value not in ("uniform", "block"):
            if method is not None and "$" in str(method.value):
                continue
            yield Flaw(
                setting.line,
                "RS604",
                "granularity full needs activations_checkpoint_method uniform or block",
                "NeMo raises a ValueError when the model is made.",
                "Set activations_checkpoint_method: uniform and ..._num_layers: 1.",
            )


def switched_on(path: tuple[str, ...], setting: Setting) -> Iterator[SettingSwitch]:
    """What its ``ParallelTransformer`` and the recipes of Automodel read."""
    if path[-2:] == ("distributed", "activation_checkpointing") and truthy(setting.value):
        yield SettingSwitch("NeMo Automodel", "the layers that it wraps", "non-reentrant")
    if path[-1:] == _GRANULARITY and setting.value in ("full", "selective"):
        which = "whole layers" if setting.value == "full" else "the attention of each layer"
        yield SettingSwitch("NeMo", which, "reentrant")
