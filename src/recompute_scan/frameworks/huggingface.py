"""Hugging Face: transformers and its Trainer, PEFT, TRL, accelerate, timm and diffusers.

``PreTrainedModel.gradient_checkpointing_enable`` is since 5.23 an alias of
``activation_checkpointing_enable``. Up to 4.51 the model's loop over its layers asks, outside a
wrapper around the layer; from 4.52 ``GradientCheckpointingLayer`` does, inside it.
``transformers/trainer.py`` enables that when training begins, or has FSDP's wrapper applied. Since
4.33 it refuses both arguments together. It does not see what the script switched on itself.

- PEFT: ``prepare_model_for_kbit_training`` in ``peft/utils/other.py`` enables the checkpointing of
  a quantized model by default. Without arguments of the user, it passes an empty dictionary on, so
  that torch's default holds in place of the one in transformers.
- TRL: its trainers have ``gradient_checkpointing`` on by default (``trl/trainer/base_config.py``);
  the ``Trainer`` below them switches it on.
- accelerate: its FSDP plugin applies torch's wrapper, for FSDP1 after sharding
  (``accelerate/accelerator.py``), for FSDP2 before (``fsdp2_apply_ac`` in
  ``accelerate/utils/fsdp_utils.py``). Neither looks at what the model has switched on itself.
- timm: its models ask through ``checkpoint`` and ``checkpoint_seq`` in
  ``timm/models/_manipulate.py``.
- diffusers: ``enable_gradient_checkpointing`` in ``diffusers/models/modeling_utils.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.base import (
    Before,
    Edit,
    Flaw,
    Mechanism,
    Rename,
    Setting,
    Values,
    truthy,
    value_of,
)
from recompute_scan.frameworks.detect import Signature

_TRAINER = ("transformers/trainer.py:*",)
_ARGUMENTS = ("transformers.training_args:TrainingArguments.__post_init__",)
_DOCS = "https://huggingface.co/docs/transformers/main/en/main_classes/trainer"


def _renamed(old: str, new: str) -> Rename:
    return Rename("transformers", "5.23", old, new)


# Shared by all mechanisms that switch it on.
BASE = Mechanism(
    name="hf-gradient-checkpointing",
    title="Hugging Face's gradient_checkpointing_enable",
    keep=50,
    why_keep="it is the model's own, and nothing else checkpoints its layers",
    remove="delete the gradient_checkpointing_enable(…) call",
    renames=(_renamed("gradient_checkpointing_enable", "activation_checkpointing_enable"),),
    docs="https://huggingface.co/docs/transformers/main/en/fsdp",
    packages=("transformers",),
    checked="ran here (transformers 5.23.0)",
    variants=(
        "transformers < 5.0: reentrant (explicit from 4.38, by torch's default before)",
        "transformers >= 5.0: non-reentrant",
    ),
    caution=(
        "With a KV cache, set use_cache=False, as the removed switch did: a recompute fails if "
        "the cache grows."
    ),
    asks=(
        "transformers/modeling_layers.py:*",
        "transformers/models/*/modeling_*.py:*",
        "transformers_modules/*modeling_*.py:*",
    ),
    switches=(
        "transformers.modeling_utils:PreTrainedModel.gradient_checkpointing_enable",
        "transformers.modeling_utils:PreTrainedModel.activation_checkpointing_enable",
    ),
    edits=(
        Edit("gradient_checkpointing_enable", "delete"),
        Edit("activation_checkpointing_enable", "delete"),
    ),
    feeds_inputs=True,
)
OWN = replace(
    BASE,
    fewer="set gradient_checkpointing = False on {layers} once it is on for the model",
    fewer_before=(
        Before(
            "transformers",
            "4.52",
            "layers have no flag for it before transformers 4.52: wrap the others in "
            "checkpoint_wrapper, and not {layers}",
        ),
    ),
    selectively=(
        'gradient_checkpointing_enable(gradient_checkpointing_kwargs={{"use_reentrant": False, '
        '"context_fn": {context}}})'
    ),
)
TRAINER = replace(
    BASE,
    name="hf-trainer",
    title="the Trainer's gradient_checkpointing",
    keep=60,
    remove="set gradient_checkpointing=False in TrainingArguments",
    renames=(_renamed("gradient_checkpointing", "activation_checkpointing"),),
    docs=_DOCS,
    switched_by=_TRAINER,
    configured_by=_ARGUMENTS,
    edits=(
        Edit("*", "keyword", "gradient_checkpointing"),
        Edit("*", "keyword", "activation_checkpointing"),
    ),
)
SHARDED = replace(
    pytorch.CONFIGURED,
    name="hf-trainer-fsdp",
    title="the Trainer's fsdp_config activation_checkpointing",
    remove='set "activation_checkpointing": false in the Trainer\'s fsdp_config',
    docs=_DOCS,
    checked="read (transformers 5.23.0, accelerate 1.15.0); the plugin that it sets up ran here",
    variants=("transformers >= 4.33: non-reentrant",),
    caution="Check whether anything else reads the same fsdp_config.",
    switched_by=_TRAINER,
    configured_by=_ARGUMENTS,
    edits=(Edit("*", "entry", "activation_checkpointing"),),
)
PEFT = replace(
    BASE,
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
        Edit("prepare_model_for_kbit_training", "keyword", "use_gradient_checkpointing", add=True),
    ),
)
TRL = replace(
    TRAINER,
    name="trl-trainer",
    title="TRL's gradient_checkpointing",
    remove=(
        "pass gradient_checkpointing=False to the TRL configuration (SFTConfig and others), which "
        "has it on by default"
    ),
    renames=(),
    docs="https://huggingface.co/docs/trl/main/en/reducing_memory_usage",
    packages=("transformers", "trl"),
    checked="read (trl 1.16.0)",
    variants=(
        "SFT: non-reentrant (set below transformers 5.0)",
        "SFT with PEFT and ZeRO-3: reentrant, forced",
    ),
    switched_by=("trl/*:*",),
    commands=("trl sft", "trl dpo", "trl grpo", "trl kto", "trl reward"),
    on_by_default=True,
)
ACCELERATE = replace(
    pytorch.CONFIGURED,
    name="accelerate-fsdp",
    title="accelerate's fsdp_activation_checkpointing",
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
    switched_by=("accelerate/accelerator.py:*", "accelerate/utils/fsdp_utils.py:*"),
    configured_by=("accelerate.utils.dataclasses:FullyShardedDataParallelPlugin.__post_init__",),
    variables=("FSDP_ACTIVATION_CHECKPOINTING",),
    commands=("accelerate launch", "accelerate.commands.launch"),
    launchers=("accelerate.commands",),
    edits=(Edit("*", "keyword", "activation_checkpointing"),),
)
TIMM = Mechanism(
    name="timm",
    title="timm's set_grad_checkpointing",
    keep=50,
    why_keep="it is the model's own, and knows its blocks",
    remove="call model.set_grad_checkpointing(False), or leave the call out",
    docs="https://huggingface.co/docs/timm/index",
    checked="ran here (timm 1.0.31)",
    variants=("1.0: non-reentrant; reentrant with TIMM_REENTRANT_CKPT=1",),
    caution="Check whether the model is used elsewhere with the same switch.",
    asks=("timm/models/*:*", "timm/layers/*:*"),
    switches=("timm.models:*.set_grad_checkpointing",),
    edits=(Edit("set_grad_checkpointing", "delete"),),
)
DIFFUSERS = Mechanism(
    name="diffusers",
    title="diffusers' enable_gradient_checkpointing",
    keep=50,
    why_keep="it is the model's own, and knows its blocks",
    remove="delete the enable_gradient_checkpointing() call",
    docs="https://huggingface.co/docs/diffusers/main/en/api/models/overview",
    checked="ran here (diffusers 0.42.1)",
    variants=("0.42: non-reentrant, unless a custom function is passed",),
    asks=("diffusers/models/*:*",),
    switches=("diffusers.models.modeling_utils:ModelMixin.enable_gradient_checkpointing",),
    edits=(Edit("enable_gradient_checkpointing", "delete"),),
)
# A layer of transformers asks for OWN, whoever switched it on: the more particular come first.
MECHANISMS = (PEFT, TRL, SHARDED, TRAINER, OWN, ACCELERATE, TIMM, DIFFUSERS)

_PLUGIN = (("fsdp_config", "fsdp_activation_checkpointing"), ("fsdp_activation_checkpointing",))


def flaws(values: Values) -> Iterator[Flaw]:
    """The random numbers under accelerate's FSDP 2. Read in accelerate 1.15."""
    settings = tuple(values.values())
    plugin = wrapper_of(settings)
    if plugin and is_fsdp2(settings) and is_fsdp(settings):
        yield Flaw(
            plugin.line,
            "RS605",
            "accelerate's FSDP 2 wraps layers with preserve_rng_state=False",
            "A recompute draws new random numbers: gradients are wrong where a layer has dropout. "
            "accelerate 1.15's source has this.",
            "Set dropout to 0, or use gradient_checkpointing instead.",
        )


