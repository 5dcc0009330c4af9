"""A client that knows nothing but docs/agents/SKILL.md, scored against known truths.

It does what the first row of the skill's table that holds says (``tests/agent_client.py``). Then
every row that was used is spoilt in turn, and the score has to fall: a row that could say anything
would not be tested.

  python -m benchmarks agent-eval --table OTHER.md     with another table

The status is 1 where a verdict or an action is wrong, or a row can be spoilt unnoticed.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
from tests.agent_client import SKILL, ask, follow, questions, right, spoilt, table_of

from benchmarks._frame import Table, benchmark, wanted, words


@benchmark
@words()
@click.option("--table", "skill", type=click.Path(path_type=Path, exists=True), default=SKILL)
def main(words: Sequence[str], skill: Path) -> int:
    rows = table_of(skill.read_text(encoding="utf-8"))
    answers = []
    used = dict.fromkeys(range(-1, len(rows)), 0)
    heads = ("input", "truth", "said", "to do", "done")
    table = Table(dict.fromkeys(heads, "<"), markdown=True)
    with tempfile.TemporaryDirectory(prefix="agent-eval") as folder:
        for question in questions(Path(folder)):
            if not wanted(question.name, words):
                continue
            seen = ask(question)
            answers.append((question, seen))
            number, verdict, action = follow(rows, seen)
            used[number] += 1
            right_ = (verdict, action) == (question.verdict, question.action)
            truth = (question.name, question.verdict, verdict, question.action)
            table.row(*truth, action, note="" if right_ else " **wrong**")
    verdicts, actions = right(rows, answers)
    untested = [
        number
        for number in range(len(rows))
        if used[number] and right(spoilt(rows, number), answers) >= (verdicts, actions)
    ]
    count = len(answers)
    print(f"\nverdicts: {verdicts} of {count} ({verdicts / count:.0%})")
    print(f"actions:  {actions} of {count} ({actions / count:.0%})")
    never = [rows[number].action for number in range(len(rows)) if not used[number]]
    print(f"rows used: {len(rows) - len(never)} of {len(rows)}; never met: {', '.join(never)}")
    print(f"rows that can be spoilt unnoticed: {len(untested)}")
    return int(verdicts < count or actions < count or bool(untested))
