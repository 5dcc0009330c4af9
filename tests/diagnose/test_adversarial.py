"""Logs written to mislead: none may get a cause that is not its own.

Each names the answers that are true of it; no answer always is.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from recompute_scan.crash import Frame, Raised, RankEnd
from recompute_scan.diagnose.checkpoint_errors import NO_INPUT_GRAD
from recompute_scan.diagnose.outcome import diagnose_log, findings_of, lines_of, read_log
from tests.present import present

LIB = "/opt/conda/lib/python3.11/site-packages"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full."
HEAD = "Traceback (most recent call last):\n"
WARNING = (
    f"{LIB}/torch/utils/checkpoint.py:238: UserWarning: None of the inputs have "
    "requires_grad=True. Gradients will be None\n"
)
DETACHED = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"
TWICE = "RuntimeError: Expected to mark a variable ready only once. This error is caused by ..."
MISMATCH = (
    "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed values for the "
    "following tensors have different metadata than during the forward pass.\n"
)
MODULE = f"{LIB}/torch/nn/modules/module.py"
CHECKPOINT = f"{LIB}/torch/utils/checkpoint.py"
TRAINER = f"{LIB}/transformers/trainer.py"


def frame(file: str, function: str, source: str = "work()") -> str:
    return f'  File "{file}", line 12, in {function}\n    {source}\n'


def raised(error: str, *frames: tuple[str, str]) -> str:
    return HEAD + "".join(frame(*one) for one in frames) + error + "\n"


def prefixed(text: str, prefix: str) -> str:
    return "".join(prefix + line + "\n" for line in text.splitlines())


def interleaved(*texts: str) -> str:
    """The lines of several processes, one of each in turn."""
    lines = [text.splitlines() for text in texts]
    longest = max(map(len, lines))
    return "".join(one[n] + "\n" for n in range(longest) for one in lines if n < len(one))


def watchdog(rank: int, number: int, operation: str, elements: int = 8) -> str:
    work = f"SeqNum={number}, OpType={operation}, NumelIn={elements}, Timeout(ms)=600000"
    return (
        f"[rank{rank}]:[E227 23:07:54.3 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught "
        f"collective operation timeout: WorkNCCL({work}) ran for 600034 milliseconds.\n"
    )


def changed(*pairs: tuple[str, str], dtypes: tuple[str, str] = ("bfloat16", "bfloat16")) -> str:
    """A checkpoint's complaint about tensors of these shapes."""
    text = MISMATCH
    for n, (saved, recomputed) in enumerate(pairs):
        text += f"tensor at position {n}:\n"
        for word, shape, dtype in (
            ("saved", saved, dtypes[0]),
            ("recomputed", recomputed, dtypes[1]),
        ):
            text += f"{word} metadata: {{'shape': torch.Size([{shape}]), 'dtype': torch.{dtype}, "
            text += "'device': device(type='cuda', index=0)}\n"
    return text


SAVES = (("train.py", "save_checkpoint"), (MODULE, "state_dict"))
EVALUATES = (
    (TRAINER, "_maybe_log_save_evaluate"),
    (TRAINER, "evaluate"),
    (TRAINER, "evaluation_loop"),
    (MODULE, "_call_impl"),
)
RECOMPUTES = ((CHECKPOINT, "unpack_hook"), (CHECKPOINT, "recompute_fn"), (MODULE, "_call_impl"))
ENGINE = f"{LIB}/torch/autograd/graph.py"
APPLY = (f"{LIB}/torch/autograd/function.py", "apply")
LAST = (("train.py", "main"), (f"{LIB}/torch/_tensor.py", "backward"), (ENGINE, "_engine_run"))
FREED = "RuntimeError: Trying to backward through the graph a second time (or directly access ..."
COUNTED = (
    "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: A different number of tensors "
    "was saved during the original forward and recomputation."
)
RECOMPILED = (
    "V0816 10:12:44 torch/_dynamo/guards.py:2995] Recompiling function forward in a.py:75\n"
)
KEYS = ("1, 8, 171, 128", "1, 8, 342, 128")
PROGRESS = "".join(f"step {n} loss 1.5\n" for n in range(60))
SUMMARY = """\
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 12)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : {} (pid: 11)
  traceback : {}
============================================================
"""


