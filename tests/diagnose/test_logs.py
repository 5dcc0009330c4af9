"""Exceptions come out of a log whole, whoever's lines stand between theirs."""

import io
import random
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from recompute_scan.crash import Frame, Raised
from recompute_scan.diagnose.outcome import LONGEST_LINE, Log, diagnose_log, lines_of, read_log
from tests.diagnose.corpus import KNOWN, answer, diagnosed, expected
from tests.present import present

PLAIN = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
  File "train.py", line 9, in main
    model(x)
    ^^^^^^^^
RuntimeError: 'weight' must be 2-D
"""


def read(text: str) -> Log:
    return read_log(text.encode().splitlines(keepends=True))


def test_a_traceback_has_type_message_and_frames() -> None:
    (failure,) = read("epoch 1\n" + PLAIN + "\n").failures
    (raised,) = failure.errors
    assert raised == Raised(
        "RuntimeError",
        "'weight' must be 2-D",
        (Frame("train.py", 3, "<module>", "main()"), Frame("train.py", 9, "main", "model(x)")),
    )
    assert (failure.rank, failure.line) == (None, 8)


def test_a_chain_is_one_failure_the_first_first() -> None:
    text = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: 1\n\n'
        "During handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "a.py", line 5, in g\nValueError: two\n\n'
        "The above exception was the direct cause of the following exception:\n\n" + PLAIN
    )
    (failure,) = read(text).failures
    assert [raised.name for raised in failure.errors] == ["KeyError", "ValueError", "RuntimeError"]


def test_a_message_of_several_lines_is_kept_and_ends_at_the_next_record() -> None:
    text = PLAIN + "second line\n\nfourth line\n2026-01-02 03:04:05,678 INFO bye\nfifth\n"
    (failure,) = read(text).failures
    assert failure.errors[0].message == "'weight' must be 2-D\nsecond line\n\nfourth line"


PREFIXES = {
    "torch": "[rank{}]: ",
    "torchrun --tee": "[default{}]:",
    "both": "[default{0}]:[rank{0}]: ",
    "srun --label": "{}: ",
    "ray": "(Worker pid=100{}) ",
    "timestamps": "2026-05-06T07:08:09.123Z [rank{}]: ",
    "a line count": "[80746] [rank{}]: ",
}


@pytest.mark.parametrize("form", PREFIXES)
@pytest.mark.parametrize("seed", range(3))
def test_mixed_lines_of_ranks_are_taken_apart(form: str, seed: int) -> None:
    """Oracle: the same logs, each read alone."""
    texts = [path.read_text() for path in KNOWN if path.stem.startswith(("RS103", "RS102-imp"))]
    texts.append(PLAIN)
    alone = [read(text).failures[0].errors for text in texts]
    generator = random.Random(seed)
    streams = [
        [PREFIXES[form].format(rank) + line for line in text.splitlines()]
        for rank, text in enumerate(texts)
    ]
    mixed = []
    while any(streams):
        mixed.append(generator.choice([stream for stream in streams if stream]).pop(0))
    failures = read("\n".join(mixed) + "\n").failures
    assert sorted((f.errors for f in failures), key=str) == sorted(alone, key=str)
    if form != "ray":
        assert {failure.rank for failure in failures} == set(range(len(texts)))


@pytest.mark.parametrize("path", KNOWN, ids=lambda path: path.stem)
def test_colours_line_ends_and_noise_change_nothing(path: Path) -> None:
    plain = path.read_bytes()
    coloured = b"".join(
        b"\x1b[1;31m" + line.replace(b": ", b"\x1b[0m: \x1b[35m") + b"\x1b[0m\r\n"
        for line in plain.splitlines()
    )
    found = diagnose_log(read_log(io.BytesIO(b"\xff\xfe\x00 noise\n" * 3 + coloured)))
    assert answer(found) == expected(path)


def test_torchruns_summary_says_which_rank_was_first() -> None:
    late = PLAIN.replace("'weight' must be 2-D", "odd").replace("\n", "\n[rank0]: ")
    early = PLAIN.replace("\n", "\n[rank1]: ")
    summary = (
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-01-01\n"
        "  rank      : 1 (local_rank: 1)\n"
    )
    log = read(f"[rank0]: {late}\n[rank1]: {early}\n{summary}")
    found = diagnose_log(log)
    assert (log.first_rank, found.cause and found.cause.rank) == (1, 1)


def test_what_follows_from_another_ranks_death_is_not_the_cause() -> None:
    gone = PLAIN.replace("'weight' must be 2-D", "[pair.cc:534] Connection closed by peer")
    text = "[rank0]: " + gone.replace("\n", "\n[rank0]: ") + "\n"
    text += "[rank1]: " + PLAIN.replace("\n", "\n[rank1]: ") + "\n"
    found = diagnose_log(read(text))
    assert (present(found.cause).signature.code, present(found.cause).rank) == ("RS117", 1)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("Segmentation fault (core dumped)", "RS213"),
        ("20%|##  | 11/56 [00:02<00:08]Segmentation fault (core dumped)", "RS213"),
        ("[1]    4711 floating point exception (core dumped)  python train.py", "RS213"),
        ("Fatal Python error: Segmentation fault", "RS213"),
        ("run.sh: line 12: 4711 Bus error               python train.py", "RS213"),
        ("run.sh: line 12: 4711 Killed                  torchrun train.py", "RS212"),
        ("/bin/bash: line 27: 318 Killed sh start.sh", "RS212"),
        ("**Killed**", "RS212"),
        ("Segmentation fault: 11", "RS213"),
        ("zsh: killed     python train.py", "RS212"),
        ("zsh: illegal hardware instruction  python train.py", "RS213"),
        ("he was Killed", None),
        # Windows, the kernel, Kubernetes.
        ("Process finished with exit code -1073741819 (0xC0000005)", "RS213"),
        ("Process finished with exit code -1", None),
        ("Process finished with exit code 137 (interrupted by signal 9:SIGKILL)", "RS212"),
        ("Windows fatal exception: access violation", "RS213"),
        ("[1.2] Memory cgroup out of memory: Killed process 12 (python) total-vm:1kB", "RS212"),
        ("[1.2] Out of memory: Killed process 12 (firefox) total-vm:1kB", None),
        ("Exit Code:    137", "RS212"),
        ("trainer-1 exited with code 139", "RS213"),
        ("command terminated with exit code 137", "RS212"),
        ("command terminated with exit code 143", None),
        ("Exit code 137 usually means that a container wanted memory", None),
        ("| exit code | 137 | out of memory |", None),
        ("exit: 135 samples", None),
        ("Fixed: RuntimeError: CUDA out of memory. Tried to allocate 2 MiB", None),
        # Schedulers' limits, Ray's word, Lightning's, gdb's.
        ("slurmstepd: error: Step 1.0 exceeded memory limit (7 > 6), being killed", "RS212"),
        ("slurmstepd: error: Exceeded job memory limit at some point.", "RS212"),
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", "RS212"),
        ("=>> PBS: job killed: mem 12kb exceeded limit 10kb", "RS212"),
        ("=>> PBS: job killed: walltime 3600 exceeded limit 3500", None),
        ("Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: Task was killed", "RS212"),
        ("Child process with PID 7 terminated with code -9. Forcefully ending", "RS212"),
        ("Child process with PID 7 terminated with code 1. Forcefully ending", None),
        ("Program terminated with signal SIGSEGV, Segmentation fault.", "RS213"),
        ('Thread 1 "python" received signal SIGSEGV, Segmentation fault.', "RS213"),
        ("Reason:       OOMKilled", "RS212"),
        # Launchers.
        ("srun: error: gpu-12: task 3: Segmentation fault (core dumped)", "RS213"),
        ("srun: error: r10n04: tasks 0-3,5: Killed", "RS212"),
        ("srun: error: node01: task 0: Out Of Memory", "RS212"),
        ("srun: error: node01: task 0: Exited with exit code 1", None),
        ("mpirun noticed that process rank 1 with PID 7 on node h exited on signal 9 (K", "RS212"),
        ("prterun: process rank 1 exited on signal 11 (Segmentation fault).", "RS213"),
        ("mpirun noticed that process rank 1 exited on signal 15 (Terminated).", None),
        # Handlers in native code.
        ("[host:1:0:1] Caught signal 11 (Segmentation fault: address not mapped)", "RS213"),
        ("logging.cc:501: *** SIGSEGV received at time=1785 on cpu 169 ***", "RS213"),
        ("*** SIGBUS (@0x0) received by PID 7 (TID 0x7f) from PID 0; stack trace: ***", "RS213"),
        ("[host:07] Signal: Segmentation fault (11)", "RS213"),
        ("Caught signal 15 (Terminated)", None),
        ("*** SIGTERM received at time=1785 on cpu 169 ***", None),
        ("[host:07] Signal: Terminated (15)", None),
        # Another program's end, and what speaks of one.
        ("run.sh: line 12: 4711 Killed                  tail -f train.log", None),
        ("Fatal Python error: Aborted", None),
        ("a Segmentation fault was seen here in older versions", None),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Segmentation fault.", None),
    ],
)
def test_a_shells_words_tell_how_its_program_ended(line: str, code: str | None) -> None:
    cause = diagnose_log(read(f"step 7, loss 0.1\n{line}\n")).cause
    assert (cause and cause.signature.code) == code
    if cause is not None:
        assert cause.evidence[0] == f"line 2: {line}"


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ("CUDA out of memory. Tried to allocate 2 MiB", True),
        ("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", True),
        ("NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity", True),
        ("MPS backend out of memory (MPS allocated: 17.68 GB, other allocations: 3.95 MB", True),
        ("MUSA out of memory. Tried to allocate 2 MiB", True),
        ("Allocation on device 0 would exceed allowed memory. (out of memory)", True),
        ("cuda runtime error (2) : out of memory at /opt/lib/THC/generic/THCStorage.cu:66", True),
        ("cuda runtime error (2) : out of memory at /opt/THC/THCCachingHostAllocator.cpp:1", False),
        ("CPU out of memory", False),
        ("The cluster is out of memory", False),
        ("Shared memory manager: out of memory", False),
    ],
)
def test_every_devices_words_for_full_memory_are_known(words: str, known: bool) -> None:
    cause = diagnose_log(read(f"RuntimeError: {words}\n")).cause
    assert (cause and cause.signature.code) == ("RS120" if known else None)


def test_exceptions_of_a_group_are_read_and_the_group_is_not_the_cause() -> None:
    """As Python prints them, written down from `asyncio.TaskGroup`."""
    text = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "train.py", line 6, in <module>\n  |     asyncio.run(main())\n'
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "train.py", line 3, in step\n    |     loss.backward()\n'
        "    | RuntimeError: 'weight' must be 2-D\n"
        "    +------------------------------------\n"
    )
    found = diagnose_log(read(text))
    (raised,) = present(found.first).errors
    assert raised.name == "RuntimeError"
    assert raised.frames == (Frame("train.py", 3, "step", "loss.backward()"),)
    assert present(found.cause).signature.code == "RS117"


def test_what_a_process_raised_outranks_how_it_ended() -> None:
    found = diagnose_log(read(f"{PLAIN}\nSegmentation fault (core dumped)\n"))
    assert present(found.cause).signature.code == "RS117"


@pytest.mark.parametrize("name", ["RS101-unknown", "RS102-impure-block", "RS121-unsaved"])
def test_a_cause_that_only_lists_possibilities_is_never_sure(name: str) -> None:
    (path,) = (one for one in KNOWN if one.stem == name)
    cause = present(diagnosed(path).cause)
    assert (expected(path), cause.confidence) == (name, "medium")


def test_a_message_without_a_traceback_is_recognised_with_less_confidence() -> None:
    found = diagnose_log(read("RuntimeError: 'weight' must be 2-D\n"))
    assert found.cause is not None
    assert (found.cause.signature.code, found.cause.confidence) == ("RS117", "low")
    bare = diagnose_log(read("KeyError: 'optimizer_states'\n"))
    assert (present(bare.cause).signature.code, present(bare.cause).confidence) == ("RS201", "low")


def test_an_empty_text_and_text_without_failures_give_nothing() -> None:
    for text in ("", "\n", "step 1\nstep 2\n", "Error\n", ": :\n"):
        found = diagnose_log(read(text))
        assert (found.first, found.cause, found.hints) == (None, None, ())


def long_log(size: int) -> Iterator[bytes]:
    step = b"[rank3]: 2026-01-01 00:00:00 INFO step %d loss 1.234 grad_norm 0.9 tokens/s 12345\n"
    warned = b"/opt/x.py:7: UserWarning: something number %d is odd\n"
    written, number = 0, 0
    while written < size:
        line = (warned if number % 50 == 0 else step) % number
        written, number = written + len(line), number + 1
        yield line
    yield from (line + b"\n" for line in PLAIN.encode().splitlines())


def test_a_long_log_streams() -> None:
    """Memory stays small whatever the size; the figure for 100 MB stands in docs/diagnoses.md."""
    tracemalloc.start()
    begin = time.process_time()
    log = read_log(long_log(5_000_000))
    taken = time.process_time() - begin
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = diagnose_log(log)
    assert present(found.cause).signature.code == "RS117"
    assert peak < 2_000_000
    assert taken < 15


def test_many_failures_and_endless_lines_stay_bounded() -> None:
    deep = '{"log": ' + "[" * 20_000 + "]" * 20_000 + "}\n"
    many = "".join(PLAIN.replace("2-D", f"{number}-D") for number in range(1000))
    assert len(read(deep + many).failures) == 100
    pieces = list(lines_of(io.BytesIO(b"x" * (3 * LONGEST_LINE))))
    assert max(map(len, pieces)) == LONGEST_LINE


@pytest.mark.parametrize(
    ("error", "piece"),
    [
        ("TypeError: ", "CheckpointWrapper("),
        ("RuntimeError: ", "expected to be in states "),
        ("RuntimeError: ", "Trying to backward an extra time "),
        ("ValueError: ", "activation_checkpointing "),
        (
            "CheckpointError: have different metadata than during the forward pass ",
            "saved metadata: {'shape': torch.Size([1, 2]), 'dtype': torch.a ",
        ),
    ],
)
def test_a_message_that_says_half_of_it_again_and_again_is_read_in_time(
    error: str, piece: str
) -> None:
    log = f'Traceback (most recent call last):\n  File "a.py", line 1, in b\n{error}{piece * 3000}'
    began = time.process_time()
    diagnose_log(read_log(lines_of(io.BytesIO(log.encode()))))
    assert time.process_time() - began < 5


def test_every_known_log_is_answered_from_its_end_too() -> None:
    """Logs are often pasted from the middle on: the traceback alone is enough."""
    for path in KNOWN:
        lines = path.read_bytes().splitlines(keepends=True)
        start = next((n for n, line in enumerate(lines) if b"Traceback (most" in line), None)
        before = ("RS104", "RS20", "RS136-warned")  # shown before the traceback
        if start is None or path.stem.startswith(before) or "recompiled" in path.stem:
            continue
        found = diagnose_log(read_log(lines[start:]))
        assert answer(found) == expected(path), path.name
    assert answer(diagnosed(KNOWN[0])) is not None


def test_frames_that_a_notebook_made_links_of_are_read() -> None:
    text = (
        "File [~/lib/python3.10/site-packages/torch/optim/adamw.py:220](http://host/lab/a.py#line=1)"
        ", in step(self, closure)\n"
        "---> 220 adamw(\n\n"
        "[/opt/site-packages/torch/optim/adamw.py](https://localhost:8080/#) in adamw(params)\n"
        "---> 12 torch._foreach_add(x)\n\n"
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB\n"
    )
    found = diagnose_log(read(text))
    assert [one.function for one in present(found.first).errors[-1].frames] == ["step", "adamw"]
    assert present(found.cause).signature.cause_name == "training"


def test_a_collective_that_timed_out_in_a_blocking_wait_is_read() -> None:
    (one,) = read(
        "[rank3]:[E616 13:41:10 ProcessGroupNCCL.cpp:628] [Rank 1] Work WorkNCCL(SeqNum=9, "
        "OpType=_ALLGATHER_BASE, NumelIn=40, NumelOut=80, Timeout(ms)=1800000) timed out in "
        "blocking wait (TORCH_NCCL_BLOCKING_WAIT=1).\n"
    ).timeouts
    assert (one.rank, one.sequence, one.operation, one.elements) == (3, 9, "_ALLGATHER_BASE", 40)


def test_a_copy_to_the_host_that_waits_for_nothing_asks_for_pinned_memory() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/opt/site-packages/unsloth_zoo/gradient_checkpointing.py", line 145, in forward\n'
        '    saved = hidden_states.to("cpu", non_blocking = True)\n'
        "RuntimeError: CUDA error: out of memory\n"
    )
    found = diagnose_log(read(text))
    assert present(found.cause).signature.code == "RS127"


@pytest.mark.parametrize(
    "line",
    (
        '  File "a.py", line {}, in f',
        "---> {} x = 1",
        "[rank{}]: ValueError: x",
        "[E] [Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum={0}, OpType=ALLREDUCE, NumelIn={0}, NumelOut=1)",
        "[PG 0 Rank {0}] work sequence id: {0} last enqueued work: {0}, last completed work: {0}",
        "failed (exitcode: -{0}) local_rank: {0} (pid: 1)",
        "exits with return code = -{}",
        "saved metadata: {{'shape': torch.Size([{0} 0]), 'dtype': torch.float32}} "
        "recomputed metadata: {{'shape': torch.Size([{0}]), 'dtype': torch.float32}}",
        "RuntimeError: The size of tensor a ({0}) must match the size of tensor b ({0})",
    ),
)
@pytest.mark.parametrize("number", ("9" * 6000, "\N{SUPERSCRIPT TWO}3", "4 0"))
def test_numbers_that_no_program_prints_are_no_numbers(line: str, number: str) -> None:
    first = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
    error = (
        "torch.utils.checkpoint.CheckpointError: have different metadata than during the forward"
    )
    for text in (f"{line}\n", f"{first}{line}\n", f"{first}{error}\n{line}\nValueError: y\n"):
        diagnose_log(read(text.format(number)))


@pytest.mark.parametrize(
    "what", ("[enforce fail at ", "[enforce fail at CPUAllocator.cpp:1] posix_")
)
def test_a_host_allocators_beginning_again_and_again_is_read_in_time(what: str) -> None:
    start = time.process_time()
    assert diagnose_log(read(f"RuntimeError: {what * 4000}\n")).cause is None
    assert time.process_time() - start < 1
