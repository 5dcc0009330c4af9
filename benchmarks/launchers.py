"""Both examples under every launcher: the verdict beside the job's own count.

The doubled and the repaired Llama of ``examples/`` are trained under each, unchanged;
``tests/record/counted_example.py`` counts how often a layer's forward runs in the backward pass,
and the verdict must say the same. What is not at hand is listed and not counted: deepspeed is not
among the packages of this project (``DS_BUILD_OPS=0 pip install --no-deps deepspeed`` and what it
imports, in another environment), mpirun is Debian's ``openmpi-bin``, srun its ``slurm-wlm`` with a
cluster that answers, two nodes are network namespaces and need root.

  python -m benchmarks launchers torchrun     the launchers whose name holds a word

The status is 1 where one is not right.
"""

import sys
from collections.abc import Sequence

from tests.record.launchers import EXPECTED, LAUNCHERS, Answer, launch, missing

from benchmarks._frame import Table, benchmark, wanted, words
from benchmarks._machine import machine


@benchmark
@words()
def main(words: Sequence[str]) -> int:
    print(f"{machine('torch', 'transformers', 'accelerate', 'deepspeed')}\n")
    examples = {f"{name}: counted, found": "<" for name in EXPECTED}
    columns = {"launcher": "<", "processes": ">", **examples, "result": "<"}
    table = Table(columns, markdown=True)
    right = launched = 0
    for launcher in LAUNCHERS:
        if not wanted(launcher.name, words):
            continue
        head = (f"`{launcher.name}`", launcher.processes)
        if (why := missing(launcher)) is not None:
            table.row(*head, "", why, "")
            continue
        answers = {example: launch(launcher, example) for example in EXPECTED}
        good = [one.right(example, launcher.processes) for example, one in answers.items()]
        right, launched = right + sum(good), launched + len(good)
        table.row(*head, *map(_cell, answers.values()), "right" if all(good) else "WRONG")
        for answer, fine in zip(answers.values(), good, strict=True):
            if not fine:
                print(f"{answer}\n{answer.error}", file=sys.stderr)
    print(f"\n{right} of {launched} right")
    return int(right < launched or not launched)


def _cell(answer: Answer) -> str:
    counted = ", ".join(f"{value:g}" for value in answer.counted)
    return f"{counted}; {answer.verdict}, {answer.recomputes}, ranks {list(answer.ranks)}"
