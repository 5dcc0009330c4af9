"""Ranks that wait for each other, and processes that ended without an exception: what is known.

None of these is recognised by an exception's class and message alone; :mod:`.waiting` and
:mod:`.classify` do that.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from recompute_scan.frameworks.signature import Signature

_NOTHING = re.compile(r"(?!)")
_DISTRIBUTED = "https://docs.pytorch.org/docs/stable/distributed.html"
_ELASTIC = "https://docs.pytorch.org/docs/stable/elastic/errors.html"

_SAVE_MORE = """\
```diff
-if rank == 0:
-    fabric.save("checkpoint.ckpt", state)
+fabric.save("checkpoint.ckpt", state)
 fabric.barrier()
```

`recompute-scan run` recognises it while it happens: when no rank has made progress for
`--timeout` seconds, it takes every rank's Python stacks, names the line where each of them
stands, and ends the run with status 124. The stacks are kept in `where-rank<N>.txt`, with those
of `py-spy dump --native` where py-spy is installed, and torch's flight recorder in
`flight-rank<N>.json` where it records.

In a log it is recognised by the traceback of a rank that was in a function that saves when the
collective was given up, while another rank waited in another collective. A line that speaks of
saving is no sign of it: most of those are in runs that hang for another reason.
"""

SAVE_HANG = Signature(
    code="RS204",
    name="save-hang",
    cause_name="guarded-save",
    error="",
    message=_NOTHING,
    title="Ranks wait for each other while saving: one saves, and the others are elsewhere",
    cause=(
        "Saving a sharded model is work for all ranks: each gives its pieces. Here the ranks are "
        "at different places, as they are when the save is under `if rank == 0` (or "
        "is_main_process) while the others go on to a barrier or to the next step."
    ),
    fix=(
        "Call the save on every rank, and guard only the writing of what is already gathered. A "
        "sharded state dict needs no gathering. Where all ranks do save and the gathering takes "
        "longer than the process group waits, raise that timeout."
    ),
    more=_SAVE_MORE,
    keep="the save, called by all ranks",
    remove="the guard by rank around it",
    versions="FSDP, ZeRO-3, Fabric, accelerate; all versions.",
    sources=(
        "https://github.com/Lightning-AI/pytorch-lightning/issues/19780",
        "https://github.com/huggingface/accelerate/issues/2000",
        "https://github.com/pytorch/pytorch/issues/122903",
    ),
    checked="reproduced",
)
DIVERGED = Signature(
    code="RS210",
    name="diverged-ranks",
    cause_name="different-places",
    error="",
    message=_NOTHING,
    title="Ranks wait for each other at different places",
    cause=(
        "Every rank must call the same collectives in the same order. Some took another way: a "
        "branch by rank, data that ends earlier on one rank, an exception that was caught on one."
    ),
    fix="Make all ranks take the same way up to the two places named here.",
    versions="Not tied to a version.",
    sources=(_DISTRIBUTED,),
    checked="reproduced",
)
FINGERPRINT = replace(
    DIVERGED,
    cause_name="fingerprint",
    error=r"\w*Error",
    message=re.compile(r"Detected mismatch between collectives on ranks\."),
    title="Ranks called different collectives, or the same one with different shapes",
    fix=(
        "Make all ranks call the same collectives with the same shapes in the same order; the "
        "message names both, and the traceback the line."
    ),
    versions="torch with TORCH_DISTRIBUTED_DEBUG=DETAIL.",
    sources=("https://github.com/pytorch/pytorch/pull/79901", _DISTRIBUTED),
    checked="message",
)
COMPARED = replace(
    DIVERGED,
    cause_name="compared",
    title="torch compared the ranks' collectives, and some rank called another one",
    fix="Look at the ranks named here, and make all ranks take the same way up to that collective.",
    versions="torch's flight recorder and its analyzer (torchfrtrace).",
    sources=("https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html",),
    checked="message",
)
TIMED_OUT = Signature(
    code="RS209",
    name="collective-timeout",
    cause_name="slow",
    error="",
    message=_NOTHING,
    title="A collective did not finish within the process group's timeout",
    cause=(
        "The ranks that are heard of wait in the same collective. One that is not heard of did "
        "not come to it: it died, or was slow. Or it got stuck itself (the network, a GPU)."
    ),
    fix=(
        "Look for the rank that is missing here, and for the first error of any rank. If it was "
        "only slow (loading, saving, compiling), pass a longer timeout to init_process_group."
    ),
    versions="Not tied to a version.",
    sources=(_DISTRIBUTED,),
)
NAMED = replace(
    TIMED_OUT,
    cause_name="named",
    title="torch compared the ranks, and some did not come to a collective",
    cause="The ranks that are named here died, were slow, or took another way.",
    fix=(
        "Look at the log of the ranks that are named, up to that collective. If they were only "
        "slow (loading, saving, compiling), pass a longer timeout to init_process_group."
    ),
    versions="torch with TORCH_NCCL_DESYNC_DEBUG=1, or its flight recorder's analyzer.",
    sources=("https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html",),
)
UNCLEAR = replace(
    TIMED_OUT,
    cause_name="unclear",
    title="Collectives did not finish, and the log does not tell whether they belong together",
    cause=(
        "The ranks wait in different collectives. Numbers count within a process group, and the "
        "log does not say that it is one group."
    ),
    fix=(
        "Look for the first error of any rank above. Run again with TORCH_FR_BUFFER_SIZE=2000 "
        "(before torch 2.9 TORCH_NCCL_TRACE_BUFFER_SIZE), which keeps every rank's collectives "
        "with their groups and stacks, or under `recompute-scan run`."
    ),
)
GLOO = replace(
    TIMED_OUT,
    cause_name="gloo",
    error="RuntimeError",
    message=re.compile(r"Timed out waiting \d+ms for (?:recv|send) operation to complete"),
    cause=(
        "This rank waited in a collective or for a message over gloo, and another rank did not "
        "come to it: it died, was slow, or took another way."
    ),
)
BARRIER = replace(
    GLOO,
    cause_name="barrier",
    message=re.compile(
        r"failed to pass monitoredBarrier in \d+ ms|successfully reached monitoredBarrier, but"
    ),
    title="Some ranks did not come to a monitored barrier in time",
    cause="The ranks that the message names died, were slow, or took another way.",
    fix=(
        "Look at the log of the ranks that the message names. If they were only slow (loading, "
        "preparing data), give the barrier more time."
    ),
)
NO_PROGRESS = Signature(
    code="RS211",
    name="no-progress",
    cause_name="waiting",
    error="",
    message=_NOTHING,
    title="The run made no progress for as long as it was given",
    cause="All ranks stood at the same place, and the watchdog ended the run.",
    fix=(
        "Look at the place named here. If the work there is only long, give it more time with "
        "`--timeout`, or `--timeout 0` to wait for ever."
    ),
    versions="Not tied to a version.",
    sources=("https://docs.python.org/3/library/faulthandler.html",),
    checked="reproduced",
)
ONE_BEHIND = replace(
    NO_PROGRESS,
    cause_name="one-behind",
    title="Ranks wait for one that is in no collective",
    cause=(
        "Some ranks wait in a collective, and another works or waits by itself and has not come "
        "to it: it loads, evaluates or writes alone, or is stuck there."
    ),
    fix=(
        "Look at the rank that is in no collective. If its work is only long, give it more time "
        "(`--timeout`, and the process group's own timeout), or let all ranks share it."
    ),
)
RECOMPUTED_MESSAGE = Signature(
    code="RS214",
    name="message-in-checkpoint",
    cause_name="recomputed",
    error=r"\w*Error",
    message=re.compile(r"Timed out waiting \d+ms for (?:recv|send) operation to complete"),
    title="A message between two ranks is inside a checkpointed block, and is awaited again",
    cause=(
        "The recompute runs the block's send or recv once more. The other rank sends it once only, "
        "unless it recomputes the same block at the same time."
    ),
    fix=(
        "Take point-to-point calls out of checkpointed blocks: checkpoint what lies between them."
    ),
    versions="Not tied to a version.",
    sources=("https://docs.pytorch.org/docs/stable/checkpoint.html",),
    checked="reproduced",
)
KILLED = Signature(
    code="RS212",
    name="process-killed",
    cause_name="sigkill",
    error="OutOfMemoryError",
    message=re.compile(r"^Task was killed due to the node running low on memory"),
    title="A process was ended from outside, by SIGKILL",
    cause=(
        "Nothing in the script does that. On most machines it is the kernel, for want of host "
        "memory; Ray's monitor, a scheduler with a limit and a person can do it as well."
    ),
    fix=(
        "Look into the kernel's log (dmesg) and the scheduler's. If host memory is the cause: "
        "fewer loader workers, loading on one rank or memory-mapped, less offloading."
    ),
    versions="Not tied to a version.",
    sources=(_ELASTIC,),
)
CRASHED = replace(
    KILLED,
    code="RS213",
    name="native-crash",
    cause_name="native",
    error="",
    message=_NOTHING,
    title="A process crashed in native code",
    cause=(
        "SIGSEGV, SIGILL and SIGFPE come from code below Python: an extension or a driver that "
        "does not fit torch, or a fault in one."
    ),
    fix=(
        "Run with PYTHONFAULTHANDLER=1, which prints the Python stack of the crash. Then look at "
        "the extension that it names, and at its version."
    ),
    sources=("https://docs.python.org/3/library/faulthandler.html", _ELASTIC),
)

BUS = replace(
    CRASHED,
    cause_name="bus",
    title="A process touched memory that could not be supplied (SIGBUS)",
    cause=(
        "SIGBUS comes where a file backs memory and has no room for it, as in /dev/shm, "
        "which loader workers, NCCL and ZeRO share and which is 64 MB in a container that "
        "asks for no more; or where a mapped file was cut short. Rarely it is a fault in native "
        "code."
    ),
    fix=(
        "Look at `df -h /dev/shm`, and give the container more (docker run --shm-size=16g, or "
        "--ipc=host). If there is room, look for a file that was written over while it was mapped."
    ),
    sources=(
        "https://github.com/deepspeedai/DeepSpeed/issues/4002",
        "https://docs.docker.com/engine/containers/run/",
    ),
)

# Recognised by an exception, after everything that says more.
BY_EXCEPTION: tuple[Signature, ...] = (FINGERPRINT, BARRIER, GLOO, KILLED)
ALL: tuple[Signature, ...] = (
    *(SAVE_HANG, DIVERGED, FINGERPRINT, COMPARED, TIMED_OUT, NAMED, UNCLEAR),
    *(GLOO, BARRIER, NO_PROGRESS, ONE_BEHIND, RECOMPUTED_MESSAGE, KILLED, CRASHED, BUS),
)
