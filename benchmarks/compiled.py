"""Compiled trainings: what ran again, counted as it ran, beside what is said of it.

    python benchmarks/compiled.py

The truth is counted by a dispatch mode under ``aot_eager``: the operators that a compiled backward
pass runs beyond those of the same model, neither compiled nor checkpointed, products also by the
module whose weights they read. What is said comes from a trace and the compiler's graphs, and from
the folder alone that ``TORCH_TRACE`` names. Exits with 1 where a verdict differs, or a number of
recomputes: in all, of a layer or of a module.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import processor, versions
from tests.compiled.answers import miscounted, misplaced, said_of, truth_of
from tests.compiled.cases import CASES


def main() -> int:
    """Print the table; 1 where an answer is wrong."""
    warnings.simplefilter("ignore")
    wrong = 0
    print(f"{processor()}, {versions(('torch', 'transformers'))}")
    print(
        f"{'training':50} {'truth':9} {'said':12} {'log alone':12} {'m':>3} confidence  "
        "products again, recomputed"
    )
    for case in CASES:
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
        highest = said.recompute_per_backward
        print(
            f"{case.name:50} {case.verdict:9} {said.verdict:12} {alone.verdict:12} "
            f"{'-' if highest is None else format(highest, 'g'):>3} {said.confidence:10}  "
            f"{products} {gemm:g}  {time.perf_counter() - began:.1f} s"
            f"{'' if right else f'  WRONG {differing}'}",
            flush=True,
        )
    print(f"{len(CASES)} trainings, {wrong} answers wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