@dataclass(frozen=True)
class Trap:
    """A log, and what is true of it."""

    name: str
    text: str
    true: tuple[str, ...]


def trap(name: str, *true: str) -> Callable[[str], Trap]:
    """The trap whose log comes next: what is true of it stands first."""
    return lambda text: Trap(name, text, true)


TRAPS = (
    trap("two processes whose frames mix: one saves, the other runs out of memory", "RS120-device")(
        interleaved(
            raised("KeyError: 'x'", *SAVES), raised(OOM, ("train.py", "step"), (MODULE, "forward"))
        )
    ),
    trap("a checkpoint's warning long before a loss that was detached", "RS104-warned")(
        WARNING + PROGRESS * 2 + raised(DETACHED, ("train.py", "main"))
    ),
    trap("a checkpoint's warning on another rank", "RS104-warned")(
        "[rank1]: " + WARNING + prefixed(raised(DETACHED, ("train.py", "main")), "[rank0]: ")
    ),
    trap("memory in evaluation, after a save", "RS120-evaluation")(
        "Saving model checkpoint to out/checkpoint-500\n" + raised(OOM, *EVALUATES)
    ),
    trap("memory in a forward pass of a function named after training and saving", "RS120-device")(
        raised(OOM, ("train.py", "train_and_save"), (MODULE, "_call_impl"), ("m.py", "forward"))
    ),
    trap("memory in a loss, in a function named after training and saving", "RS120-device")(
        raised(OOM, ("train.py", "train_and_save"), (f"{LIB}/torch/nn/functional.py", "loss"))
    ),
    trap("memory while a state dict is loaded, by hooks named after state dicts", "RS120-loading")(
        raised(
            OOM,
            ("train.py", "resume"),
            (MODULE, "_load_from_state_dict"),
            (f"{LIB}/torch/distributed/fsdp/_state_dict_utils.py", "_pre_load_state_dict_hook"),
        )
    ),
    trap("memory in a forward pass of a function named after loading", "RS120-device")(
        raised(OOM, ("train.py", "load_and_train"), (MODULE, "_call_impl"), ("m.py", "forward"))
    ),
    trap("memory in a custom function that saves tensors for backward", "RS120-device")(
        raised(OOM, (MODULE, "_call_impl"), ("kernels.py", "save_for_backward"))
    ),
    trap("memory while pictures are generated in a function that saves them", "RS120-generation")(
        raised(
            OOM, ("train.py", "save_samples"), (f"{LIB}/x/pipe.py", "generate"), (MODULE, "forward")
        )
    ),
    trap("pinned memory that an offload of activations asks for in the forward pass")(
        raised(
            "RuntimeError: CUDA error: out of memory",
            (MODULE, "forward"),
            (f"{LIB}/torch/autograd/graph.py", "pack_to_cpu"),
        )
    ),
    trap("a traceback in a save that was cut off, and memory elsewhere much later", "RS120-device")(
        HEAD + "".join(frame(*one) for one in SAVES) + PROGRESS * 3 + OOM + "\n"
    ),
    trap("memory that was caught while a batch size was sought, and another end")(
        raised(OOM, ("train.py", "try_batch"), (f"{LIB}/torch/_tensor.py", "backward"))
        + PROGRESS
        + raised("KeyError: 'labels'", ("train.py", "main"))
    ),
    trap("an exception that is spoken of in a hint")(
        "INFO if you see RuntimeError: CUDA out of memory, lower the batch size\nstep 1\ndone\n"
    ),
    trap("an exception that is quoted from the documentation")(
        "see the FAQ: 'RuntimeError: Expected to have finished reduction in the prior iteration'\n"
    ),
    trap("memory that runs out under no_grad, as torch 1 decorates it", "RS120-device")(
        raised(
            OOM,
            ("demo.py", "predict"),
            ("/opt/lib/site-packages/torch/autograd/grad_mode.py", "decorate_no_grad"),
            (MODULE, "forward"),
        )
    ),
    trap("an optimizer's state that is loaded", "RS120-loading")(
        raised(
            OOM,
            ("train.py", "<module>"),
            ("/opt/lib/site-packages/torch/optim/optimizer.py", "load_state_dict"),
            (
                "/opt/lib/site-packages/torch/optim/optimizer.py",
                "_process_value_according_to_param_policy",
            ),
        )
    ),
    trap("the first ranks of two groups, each number 44 of its own", "RS209-unclear")(
        watchdog(0, 44, "ALLREDUCE")
        + watchdog(2, 44, "BROADCAST").replace("[Rank 2]", "[Rank 0]")
        + "".join(
            f"[rank{rank}]:[E ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID {guid} Rank 0] Exception "
            "detected by watchdog at work: 44, last enqueued NCCL work: 45, last completed NCCL "
            "work: 43.\n"
            for rank, guid in ((0, 9), (2, 10))
        )
    ),
    trap("all-gathers of one size a rank, of different sizes", "RS210-different-places")(
        watchdog(0, 9, "_ALLGATHER_BASE") + watchdog(1, 9, "_ALLGATHER_BASE").replace("=8", "=16")
    ),
    trap("a table's weight that is none, without anything that shards", "RS117-called-past-root")(
        raised("RuntimeError: 'weight' must be 2-D", ("train.py", "main"), (MODULE, "forward"))
    ),
    trap("ranks apart, after a save that was complete", "RS210-different-places")(
        "Model weights saved in out/pytorch_model.bin\n"
        + watchdog(0, 7, "ALLREDUCE")
        + watchdog(1, 7, "BROADCAST")
    ),
    trap("arguments that speak of saving, and a rank that is missing", "RS209-slow")(
        "save_strategy=steps save_steps=500 save_total_limit=3\nsave_on_each_node=False\n"
        + watchdog(1, 7, "ALLREDUCE")
    ),
    Trap(
        "a rank that gave up in an evaluation, below a function named after saving",
        watchdog(0, 7, "ALLREDUCE")
        + watchdog(1, 7, "BROADCAST")
        + prefixed(
            raised("torch.distributed.DistBackendError: communicator was aborted", *EVALUATES),
            "[rank0]: ",
        ),
        ("RS210-different-places",),
    ),
    trap("a rank that gave up while it loaded", "RS210-different-places")(
        watchdog(0, 7, "ALLREDUCE")
        + watchdog(1, 7, "BROADCAST")
        + prefixed(
            raised(
                "torch.distributed.DistBackendError: communicator was aborted",
                ("train.py", "main"),
                (MODULE, "load_state_dict"),
            ),
            "[rank0]: ",
        )
    ),
    trap("all ranks gave up while they saved", "RS210-different-places")(
        watchdog(0, 7, "ALLREDUCE")
        + watchdog(1, 7, "BROADCAST")
        + "".join(
            prefixed(
                raised("torch.distributed.DistBackendError: communicator was aborted", *SAVES),
                f"[rank{rank}]: ",
            )
            for rank in (0, 1)
        )
    ),
    trap("numbers of process groups that are not named", "RS209-unclear")(
        watchdog(0, 90, "ALLREDUCE") + watchdog(1, 64, "ALLREDUCE")
    ),
    trap("rows that doubled", "RS101-rows")(changed(("1, 5120", "2, 5120"))),
    trap("one row more, without experts", "RS101-rows")(changed(("4, 8", "5, 8"))),
    trap("rows that leave one expert for another", "RS101-expert-routing")(
        changed(("965, 5120", "964, 5120"), ("871, 5120", "872, 5120"))
    ),
    trap("one row more, in a block of experts", "RS101-expert-routing")(
        raised(changed(("4, 8", "5, 8")).rstrip(), ("layers/moe.py", "forward"), *RECOMPUTES)
    ),
    trap("a sequence that doubled in a feed-forward layer")(
        changed(("1, 171, 4096", "1, 342, 4096"), ("171, 4096", "342, 4096"))
    ),
    trap("feature maps of which only the height doubled", "RS101-unknown")(
        changed(("1, 64, 128, 128", "1, 64, 256, 128"), ("1, 128, 64, 64", "1, 128, 128, 64"))
    ),
    trap("sequences packed into one table, and some tokens more", "RS101-rows")(
        changed(("3912, 4096", "4004, 4096"), ("3912, 11008", "4004, 11008"))
    ),
    trap("an inference engine that loads its weights", "RS120-loading", "RS120-device")(
        raised(
            OOM,
            (f"{LIB}/vllm/v1/worker/gpu_worker.py", "load_model"),
            (f"{LIB}/vllm/model_executor/layers/linear.py", "create_weights"),
        )
    ),
    trap("what a loader's worker raised, quoted, beside a warning of a checkpoint", "RS104-warned")(
        WARNING
        + raised("KeyError: Caught KeyError in DataLoader worker process 0.", ("d.py", "next"))
        + "Original "
        + raised("KeyError: 'id'", ("d.py", "__getitem__"))
    ),
    trap("a container's memory, in an engine's method that runs no model", "RS120-device")(
        raised(OOM, ("sglang/srt/managers/moves.py", "_execute"), ("sglang/moves.py", "exchange"))
    ),
    trap("a table that is printed with bars")("loss | 0.5\nRuntimeError | 0 times\nmiou | 0.7\n"),
    trap("memory in a backward() that runs no module", "RS120-training")(
        raised(OOM, *LAST, APPLY, ("kernels.py", "backward"))
    ),
    trap("keys and a hidden state that doubled")(changed(KEYS, ("1, 171, 4096", "1, 342, 4096"))),
    trap("a batch that was halved")(changed(("2, 8, 128, 64", "1, 8, 128, 64"))),
    trap("heads that were halved")(changed(("1, 32, 512, 128", "1, 16, 512, 128"))),
    trap("a length of 2 that became 1")(changed(("4, 2, 64", "4, 1, 64"))),
    trap("a width that was halved")(changed(("1, 512, 4096", "1, 512, 2048"))),
    trap("keys that doubled in another dtype")(changed(KEYS, dtypes=("bfloat16", "float32"))),
    trap("whole numbers of another dtype")(changed(("8, 8", "8, 8"), dtypes=("int64", "int32"))),
    trap("a complaint that was cut off")(changed(KEYS)[: len(MISMATCH) + 90]),
    trap("doubled keys with colours and Windows' line ends", "RS101-kv-cache")(
        changed(KEYS).replace("tensor", "\x1b[31mtensor\x1b[0m").replace("\n", "\r\n")
    ),
    trap("doubled keys, a time before every line", "RS101-kv-cache")(
        prefixed(raised(changed(KEYS).rstrip(), *RECOMPUTES[:2]), "2026-01-02 03:04:05,678 ")
    ),
    trap("doubled keys, journald's words before every line", "RS101-kv-cache")(
        prefixed(
            raised(changed(KEYS).rstrip(), *RECOMPUTES[:2]), "Nov 22 11:05:30 host python[123]: "
        )
    ),
    trap("a mask half as long as the keys, in generation")(
        raised(
            "ValueError: Attention mask should be of size (1, 1, 9, 18), but is (1, 1, 9, 9)",
            (f"{LIB}/transformers/generation/utils.py", "generate"),
            (f"{LIB}/transformers/models/llama/modeling_llama.py", "forward"),
        )
    ),
    trap(
        "a variable ready twice, without a checkpoint in the stack", "RS104-warned", "RS124-warning"
    )(
        WARNING
        + "gradient_checkpointing=True use_reentrant=True\n"
        + raised(TWICE, ("train.py", "main"), (f"{LIB}/torch/autograd/graph.py", "backward"))
    ),
    trap("mixed tensors in the forward pass of a model under FSDP2")(
        raised(
            "RuntimeError: aten.mm.default: got mixed torch.Tensor and DTensor",
            (f"{LIB}/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", "_pre_forward"),
            (MODULE, "forward"),
        )
    ),
    trap("SIGKILL of another rank, after a Python error that is not known")(
        prefixed(raised("KeyError: 'bleu'", ("train.py", "main")), "[rank0]: ")
        + SUMMARY.format(1, "To enable traceback see: ...")
    ),
    trap("SIGKILL of another rank, where the first one only exited")(
        SUMMARY.format(1, "To enable traceback see: ...")
    ),
    trap("SIGABRT of a rank that NCCL's watchdog ended", "RS209-slow")(
        watchdog(0, 7, "ALLREDUCE") + SUMMARY.format(-6, "Signal 6 (SIGABRT) received by PID 11")
    ),
    trap("a traceback in the launcher's own indented summary")(
        SUMMARY.format(
            1,
            HEAD
            + "".join("  " + line for line in frame("t.py", "main").splitlines(keepends=True))
            + "  KeyError: 'bleu'",
        )
    ),
    trap("a loader's worker that was killed")(
        raised(
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
            ("train.py", "main"),
        )
    ),
    trap("gloo gave up because another rank had failed")(
        prefixed(raised("KeyError: 'bleu'", ("train.py", "main")), "[rank1]: ")
        + prefixed(
            raised(
                "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
                ("train.py", "main"),
            ),
            "[rank0]: ",
        )
    ),
    trap("messages that both ranks await in their recomputes", "RS209-gloo")(
        "".join(
            prefixed(
                raised(
                    "RuntimeError: Timed out waiting 60000ms for recv operation to complete",
                    *RECOMPUTES[:2],
                    (f"{LIB}/torch/distributed/distributed_c10d.py", "recv"),
                ),
                f"[rank{rank}]: ",
            )
            for rank in (0, 1)
        )
    ),
    trap("memory first, and what saving in its wake complains of", "RS120-training")(
        raised(OOM, (f"{LIB}/torch/_tensor.py", "backward"))
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + raised(
            "AssertionError: expected to be in states [<TrainingState.IDLE: 1>] but current state "
            "is TrainingState.FORWARD_BACKWARD",
            *SAVES,
        )
    ),
    trap("host memory, by Ray's word", "RS212-sigkill")(
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
    ),
    trap("a traceback inside a line of JSON", "RS120-device")(
        '{"log":"Traceback (most recent call last):\\n  File \\"a.py\\", line 1\\nRuntimeError: '
        'CUDA out of memory","stream":"stderr"}\n'
    ),
    trap("a warning, and an adversarial loss in a validation", "RS104-warned")(
        WARNING + PROGRESS[:200] + raised(DETACHED, ("train.py", "validate"), *LAST)
    ),
    trap("a graph walked twice by the script, in a step with checkpoints")(
        raised(FREED, ("train.py", "main"), (MODULE, "forward"), *LAST)
    ),
    trap("a second backward pass through a reentrant checkpoint, asked for by the script")(
        raised(FREED, *LAST, APPLY, (CHECKPOINT, "backward"))
    ),
    trap("a gradient that the block itself takes twice")(
        raised(FREED, *LAST, APPLY, (CHECKPOINT, "backward"), ("a.py", "forward"), LAST[1], LAST[2])
    ),
    trap("a function named backward in a file named checkpointing.py")(
        raised(FREED, ("tools/checkpointing.py", "backward"), (ENGINE, "_engine_run_backward"))
    ),
    trap("arguments of an autograd function of the script's own")(
        raised(
            "TypeError: save_for_backward can only save variables, but argument 1 is of type tuple",
            ("train.py", "main"),
            APPLY,
        )
    ),
    trap("a recursion of the script's own, below one checkpoint")(
        raised(
            "RecursionError: maximum recursion depth exceeded",
            (CHECKPOINT, "checkpoint"),
            *((("a.py", "visit"),) * 60),
        )
    ),
    trap("a recompilation long before", "RS102-impure-block")(
        RECOMPILED + PROGRESS * 2 + raised(COUNTED, *LAST, (CHECKPOINT, "unpack_hook"))
    ),
    trap("a recompilation of another rank", "RS102-impure-block")(
        f"[rank1]: {RECOMPILED}"
        + prefixed(raised(COUNTED, *LAST, (CHECKPOINT, "unpack_hook")), "[rank0]: ")
    ),
    trap("a limit of recompilations, and another failure")(
        "W0110 torch._dynamo hit config.recompile_limit (8)\n" + raised("KeyError: 'x'", *LAST)
    ),
    trap("side effects in a loop that torch.compile traces")(
        raised(
            "torch._dynamo.exc.Unsupported: HOP: Unsafe side effect\n"
            "  Higher Order Operator: torch.ops.higher_order.while_loop",
            ("train.py", "main"),
        )
    ),
    trap("hooks of offloading under torch.func")(
        raised(
            "RuntimeError: torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor "
            "hooks. Please open an issue with your use case.",
            ("train.py", "main"),
            (ENGINE, "__enter__"),
        )
    ),
    trap("a model on meta that was never loaded, in its forward pass")(
        raised(
            "RuntimeError: Tensor on device cuda:0 is not on the expected device meta!",
            ("train.py", "main"),
            (CHECKPOINT, "checkpoint"),
            (MODULE, "forward"),
        )
    ),
    trap("a seed of one kernel on another device", "RS101-unknown")(
        changed(("", ""), dtypes=("int64", "int64")).replace(
            "type='cuda', index=0", "type='cpu'", 1
        )
    ),
    trap("a list that is too short, in another function of DeepSpeed's checkpoints")(
        raised(
            "IndexError: list index out of range",
            (f"{LIB}/deepspeed/runtime/activation_checkpointing/checkpointing.py", "checkpoint"),
            ("train.py", "block"),
        )
    ),
    trap("a partial where a data loader wants a method")(
        raised(
            "AttributeError: 'functools.partial' object has no attribute '__self__'",
            (CHECKPOINT, "checkpoint"),
            ("data.py", "collate"),
        )
    ),
    trap("settings of the script's own")(
        raised("ValueError: recompute_every must be positive", ("train.py", "parse"))
    ),
    trap("two groups whose ranks count them from their own", "RS209-unclear")(
        "".join(
            watchdog(rank, 9, operation).replace("[Rank", "[PG 2 Rank")
            for rank, operation in ((0, "ALLREDUCE"), (1, "ALLREDUCE"))
        )
        + watchdog(1, 11, "BROADCAST").replace("[Rank", "[PG 3 Rank")
    ),
    trap("an optimizer_states key of the user's own")(
        raised("KeyError: 'optimizer_states'", ("train.py", "restore_optimizer"))
    ),
    trap("a folder that another rank made, while saving")(
        raised("FileExistsError: [Errno 17] File exists: 'out/checkpoint-5'", *SAVES)
    ),
)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_a_misleading_log_gets_no_wrong_cause(trap: Trap) -> None:
    found = diagnose_log(read_log(lines_of(io.BytesIO(trap.text.encode()))))
    said = [one for one in (found.cause, *found.hints) if one is not None]
    general = {"RS101-unknown"} if MISMATCH.split(":", 1)[0] in trap.text else set()
    names = {f"{one.signature.code}-{one.signature.cause_name}" for one in said}
    assert names <= {*trap.true, *general}, [one.evidence for one in said]


