"""The model of transformers with its cache on, its layers checkpointed and sharded by FSDP."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

BROKEN = True

torch.manual_seed(0)
dist.init_process_group("gloo")
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    attn_implementation="eager",  # type: ignore[call-arg]
    use_cache=BROKEN,
)
model = FullyShardedDataParallel(
    LlamaForCausalLM(config),
    device_id=torch.device("cpu"),
    auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
    use_orig_params=True,
)
apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, LlamaDecoderLayer))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 64, (2, 8))
for _ in range(4):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
