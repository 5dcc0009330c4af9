"""A model of transformers whose checkpointing flag is set by hand."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config)
for module in model.modules():
    if hasattr(module, "gradient_checkpointing"):
        setattr(module, "gradient_checkpointing", True)  # noqa: B010
tokens = torch.randint(0, 64, (2, 8))
model(input_ids=tokens, labels=tokens).loss.backward()
