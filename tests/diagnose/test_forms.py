"""Known failures and look-alikes in forms that launchers, clusters and loggers give a log.

Labelled before the program saw them: what is right, and what says less and is true.
"""

import io
import json
import textwrap
from collections.abc import Callable

import pytest

from recompute_scan.diagnose.outcome import diagnose_log, lines_of, read_log
from tests.diagnose.corpus import answer
from tests.diagnose.test_adversarial import (
    CHECKPOINT,
    EVALUATES,
    HEAD,
    KEYS,
    LIB,
    MODULE,
    OOM,
    PROGRESS,
    SAVES,
    SUMMARY,
    TWICE,
    changed,
    interleaved,
    prefixed,
    raised,
    watchdog,
)

BACKWARD = (("train.py", "main"), (f"{LIB}/torch/_tensor.py", "backward"))
MEMORY = raised(OOM, *BACKWARD)
RECOMPUTED = (
    *BACKWARD,
    (CHECKPOINT, "unpack_hook"),
    (CHECKPOINT, "check_recomputed_tensors_match"),
)
CACHE = raised(changed(KEYS).rstrip(), *RECOMPUTED)
UNUSED = raised(
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a "
    "new one.\nParameter indices which did not receive grad for rank 1: 3 4",
    ("train.py", "main"),
    (f"{LIB}/torch/nn/parallel/distributed.py", "forward"),
)
REDUCED = raised(
    "AssertionError: The parameter 7 has already been reduced.             Gradient computed twice "
    "for this partition.",
    *BACKWARD,
    (CHECKPOINT, "backward"),
    (f"{LIB}/deepspeed/runtime/zero/stage_1_and_2.py", "reduce_independent_p_g_buckets"),
)
DTYPES = raised(
    "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32",
    ("train.py", "main"),
    (f"{LIB}/torch/distributed/fsdp/_flat_param.py", "_validate_tensors_to_flatten"),
)
KEY = raised("KeyError: 'bleu'", ("train.py", "main"), ("data.py", "collate"))
RICH = (
    "╭──────────── Traceback (most recent call last) ────────────╮\n"
    "│ /work/train.py:12 in main                                  │\n"
    "│                                                            │\n"
    "│ ❱ 12 │   loss.backward()                                   │\n"
    "│ ╭──────── locals ────────╮                                 │\n"
    "│ │ error = 'KeyError: 7'  │                                 │\n"
    "│ ╰────────────────────────╯                                 │\n"
    f"│ {LIB}/torch/_tensor.py:648 in       │\n"
    "│ backward                                                   │\n"
    "╰────────────────────────────────────────────────────────────╯\n"
)
COLOURED = (
    "".join(
        f'  File \x1b[35m"{file}"\x1b[0m, line \x1b[35m12\x1b[0m, in \x1b[35m{function}\x1b[0m\n'
        f"    \x1b[31mloss.backward\x1b[0m\x1b[1;31m()\x1b[0m\n    \x1b[31m~~~~~\x1b[0m\n"
        for file, function in BACKWARD
    )
    + f"\x1b[1;35mtorch.OutOfMemoryError\x1b[0m: \x1b[35m{OOM.partition(': ')[2]}\x1b[0m\n"
)
DIVERGED = watchdog(0, 44, "ALLGATHER") + watchdog(1, 44, "BROADCAST")

Form = tuple[str, str, str | None, tuple[str, ...]]


def form(name: str, right: str | None = None, *less: str) -> Callable[[str], Form]:
    """The form whose log comes next: what is right, and what says less."""
    return lambda text: (name, text, right, less)


