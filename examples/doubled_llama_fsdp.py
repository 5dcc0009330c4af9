"""Train a small Llama under FSDP with activation checkpointing switched on twice.

What is wrong here: ``gradient_checkpointing_enable()`` and ``apply_fsdp_checkpointing()`` each
checkpoint every decoder layer, so each layer's forward runs twice more in the backward pass
instead of once. Nothing fails and the loss is right; every step is only slower than it needs
to be. This is the small form of a reported case (meta-llama/llama-cookbook issue 740).
``repaired_llama_fsdp.py`` is the same script without the first switch.

    python examples/doubled_llama_fsdp.py
    torchrun --nproc-per-node 2 examples/doubled_llama_fsdp.py --steps 50
"""

from __future__ import annotations

import argparse
import functools
import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

# transformers 5.23 renamed gradient_checkpointing_enable; the old name still works and warns.
warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable.* is deprecated")
# With one process there is nothing to shard, and FSDP says so.
warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")


def setup() -> torch.device:
    """Join torchrun's process group, or make one of a single process."""
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def build_model(device: torch.device) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        use_cache=False,
    )
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    wrap = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
    )
    return FullyShardedDataParallel(
        LlamaForCausalLM(config),
        auto_wrap_policy=wrap,
        mixed_precision=bf16 if device.type == "cuda" else None,
        use_orig_params=True,
        device_id=device,
    )


def apply_fsdp_checkpointing(model: FullyShardedDataParallel) -> None:
    """Wrap every decoder layer in a non-reentrant checkpoint."""
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=wrapper,
        check_fn=lambda module: isinstance(module, LlamaDecoderLayer),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama under FSDP.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=128)
    args = parser.parse_args()

    device = setup()
    model = build_model(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    apply_fsdp_checkpointing(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(0, 1024, (args.batch_size, args.sequence_length), device=device)
    model.train()
    for step in range(args.steps):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
