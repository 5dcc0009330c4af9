"""What litgpt and torchtune are given of the tiny Llama: its weights in litgpt's names, a recipe.

Weights are renamed by what the two say of their models; the values are those of the inputs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from transformers import LlamaConfig, LlamaForCausalLM

# Of a layer: litgpt's name, and transformers'.
_LAYER = {
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attn.proj": "self_attn.o_proj",
    "mlp.fc_1": "mlp.gate_proj",
    "mlp.fc_2": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
}
_OUTSIDE = {
    "lm_head": "lm_head",
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
}


def litgpt(llama: Path, folder: Path) -> None:
    """The model as litgpt keeps one, with the tokenizer."""
    shutil.copytree(llama, folder)
    model = LlamaForCausalLM.from_pretrained(llama)
    config: Any = model.config
    theirs = model.state_dict()
    ours = {f"{name}.weight": theirs[f"{old}.weight"] for name, old in _OUTSIDE.items()}
    for number in range(config.num_hidden_layers):
        new, old = f"transformer.h.{number}.", f"model.layers.{number}."
        for name, their in _LAYER.items():
            ours[f"{new}{name}.weight"] = theirs[f"{old}{their}.weight"]
        parts = [theirs[f"{old}self_attn.{part}_proj.weight"] for part in "qkv"]
        ours[f"{new}attn.qkv.weight"] = torch.cat(parts)
    torch.save({name: weight.clone() for name, weight in ours.items()}, folder / "lit_model.pth")
    described = {
        "name": "tiny",
        "block_size": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_query_groups": config.num_attention_heads,
        "n_embd": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
    }
    (folder / "model_config.yaml").write_text(json.dumps(described))


def torchtune(llama: Path, texts: Path, lines: list[str], file: Path) -> None:
    """A configuration of torchtune's full finetuning on one device, for this model, with a
    tokenizer of SentencePiece's.
    """
    config: Any = LlamaConfig.from_pretrained(llama)
    pieces = file.with_name("pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(pieces),
        vocab_size=config.vocab_size,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    recipe = {
        "model": {
            "_component_": "torchtune.models.llama2.llama2",
            "vocab_size": config.vocab_size,
            "num_layers": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "embed_dim": config.hidden_size,
            "max_seq_len": config.max_position_embeddings,
            "intermediate_dim": config.intermediate_size,
        },
        "tokenizer": {
            "_component_": "torchtune.models.llama2.llama2_tokenizer",
            "path": str(pieces.with_suffix(".model")),
            "max_seq_len": config.max_position_embeddings,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(llama),
            "checkpoint_files": ["model.safetensors"],
            "recipe_checkpoint": None,
            "output_dir": "${output_dir}",
            "model_type": "LLAMA2",
        },
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "source": "json",
            "data_files": str(texts),
            "column": "text",
            "split": "train",
            "packed": False,
        },
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
        "optimizer_in_bwd": False,
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.StdoutLogger"},
        "resume_from_checkpoint": False,
        "seed": 7,
        "shuffle": True,
        "batch_size": 4,
        "epochs": 1,
        "max_steps_per_epoch": 10,
        "gradient_accumulation_steps": 1,
        "clip_grad_norm": None,
        "compile": False,
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
        "log_level": "INFO",
        "device": "cpu",
        "dtype": "fp32",
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
    }
    file.write_text(json.dumps(recipe, indent=1))
