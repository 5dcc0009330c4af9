"""Fine-tune a small Llama as a widely used recipe does: FSDP, then three switches in a row.

The order of calls is that of llama-recipes' finetuning script from its 0.0.3 on
(meta-llama/llama-cookbook issue 740): the model is sharded, its inputs are made to ask for
gradients, Hugging Face's checkpointing is switched on, and torch's wrapper is put around every
decoder layer. ``--once`` leaves out Hugging Face's switch, which is the repair. ``--profile`` has
torch.profiler record some steps, a file a rank.

    torchrun --nproc-per-node 2 tests/versions/finetuning.py
"""

import argparse
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

VOCABULARY, LENGTH, BATCH = 256, 32, 2
around_each_layer = functools.partial(
    checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT
)


def small_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def sharded(model: LlamaForCausalLM) -> Any:
    wrap = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
    )
    return FullyShardedDataParallel(
        model, auto_wrap_policy=wrap, device_id=torch.device("cpu"), limit_all_gathers=True
    )


def checkpoint_layers(model: Any) -> None:
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=around_each_layer,
        check_fn=lambda module: isinstance(module, LlamaDecoderLayer),
    )


def batches(steps: int) -> Iterator[dict[str, torch.Tensor]]:
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
        yield {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "labels": tokens,
        }


@contextmanager
def profiled(folder: str | None) -> Iterator[Callable[[], None]]:
    """What to call at the end of each step."""
    if folder is None:
        yield lambda: None
        return
    trace = f"{folder}/trace-rank{dist.get_rank()}.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(trace),
        record_shapes=True,
    ) as profiler:
        yield profiler.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", metavar="FOLDER")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = sharded(small_llama())
    model.enable_input_require_grads()
    if not args.once:
        model.gradient_checkpointing_enable()
    checkpoint_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.85)
    torch.manual_seed(1 + dist.get_rank())
    model.train()
    with profiled(args.profile) as end_step:
        for step, batch in enumerate(batches(args.steps)):
            loss = model(**batch).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            end_step()
            if dist.get_rank() == 0:
                print(f"step {step} loss {float(loss.item()).hex()}", flush=True)
    scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
