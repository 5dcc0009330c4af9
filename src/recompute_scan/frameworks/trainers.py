"""Training frameworks and tools for fine-tuning that set up checkpointing.

Tools for fine-tuning configure or replace the checkpointing of transformers:

- unsloth: ``unsloth_zoo/gradient_checkpointing.py`` puts its functions in the place of
  ``torch.utils.checkpoint.checkpoint`` and ``CheckpointFunction``, for the whole process.
- LLaMA-Factory: ``llamafactory/model/model_utils/checkpointing.py`` replaces the model's enable
  method, so the ``Trainer`` does not see it and accelerate's FSDP setting comes on top.
- axolotl: the configuration goes to the ``Trainer``, for adapters to the model in
  ``axolotl/loaders/``. Offloading wraps the layers, or replaces the checkpoint function.

Frameworks have settings that put torch's wrapper around layers:

- NeMo Automodel: ``nemo_automodel/components/distributed/`` chooses the model's checkpointing, the
  wrapper around layers, or the wrapper around parts of them, and never two. NeMo's Megatron models
  go by Megatron-core's settings.
- torchtitan: ``FullAC``, ``SelectiveAC`` and ``MemoryBudgetAC``, in
  ``torchtitan/distributed/activation_checkpoint.py``, wrap each block with early stop off, so that
  a second non-reentrant checkpoint around a block would double it.
- torchtune: a recipe applies ``set_activation_checkpointing`` (``torchtune/training/memory.py``) or
  the selective wrapper (``torchtune/training/activations.py``).
- Composer and LLM Foundry: ``fsdp_config``, read for FSDP1 in
  ``composer/distributed/dist_strategy.py``, for FSDP2 by ``apply_ac`` in
  ``composer/distributed/activation_checkpointing.py``.
- Lightning and Fabric: ``_setup_activation_checkpointing`` in
  ``lightning/fabric/strategies/fsdp.py`` applies torch's wrapper, unless a ``CheckpointWrapper`` is
  there already; it does not look at the model's flags. ``DeepSpeedStrategy``'s settings only
  configure DeepSpeed's function and turn nothing on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from recompute_scan.frameworks import huggingface, pytorch
from recompute_scan.frameworks.base import (
    RUN,
    Edit,
    Flaw,
    Mechanism,
    Setting,
    SettingSwitch,
    Values,
    Variant,
    truthy,
    value_of,
)
from recompute_scan.frameworks.detect import Signature, innermost

_GRANULARITY = ("activations_checkpoint_granularity",)
POLICIES = {"activation_checkpointing", "activation_checkpointing_policy"}
_FSDP_FILES = (
    "lightning/fabric/strategies/fsdp",
    "lightning/pytorch/strategies/fsdp",
    "lightning_fabric/strategies/fsdp",
    "pytorch_lightning/strategies/fsdp",
)
_ISSUES = "Lightning-AI/pytorch-lightning/issues/"

_UNSLOTH = "unsloth_zoo.gradient_checkpointing"
_UNSLOTH_FUNCTIONS = (
    "UnslothCheckpointFunction",
    "Unsloth_Gradient_Checkpointer",
    "Unsloth_Offloaded_Gradient_Checkpointer",
)

UNSLOTH = Mechanism(
    name="unsloth",
    title="unsloth's own checkpointing (use_gradient_checkpointing)",
    keep=120,
    why_keep="its kernels rely on it, and it moves what it saves to the host",
    remove="pass use_gradient_checkpointing=False to FastLanguageModel.get_peft_model(…)",
    docs="https://unsloth.ai/docs",
    checked="read (unsloth_zoo 2026.10.9)",
    variants=("its own, reentrant",),
    caution="It replaces torch's functions: other checkpoints of the process use it too.",
    functions=_UNSLOTH_FUNCTIONS,
    holding=("unsloth_zoo/gradient_checkpointing.py:unsloth_checkpoint",),
    asks=("unsloth_zoo/gradient_checkpointing.py:*",),
    watched=tuple(f"{_UNSLOTH}:{name}" for name in _UNSLOTH_FUNCTIONS),
    edits=(Edit("get_peft_model", "keyword", "use_gradient_checkpointing"),),
)
LLAMA_FACTORY = replace(
    huggingface.BASE,
    name="llama-factory",
    title="LLaMA-Factory's own switch (disable_gradient_checkpointing turns it off)",
    keep=45,
    remove="set disable_gradient_checkpointing: true in LLaMA-Factory's configuration",
    renames=(),
    docs="https://llamafactory.readthedocs.io/en/latest/",
    checked="read (llamafactory 0.9.5, which fails with transformers 5.23)",
    variants=("reentrant (use_reentrant_gc)", "FSDP2: non-reentrant, forced"),
    asks=("llamafactory/model/model_utils/checkpointing.py:*",),
    functions=("UnslothGradientCheckpointing",),
    commands=("llamafactory-cli",),
    switches=(),
    edits=(),
)
AXOLOTL = replace(
    huggingface.BASE,
    name="axolotl",
    title="axolotl's gradient_checkpointing",
    keep=60,
    remove="set gradient_checkpointing: false in axolotl's YAML file",
    renames=(),
    docs="https://docs.axolotl.ai/docs/gradient_checkpointing.html",
    checked="read (axolotl 0.19.0)",
    variants=(
        "supervised, without unfrozen_parameters: reentrant by default",
        "reinforcement learning: non-reentrant by default",
    ),
    asks=(*huggingface.BASE.asks, *pytorch.WRAPPER.asks, "axolotl/*:*"),
    switched_by=("axolotl/*:*",),
    functions=("CPU_Offloaded_Gradient_Checkpointer", "HiddenStatesOffloadCheckpoint", "Disco"),
    edits=(),
)
NEMO = replace(
    pytorch.CONFIGURED,
    name="nemo-automodel",
    title="NeMo Automodel's activation_checkpointing",
    remove="set distributed.activation_checkpointing: false in the recipe",
    docs="https://docs.nvidia.com/nemo/automodel/latest/index.html",
    checked="read (nemo-automodel 0.7.0)",
    variants=("0.7: non-reentrant",),
    caution="Check whether other jobs share the recipe.",
    asks=(*pytorch.WRAPPER.asks, *huggingface.BASE.asks),
    switched_by=("nemo_automodel/components/*:*",),
)
TORCHTITAN = replace(
    pytorch.CONFIGURED,
    name="torchtitan",
    title="torchtitan's activation checkpointing",
    remove="take activation checkpointing out of the trainer's configuration",
    docs="https://github.com/pytorch/torchtitan/tree/main/docs",
    packages=("torchtitan",),
    checked="ran here (torchtitan 0.3.0: FullAC); read (the others)",
    variants=("0.3: non-reentrant, early stop off",),
    switched_by=("torchtitan/distributed/activation_checkpoint.py:*",),
)
TORCHTUNE = replace(
    pytorch.CONFIGURED,
    name="torchtune",
    title="torchtune's enable_activation_checkpointing",
    remove="set enable_activation_checkpointing: false in the recipe, and leave ac_mode out",
    docs="https://docs.pytorch.org/torchtune/stable/tutorials/memory_optimizations.html",
    checked="ran here (torchtune 0.6.1: set_activation_checkpointing); read (recipes)",
    variants=("0.6: non-reentrant",),
    caution="Check whether other jobs share the recipe.",
    switched_by=("torchtune/training/*:*",),
    edits=(Edit("set_activation_checkpointing", "delete"),),
)
COMPOSER = replace(
    pytorch.CONFIGURED,
    name="composer-fsdp",
    title="Composer's fsdp_config activation_checkpointing",
    keep_sharded=105,
    remove="set activation_checkpointing: false in fsdp_config",
    docs="https://docs.mosaicml.com/projects/composer/en/stable/notes/distributed_training.html",
    checked="read (mosaicml 0.32.1)",
    variants=(
        "FSDP1: reentrant unless activation_checkpointing_reentrant is false",
        "FSDP2: non-reentrant",
    ),
    switched_by=("composer/distributed/*:*",),
)
LIGHTNING = replace(
    pytorch.CONFIGURED,
    name="lightning-fsdp",
    title="Lightning's activation_checkpointing_policy",
    remove="leave activation_checkpointing_policy out of FSDPStrategy(…)",
    docs="https://lightning.ai/docs/pytorch/stable/advanced/model_parallel/fsdp.html",
    packages=("lightning", "pytorch-lightning"),
    checked="ran here (lightning 2.6.6: its set-up function; the strategy needs a GPU)",
    variants=("lightning 2.x: non-reentrant (explicit below torch 2.2)",),
    caution="Check whether other jobs share the strategy.",
    switched_by=tuple(f"{file}.py:*" for file in _FSDP_FILES),
    configured_by=tuple(f"{file.replace('/', '.')}:FSDPStrategy.__init__" for file in _FSDP_FILES),
    edits=(
        Edit("*", "keyword", "activation_checkpointing_policy", "None"),
        Edit("*", "keyword", "activation_checkpointing", "None"),
    ),
)
MECHANISMS = (UNSLOTH, LLAMA_FACTORY, AXOLOTL, NEMO, TORCHTITAN, TORCHTUNE, COMPOSER, LIGHTNING)


def flaws(values: Values) -> Iterator[Flaw]:
    """Settings that a framework refuses, or reads otherwise than they look."""
    yield from _llama_factory_flaws(values)
    yield from _nemo_flaws(values)
    yield from _torchtune_flaws(values)
    yield from _lightning_flaws(values)


def _llama_factory_flaws(values: Values) -> Iterator[Flaw]:
    """LLaMA-Factory's switch, with FSDP's wrapper around the same layers, in one file."""
    settings = tuple(values.values())
    if not is_llama_factory(settings):
        return
    wrapper = values.get(("fsdp_config", "activation_checkpointing"))
    fsdp = values.get(("fsdp",))
    own = llama_factory_variant(settings, fsdp2=huggingface.is_fsdp2(settings))
    if own and fsdp and fsdp.value and wrapper and truthy(wrapper.value):
        whole = "auto_wrap" in str(fsdp.value) or any(
            path[-1] == "transformer_layer_cls_to_wrap" for path in values if path
        )
        yield llama_factory_doubled(wrapper.line, own, certain=whole, where="FSDP's wrapper, here")


def is_llama_factory(settings: Sequence[Setting]) -> bool:
    """Whether these are LLaMA-Factory's arguments."""
    roots = {s.path[0] for s in settings if len(s.path) == 1}
    return {"stage", "finetuning_type"} <= roots


