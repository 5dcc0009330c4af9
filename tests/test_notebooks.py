"""The notebooks run from top to bottom, their cells compute what their text says, and what is
stored with them is what they give.
"""

import gzip
import json
import re
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.test_docs import module_at

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
PUBLIC = ROOT / "traces" / "public"
FIGURE = "application/vnd.plotly.v1+json"

# Jupyter's own warnings say nothing about the notebook.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:Warning:" + module)
    for module in ("jupyter_client", "jupyter_core", "nbclient", "nbformat", "zmq", "tornado")
]


class Executed:
    """A notebook that has run: what each cell printed and showed, by the cell's id."""

    def __init__(self, notebook: Any) -> None:
        self.notebook = notebook
        self._cells = {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}

    def printed(self, cell: str) -> str:
        outputs = self._cells[cell].outputs
        return "".join(output.text for output in outputs if output.output_type == "stream")

    def shown(self, cell: str, kind: str) -> Any:
        (data,) = (
            output.data[kind]
            for output in self._cells[cell].outputs
            if output.output_type in ("execute_result", "display_data") and kind in output.data
        )
        return data

    def table(self, cell: str) -> dict[str, dict[str, str]]:
        """A table that a cell shows: rows by their index, cells by their column."""
        reader = _Table()
        reader.feed(self.shown(cell, "text/html"))
        heads = reader.rows[0][1:]
        # An index with a name has a row of its own under the head.
        body = [row for row in reader.rows[1:] if any(row[1:])]
        return {row[0]: dict(zip(heads, row[1:], strict=True)) for row in body}


class _Table(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self._inside = tag in ("td", "th")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.rows[-1][-1] += data


Execute = Callable[[str], Executed]


@pytest.fixture(scope="module")
def execute() -> Execute:
    """Runs a notebook, once, in the kernel of this environment."""

    runner = module_at(ROOT / "docs" / "notebooks.py")

    @cache
    def execute(name: str) -> Executed:
        return Executed(runner.executed(NOTEBOOKS / f"{name}.ipynb"))

    return execute


def kernels(name: str) -> list[dict[str, Any]]:
    """The kernels of a public trace, read without the tool."""
    events = json.loads(gzip.decompress((PUBLIC / name).read_bytes()))["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "Kernel")]


def test_the_recorded_loop_is_doubled_until_it_is_repaired(execute: Execute) -> None:
    executed = execute("doubled_checkpointing")
    verdict, count = executed.printed("count").splitlines()
    assert verdict == "doubled 2.0"
    assert count.startswith("2.0 runs"), "the block counts the same"
    blocks = executed.table("blocks").values()
    assert [block["module"] for block in blocks] == [f"blocks.{n}" for n in range(4)]
    assert {block["recompute_runs_per_backward"] for block in blocks} == {"2.0"}
    fix = executed.printed("fix")
    assert fix.startswith("RS001 doubled-checkpoint")
    assert "-        return checkpoint(self.compute, x, use_reentrant=True)" in fix
    assert executed.printed("compare").splitlines() == [
        "doubled -> full",
        "2 -> 1 recomputes per backward",
        "the same losses: True",
    ]
    for cell, said in (("record", "doubled"), ("after", "once")):
        assert said in executed.shown(cell, "text/html")
    assert "In[2]:" in executed.shown("record", "text/html")
    lanes = executed.shown("timeline", FIGURE)["layout"]["yaxis"]["categoryarray"]
    assert [("redundant" in lane) for lane in lanes] == [False, True, False, False]


def test_the_kernels_of_any_trace_are_those_of_the_file(execute: Execute) -> None:
    executed = execute("any_trace")
    found = kernels("mi300x-resnet-checkpointed.json.gz")
    table = executed.table("gpu")
    for row, wanted in (("communication", True), ("computation", False)):
        mine = [event["dur"] for event in found if event["name"].startswith("nccl") == wanted]
        assert table[row]["count"] == str(len(mine))
        assert float(table[row]["ms"]) == pytest.approx(sum(mine) / 1000, abs=0.01)
    busy, span = (float(number) for number in re.findall(r"[\d.]+", executed.printed("busy")))
    ordered = sorted(found, key=lambda event: event["ts"])
    covered, last = 0.0, ordered[0]["ts"]
    for event in ordered:
        end = event["ts"] + event["dur"]
        covered += max(0.0, end - max(last, event["ts"]))
        last = max(last, end)
    assert busy == pytest.approx(covered / 1000, abs=0.02)
    assert span == pytest.approx((last - ordered[0]["ts"]) / 1000, abs=0.02)
    assert executed.printed("again").split() == ["full", "1.0", "autograd"]
    assert executed.table("again")["conv"]["recomputed_per_step"] == "19.0"
    assert "full" in executed.shown("load", "text/html")


NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_stored_with_what_it_gives(name: str, execute: Execute) -> None:
    stored = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    fresh = execute(name).notebook
    assert [cell.source for cell in stored.cells] == [cell.source for cell in fresh.cells]
    for old, new in zip(stored.cells, fresh.cells, strict=True):
        for output in old.get("outputs", ()):
            output.get("data", {}).pop("image/png", None)  # no part of what the cell gives
        same = (
            kinds(old) == kinds(new) if "measured" in old.metadata.get("tags", ()) else old == new
        )
        assert same, f"cell {old.id} of {name}: run python docs/notebooks.py"


def kinds(cell: Any) -> list[tuple[str, list[str]]]:
    """What a cell gives, without the times in it."""
    return [(output.output_type, sorted(output.get("data", ()))) for output in cell.outputs]


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_read_where_nothing_runs(name: str) -> None:
    """Text, tables and an image are in the file; nothing in it is a script or an error."""
    stored = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    shown = [output for cell in stored.cells if cell.cell_type == "code" for output in cell.outputs]
    assert shown
    assert {output.output_type for output in shown} <= {"stream", "execute_result", "display_data"}
    data = [output.data for output in shown if output.output_type != "stream"]
    assert not [one for one in data if "<script" in one.get("text/html", "")]
    assert any("data:image/svg+xml;base64," in one.get("text/html", "") for one in data)
    assert all("image/png" in one for one in data if FIGURE in one)
    assert str(ROOT) not in (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
