"""A client that knows nothing but docs/agents/SKILL.md, and questions whose answer is known.

It reads the table of the skill, calls the command line as an agent would, and does what the first
row that holds says. The truth is what the models counted while they were recorded (the nesting
cases, those of other versions of torch), or what is known of the traces that others published.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.cases.case import record
from tests.cases.nesting import NESTING
from tests.record.runs import tool

ROOT = Path(__file__).resolve().parents[1]
TRACES = ROOT / "traces"
SKILL = ROOT / "docs" / "agents" / "SKILL.md"
TIMEOUT_S = 300
UNKNOWN = "unknown"
THE_FIELD = "the field"

_CONDITION = re.compile(r"(any )?([a-z_.]+) (=|!=) (\S+)")
_HEADER = "| when | verdict | do |"

FAILING = """
import torch
from torch.utils.checkpoint import checkpoint
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(60):
    if step == 3:
        raise RuntimeError("theirs")
    checkpoint(net, torch.randn(2, 4), use_reentrant=False).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OTHER_NUMBERS = """
import torch
from torch.utils.checkpoint import checkpoint
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(60):
    out = checkpoint(net, torch.randn(8, 64), use_reentrant=False, preserve_rng_state=False)
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Row:
    """One line of the table: conditions that must all hold, and what follows."""

    conditions: tuple[tuple[bool, str, bool, str], ...]
    verdict: str
    action: str


@dataclass(frozen=True)
class Question:
    """What the client is given, the truth, and what a person who knows it would do."""

    name: str
    command: tuple[str, ...]
    verdict: str
    action: str
    result: Path | None = None


@dataclass(frozen=True)
class Seen:
    """What the command line has answered."""

    exit: int
    document: dict[str, Any]


def table_of(text: str) -> list[Row]:
    """The rows of the skill's table.

    Raises:
        ValueError: There is no such table, or a row is not to be understood.
    """
    lines = iter(text.splitlines())
    if _HEADER not in lines or not next(lines, "").startswith("| ---"):
        raise ValueError(f"no table that begins with {_HEADER}")
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        when, verdict, action = (cell.strip() for cell in line.strip("|").split("|"))
        conditions = []
        for part in when.split(" and "):
            found = _CONDITION.fullmatch(part.strip().strip("`"))
            if found is None:
                raise ValueError(f"not to be understood: {part}")
            among, field, sign, value = found.groups()
            conditions.append((bool(among), field, sign == "=", value))
        rows.append(Row(tuple(conditions), verdict.strip("`"), action.strip("`")))
    return rows


def follow(rows: Sequence[Row], seen: Seen) -> tuple[int, str, str]:
    """Number of the first row that holds (-1 for none), the verdict, and what to do."""
    for number, row in enumerate(rows):
        if all(_holds(condition, seen) for condition in row.conditions):
            said = seen.document.get("verdict") if row.verdict == THE_FIELD else row.verdict
            return number, str(said), row.action
    return -1, "no row holds", "no row holds"


def _holds(condition: tuple[bool, str, bool, str], seen: Seen) -> bool:
    among, field, equal, value = condition
    if field == "exit":
        return (str(seen.exit) == value) == equal
    if not seen.document:
        return False
    first, _, rest = field.partition(".")
    if first not in seen.document:
        raise ValueError(f"the result has no field {first}")
    held = seen.document[first]
    if among:
        return any((_text(one[rest]) == value) == equal for one in held)
    return (_text(held) == value) == equal


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def ask(question: Question) -> Seen:
    """Call the command line, and read what it has to say."""
    done = tool(Path.cwd(), *question.command)
    text = done.stdout
    if question.result is not None:
        text = question.result.read_text(encoding="utf-8") if question.result.exists() else ""
    return Seen(done.returncode, json.loads(text) if text.lstrip().startswith("{") else {})


def _analyze(name: str, path: Path, verdict: str) -> Question:
    actions = {"doubled": "remove-one-checkpoint", "inconclusive": "record-again"}
    return Question(
        name,
        ("analyze", str(path), "--format", "json"),
        UNKNOWN if verdict == "inconclusive" else verdict,
        actions.get(verdict, "leave-it"),
    )


def questions(scratch: Path) -> Iterator[Question]:
    """All inputs with their truths; what is recorded here is written to ``scratch``."""
    for name, label in json.loads((TRACES / "expected.json").read_text()).items():
        yield _analyze(name, TRACES / name, label["verdict"])
    for name, label in json.loads((TRACES / "public" / "expected.json").read_text()).items():
        yield _analyze(f"public {name}", TRACES / "public" / name, label["verdict"])
    for folder in sorted((TRACES / "versions").iterdir()):
        for name, truth in json.loads((folder / "truth.json").read_text())["truths"].items():
            if truth["verdict"] is not None:
                path = folder / f"{name}.json.gz"
                yield _analyze(f"torch {folder.name} {name}", path, truth["verdict"])
    for case in NESTING:
        path = scratch / f"{case.name}.json.gz"
        truth = record(case, path)
        assert truth.verdict is not None
        yield _analyze(f"nesting {case.name}", path, truth.verdict)
    nowhere, no_trace = scratch / "nowhere.json", scratch / "no_trace.json"
    no_trace.write_text('{"traceEvents": 7}')
    yield Question("no such option", ("analyze", "--frmat"), UNKNOWN, "correct-the-command")
    for name, path in (("no such file", nowhere), ("no trace", no_trace)):
        command = ("analyze", str(path), "--format", "json")
        yield Question(name, command, UNKNOWN, "use-another-input")
    for name, script, verdict, action in (
        ("a script that fails", FAILING, UNKNOWN, "read-the-crash"),
        ("dropout of other numbers", OTHER_NUMBERS, "full", "restore-the-gradients"),
    ):
        file, out = scratch / f"{name.replace(' ', '_')}.py", scratch / name.replace(" ", "_")
        file.write_text(script)
        run = ("run", "--steps", "2", "-o", str(out), str(file))
        yield Question(name, run, verdict, action, out / "result.json")


def right(rows: Sequence[Row], answers: Sequence[tuple[Question, Seen]]) -> tuple[int, int]:
    """How many verdicts, and how many actions, are those of the truth."""
    said = [(question, follow(rows, seen)) for question, seen in answers]
    return (
        sum(verdict == question.verdict for question, (_, verdict, _) in said),
        sum(action == question.action for question, (_, _, action) in said),
    )


def spoilt(rows: Sequence[Row], number: int) -> list[Row]:
    """The table with another verdict and another action in one row."""
    verdict = "doubled" if rows[number].verdict == UNKNOWN else UNKNOWN
    other = replace(rows[number], verdict=verdict, action="something-else")
    return [other if place == number else row for place, row in enumerate(rows)]