def llama_factory_variant(settings: Sequence[Setting], *, fsdp2: bool) -> Variant | None:
    """The variant of its switch, which is on by default; ``None`` where it is off.

    ``prepare_model_for_training`` in ``model_utils/checkpointing.py``: reentrant by default, never
    under FSDP 2.
    """
    if truthy(value_of(settings, "disable_gradient_checkpointing")):
        return None
    if truthy(value_of(settings, "use_unsloth_gc")) or truthy(value_of(settings, "use_unsloth")):
        return "unknown"
    chosen = value_of(settings, "use_reentrant_gc")
    return "non-reentrant" if fsdp2 or (chosen is not None and not truthy(chosen)) else "reentrant"


def llama_factory_doubled(line: int, own: Variant, *, certain: bool, where: str) -> Flaw:
    """Its own switch, with FSDP's wrapper around the same layers."""
    if own == "reentrant":
        code, title = ("RS601", "checkpointed twice") if certain else ("RS602", "may double")
        why = "LLaMA-Factory's own switch is reentrant, and the Trainer does not see it."
    elif own == "non-reentrant":
        code, title = "RS603", "two switches for one recompute"
        why = "Both are non-reentrant, and the outer recompute stops at the inner one."
    else:
        code, title = "RS602", "may be checkpointed twice"
        why = f"Unsloth's own was not read. {RUN}"
    return Flaw(
        line,
        code,
        f"{title}: by LLaMA-Factory, which switches it on by default, and by {where}",
        why,
        "Turn FSDP's activation_checkpointing off, or set disable_gradient_checkpointing: true.",
        "off",
    )


