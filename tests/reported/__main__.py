"""A row for each reported case: its truth, the answer, and what disagrees.

``python -m tests.reported [PART OF A NAME …]``
"""

import sys
import tempfile
from pathlib import Path

from tests.reported.cases import answer_to, disagreements, names, truth_of


def main() -> int:
    """1 where an answer is wrong."""
    wanted = [name for name in names() if not sys.argv[1:] or any(a in name for a in sys.argv[1:])]
    right = 0
    print("| case | what is true | said | |\n| --- | --- | --- | --- |", flush=True)
    for name in wanted:
        truth = truth_of(name)
        with tempfile.TemporaryDirectory() as folder:
            answer = answer_to(name, Path(folder, "case"))
        wrong = disagreements(answer, truth["expected"])
        right += not wrong
        said = "; ".join(wrong).replace("|", "\\|") or "right"
        print(f"| {name} | {truth['truth']} | {answer.said} | {said} |", flush=True)
    print(f"\n{right} of {len(wanted)} right")
    return int(right < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
