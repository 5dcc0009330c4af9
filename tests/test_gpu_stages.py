"""The stages for a machine with a GPU: their small form runs on a CPU, and is right."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks._frame import Ran, call
from benchmarks.accuracy import main as accuracy
from benchmarks.gpu import main
from benchmarks.gpu.answers import answer
from benchmarks.gpu.runner import command, items

# On a CPU their status says how near the figures of a few short steps come.
FIGURES = ("kinds", "prediction")


def run(folder: Path, *asked: str) -> dict[str, dict[str, Any]]:
    """The lines of results of a run, by item."""
    status = call(main, [*asked, "--tiny", "--device", "cpu", "--jobs", "2", "--keep", str(folder)])
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert status == int(not all(line["right"] for line in lines))
    return {line["item"]: line for line in lines}


@pytest.mark.parametrize(("device", "tiny"), [("cuda", False), ("cuda", True), ("cpu", True)])
def test_every_command_can_be_filled_in(device: str, tiny: bool, tmp_path: Path) -> None:
    every = items(device, [])
    assert len({item["name"] for item in every}) == len(every)
    for item in every:
        words = command(item, tmp_path, device, tiny)
        assert "{" not in shlex.join(words)
        others = [item[key].partition("/")[0] for key in ("before", "after") if key in item]
        others += [*item.get("losses", ()), *item.get("peak", {}).values()]
        names = [one["name"] for one in every]
        assert all(names.index(other) < names.index(item["name"]) for other in others)


def test_answers_beside_truths(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, "--stage", "1", "run-r-in-n", "steps-once", "operators")
    assert [(name, found[name]["status"]) for name in sorted(found)] == [
        ("operators", 0), ("run-r-in-n", 0), ("steps-once", 0),
    ]  # fmt: skip
    line = found["run-r-in-n"]
    assert line["right"]
    assert (line["verdict"], line["per_backward"], line["counted"]) == ("doubled", 2, 2)
    assert found["steps-once"]["step_ms"] > 0
    assert found["operators"]["product_tflops"] > 0
    assert call(main, ["--read", str(tmp_path)]) == 0
    assert "2 of 2 right" in capfd.readouterr().out
    truth = tmp_path / "run-r-in-n" / "trace-rank0.truth.json"
    truth.write_text(truth.read_text().replace("doubled", "full"))
    assert call(main, ["--read", str(tmp_path)]) == 1


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_all_of_it_on_a_cpu(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert set(found) == {item["name"] for item in items("cpu", [])}
    assert [name for name, line in found.items() if line["status"] not in (0, 1)] == []
    assert [name for name in found if name not in FIGURES and not found[name]["right"]] == []
    assert all("inside the interval" in found[name]["said"][-1] for name in FIGURES)
    assert found["run-exact"]["losses_equal"]
    assert found["run-exact"]["repeats"]
    assert "error_pct" in found["run-twice"]
    assert {"timed", "compared", "after"} <= set(found["phases"]["phases_ms"])
    assert found["plan"]["budget_bytes"] > 0
    recorded = {path.name for path in (tmp_path / "kinds").iterdir()}
    assert recorded >= {"18.json.gz", "18.json.times.json", "20.json.times.json"}


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (call(main, []), call(accuracy, ["--device", "cuda"])) == (2, 2)
    assert capsys.readouterr().err.count("--device cpu") == 2


def test_what_is_wrong_is_said_to_be(tmp_path: Path) -> None:
    def said(item: dict[str, Any], **report: Any) -> bool:
        (tmp_path / "x.json").write_text(json.dumps({"peak_bytes": None, **report}))
        right: bool = answer({"name": "x", **item}, tmp_path, Ran(0, "", 1.0))["right"]
        return right

    (tmp_path / "a.json").write_text(json.dumps({"losses": ["0x1", "0x2", "0x3"]}))
    (tmp_path / "b.json").write_text(json.dumps({"losses": ["0x1", "0x2", "0x4"]}))
    assert said({"losses": ["a", "a"]}, losses=["0x1", "0x2"])
    assert not said({"losses": ["a", "a"]}, losses=["0x1", "0x3"])
    assert said({"losses": ["a", "b"]}, losses=["0x1", "0x3"])  # it does not repeat itself
    assert not said({"verdict": "doubled"})  # no result
    assert not answer({"name": "y"}, tmp_path, Ran(124, "ended", 1.0))["right"]