def _nemo_flaws(values: Values) -> Iterator[Flaw]:
    """A granularity that NeMo's ``ParallelTransformer`` refuses."""
    for path, setting in values.items():
        if path[-1:] != _GRANULARITY or setting.value != "full":
            continue
        method = values.get((*path[:-1], "activations_checkpoint_method"))
        given = str(method.value) if method else ""
        if given not in ("uniform", "block") and "$" not in given:
            yield Flaw(
                setting.line,
                "RS604",
                "granularity full needs activations_checkpoint_method uniform or block",
                "NeMo raises a ValueError when the model is made.",
                "Set activations_checkpoint_method: uniform and ..._num_layers: 1.",
            )


def _torchtune_flaws(values: Values) -> Iterator[Flaw]:
    """Settings that ``recipes/full_finetune_distributed.py`` leaves out or refuses."""
    if not any(
        path[-1:] == ("_component_",) and str(setting.value).startswith("torchtune.")
        for path, setting in values.items()
    ):
        return
    whole = values.get(("enable_activation_checkpointing",))
    mode = values.get(("ac_mode",))
    offload = values.get(("enable_activation_offloading",))
    if whole and truthy(whole.value) and mode and mode.value not in (None, "None", ""):
        yield Flaw(
            mode.line,
            "RS606",
            "nothing is checkpointed: ac_mode excludes enable_activation_checkpointing, which line "
            f"{whole.line} switches on",
            "torchtune's distributed recipe applies each only where the other is off.",
            "Keep one of the two.",
        )
    if offload and truthy(offload.value) and not (whole and truthy(whole.value)):
        yield Flaw(
            offload.line,
            "RS604",
            "enable_activation_offloading needs enable_activation_checkpointing",
            "torchtune's recipes raise a RuntimeError.",
            "Switch both on, or this one off.",
            "off",
        )


