"""Where ranks stand that make no progress, and what that means."""

import pytest

from recompute_scan.crash import Frame, RankEnd
from recompute_scan.diagnose.hangs import Timeout, of_ranks, of_timeouts
from recompute_scan.diagnose.tracebacks import user_place

LIB = "/opt/conda/lib/python3.11/site-packages"
C10D = f"{LIB}/torch/distributed/distributed_c10d.py"
FSDP = f"{LIB}/torch/distributed/fsdp"
MODULE = f"{LIB}/torch/nn/modules/module.py"
CHECKPOINT = f"{LIB}/torch/utils/checkpoint.py"
TRAINER = f"{LIB}/transformers/trainer.py"
STEP = ("train.py", "main", 30)
BARRIER = (("train.py", "main", 50), (C10D, "barrier", 4))
FORWARD = (STEP, (f"{FSDP}/_flat_param.py", "_all_gather_flat_param", 7), (C10D, "all_gather", 3))
REDUCED = (
    STEP,
    (f"{FSDP}/_runtime_utils.py", "_post_backward_hook", 9),
    (C10D, "reduce_scatter", 2),
)
GATHERED = (
    ("train.py", "save_checkpoint", 40),
    (MODULE, "state_dict", 8),
    (C10D, "all_gather_into_tensor", 5),
)
LIBRARY_SAVE = (("train.py", "main", 41), (TRAINER, "save_model", 9))
LOADED = (("train.py", "resume", 20), (MODULE, "load_state_dict", 8), (C10D, "broadcast", 5))
EVALUATED = (
    ("train.py", "main", 30),
    (TRAINER, "_maybe_log_save_evaluate", 3),
    (TRAINER, "evaluate", 4),
    (C10D, "all_gather", 3),
)
ALONE = (("train.py", "main", 31), (f"{LIB}/datasets/arrow_dataset.py", "map", 8))
RECEIVES = (
    ("train.py", "main", 32),
    (CHECKPOINT, "recompute_fn", 9),
    ("train.py", "block", 12),
    (C10D, "recv", 3),
)

Stack = tuple[tuple[str, str, int], ...]


def hung(rank: int, stack: Stack, *notes: str) -> RankEnd:
    frames = tuple(Frame(file, line, function) for file, function, line in stack)
    return RankEnd(rank, "hung", place=user_place(frames), stack=frames, notes=notes)


def noted(number: int) -> str:
    return f"torch's flight recorder has nccl:all_reduce, number {number}, as its last (started)."


ENDED = RankEnd(1, "ended")
CASES = {
    "the same collective": ((hung(0, FORWARD), hung(1, FORWARD)), "RS211-waiting"),
    "one line, two collectives": ((hung(0, FORWARD), hung(1, REDUCED)), "RS210-different-places"),
    "one stack, two numbers": (
        (hung(0, BARRIER, noted(7)), hung(1, BARRIER, noted(8))),
        "RS210-different-places",
    ),
    "one stack, one number": (
        (hung(0, BARRIER, noted(7)), hung(1, BARRIER, noted(7))),
        "RS211-waiting",
    ),
    "a save by one, a barrier": ((hung(0, GATHERED), hung(1, BARRIER)), "RS204-guarded-save"),
    "a save by one, the next step": ((hung(0, GATHERED), hung(1, FORWARD)), "RS204-guarded-save"),
    "a save by one, and an end": ((hung(0, GATHERED), ENDED), "RS204-guarded-save"),
    "a load by one": ((hung(0, LOADED), hung(1, BARRIER)), "RS210-different-places"),
    "an evaluation by one": ((hung(0, EVALUATED), hung(1, BARRIER)), "RS210-different-places"),
    "data made ready by one": ((hung(0, ALONE), hung(1, BARRIER)), "RS211-one-behind"),
    "a file written by one": (
        (
            hung(0, (*LIBRARY_SAVE, (f"{LIB}/torch/serialization.py", "save", 4))),
            hung(1, (*LIBRARY_SAVE, (C10D, "barrier", 3))),
        ),
        "RS211-one-behind",
    ),
    "a message in a recompute": ((hung(0, BARRIER), hung(1, RECEIVES)), "RS214-recomputed"),
    "messages in both recomputes": ((hung(0, RECEIVES), hung(1, RECEIVES)), "RS211-waiting"),
}


@pytest.mark.parametrize("name", CASES)
def test_where_ranks_stand_says_why(name: str) -> None:
    ranks, expected = CASES[name]
    signature, evidence = of_ranks(ranks)
    assert f"{signature.code}-{signature.cause_name}" == expected
    assert len(evidence) == len(ranks)


def gave_up(rank: int, number: int, operation: str, group: str | None) -> Timeout:
    return Timeout(rank, rank + 1, operation, number, 8, group)


DEFAULT, DATA, TENSOR = "ID 0 PG GUID 0(default_pg)", "ID 1 PG GUID 3(dp)", "ID 2 PG GUID 3(tp)"
GIVEN_UP = {
    "one collective": (((0, 9, "ALLREDUCE", DATA), (1, 9, "ALLREDUCE", DATA)), "RS209-slow"),
    "one number of one group, two operations, and another group": (
        ((0, 9, "ALLREDUCE", DATA), (1, 9, "BROADCAST", DATA), (1, 4, "BROADCAST", DEFAULT)),
        "RS210-different-places",
    ),
    "one group that ranks count differently": (
        ((0, 9, "ALLREDUCE", DATA), (1, 9, "BROADCAST", TENSOR), (1, 4, "BROADCAST", DEFAULT)),
        "RS210-different-places",
    ),
    "one number of groups that nobody names alike": (
        ((0, 9, "ALLREDUCE", "1"), (1, 9, "BROADCAST", "1"), (1, 4, "BROADCAST", "0")),
        "RS209-unclear",
    ),
    "two groups": (
        ((0, 9, "ALLREDUCE", DEFAULT), (1, 9, "BROADCAST", DATA)),
        "RS209-unclear",
    ),
}


@pytest.mark.parametrize("name", GIVEN_UP)
def test_two_ranks_are_compared_within_their_group(name: str) -> None:
    timeouts, expected = GIVEN_UP[name]
    signature, evidence = of_timeouts([gave_up(*one) for one in timeouts])
    assert f"{signature.code}-{signature.cause_name}" == expected
    assert len(evidence) == len(timeouts)
