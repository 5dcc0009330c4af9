"""Hugging Face models from configs, with their own checkpointing, FSDP's wrapper, and both."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .architectures import Own, trained, use
from .case import Build, Case, TrainingStep
from .model import NON_REENTRANT, REENTRANT, Oracle
from .truth import Verdict
from .watch import watch

N, R = NON_REENTRANT, REENTRANT
VOCABULARY, WIDTH, LAYERS, LENGTH = 128, 32, 3, 16
_TEXT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
_SIZE = {"intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
_ATTENTION_NAMES = ("self_attn", "attn", "attention")
_MLP_NAMES = ("mlp", "intermediate", "feed_forward", "block_sparse_moe")


@dataclass(frozen=True)
class Architecture:
    """A model of transformers: its classes, the config that keeps it small, its layer's class."""

    model: str
    config: str
    layer: str
    settings: dict[str, Any]


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM",
        "LlamaConfig",
        "LlamaDecoderLayer",
        {**_TEXT, **_SIZE, "num_key_value_heads": 2},
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        "Qwen2DecoderLayer",
        {**_TEXT, **_SIZE, "num_key_value_heads": 2},
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        "MixtralConfig",
        "MixtralDecoderLayer",
        {**_TEXT, **_SIZE, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        "GPT2Block",
        {
            "vocab_size": VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": 4,
            "n_positions": 64,
        },
    ),
    "bert": Architecture("BertForMaskedLM", "BertConfig", "BertLayer", {**_TEXT, **_SIZE}),
    "vit": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        "ViTLayer",
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "image_size": 16,
            "patch_size": 4,
            **_SIZE,
        },
    ),
}


# Verdict, Hugging Face's own switch, and FSDP's wrapper.
SWITCHES: dict[str, tuple[Verdict, Own, Own]] = {
    "none": ("none", None, None),
    "own_n": ("full", N, None),
    "own_r": ("full", R, None),
    "wrapper_n": ("full", None, N),
    "own_r_in_wrapper_n": ("doubled", R, N),
    "own_n_in_wrapper_n": ("full", N, N),
    "own_n_in_wrapper_r": ("doubled", N, R),
}


def train_model(architecture: Architecture, own: Own = None, wrapper: Own = None) -> Build:
    """Trains the model on random tokens or images."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        import transformers  # noqa: PLC0415 - seconds, and only these cases need it

        config = getattr(transformers, architecture.config)(**architecture.settings)
        config.use_cache = False
        model = getattr(transformers, architecture.model)(config).to(device).train()
        layers = [m for m in model.modules() if type(m).__name__ == architecture.layer]
        for number, layer in enumerate(layers):
            _watch(oracle, layer, f"layers.{number}")
        use(model, own, wrapper, architecture.layer)
        return trained(model, lambda: _batch(model, device))

    return build


def _batch(model: Any, device: torch.device) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        images = torch.randn(2, 3, 16, 16, device=device)
        return {"pixel_values": images, "labels": torch.zeros(2, dtype=torch.long, device=device)}
    tokens = torch.randint(VOCABULARY, (2, LENGTH), device=device)
    return {"input_ids": tokens, "labels": tokens}


def _watch(oracle: Oracle, layer: nn.Module, name: str) -> None:
    children = dict(layer.named_children())
    for part, names in (("attention", _ATTENTION_NAMES), ("mlp", _MLP_NAMES)):
        watch(oracle, next(children[child] for child in names if child in children), name, part)


HUGGING_FACE = tuple(
    Case(
        f"{name}_{switch}",
        f"{architecture.model}: {switch}.",
        verdict,
        train_model(architecture, own, wrapper),
    )
    for name, architecture in ARCHITECTURES.items()
    for switch, (verdict, own, wrapper) in SWITCHES.items()
)
