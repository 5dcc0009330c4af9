"""Feed every reader inputs that nobody would write: ``python -m tests.fuzz --seconds 600``.

Inputs are changed step by step, and those that lead to something new are kept and changed
further. What ends in any other way than a documented one is made as small as it can be and
written to ``tests/fuzz/corpus``, which an ordinary test recomputes. Prints inputs a second, and the
slowest input of each target; the status is 1 when something was found.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.fuzz import seeds
from tests.fuzz.mutate import mutated
from tests.fuzz.target import TARGETS, outcome

CORPUS = Path(__file__).with_name("corpus")
_SEEDS = {
    "trace": seeds.traces,
    "whole": seeds.traces,
    "result": seeds.results,
    "baseline": seeds.baselines,
    "run_record": seeds.run_records,
    "archive": seeds.archives,
    "log": seeds.logs,
}
# Larger ones are not changed further: they are slow, and small ones lead to the same.
_LARGEST = 6_000
# An input may take so long for each of its bytes, and so long at all.
_SLOW_S, _SLOW_S_PER_BYTE = 2.0, 1e-3


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz the targets in turn; 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", nargs="*", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--keep", type=Path, default=CORPUS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    warnings.simplefilter("error")
    found = 0
    for target in options.target:
        chance = Random(f"{options.seed} {target}")
        found += fuzz(target, options.seconds / len(options.target), chance, options.keep)
    return int(found > 0)


def fuzz(target: str, seconds: float, chance: Random, keep: Path) -> int:
    """How many different failures one target has shown."""
    pool = list(_SEEDS[target]())
    words = {outcome(target, data) for data in pool}
    failures: set[str] = set()
    slowest, longest, tried = b"", 0.0, 0
    began, busy = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        # The newest are the oddest.
        data = mutated(pool[-1 - int(chance.random() ** 2 * len(pool))], pool, chance)
        start = time.process_time()  # of its own: the machine may be busy
        failure, word = attempt(target, data)
        took = time.process_time() - start
        tried += 1
        if took > longest:
            slowest, longest = data, took
        if failure is None and took > _SLOW_S + _SLOW_S_PER_BYTE * len(data):
            failure = "slow"
        if failure is not None and failure not in failures:
            failures.add(failure)
            _keep(target, failure, data, keep)
        elif word not in words and len(data) <= _LARGEST:
            words.add(word)
            pool.append(data)
    rate = tried / (time.process_time() - busy)
    print(
        f"{target:9} {tried:8,} inputs, {rate:6,.0f} per busy second, {len(words)} endings, "
        f"{len(failures)} failures; slowest: {len(slowest):,} bytes, {longest * 1e3:.0f} ms",
        flush=True,
    )
    return len(failures)


def attempt(target: str, data: bytes) -> tuple[str | None, str]:
    """Where one input fails, if it does, and what it leads to otherwise."""
    try:
        return None, outcome(target, data)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} {Path(last.filename).name}:{last.name}", ""


def smallest(target: str, failure: str, data: bytes) -> bytes:
    """The input without all parts that it fails without, in the same place."""
    size = max(1, len(data) // 2)
    while size:
        at = 0
        while at < len(data):
            shorter = data[:at] + data[at + size :]
            if attempt(target, shorter)[0] == failure:
                data = shorter
            else:
                at += size
        size //= 2
    return data


def _keep(target: str, failure: str, data: bytes, folder: Path) -> None:
    small = data if failure == "slow" else smallest(target, failure, data)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target}-{hashlib.sha256(small).hexdigest()[:12]}"
    path.write_bytes(small)
    print(f"{failure}: {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