def _lightning_flaws(values: Values) -> Iterator[Flaw]:
    """Arguments that a strategy in a configuration refuses."""
    begins: set[tuple[str, ...]] = set()
    for path, setting in values.items():
        if path[-1:] != ("class_path",) or not str(setting.value).endswith("FSDPStrategy"):
            continue
        begins = begins or {other[:size] for other in values for size in range(1, len(other) + 1)}
        if all((*path[:-1], "init_args", name) in begins for name in POLICIES):
            yield lightning_refuses(setting.line)


def lightning_refuses(line: int) -> Flaw:
    """Two arguments of one strategy, which takes either alone."""
    return Flaw(
        line,
        "RS604",
        "activation_checkpointing and activation_checkpointing_policy are both given",
        "Lightning's FSDPStrategy raises a ValueError.",
        "Keep activation_checkpointing_policy.",
    )


def switched_on(path: tuple[str, ...], setting: Setting) -> Iterator[SettingSwitch]:
    """The checkpoints that one setting asks for, by the framework that reads it."""
    if path[-2:] == ("distributed", "activation_checkpointing") and truthy(setting.value):
        yield SettingSwitch("NeMo Automodel", "the layers that it wraps", "non-reentrant")
    if path[-1:] == _GRANULARITY and setting.value in ("full", "selective"):
        which = "whole layers" if setting.value == "full" else "the attention of each layer"
        yield SettingSwitch("NeMo", which, "reentrant")
    if path == ("activation_checkpoint", "mode") and setting.value in ("full", "selective"):
        each = (
            "each TransformerBlock" if setting.value == "full" else "TransformerBlocks, selectively"
        )
        yield SettingSwitch("torchtitan", each, "non-reentrant")
    if path == ("enable_activation_checkpointing",) and truthy(setting.value):
        yield SettingSwitch("torchtune", "each TransformerSelfAttentionLayer", "non-reentrant")
    if path[-2:-1] == ("activation_checkpointing_policy",) and "init_args" in path:
        layers = f"each {str(setting.value).rpartition('.')[2]}"
        yield SettingSwitch("Lightning's strategy", layers, "non-reentrant")


def signatures() -> tuple[Signature, ...]:
    """Failures of Lightning and Fabric alone."""
    return (
        Signature(
            code="RS201",
            cause_name="optimizer-states",
            error="KeyError",
            message=re.compile(r"^'optimizer_states'$"),
            where=innermost(r"lightning/\S*strategies/\S+:\S*save_checkpoint$"),
            frameless=True,
            title="Lightning looked for optimizer state in a weights-only checkpoint",
            cause="""With state_dict_type='sharded', FSDPStrategy.save_checkpoint removes
                'optimizer_states' from the checkpoint, but ModelCheckpoint(save_weights_only=True)
                left it out.""",
            fix="Upgrade to lightning 2.2.2 or later, or save with save_weights_only=False.",
            versions="lightning 2.1.4 to 2.2.1, perhaps earlier ones; fixed in 2.2.2.",
            sources=(f"{_ISSUES}19492",),
            checked="reproduced",
        ),
        Signature(
            code="RS206",
            cause_name="exists",
            error="FileExistsError",
            message=re.compile(r"The checkpoint directory already exists and is not empty"),
            title="A sharded checkpoint was to be written over an older one",
            cause="""A sharded checkpoint is a folder; Lightning Fabric writes only into an empty
                one.""",
            fix="""Save under a new name, or remove the old folder first (on one rank, then a
                barrier).""",
            versions="Fabric 2.1.0; later versions refuse only with XLA's strategy.",
            sources=(f"{_ISSUES}18881",),
        ),
        Signature(
            code="RS125",
            cause_name="lightning",
            message=re.compile(r"the model already contains checkpointed layers"),
            notice=True,
            severity="warning",
            title="Lightning found checkpoint wrappers in the model and left its own policy out",
            cause="Checkpointing is configured in the strategy and in the model's code.",
            fix="Keep the strategy's policy and remove the wrappers from the model's code.",
            versions="Lightning 2.1 and later.",
            sources=("Lightning-AI/pytorch-lightning/pull/18006",),
        ),
    )
