"""Feed every reader inputs that nobody would write: ``python -m tests.fuzz --seconds 600``.

Inputs are changed step by step, and those that lead to something new are kept and changed
further. What ends in any other way than a documented one is made as small as it can be and
written to ``tests/fuzz/corpus``, which an ordinary test reads again. Prints inputs a second, the
slowest input and the most memory of each target; the status is 1 when something was found.
"""

import argparse
import gc
import hashlib
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
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
    "gradients": seeds.gradients,
    "config": seeds.configurations,
    "code": seeds.code,
    "archive": seeds.archives,
    "log": seeds.logs,
    "snapshot": seeds.snapshots,
    "guard": seeds.guards,
    "rehearsal": seeds.rehearsals,
    "lint": seeds.lint_inputs,
    "compiled": seeds.compiler_logs,
    "nsys": seeds.nsys_exports,
    "project": seeds.projects,
    "pins": seeds.requirements,
    "shell": seeds.launch_scripts,
    "notebook": seeds.notebooks,
    "link": seeds.link_targets,
    "redirect": seeds.redirects,
    "line": seeds.logs,
}
# Larger ones are not changed further: they are slow, and small ones lead to the same. Of some
# kinds none is small.
_LARGEST = 3_000
_LARGER = {"result": 30_000, "run_record": 10_000, "nsys": 60_000}
# An input may take so long for each megabyte that it has begun.
_SLOW_S_PER_MB = 2.0
# The process may grow by so much for one target, whatever it is given.
_MOST_MEMORY = 200 << 20


@dataclass
class Tally:
    """What came of the inputs of one target.

    Attributes:
        inputs: How many there were.
        busy_s: Processor time that they took, with making them.
        slowest_ms: The longest that one took.
        slowest_bytes: Its length.
        grown_mb: By how much the process's memory was ever larger than before the first.
        endings: Different ways in which they ended.
        failures: Those of them that are not documented, each once.
    """

    inputs: int
    busy_s: float
    slowest_ms: float
    slowest_bytes: int
    grown_mb: float
    endings: int
    failures: list[str]

    def __str__(self) -> str:
        return (
            f"{self.inputs:9,} inputs, {self.inputs / max(self.busy_s, 1e-9):6,.0f} per busy "
            f"second, {self.endings} endings, {len(self.failures)} failures; slowest: "
            f"{self.slowest_bytes:,} bytes, {self.slowest_ms:.0f} ms; "
            f"memory +{self.grown_mb:.0f} MB"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz the targets in turn; 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together")
    parser.add_argument("--inputs", type=int, help="for each target, in place of --seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", nargs="*", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--keep", type=Path, default=CORPUS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    warnings.simplefilter("error")
    found = 0
    for target in options.target:
        chance = Random(f"{options.seed} {target}")
        seconds = float("inf") if options.inputs else options.seconds / len(options.target)
        tally = fuzz(target, seconds, chance, options.keep, inputs=options.inputs)
        found += len(tally.failures)
        print(f"{target:10}{tally}", flush=True)
    return int(found > 0)


def fuzz(
    target: str,
    seconds: float,
    chance: Random,
    keep: Path,
    *,
    inputs: int | None = None,
) -> Tally:
    """What came of one target's inputs.

    Args:
        target: Its name.
        seconds: How long to go on.
        chance: Makes the inputs.
        keep: Where inputs that fail are written.
        inputs: How many there are at most.
    """
    pool = list(_SEEDS[target]())
    words = {outcome(target, data) for data in pool}
    # What was imported stays: looking through it for garbage is no part of reading an input.
    thaws = not gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    tally = Tally(0, 0.0, 0.0, 0, 0.0, len(words), [])
    at_first = start_of_peak()
    began, busy = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds and tally.inputs != inputs:
        # The newest are the oddest.
        data = mutated(pool[-1 - int(chance.random() ** 2 * len(pool))], pool, chance)
        start = time.process_time()  # of its own: the machine may be busy
        failure, word = attempt(target, data)
        took = time.process_time() - start
        tally.inputs += 1
        if took * 1e3 > tally.slowest_ms:
            tally.slowest_bytes, tally.slowest_ms = len(data), took * 1e3
        if failure is None and took > _SLOW_S_PER_MB * max(1, len(data) / 1e6):
            failure = "slow"
        if tally.inputs % 100 == 0:
            tally.grown_mb = max(0, peak() - at_first) / 2**20
            if failure is None and tally.grown_mb > _MOST_MEMORY / 2**20:
                failure = "large"
        if failure is not None and failure not in tally.failures:
            tally.failures.append(failure)
            _keep(target, failure, data, keep)
        elif word not in words and len(data) <= _LARGER.get(target, _LARGEST):
            words.add(word)
            pool.append(data)
        tally.busy_s, tally.endings = time.process_time() - busy, len(words)
    tally.grown_mb = max(0, peak() - at_first) / 2**20
    if thaws:
        gc.unfreeze()
    return tally


def start_of_peak() -> int:
    """Forget how much memory this process ever took; how much it takes now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The most memory that this process took since then, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


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
    small = data if failure in ("slow", "large") else smallest(target, failure, data)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target}-{hashlib.sha256(small).hexdigest()[:12]}"
    path.write_bytes(small)
    print(f"{failure}: {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