def wrapper_of(settings: Sequence[Setting]) -> Setting | None:
    """The setting by which accelerate's FSDP plugin wraps layers, where it is on."""
    return next((s for s in settings if s.path in _PLUGIN and truthy(s.value)), None)


def any_wrapper_of(settings: Sequence[Setting]) -> Setting | None:
    """The Trainer's setting of a wrapper around layers, on or off, or else accelerate's."""
    trainers = [s for s in settings if s.path == ("fsdp_config", "activation_checkpointing")]
    return trainers[-1] if trainers else wrapper_of(settings)


def is_fsdp(settings: Sequence[Setting]) -> bool:
    """Whether accelerate's configuration asks for FSDP."""
    kind = value_of(settings, "distributed_type")
    return kind is not None and str(kind).upper() == "FSDP"


def is_fsdp2(settings: Sequence[Setting]) -> bool:
    """Whether it asks for version 2 of it."""
    return any(s.path[-1:] == ("fsdp_version",) and str(s.value) == "2" for s in settings)


def wraps_layers(settings: Sequence[Setting]) -> bool:
    """Whether the plugin wraps whole decoder layers: by a class that is named, or the model's."""
    policy = value_of(settings, "fsdp_config", "fsdp_auto_wrap_policy")
    kind = value_of(settings, "fsdp_config", "fsdp_transformer_layer_cls_to_wrap")
    by_class = policy is not None and str(policy).upper() == "TRANSFORMER_BASED_WRAP"
    return by_class and (kind is None or str(kind).strip().endswith(("Layer", "Block")))


