"""LLaMA-Factory's own way into a Hugging Face model's checkpointing, on by default.

``llamafactory/model/model_utils/checkpointing.py`` replaces the model's enable method, so the
``Trainer`` does not see it and accelerate's FSDP setting comes on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from recompute_scan.frameworks import accelerate, huggingface
from recompute_scan.frameworks.base import RUN, Flaw, Setting, Values, Variant, truthy, value_of

MECHANISM = replace(
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


def flaws(values: Values) -> Iterator[Flaw]:
    """Its own switch, with FSDP's wrapper around the same layers, in one file."""
    settings = tuple(values.values())
    if not is_its_own(settings):
        return
    wrapper = values.get(("fsdp_config", "activation_checkpointing"))
    fsdp = values.get(("fsdp",))
    own = own_variant(settings, fsdp2=accelerate.is_fsdp2(settings))
    if own and fsdp and fsdp.value and wrapper and truthy(wrapper.value):
        whole = "auto_wrap" in str(fsdp.value) or any(
            path[-1] == "transformer_layer_cls_to_wrap" for path in values if path
        )
        yield doubled(wrapper.line, own, certain=whole, where="FSDP's wrapper, here")


def is_its_own(settings: Sequence[Setting]) -> bool:
    """Whether these are LLaMA-Factory's arguments."""
    roots = {s.path[0] for s in settings if len(s.path) == 1}
    return {"stage", "finetuning_type"} <= roots


def own_variant(settings: Sequence[Setting], *, fsdp2: bool) -> Variant | None:
    """Its own switch, which is on unless told otherwise; ``None`` where it is off.

    ``prepare_model_for_training`` in its ``model_utils/checkpointing.py``: reentrant by default,
    never under FSDP 2.
    """
    if truthy(value_of(settings, "disable_gradient_checkpointing")):
        return None
    if truthy(value_of(settings, "use_unsloth_gc")) or truthy(value_of(settings, "use_unsloth")):
        return "unknown"
    chosen = value_of(settings, "use_reentrant_gc")
    return "non-reentrant" if fsdp2 or (chosen is not None and not truthy(chosen)) else "reentrant"


def doubled(line: int, own: Variant, *, certain: bool, where: str) -> Flaw:
    """Its own switch, with FSDP's wrapper around the same layers."""
    if own == "reentrant":
        code, title = ("RS601", "checkpointed twice") if certain else ("RS602", "may double")
        why = "LLaMA-Factory's own switch is reentrant, and the Trainer does not see it."
    elif own == "non-reentrant":
        code, title = "RS603", "two switches for one recompute"
        why = "Both are non-reentrant, and the inner one finds its work done."
    else:
        code, title, why = (
            "RS602",
            "may be checkpointed twice",
            f"Unsloth's own was not read. {RUN}",
        )
    return Flaw(
        line,
        code,
        f"{title}: by LLaMA-Factory, which switches it on by default, and by {where}",
        why,
        "Turn FSDP's activation_checkpointing off, or set disable_gradient_checkpointing: true.",
        "off",
    )
