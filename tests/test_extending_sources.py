"""The recipes "A trace source" and "A launcher" of docs/extending.md, followed in a copy."""

import json
import re
from pathlib import Path

import pytest

from tests.scratch import copy_package, printed

ROOT = Path(__file__).resolve().parents[1]
RECIPES = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")

# Lines of "kind name start end" in µs after a first line that says what the file is.
TOY = '''\
"""Toy traces: three words and a first line."""

from pathlib import Path

import numpy as np

from recompute_scan.trace.columns import Kind, Limits, Trace


def is_toy(head: bytes) -> bool:
    return head.startswith(b"toy trace 1\\n")


def load_toy(path: Path, limits: Limits) -> Trace:
    rows = [line.split() for line in path.read_text().splitlines()[1:]]
    names = tuple(dict.fromkeys(row[1] for row in rows))
    start, end = (np.array([int(row[at]) * 1000 for row in rows]) for at in (2, 3))
    none = np.full(len(rows), -1, np.int32)
    return Trace(
        name=np.array([names.index(row[1]) for row in rows], np.int32),
        kind=np.array([getattr(Kind, row[0]) for row in rows], np.int8),
        thread=np.zeros(len(rows), np.int32),
        ts=start,
        dur=end - start,
        sequence=none,
        correlation=none,
        stream=none,
        dims=np.zeros(len(rows), np.int32),
        names=names,
        threads=(("1", "1"),),
        signatures=("",),
    )
'''
EVENTS = """\
toy trace 1
ANNOTATION ProfilerStep#0 0 100
OP aten::linear 10 20
OP aten::relu 20 30
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The folder of a copy of the package, to write in."""
    return copy_package(tmp_path)


def recipe(title: str) -> str:
    """The text of one recipe, with its line breaks taken out."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", RECIPES, re.MULTILINE | re.DOTALL)
    assert found
    return " ".join(found[1].split())


def insert(path: Path, before: str, text: str) -> None:
    """Write a line before the one place where something is."""
    source = path.read_text(encoding="utf-8")
    assert source.count(before) == 1
    path.write_text(source.replace(before, text + before), encoding="utf-8")


def test_a_trace_source(copy: Path, tmp_path: Path) -> None:
    text = recipe("A trace source")
    for part in (
        "is_<source>(head)",
        "load_<source>(path, limits)",
        "`load` in `trace/sources.py`",
    ):
        assert part in text
    (copy / "trace" / "toy.py").write_text(TOY, encoding="utf-8")
    sources = copy / "trace" / "sources.py"
    insert(
        sources,
        "from recompute_scan.trace.sniff import",
        "from recompute_scan.trace import toy\n",
    )
    insert(
        sources,
        "        if is_sqlite(head):\n",
        "        if toy.is_toy(head):\n            return toy.load_toy(path, limits)\n",
    )
    trace = tmp_path / "run.toy"
    trace.write_text(EVENTS, encoding="utf-8")
    answer = printed(copy, "-m", "recompute_scan", "analyze", "--format", "json", str(trace))
    result = json.loads(answer)
    assert result["health"]["events"] == 3
    assert result["verdict"] == "inconclusive"
    assert "backward" in result["reason"]


def test_a_launcher(copy: Path) -> None:
    asks = (
        "from recompute_scan.startup import joined\n"
        "from recompute_scan.record.launch import rank_facts\n"
        "for module in ('toylauncher', 'train'):\n"
        "    print(joined(['python', '-m', module], [], []) is None)\n"
        "facts = rank_facts()\n"
        "print(facts.rank, facts.world_size)"
    )
    text = recipe("A launcher")
    for name, line in {
        "_TOOLS": '"toylauncher", ',
        "_RANK_VARIABLES": '("TOY_RANK", "TOY_SIZE"), ',
    }.items():
        found = re.search(rf"`{name}` in `src/recompute_scan/([\w/]+\.py)`", text)
        assert found
        path = copy / found[1]
        source = path.read_text(encoding="utf-8")
        assert source.count(f"{name} = (") == 1
        path.write_text(source.replace(f"{name} = (", f"{name} = ({line}"), encoding="utf-8")
    answer = printed(copy, "-c", asks, TOY_RANK="1", TOY_SIZE="2")
    assert answer.split() == ["True", "False", "1", "2"]
