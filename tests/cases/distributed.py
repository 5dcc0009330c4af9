"""Sharded and replicated training over gloo: in one process, or in one process per rank.

In one process the group has a single member, so that FSDP's and DDP's own hooks, ranges and
collectives are in the trace; with several, parameters really are sharded.
"""

import atexit
import contextlib
import functools
import tempfile
import warnings
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from .case import Build, Case, TrainingStep, doubled, full, none, record
from .loops import batch, next_token_loss, updated
from .marked import annotating
from .model import NON_REENTRANT, REENTRANT, Checkpoints, Layer, Model, Oracle
from .truth import Truth, read_truth, write_truth
from .versions import FSDP_ON_CPU

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
        wrapper: torch's checkpoint wrapper around each layer.
        wrapper_outside: Around the layer's FSDP unit, so that a recompute gathers again; else
            inside it.
        mixed: FSDP's own mixed precision.
        micro_batches: Per step, with gradients reduced in each.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        _join_group(device)
        with warnings.catch_warnings():
            # FSDP of one process has nothing to shard and says so.
            warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
            plain = Model(oracle, asked).to(device)
            model = _distribute(plain, device, method, wrapper, wrapper_outside, mixed)
        batches = [batch(device) for _ in range(micro_batches)]

        def gradients() -> None:
            for tokens in batches:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* view")
                    logits = model(tokens)
                loss = next_token_loss(logits.float(), tokens)
                (loss / micro_batches).backward()

        return updated(model.parameters(), gradients)

    return build


def _distribute(
    model: nn.Module,
    device: torch.device,
    method: Method,
    wrapper: Wrapper,
    outside: bool,
    mixed: bool,
) -> nn.Module:
    low = torch.bfloat16 if mixed else None
    if method == "fsdp1":
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            device_id=device,
            mixed_precision=MixedPrecision(param_dtype=low) if mixed else None,
        )
        _checkpoint(model, wrapper, FullyShardedDataParallel if outside else Layer)
        return model
    if method == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - since 2.2
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415 - since 2.6

        if not outside:
            _checkpoint(model, wrapper, Layer)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=low)
        for module in (*model.get_submodule("layers").children(), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        if outside:
            _checkpoint(model, wrapper, Layer)
        return model
    _checkpoint(model, wrapper, Layer)
    return DistributedDataParallel(model)


def _checkpoint(model: nn.Module, wrapper: Wrapper, kind: type[nn.Module]) -> None:
    if wrapper is not None:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(
                checkpoint_wrapper, checkpoint_impl=_WRAPPERS[wrapper]
            ),
            check_fn=lambda module: isinstance(module, kind) and module is not model,
        )


def _join_group(device: torch.device) -> None:
    """A group of this process alone, unless it is in one: over NCCL on a GPU, gloo on a CPU."""
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        atexit.register(leave_group)


def leave_group() -> None:
    """Leave the group that a case made, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def record_ranks(
    name: str, folder: Path, processes: int = 2, marked: bool = False
) -> list[tuple[Path, Truth]]:
    """Trace and truth of every rank, in order; the traces are ``folder/NAME.rankI.json.gz``.

    Args:
        name: One of the cases below.
        folder: Where the traces and truths go.
        processes: How many ranks.
        marked: Whether checkpointed calls are marked, as ``recompute-scan run`` annotates them.
    """
    with tempfile.TemporaryDirectory() as meeting:
        meeting_place = Path(meeting) / "store"
        spawn(_record_rank, (processes, name, folder, meeting_place, marked), nprocs=processes)
    traces = [folder / f"{name}.rank{rank}.json.gz" for rank in range(processes)]
    return [(trace, read_truth(_truth_of(trace))) for trace in traces]


def _record_rank(
    rank: int, processes: int, name: str, folder: Path, store: Path, marked: bool
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=FileStore(str(store), processes), rank=rank, world_size=processes
    )
    case = next(case for case in DISTRIBUTED if case.name == name)
    trace = folder / f"{name}.rank{rank}.json.gz"
    with annotating() if marked else contextlib.nullcontext():
        write_truth(_truth_of(trace), record(case, trace))
    leave_group()


def _truth_of(trace: Path) -> Path:
    return trace.with_name(trace.name.replace(".json.gz", ".truth.json"))


def _cases(method: Method) -> tuple[Case, ...]:
    own_n, own_r = Checkpoints(inner=N), Checkpoints(inner=R)
    return (
        none(f"{method}_none", "Nothing is checkpointed.", shard(method)),
        full(f"{method}_wrapper_n", "Wrapper, non-reentrant.", shard(method, wrapper=N)),
        full(f"{method}_wrapper_r", "Wrapper, reentrant.", shard(method, wrapper=R)),
        doubled(
            f"{method}_r_in_wrapper_n",
            "The reported pair: reentrant in the wrapper.",
            shard(method, own_r, wrapper=N),
        ),
        full(
            f"{method}_n_in_wrapper_n",
            "Non-reentrant in the wrapper.",
            shard(method, own_n, wrapper=N),
        ),
        doubled(
            f"{method}_accumulation",
            "Two micro-batches, each reduced.",
            shard(method, own_r, wrapper=N, micro_batches=2),
            micro_batches=2,
        ),
    )


_ALL = (
    *_cases("fsdp1"),
    *_cases("fsdp2"),
    *_cases("ddp"),
    full(
        "fsdp1_wrapper_outside",
        "The wrapper is around the FSDP units: a recompute gathers again.",
        shard("fsdp1", wrapper=N, wrapper_outside=True),
    ),
    full(
        "fsdp2_wrapper_outside",
        "The same with fully_shard.",
        shard("fsdp2", wrapper=N, wrapper_outside=True),
    ),
    full(
        "fsdp1_wrapper_outside_r",
        "The same, reentrant: its forward leaves nothing for the backward pass to gather for.",
        shard("fsdp1", wrapper=R, wrapper_outside=True),
    ),
    full(
        "fsdp2_wrapper_outside_r",
        "The same with fully_shard.",
        shard("fsdp2", wrapper=R, wrapper_outside=True),
    ),
    doubled(
        "fsdp1_mixed",
        "FSDP's mixed precision, checkpointed twice.",
        shard("fsdp1", Checkpoints(inner=R), wrapper=N, mixed=True),
    ),
    doubled(
        "fsdp2_mixed",
        "The same with fully_shard.",
        shard("fsdp2", Checkpoints(inner=R), wrapper=N, mixed=True),
    ),
)

# fully_shard has this place since torch 2.6, where it does not run on a CPU.
_FSDP2 = hasattr(torch.distributed.fsdp, "fully_shard") and hasattr(
    torch.cpu.Stream, "record_event"
)
_MISSING = (*(() if _FSDP2 else ("fsdp2",)), *(() if FSDP_ON_CPU else ("fsdp1",)))
DISTRIBUTED = tuple(case for case in _ALL if not case.name.startswith(_MISSING))
