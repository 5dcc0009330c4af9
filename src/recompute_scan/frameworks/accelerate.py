"""Accelerate's FSDP plugin, for FSDP1 and FSDP2.

FSDP1: ``accelerate/accelerator.py`` applies the wrapper after sharding, by the auto-wrap policy.
FSDP2: ``fsdp2_apply_ac`` in ``accelerate/utils/fsdp_utils.py``, before ``fully_shard``. Neither
looks at what the model has switched on itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.base import Edit, Flaw, Setting, Values, truthy, value_of

MECHANISM = replace(
    pytorch.WRAPPER,
    name="accelerate-fsdp",
    title="accelerate's fsdp_activation_checkpointing",
    keep=70,
    keep_sharded=110,
    remove=(
        "set fsdp_activation_checkpointing: false in accelerate's configuration, or "
        "activation_checkpointing=False in FullyShardedDataParallelPlugin"
    ),
    docs="https://huggingface.co/docs/accelerate/usage_guides/fsdp",
    packages=("accelerate",),
    checked="ran here (accelerate 1.15.0, FSDP1 and FSDP2)",
    variants=(
        "FSDP1: non-reentrant",
        "FSDP2: torch's default, non-reentrant (fsdp2_apply_ac: in 1.10.1, not in 1.7.0)",
    ),
    caution="Look whether the configuration is shared with other jobs.",
    switched_by=("accelerate/accelerator.py:*", "accelerate/utils/fsdp_utils.py:*"),
    settings=("accelerate.utils.dataclasses:FullyShardedDataParallelPlugin.__post_init__",),
    variables=("FSDP_ACTIVATION_CHECKPOINTING",),
    commands=("accelerate launch", "accelerate.commands.launch"),
    launchers=("accelerate.commands",),
    edits=(Edit("*", "keyword", "activation_checkpointing"),),
)

_PLUGIN = (("fsdp_config", "fsdp_activation_checkpointing"), ("fsdp_activation_checkpointing",))


def flaws(values: Values) -> Iterator[Flaw]:
    """What its FSDP 2 does to random numbers. Read in accelerate 1.15."""
    settings = tuple(values.values())
    plugin = wrapper_of(settings)
    if plugin and is_fsdp2(settings) and is_fsdp(settings):
        yield Flaw(
            plugin.line,
            "RS605",
            "accelerate's FSDP 2 wraps layers with preserve_rng_state=False",
            "Recomputes draw random numbers of their own: gradients change where a layer has "
            "dropout. Read in accelerate 1.15.",
            "Set dropout to 0, or use gradient_checkpointing instead.",
        )


def wrapper_of(settings: Sequence[Setting]) -> Setting | None:
    """The setting by which accelerate's FSDP plugin wraps layers, where it is on."""
    return next((s for s in settings if s.path in _PLUGIN and truthy(s.value)), None)


def is_fsdp(settings: Sequence[Setting]) -> bool:
    """Whether accelerate's configuration asks for FSDP."""
    kind = value_of(settings, "distributed_type")
    return kind is not None and str(kind).upper() == "FSDP"


def is_fsdp2(settings: Sequence[Setting]) -> bool:
    """Whether it asks for version 2 of it."""
    return any(s.path[-1:] == ("fsdp_version",) and str(s.value) == "2" for s in settings)


def wraps_layers(settings: Sequence[Setting]) -> bool:
    """Whether the plugin wraps decoder layers whole: by a class that is named, or the model's."""
    policy = value_of(settings, "fsdp_config", "fsdp_auto_wrap_policy")
    kind = value_of(settings, "fsdp_config", "fsdp_transformer_layer_cls_to_wrap")
    by_class = policy is not None and str(policy).upper() == "TRANSFORMER_BASED_WRAP"
    return by_class and (kind is None or str(kind).strip().endswith(("Layer", "Block")))
