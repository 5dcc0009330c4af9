"""Tools for fine-tuning that configure or replace the checkpointing of transformers.

- unsloth: ``unsloth_zoo/gradient_checkpointing.py`` puts its functions in the place of
  ``torch.utils.checkpoint.checkpoint`` and ``CheckpointFunction``, for the whole process.
- LLaMA-Factory: ``llamafactory/model/model_utils/checkpointing.py`` replaces the model's enable
  method, so the ``Trainer`` does not see it and accelerate's FSDP setting comes on top.
- axolotl: the configuration goes to the ``Trainer``, for adapters to the model in
  ``axolotl/loaders/``. Offloading wraps the layers, or replaces the checkpoint function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from recompute_scan.frameworks import huggingface, pytorch
from recompute_scan.frameworks.base import (
    RUN,
    Edit,
    Flaw,
    Mechanism,
    Setting,
    Values,
    Variant,
    truthy,
    value_of,
)

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
    why_keep="its kernels count on it, and it moves what it saves to the host",
    remove="pass use_gradient_checkpointing=False to FastLanguageModel.get_peft_model(…)",
    docs="https://unsloth.ai/docs",
    checked="read (unsloth_zoo 2026.10.9)",
    variants=("its own, reentrant",),
    caution="It replaces torch's functions: other checkpoints of the process use it too.",
    functions=_UNSLOTH_FUNCTIONS,
    holding=("unsloth_zoo/gradient_checkpointing.py:unsloth_checkpoint",),
    asks=("unsloth_zoo/gradient_checkpointing.py:*",),
    watched=tuple(f"{_UNSLOTH}:{name}" for name in _UNSLOTH_FUNCTIONS),
    backward=r"gradient_checkpointing\.py:backward$",
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
        "supervised, all layers trained: reentrant by its default",
        "reinforcement learning: non-reentrant by its default",
    ),
    asks=(*huggingface.BASE.asks, *pytorch.WRAPPER.asks, "axolotl/*:*"),
    switched_by=("axolotl/*:*",),
    functions=("CPU_Offloaded_Gradient_Checkpointer", "HiddenStatesOffloadCheckpoint", "Disco"),
    edits=(),
)
MECHANISMS = (UNSLOTH, LLAMA_FACTORY, AXOLOTL)


def flaws(values: Values) -> Iterator[Flaw]:
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
        why = "Both are non-reentrant, and the inner one has nothing left to recompute."
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