def test_a_quoted_traceback_was_raised_first() -> None:
    (trap,) = (one for one in TRAPS if "worker raised, quoted" in one.name)
    first = present(diagnose_log(read_log(lines_of(io.BytesIO(trap.text.encode())))).first)
    assert [(error.summary.split(".")[0], error.frames[-1].file) for error in first.errors] == [
        ("KeyError: 'id'", "d.py"),
        ("KeyError: Caught KeyError in DataLoader worker process 0", "d.py"),
    ]


def test_a_traceback_in_the_launchers_summary_is_found() -> None:
    (trap,) = (one for one in TRAPS if "indented summary" in one.name)
    first = present(diagnose_log(read_log(lines_of(io.BytesIO(trap.text.encode())))).first)
    (error,) = first.errors
    assert (error.summary, [one.function for one in error.frames]) == ("KeyError: 'bleu'", ["main"])


@pytest.mark.parametrize("ending", ["", "KeyError: 'auroc'\n"])
def test_a_stack_of_a_rank_that_does_not_wait_is_evidence(ending: str) -> None:
    stack = HEAD + frame("train.py", "main") + frame("metrics.py", "compute") + ending
    text = stack + "[rank1]: waits\n" + watchdog(1, 7, "ALLREDUCE")
    found = diagnose_log(read_log(lines_of(io.BytesIO(text.encode()))))
    if ending:
        assert (present(found.first).errors[-1].name, found.cause) == ("KeyError", None)
        return
    cause = present(found.cause)
    assert cause.signature.cause_name == "slow"
    assert cause.evidence[1] == "line 2: a stack without an exception's name, at metrics.py:12"