def signatures() -> tuple[Signature, ...]:
    """Failures of transformers alone."""
    return (
        Signature(
            code="RS119",
            cause_name="trainer",
            error="ValueError",
            message=re.compile(
                r"activation_checkpointing.{0,400}?can't (?:both )?be set to True", re.DOTALL
            ),
            title="Both switches for activation checkpointing are on, and the Trainer refuses them",
            cause="""FSDP's activation_checkpointing and the training argument would each
                checkpoint every layer.""",
            fix="""Keep fsdp_config's activation_checkpointing and set TrainingArguments'
                gradient_checkpointing (transformers 5.23: activation_checkpointing) to
                False.""",
            keep="fsdp_config['activation_checkpointing']",
            remove="the training argument",
            versions="transformers 4.33 and later.",
            sources=("huggingface/transformers/pull/25771",),
            checked="message",
        ),
        Signature(
            code="RS125",
            cause_name="all-gather",
            message=re.compile(
                r"redundant AllGather (?:operation )?in (?:the )?backward pass", re.IGNORECASE
            ),
            notice=True,
            severity="warning",
            title="transformers warns that its checkpointing gathers FSDP's parameters once more",
            cause="""The model's checkpointing is on under FSDP. Recomputes around FSDP units gather
                parameters again.""",
            fix="""Set activation_checkpointing in fsdp_config, and pass
                gradient_checkpointing=False (RS119).""",
            versions="The warning: transformers 4.43 and later.",
            sources=("huggingface/transformers/issues/30404",),
        ),
    )