FORMS = (
    form("two ranks in turn, and the second one's failure is its own", "RS120-training")(
        interleaved(prefixed(MEMORY, "[rank0]: "), prefixed(KEY, "[rank1]: "))
    ),
    form("a step's forward pass, of weights that do not train there", "RS120-device")(
        raised(
            OOM,
            ("t.py", "training_step"),
            (f"{LIB}/torch/utils/_contextlib.py", "decorate_context"),
            (MODULE, "_call_impl"),
        )
    ),
    form("a step's forward pass", "RS120-training")(
        raised(OOM, ("t.py", "training_step"), (MODULE, "_call_impl"), ("m.py", "forward"))
    ),
    form("Ray's count of workers, none of them for memory, and an actor that died")(
        "(raylet) node_manager.cc:3277: 0 Workers (tasks / actors) killed due to memory pressure "
        "(OOM), 2 Workers crashed due to other reasons at node (ID: 8289)\n"
        + raised("ray.exceptions.RayActorError: The actor died.", ("t.py", "main"))
    ),
    form("Ray's count of workers that memory ended, and a mistake of one's own")(
        "(raylet) node_manager.cc:3277: 1 Workers (tasks / actors) killed due to memory pressure "
        "(OOM), 0 Workers crashed due to other reasons at node (ID: 8289)\n" + KEY
    ),
    form("a rank that waited itself, and was ended by the launcher afterwards", "RS209-slow")(
        watchdog(0, 44, "ALLGATHER") + watchdog(1, 44, "ALLGATHER") + SUMMARY.format(-9, "x")
    ),
    form("a rank that fails in its data, while others wait in a collective")(
        prefixed(KEY, "[rank0]: ") + watchdog(1, 44, "ALLGATHER") + watchdog(2, 44, "ALLGATHER")
    ),
    form("torchrun's summary with the traceback", "RS120-training")(
        SUMMARY.format(1, textwrap.indent(MEMORY, "  "))
    ),
    form("torchrun's summary that names the signal", "RS213-native")(
        SUMMARY.format("-11 (SIGSEGV)", "Signal 11")
    ),
    form("torchrun's later summary, the signal last", "RS213-bus")(
        SUMMARY.format(-7, "x").replace("(pid: 11)", "(pid: 11) (SIGBUS)")
    ),
    form("rich, with its box of locals", "RS120-training", "RS120-device")(RICH + OOM + "\n"),
    form("rich, which breaks the message", "RS101-kv-cache")(RICH + changed(KEYS)),
    form("the colours of Python 3.13", "RS120-training")(
        "Traceback (most recent call last):\n" + COLOURED
    ),
    form("colours and no first line", "RS120-training")(COLOURED),
    form("cut off within the message")(MEMORY[: MEMORY.index("out of memory") + 6]),
    form("cut off before, in the middle of a frame", "RS101-kv-cache")(CACHE[120:]),
    form("a save in the wake of a failed step", "RS120-training")(
        MEMORY
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + raised("OSError: [Errno 28] No space left on device", *SAVES)
    ),
    form("srun --label", "RS120-evaluation")(
        prefixed(PROGRESS, "0: ")
        + prefixed(raised(OOM, *EVALUATES), "1: ")
        + "srun: error: gpu-2: task 1: Exited with exit code 1\n"
    ),
    form("srun --label of ten tasks and more", "RS112-unused")(
        prefixed(UNUSED, " 3: ") + prefixed(UNUSED, "12: ")
    ),
    form("kubectl logs --prefix", "RS126-reduced-twice")(
        prefixed(REDUCED, "[pod/train-worker-0/pytorch] ")
    ),
    form("kubectl logs --timestamps", "RS111-reentrant")(
        prefixed(
            raised(TWICE, *BACKWARD, (CHECKPOINT, "backward")), "2026-11-25T02:00:00.123456789Z "
        )
    ),
    form("stern", "RS116-flattening")(prefixed(DTYPES, "train-worker-0 pytorch ")),
    form("GitHub's log", "RS112-unused")(prefixed(UNUSED, "2026-11-25T02:00:00.1234567Z ")),
    form("Windows' line ends", "RS101-kv-cache")(CACHE.replace("\n", "\r\n")),
    form("a bar before the traceback", "RS120-training")(
        "\r 12%|█▏| 12/99\r 13%|█▎| 13/99" + MEMORY
    ),
    form("pytest", "RS120-training", "RS120-device")(
        "    def test_step():\n>       loss.backward()\n\ntrain.py:12: \n"
        + prefixed(OOM, "E       ")
        + "train.py:12: OutOfMemoryError\n"
    ),
    form("docker's lines of JSON", "RS120-training")(
        "".join(
            json.dumps({"log": line + "\n", "stream": "stderr"}) + "\n"
            for line in MEMORY.splitlines()
        )
    ),
    form("Kaggle's list of JSON", "RS120-training")(
        "["
        + ",".join(
            json.dumps({"stream_name": "stderr", "time": 1.5, "data": line + "\n"}) + "\n"
            for line in MEMORY.splitlines()
        )
        + "]"
    ),
    form("docker compose, a container with a name", "RS111-reentrant")(
        prefixed(
            raised(TWICE, *BACKWARD, (CHECKPOINT, "backward")).removeprefix(HEAD), "my_job    | "
        )
    ),
    form("a title that cuts the message, then the traceback", "RS111-reentrant")(
        TWICE[:60] + "...\n\n" + PROGRESS + raised(TWICE, *BACKWARD, (CHECKPOINT, "backward"))
    ),
    form("a title, then frames without the first line of a traceback", "RS111-reentrant")(
        f"{TWICE[:59]}\nParameter at index 3.\n\n"
        + raised(TWICE, *BACKWARD, (CHECKPOINT, "backward")).removeprefix(HEAD)
    ),
    form("a traceback, and its last line again at the end", "RS111-reentrant")(
        raised(TWICE, *BACKWARD, (CHECKPOINT, "backward")) + PROGRESS + TWICE + "\n"
    ),
    form("one failure without frames, and another one", "RS111-unclear")(
        TWICE + "\n" + raised("RuntimeError: Expected", *BACKWARD, (CHECKPOINT, "backward"))
    ),
    form("a logger's line of JSON", "RS120-training")(
        json.dumps({"level": "error", "exception": MEMORY}) + "\n"
    ),
    form("loguru's variables", "RS120-training")(
        MEMORY.replace("    work()\n", "    work()\n    │ └ <function work>\n")
    ),
    form("a sample of text that speaks of an error")(
        f'sample 3: "{OOM}" How do I mend that?\n' + KEY
    ),
    form("a rank that was killed, and others that then waited", "RS212-sigkill", "RS209-slow")(
        watchdog(1, 44, "ALLGATHER") + SUMMARY.format(-9, "Signal 9 (SIGKILL) received by PID 11")
    ),
    form("lines of the watchdog at 80 columns", "RS210-different-places", "RS209-unclear")(
        "\n".join(
            line[n : n + 80] for line in DIVERGED.splitlines() for n in range(0, len(line), 80)
        )
        + "\n"
    ),
    form("what ran, in the words of a failure")(
        "+ grep -c 'Detected 1 oom-kill event' slurm.out\n" + KEY
    ),
)


def said(text: str) -> str | None:
    found = diagnose_log(read_log(lines_of(io.BytesIO(text.encode()))))
    return answer(found) if found.cause is not None else None


@pytest.mark.parametrize(("name", "text", "right", "less"), FORMS, ids=[one[0] for one in FORMS])
def test_a_form_gets_its_cause_or_none(
    name: str, text: str, right: str | None, less: tuple[str, ...]
) -> None:
    assert said(text) in {right, *less}