@pytest.mark.parametrize(
    ("rank", "call", "answer"),
    [
        (0, "all_gather", ("different-places", "low")),
        (0, "all_reduce", ("slow", "medium")),
        (0, "barrier", ("slow", "medium")),
        # Its own line of the watchdog counts: the script may be further on than its kernels.
        (1, "all_gather", ("slow", "medium")),
    ],
)
def test_a_rank_that_the_watchdog_does_not_name_shows_where_it_was(
    rank: int, call: str, answer: tuple[str, str]
) -> None:
    inner = (f"{LIB}/torch/distributed/distributed_c10d.py", call)
    closed = raised(
        "RuntimeError: Connection closed by peer [10.0.0.7]:57000", ("a.py", "f"), inner
    )
    text = watchdog(1, 7, "ALLREDUCE") + watchdog(2, 7, "ALLREDUCE")
    text += prefixed(closed, f"[rank{rank}]: ")
    cause = present(diagnose_log(read_log(lines_of(io.BytesIO(text.encode())))).cause)
    assert (cause.signature.cause_name, cause.confidence) == answer
    assert cause.evidence[-1] == f"line 4, rank {rank}: raised at a.py:12"


@pytest.mark.parametrize(
    ("function", "steps", "codes"), [("main", 0, ["RS104"]), ("main", 10, []), ("validate", 0, [])]
)
def test_a_warning_counts_for_the_step_that_it_came_in(
    function: str, steps: int, codes: list[str]
) -> None:
    frames = (Frame("train.py", 3, function), Frame(f"{LIB}/torch/_tensor.py", 9, "backward"))
    error = Raised("RuntimeError", DETACHED.removeprefix("RuntimeError: "), frames)
    end = RankEnd(0, "raised", errors=(error,), stack=frames, steps=steps, notes=(NO_INPUT_GRAD,))
    assert [one.code for one in findings_of([end])] == codes


def test_there_are_forty() -> None:
    assert len({trap.name for trap in TRAPS}) == len(TRAPS) >= 40
