"""Train a Llama of any size, checkpointed from outside, inside, or both, and report what happened.

An ordinary training script, in which nothing knows of recompute-scan. It counts the runs of its
layers by hooks and times its steps, on a GPU by CUDA events. With ``--interleaved`` the checkpoints
inside are switched on and off, so that steps with them and without take turns in one process.

    python benchmarks/gpu/llama.py --outer N --inner R --report report.json
"""

import argparse
import functools
import json
import os
import time
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated")
warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")


MODEL = {"hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 8}
MODEL |= {"num_attention_heads": 16, "vocab_size": 32000}


def parse() -> argparse.Namespace:
    """What is asked for. Of checkpoints, R is reentrant, N is not, and P is selective."""
    parser = argparse.ArgumentParser()
    run = {"seq": 2048, "batch": 4, "steps": 40, "interleaved": 0}
    for name, value in (MODEL | run).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--outer", default="none", choices=("none", "R", "N", "P"))
    parser.add_argument("--inner", default="none", choices=("none", "R", "N"))
    parser.add_argument("--fsdp", default="none", choices=("none", "1", "2"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--snapshot", type=Path, help="of the allocator, over the last steps")
    parser.add_argument("--report", type=Path)
    return parser.parse_args()


def make(a: argparse.Namespace, device: torch.device) -> Any:
    """The model, sharded as asked; in its dtype from the start, as no copy of it might fit."""
    sizes = {name: getattr(a, name) for name in MODEL}
    config = LlamaConfig(**sizes, max_position_embeddings=max(2048, a.seq), use_cache=False)
    with device:
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=getattr(torch, a.dtype)).train()
    if a.fsdp == "none":
        return model
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if a.fsdp == "1":
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=device
        )
    for module in (*model.model.layers, model):
        fully_shard(module)
    return model


# A selective checkpoint keeps what products make, and runs the rest again.
keep_products = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


def arrange(model: Any, a: argparse.Namespace) -> None:
    """Switch on the checkpoints, as one who does not see that there are two would."""
    switch(model, a.inner)
    if a.outer != "none":
        kind = CheckpointImpl.REENTRANT if a.outer == "R" else CheckpointImpl.NO_REENTRANT
        wrapper: Any = functools.partial(checkpoint_wrapper, checkpoint_impl=kind)
        if a.outer == "P":
            wrapper = functools.partial(wrapper, context_fn=keep_products)
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=wrapper,
            check_fn=lambda module: isinstance(module, LlamaDecoderLayer),
        )
    if "R" in (a.inner, a.outer):
        model.enable_input_require_grads()


def switch(model: Any, variant: str) -> None:
    """The checkpoints inside, on or off."""
    if variant != "none":
        model.gradient_checkpointing_enable({"use_reentrant": variant == "R"})
    elif model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()


class Training:
    """One model and its steps, each timed, with the runs of its layers' parts counted."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.cuda = a.device == "cuda"
        device = torch.device("cuda", 0) if self.cuda else torch.device(a.device)
        torch.manual_seed(0)
        self.model = make(a, device)
        arrange(self.model, a)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.cuda)
        torch.manual_seed(1)
        self.tokens = torch.randint(0, a.vocab_size, (a.batch, a.seq), device=device)
        self.in_backward = False
        self.runs: Counter[tuple[str, bool]] = Counter()
        self.marks: list[Any] = []
        self.losses: list[torch.Tensor] = []
        for name, module in self.model.named_modules():
            if name.endswith((".self_attn", ".mlp")):
                module.register_forward_pre_hook(functools.partial(self._saw, name))

    def _saw(self, name: str, *_: object) -> None:
        self.runs[name, self.in_backward] += 1

    def steps(self, number: int) -> None:
        """Forward, backward and update, so many times."""
        self._mark()
        for _ in range(number):
            self.runs.clear()
            loss = self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
            self.losses.append(loss.detach().clone())
            self.in_backward = True
            loss.backward()
            self.in_backward = False
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._mark()

    def _mark(self) -> None:
        kind: Any = torch.cuda.Event if self.cuda else None
        self.marks.append(kind(enable_timing=True) if kind else 1e3 * time.perf_counter())
        if kind:
            self.marks[-1].record()

    def report(self) -> dict[str, Any]:
        """Since the last report: times of steps in ms, losses, the most that torch had allocated on
        the GPU in bytes; of the last step, the runs of each part outside and inside the backward
        pass.
        """
        losses = [float(loss).hex() for loss in self.losses]  # waits for the GPU
        times = [
            e - b if isinstance(e, float) else b.elapsed_time(e) for b, e in pairwise(self.marks)
        ]
        found = {
            "times_ms": times,
            "losses": losses,
            "counted": {n: [self.runs[n, False], self.runs[n, True]] for n, _ in self.runs},
            "peak_bytes": torch.cuda.max_memory_allocated() if self.cuda else None,
        }
        self.marks, self.losses = [], []
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        return found


def interleaved(training: Training, a: argparse.Namespace) -> None:
    """Steps once and twice checkpointed in turn, reported after each round."""
    times: dict[str, list[float]] = {"once": [], "twice": []}
    for number in range(a.interleaved + 1):
        found = {}
        for way in times if number % 2 else reversed(times):
            switch(training.model, a.inner if way == "twice" else "none")
            training.steps(3)
            found[way] = training.report()
            # The first step finds the caches full of the other way's; the first round warms up.
            times[way] += found[way]["times_ms"][1:] if number else []
            found[way]["times_ms"] = times[way]
        a.report.write_text(json.dumps(found))


def main() -> None:
    """Train as asked."""
    a = parse()
    if a.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # flash attention ignores a mere warning
        torch.backends.cuda.enable_cudnn_sdp(False)  # adds its gradients up in any order
    training = Training(a)
    if a.interleaved:
        interleaved(training, a)
        return
    if a.snapshot:
        torch.cuda.memory._record_memory_history(max_entries=20_000, stacks="python")
    try:
        training.steps(a.steps)
        if a.snapshot:
            torch.cuda.memory._dump_snapshot(str(a.snapshot))  # type: ignore[no-untyped-call]
    finally:  # also where whoever records it ends it early
        if a.report:
            a.report.write_text(json.dumps(training.report()))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
