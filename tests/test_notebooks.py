"""The notebooks run from top to bottom, and their cells compute what their text says."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "doubled_checkpointing.ipynb"

# Jupyter's own warnings say nothing about the notebook.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:Warning:" + module)
    for module in ("jupyter_client", "jupyter_core", "nbclient", "nbformat", "zmq", "tornado")
]


class Executed:
    """A notebook that has run: what each cell printed and showed, by the cell's id."""

    def __init__(self, notebook: Any) -> None:
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


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    # The kernel of this environment, without the settings of whoever runs the tests.
    private = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        patch.setenv("JUPYTER_RUNTIME_DIR", str(private / "runtime"))
        patch.setenv("IPYTHONDIR", str(private / "ipython"))
        patch.setenv("PLOTLY_RENDERER", "plotly_mimetype")
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        client = NotebookClient(
            notebook,
            timeout=300,
            kernel_name="python3",
            resources={"metadata": {"path": str(NOTEBOOK.parent)}},
        )
        client.execute()
    return Executed(notebook)


def test_the_verdict_is_doubled(executed: Executed) -> None:
    first, headline, confidence = executed.printed("verdict").splitlines()
    assert first == "doubled 2.0"
    assert headline.startswith("Checkpointing is doubled: every block runs its forward 2 more")
    assert confidence == "confidence high, from annotated evidence"


def test_the_timeline_shows_the_forward_pass_two_replays_and_the_backward(
    executed: Executed,
) -> None:
    figure = executed.shown("timeline", "application/vnd.plotly.v1+json")
    lanes = figure["layout"]["yaxis"]["categoryarray"]
    assert len(lanes) == 4
    assert {lane for bars in figure["data"] for lane in bars["y"]} == set(lanes)
    kinds = [line.split()[0] for line in executed.printed("lanes").splitlines()]
    assert kinds == ["forward", "replay", "surplus", "backward"]


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
        (row["verdict"], row["replays per backward"], row["findings"])
        for row in (doubled, repaired, plain)
    ]
    assert answers == [
        ("doubled", "2.0", "RS001"),
        ("full", "1.0", "none"),
        ("none", "0.0", "none"),
    ]
    assert float(repaired["step, ms"]) < float(doubled["step, ms"])
    assert float(doubled["surplus, ms"]) > 0
    assert float(repaired["surplus, ms"]) == 0


def test_the_cost_is_drawn_now_and_after_the_fix(executed: Executed) -> None:
    figure = executed.shown("cost-figure", "application/vnd.plotly.v1+json")
    totals = {"now": 0.0, "after the fix": 0.0}
    for bars in figure["data"]:
        for row, width in zip(bars["y"], bars["x"], strict=True):
            totals[row] += width
    assert totals["after the fix"] < totals["now"]
    step = float(executed.printed("cost").split("takes")[1].split()[0])
    assert totals["now"] == pytest.approx(step, rel=0.01)


def test_it_is_stored_without_outputs() -> None:
    stored = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
