"""Planted waste and ordinary trainings: what a watched step finds, and what a repair saves.

Operators are counted by a dispatch mode that knows storages only, peaks are added up from the
allocator's own records, and a saving is measured by pairs of steps in turn, with and without the
waste. The analyser has no part in any of the three.

  python -m benchmarks earn                     all trainings
  python -m benchmarks earn between cycle       those whose name holds a word
  python -m benchmarks earn --pairs 40          more pairs of steps for each saving
  python -m benchmarks earn --ranks fsdp2       on two processes, without savings

The status is 1 where a waste was not found, or something was found in an ordinary training.
"""

import functools
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.work import trainings
from tests.work.test_work import seen
from tests.work.trainings import ALONE, ORDINARY, ORDINARY_LAYERS, PLANTED, Planted, Step
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._frame import Table, benchmark, wanted, words
from benchmarks._machine import machine
from recompute_scan.result.watched_step import WatchedStep
from recompute_scan.work import watched_step

_TRAINED = trainings.trained
_TIMED = 10  # steps before a watched one, which say how long a step takes
_WORK = ("repeated", "repeated-rows", "unread", "unread-gradient", "unread-recompute")


@benchmark
@words()
@click.option("--pairs", default=20, help="Pairs of steps for each saving; 0 for none.")
@click.option("--ranks", type=click.Choice(["ddp", "fsdp2"]), help="Train on two processes.")
def main(words: Sequence[str], pairs: int, ranks: str | None) -> int:
    print(machine("torch"))
    if ranks is None:
        return _tried(words, pairs)
    with TemporaryDirectory() as folder:
        given = (ranks, f"{folder}/store", words)
        mp.spawn(_rank, given, 2)  # type: ignore[attr-defined, no-untyped-call]
    return 0


def _replicated(*modules: torch.nn.Module, **options: Any) -> Any:
    for module in modules:
        replicate(module)
    return _TRAINED(*modules, **options)


def _sharded(*modules: torch.nn.Module, **options: Any) -> Any:
    for module in modules:
        for one in [one for one in module.modules() if isinstance(one, trainings.Block)]:
            fully_shard(one)
        if not isinstance(module, torch.nn.ModuleList):
            fully_shard(module)
    return _TRAINED(*modules, **options)


