"""Compiled trainings: what ran again, counted as it ran, beside what is said of it.

The truth is counted by a dispatch mode under ``aot_eager``: the operators that a compiled backward
pass runs beyond those of the same model, neither compiled nor checkpointed, products also by the
module whose weights they read. What is said comes from a trace and the compiler's graphs, and from
the folder alone that ``TORCH_TRACE`` names. The status is 1 where a verdict differs, or a number of
recomputes: in all, of a layer or of a module.
"""

import time
import warnings
from collections.abc import Sequence

from tests.compiled.answers import miscounted, misplaced, said_of, truth_of
from tests.compiled.cases import CASES

from benchmarks._frame import Table, benchmark, wanted, words
from benchmarks._machine import machine


@benchmark
@words()
def main(words: Sequence[str]) -> int:
    warnings.simplefilter("ignore")
    wrong = 0
    print(machine("torch", "transformers"))
    table = Table(
        "training <50 | truth <9 | said <12 | log alone <12 | m >3g | confidence <10 | products "
        ">9 | recomputed >10g | s >6.1f"
    )
    cases = [case for case in CASES if wanted(case.name, words)]
    for case in cases:
        began = time.perf_counter()
        truth, both = truth_of(case), said_of(case)
        said, alone = both.by_trace, both.by_log
        products = sum(truth.again[name] for name in ("mm", "addmm", "bmm"))
        gemm = sum(one.recomputed_per_step for one in said.families if one.kind == "gemm")
        differing = miscounted(said, truth) if case.backend != "inductor" else {}
        differing |= misplaced(said, truth)
        right = said.verdict == case.verdict and not differing
        right = right and alone.verdict == (case.alone or case.verdict)
        wrong += not right
        verdicts = (case.verdict, said.verdict, alone.verdict, said.recompute_per_backward)
        note = "" if right else f"  WRONG {differing}"
        seconds = time.perf_counter() - began
        table.row(case.name, *verdicts, said.confidence, products, gemm, seconds, note=note)
    print(f"{len(cases)} trainings, {wrong} answers wrong")
    return int(wrong > 0)
