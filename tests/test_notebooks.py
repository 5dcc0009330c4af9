"""The notebooks run from top to bottom, their cells compute what their text says, and what is
stored with them is what they give.
"""

from __future__ import annotations

import gzip
import json
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


@pytest.fixture
def executed(execute: Execute) -> Executed:
    return execute("doubled_checkpointing")


def kernels(name: str) -> list[dict[str, Any]]:
    """The kernels of a public trace, read without the tool."""
    events = json.loads(gzip.decompress((PUBLIC / name).read_bytes()))["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "Kernel")]


def test_the_verdict_is_doubled(executed: Executed) -> None:
    first, headline, confidence = executed.printed("verdict").splitlines()
    assert first == "doubled 2.0"
    assert headline.startswith("Checkpointing is doubled: every block runs its forward 2 more")
    assert confidence == "confidence high, from annotated evidence"


def test_the_timeline_shows_the_forward_pass_two_recomputes_and_the_backward(
    executed: Executed,
) -> None:
    figure = executed.shown("timeline", "application/vnd.plotly.v1+json")
    lanes = figure["layout"]["yaxis"]["categoryarray"]
    assert len(lanes) == 4
    assert {lane for bars in figure["data"] for lane in bars["y"]} == set(lanes)
    kinds = [line.split()[0] for line in executed.printed("lanes").splitlines()]
    assert kinds == ["forward", "recompute", "redundant", "backward"]


def test_every_layer_ran_again_twice(executed: Executed) -> None:
    regions = executed.table("regions").values()
    assert [region["module"] for region in regions] == [f"model.layers.{n}" for n in range(4)]
    assert {region["forward_runs_per_step"] for region in regions} == {"1.0"}
    assert {region["recompute_runs_per_backward"] for region in regions} == {"2.0"}
    families = executed.table("families")
    (attention,) = (row for name, row in families.items() if "attention" in name)
    assert list(attention.values()) == ["4.0", "8.0", "4.0"]


def test_both_call_sites_are_named(executed: Executed) -> None:
    outer, inner = (line.split() for line in executed.printed("who").splitlines())
    assert outer[:2] == ["0", "non-reentrant"]
    assert inner[:2] == ["1", "reentrant"]
    for *_, site in (outer, inner):
        file, _, line = site.rpartition(":")
        assert file == "examples/doubled_llama_fsdp.py"
        assert line.isdigit()
    assert outer[-1] != inner[-1]


def test_the_fix_removes_the_line_that_the_repaired_twin_lacks(executed: Executed) -> None:
    doubled = (ROOT / "examples" / "doubled_llama_fsdp.py").read_text().splitlines()
    repaired = (ROOT / "examples" / "repaired_llama_fsdp.py").read_text().splitlines()
    printed = executed.printed("fix").splitlines()
    assert printed[0] == "RS001 doubled-checkpoint"
    removed = [line[1:] for line in printed if line.startswith("-") and line[1:2] != "-"]
    assert removed
    assert all(line in doubled and line not in repaired for line in removed)


def test_the_twin_is_clean_and_cheaper(executed: Executed) -> None:
    rows = executed.table("compare")
    doubled, repaired, plain = (
        rows[name] for name in ("doubled_llama_fsdp", "repaired_llama_fsdp", "plain_none")
    )
    answers = [
        (row["verdict"], row["recomputes per backward"], row["findings"])
        for row in (doubled, repaired, plain)
    ]
    assert answers == [
        ("doubled", "2.0", "RS001"),
        ("full", "1.0", "none"),
        ("none", "0.0", "none"),
    ]
    assert float(repaired["step, ms"]) < float(doubled["step, ms"])
    assert float(doubled["redundant, ms"]) > 0
    assert float(repaired["redundant, ms"]) == 0


def test_the_cost_is_drawn_now_and_after_the_fix(executed: Executed) -> None:
    figure = executed.shown("cost-figure", "application/vnd.plotly.v1+json")
    totals = {"now": 0.0, "after the fix": 0.0}
    for bars in figure["data"]:
        for row, width in zip(bars["y"], bars["x"], strict=True):
            totals[row] += width
    assert totals["after the fix"] < totals["now"]
    step = float(executed.printed("cost").split("takes")[1].split()[0])
    assert totals["now"] == pytest.approx(step, rel=0.01)


def test_the_kernels_of_any_trace_are_those_of_the_file(execute: Execute) -> None:
    executed = execute("any_trace")
    found = kernels("mi300x-resnet-checkpointed.json.gz")
    table = executed.table("gpu")
    for row, wanted in (("communication", True), ("computation", False)):
        mine = [event["dur"] for event in found if event["name"].startswith("nccl") == wanted]
        assert table[row]["count"] == str(len(mine))
        assert float(table[row]["ms"]) == pytest.approx(sum(mine) / 1000, abs=0.01)
    busy, computing = (float(line.split()[1]) for line in executed.printed("busy").splitlines())
    covered, last = 0.0, 0.0
    for event in sorted(found, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        covered += max(0.0, end - max(last, event["ts"]))
        last = max(last, end)
    assert busy == pytest.approx(covered / 1000, abs=0.02)
    assert computing <= busy
    assert executed.printed("again").split() == ["full", "1.0", "autograd"]
    assert executed.table("again")["conv"]["recomputed_per_step"] == "19.0"
    assert "full" in executed.shown("load", "text/html")


def test_the_rank_that_waits_is_the_one_longest_in_its_collectives(execute: Execute) -> None:
    executed = execute("comparing_ranks")
    table = executed.table("kernels")
    spent = {}
    for rank in (0, 1):
        found = kernels(f"v100-megatron-tp2-rank{rank}.json.gz")
        mine = [event["dur"] for event in found if event["name"].startswith("nccl")]
        spent[rank] = sum(mine) / 1000
        assert float(table[str(rank)]["collectives"]) == pytest.approx(spent[rank], abs=0.01)
        assert float(table[str(rank)]["calls"]) == len(mine)
    assert spent[1] > spent[0]
    assert executed.printed("wait").startswith(
        f"rank 1 waits for rank 0: {spent[1] - spent[0]:.1f} ms of a step of 58.8 ms"
    )
    assert {row["verdict"] for row in executed.table("ranks").values()} == {"none"}


def test_the_plan_weighs_what_the_model_computes(execute: Execute) -> None:
    """Batch 4, 128 tokens, width 256, 8 heads, four layers: see ``examples/plain_pytorch.py``."""
    executed = execute("selective_checkpointing")
    operators = list(executed.table("operators").values())
    mib = {
        (row["operator"], float(row["MiB to keep"])): float(row["ms to run again"])
        for row in operators
    }
    tokens = 4 * 128 * 4 / 2**20  # one number of each token, in MiB
    assert set(mib) == {
        ("linear", 3 * 256 * tokens),
        ("linear", 256 * tokens),
        ("linear", 1024 * tokens),
        ("scaled_dot_product_attention", 256 * tokens),
        ("layer_norm", 256 * tokens),
        ("gelu", 1024 * tokens),
    }
    ratios = [float(row["ms per MiB"]) for row in operators]
    assert ratios == sorted(ratios, reverse=True)
    plan = list(executed.table("plan").values())
    assert float(plan[-1]["MiB"]) == 4 * sum(float(row["MiB to keep"]) for row in operators)
    # All but views and additions: nearly all of what the recomputes take.
    assert 80 < float(plan[-1]["of all recomputes, %"]) <= 105


NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_stored_with_what_it_gives(name: str, execute: Execute) -> None:
    stored = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    fresh = execute(name).notebook
    assert [cell.source for cell in stored.cells] == [cell.source for cell in fresh.cells]
    for old, new in zip(stored.cells, fresh.cells, strict=True):
        assert old == new, f"cell {old.id} of {name}: run python docs/notebooks.py"


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_read_where_nothing_runs(name: str) -> None:
    """Text, tables and an image are in the file; nothing in it is a script or an error."""
    stored = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    shown = [output for cell in stored.cells if cell.cell_type == "code" for output in cell.outputs]
    assert shown
    assert {output.output_type for output in shown} <= {"stream", "execute_result", "display_data"}
    data = [output.data for output in shown if output.output_type != "stream"]
    assert not [one for one in data if "<script" in one.get("text/html", "")]
    if name in ("doubled_checkpointing", "any_trace"):
        assert any("data:image/svg+xml;base64," in one.get("text/html", "") for one in data)
    assert str(ROOT) not in (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
