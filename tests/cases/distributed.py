"""Sharded and replicated training over gloo: in one process, or in one process per rank.

In one process the group has a single member, so that FSDP's and DDP's own hooks, ranges and
collectives are in the trace; with several, parameters really are sharded.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
import warnings
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from .case import Build, Case, TrainingStep, record
from .loops import batch, next_token_loss
from .model import NON_REENTRANT, REENTRANT, Checkpoints, Layer, Model, Oracle
from .truth import Truth

N, R = NON_REENTRANT, REENTRANT
_WRAPPERS = {N: CheckpointImpl.NO_REENTRANT, R: CheckpointImpl.REENTRANT}

Method = Literal["fsdp1", "fsdp2", "ddp"]
Wrapper = Literal["reentrant", "non-reentrant"] | None


def shard(
    method: Method,
    asked: Checkpoints | None = None,
    *,
    wrapper: Wrapper = None,
    wrapper_outside: bool = False,
    mixed: bool = False,
    micro_batches: int = 1,
) -> Build:
    """One step of the model under that method.

    Args:
        method: ``fsdp1`` wraps each layer and the model, ``fsdp2`` the same with
            ``fully_shard``, ``ddp`` the model.
        asked: Checkpoints that the model itself asks for.
        wrapper: torch's checkpoint wrapper round each layer.
        wrapper_outside: Round the layer's FSDP unit, so that a replay gathers again; else
            inside it.
        mixed: FSDP's own mixed precision.
        micro_batches: Per step, with gradients reduced in each.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        _join_group()
        wrap = functools.partial(_wrap, wrapper)
        with warnings.catch_warnings():
            # FSDP of one process has nothing to shard and says so.
            warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
            model = _distribute(Model(oracle, asked).to(device), method, wrap, wrapper_outside, mixed)
        adamw = torch.optim.AdamW(model.parameters())
        batches = [batch(device) for _ in range(micro_batches)]

        def step() -> None:
            for tokens in batches:
                loss = next_token_loss(model(tokens).float(), tokens)
                (loss / micro_batches).backward()
            adamw.step()
            adamw.zero_grad()

        return step

    return build


def _wrap(wrapper: Wrapper, model: nn.Module, kind: type[nn.Module] = Layer) -> None:
    if wrapper is not None:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(
                checkpoint_wrapper, checkpoint_impl=_WRAPPERS[wrapper]
            ),
            check_fn=lambda module: isinstance(module, kind) and module is not model,
        )


def _distribute(model, method, wrap, wrapper_outside, mixed):
    ...