def _rank(rank: int, way: str, store: str, words: Sequence[str]) -> None:
    """One of two processes; its status is 1 where something was wrong in it."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    quiet = nullcontext() if rank == 0 else redirect_stdout(StringIO())
    with patch.object(trainings, "trained", _sharded if way == "fsdp2" else _replicated), quiet:
        wrong = _tried(words, 0)
    dist.destroy_process_group()
    sys.exit(wrong)


def _tried(words: Sequence[str], pairs: int) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.disable()  # the moment at which it runs changes what a reference cycle keeps
    return int(planted(words, pairs) + ordinary(words) > 0)


def planted(words: Sequence[str], pairs: int) -> int:
    """A line for each training with a waste; how many were not found as they are."""
    table = Table(
        {
            "training": "<26",
            "kind": "<16",
            "line": "<7",
            "operators": ">9",
            "counted": ">8",
            "ms": ">12",
            "saved ms": ">15",
            "KiB": ">8",
            "true KiB": ">8",
            "peak/true": ">9.3f",
        }
    )
    missed = tried = 0
    for name, case in PLANTED.items():
        for layers in case.layers:
            title = f"{name} {layers}"
            if not wanted(title, words):
                continue
            tried += 1
            missed += not _row(table, title, name, case, layers, pairs)
    print(f"{tried} planted, {missed} not found with line, operators and bytes\n")
    return missed


def _row(table: Table, title: str, name: str, case: Planted, layers: int, pairs: int) -> bool:
    def made(*, repaired: bool = False, marked: Callable[[Any], Any] = lambda run: run()) -> Step:
        torch.manual_seed(0)
        return case.make(layers, repaired, marked)

    found = watched(made(), timed=_TIMED if pairs else 0)
    every: list[Any] = [*found.work, *found.kept]
    of_kind = [one for one in every if one.kind == case.kind]
    lines = _lines(name)
    # The work of a backward pass or a recompute is named by lines of the forward.
    at = {_line(one) for one in of_kind}
    right = bool(at) and (not case.counted or not lines.isdisjoint(at))
    operators = counted = kept = truth = None
    promised = saved = ""
    if case.kind in _WORK:
        here = [one for one in of_kind if not case.counted or _line(one) in lines]
        operators = sum(one.operators for one in here)
        counted = _counted(made) if case.counted else None
        right &= counted is None or operators == counted
        if pairs:
            low, middle, high = measured(made(), made(repaired=True), pairs)
            saved = f"{low:.1f} {middle:.1f} {high:.1f}"
            least = sum(one.least_ms for one in here)
            most = sum(one.most_ms for one in here)
            promised = f"{least:.1f} {most:.1f}"
            right &= least <= high and low <= most
    else:
        kept = sum(one.bytes for one in of_kind)
        truth = case.bytes(layers) if case.bytes is not None else None
        right &= truth is None or kept == truth
    # gloo's threads may let go of a gathered tensor late: the least counts.
    tries = 5 if dist.is_initialized() else 1
    peak = found.peak_bytes / min(true_peak(made()) for _ in range(tries))
    right &= abs(peak - 1) <= 0.02
    table.row(
        *(title, case.kind, "right" if right else "WRONG", operators, counted, promised, saved),
        *(kept and kept >> 10, truth and truth >> 10, peak),
    )
    return right


def _line(one: Any) -> int:
    return int(one.line.rpartition(":")[2])


def _lines(name: str) -> set[int]:
    source = Path(trainings.__file__).read_text("utf-8").splitlines()
    return {n for n, text in enumerate(source, 1) if text.endswith(f"# WASTE: {name}")}


def ordinary(words: Sequence[str]) -> int:
    """Prints what is found in ordinary trainings; in how many of them anything was."""
    tried = untrue = 0
    # Some of those that stand alone mix whole tensors with parts of them.
    every = ({} if dist.is_initialized() else {**ALONE}) | {
        f"{name} {layers}": functools.partial(make, layers)
        for name, make in ORDINARY.items()
        for layers in ORDINARY_LAYERS
    }
    if not dist.is_initialized():
        every |= {
            f"{name} {way}": functools.partial(_language, name, way)
            for way in ("plain", "checkpointed", "accumulated")
            for name in _LANGUAGE
        }
    for name, made in every.items():
        if not wanted(name, words):
            continue
        torch.manual_seed(0)
        found = watched(made())
        tried += 1
        if found.work or found.kept or found.untold:
            untrue += 1
            print(f"{name}: {found.untold or (*found.work, *found.kept)}")
    print(f"{tried} ordinary trainings, something found in {untrue}")
    return untrue


# Models of transformers, by the name of their configuration.
_LANGUAGE = (
    "llama qwen2 qwen3 mistral mixtral gemma2 gemma3_text phi3 olmo2 stablelm granite cohere "
    "gpt_neox gpt2 opt bloom mamba bert roberta electra deberta-v2 modernbert"
).split()
_WIDTH, _TOKENS = 128, 512
_SMALL = {
    "vocab_size": _TOKENS, "hidden_size": _WIDTH, "word_embed_proj_dim": _WIDTH, "head_dim": 32,
    "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 160, "pad_token_id": 0,
    "use_cache": False, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
}  # fmt: skip


def _language(name: str, way: str) -> Step:
    """A language model that learns to name the tokens that it gets."""
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415 - seconds

    make: Any = AutoModel.from_config
    model = make(AutoConfig.for_model(name, **_SMALL)).train()
    if way == "checkpointed":
        model.gradient_checkpointing_enable()
    head = torch.nn.Linear(_WIDTH, _TOKENS)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])

    def step() -> None:
        for _ in range(1 + (way == "accumulated")):
            tokens = torch.randint(5, _TOKENS, (8, 64))
            # No variable holds the scores: they would be memory that nothing reads.
            loss: Any = torch.nn.functional.cross_entropy(
                head(model(input_ids=tokens).last_hidden_state).flatten(0, 1), tokens.flatten()
            )
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def watched(step: Step, *, timed: int = 0) -> WatchedStep:
    """What the third step of a training shows, or that after so many more, which are timed."""
    gc.collect()
    for _ in range(2):
        step()
    marks = [time.perf_counter()]
    for _ in range(timed):
        step()
        marks.append(time.perf_counter())
    return watched_step(seen(step), [1000 * (end - begin) for begin, end in pairwise(marks)])


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that get tensors and leave their results in new storages."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, results = _tensors((args, kwargs)), _tensors(result)
        there = {one.untyped_storage().data_ptr() for one in given}
        new = any(one.untyped_storage().data_ptr() not in there for one in results)
        derived = not func._schema.name.endswith("_like")
        self.count += bool(given and new and derived)
        return result


def _tensors(value: object) -> list[torch.Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(value) if torch.is_tensor(one)]


def _counted(made: Callable[..., Step]) -> int:
    """The operators of the marked waste in one step."""
    counter = Counter()

    def marked(run: Callable[[], Any]) -> Any:
        with counter:
            return run()

    with patch.object(trainings, "trained", _TRAINED):  # what DDP and FSDP add is no waste
        made(marked=marked)()
    return counter.count


def measured(waste: Step, repaired: Step, pairs: int) -> list[float]:
    """Lower quartile, median and upper quartile of what a repair saves, in ms of the CPU a step."""

    def took(step: Step) -> float:
        begun = time.process_time()
        step()
        return 1000 * (time.process_time() - begun)

    for _ in range(3):
        waste()
        repaired()
    # The order changes from pair to pair.
    saved = []
    for pair in range(pairs):
        first, second = (waste, repaired) if pair % 2 else (repaired, waste)
        one, other = took(first), took(second)
        saved.append(one - other if pair % 2 else other - one)
    return statistics.quantiles(saved, n=4)


def true_peak(step: Step) -> int:
    """The most that the third step's own memory takes, by the allocator's records.

    Weights that FSDP2 gathers, into storages that it resizes, are left out.
    """
    gc.collect()
    for _ in range(2):
        step()
    mark = "resizes a storage"
    around = record_function(mark)(torch.UntypedStorage.resize_)
    with (
        patch.object(torch.UntypedStorage, "resize_", around),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        step()

    def changes(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
        for one in events:
            if one.name == "[memory]":
                yield one.start_time_ns, one.typed[1].ptr, one.typed[1].alloc_size
            elif one.name != mark:
                yield from changes(one.children)

    alive = dict[int, int]()  # what is given back at any other address was there before
    now = most = 0
    for _, address, size in sorted(changes(seen.profiler.kineto_results.experimental_event_tree())):
        now -= alive.pop(address, 0)
        if size > 0:
            alive[address] = size
            now += size
            most = max(most, now)
    return most
