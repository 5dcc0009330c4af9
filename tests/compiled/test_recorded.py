"""``run`` keeps the compiler's graphs, and a folder that ``TORCH_TRACE`` names has the same."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.compiled.code import with_call_sites
from recompute_scan.record.isolation import Guard
from recompute_scan.record.profiler import CompiledGraphs
from recompute_scan.result import Checkpoint, Result, from_json
from recompute_scan.result.run_record import compiled_name
from tests.present import present
from tests.record.runs import tool
from tests.report.sample_results import regions

_LAYERS = Path(__file__).parents[1] / "versions" / "compiled_layers.py"
_SCRIPT = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
calls = [torch.compile(lambda x, f=f: checkpoint(f, x, use_reentrant=False), backend="aot_eager")
         for f in (nn.Sequential(one, nn.GELU(), one) for one in layers)]
adamw = torch.optim.AdamW(layers.parameters())
for step in range(9):
    x = torch.ones(4, 8)
    for call in calls:
        x = checkpoint(call, x, use_reentrant=False)
    x.pow(2).mean().backward()
    adamw.step()
    adamw.zero_grad()
print("done")
"""


def _kept(result: Result) -> tuple[object, ...]:
    regions = [(one.module, one.recompute_runs_per_backward) for one in result.regions]
    return result.verdict, result.recompute_per_backward, regions, result.compiled


def _graphs(result: Result) -> list[tuple[object, ...]]:
    graphs = result.compiled.graphs if result.compiled else ()
    return [(one.name, one.operators, one.recomputes, one.checkpoints) for one in graphs]


@pytest.mark.slow
def test_a_run_and_torchs_own_log_give_one_answer(tmp_path: Path) -> None:
    script, out, log = tmp_path / "train.py", tmp_path / "out", tmp_path / "log"
    script.write_text(_SCRIPT)
    options = ("--steps", "2", "--timing-steps", "1", "--warmup", "2", "--keep-going")
    ran = tool(Path.cwd(), "run", *options, "-o", out, script, TORCH_TRACE=str(log))
    assert ran.returncode == 0, ran.stderr
    assert "done" in ran.stdout
    by_run = analyse([out])
    assert (by_run.verdict, by_run.recompute_per_backward) == ("doubled", 2.0)
    sites = [one.call_site for one in by_run.regions[0].checkpoints]
    assert [site and site.rpartition(":")[2] for site in sites] == ["13", "7"]
    (out / compiled_name(0)).unlink()
    (own,) = log.glob("*.log")
    own.rename(out / own.name)
    by_torch = analyse([out])
    assert _kept(by_torch) == _kept(by_run)
    # The folder alone that ``TORCH_TRACE`` named.
    log.mkdir(exist_ok=True)
    (log / own.name).write_bytes((out / own.name).read_bytes())
    alone = analyse([log])
    assert _kept(alone)[:2] == _kept(by_run)[:2]
    assert _graphs(alone) == _graphs(by_run)
    (out / own.name).unlink()
    assert analyse([out]).compiled is None


def _record(metadata: object) -> logging.LogRecord:
    record = logging.LogRecord("torch.__trace", logging.DEBUG, "a.py", 1, "", (), None)
    record.metadata, record.payload = metadata, "class G"
    return record


def test_what_is_not_needed_is_not_kept(tmp_path: Path) -> None:
    graphs = CompiledGraphs(tmp_path, lambda: 3, Guard())
    graphs.write()
    assert not list(tmp_path.iterdir())
    graphs.handle(_record({"describe_tensor": {"id": 1}}))
    graphs.handle(_record({"aot_forward_graph": {}, "frame_id": 0}))
    graphs.write()
    (written,) = tmp_path.iterdir()
    assert written.name == compiled_name(3)
    assert "aot_forward_graph" in written.read_text()
    assert "describe_tensor" not in written.read_text()


def test_what_fails_here_stays_here(tmp_path: Path) -> None:
    class Odd(dict[str, object]):
        def __iter__(self) -> None:  # type: ignore[override]
            raise RuntimeError("odd")

    guard = Guard()
    graphs = CompiledGraphs(tmp_path / "gone", lambda: 0, guard)
    assert graphs.handle(_record(Odd({"aot_forward_graph": {}})))
    graphs.handle(_record({"aot_forward_graph": {}}))
    graphs.write()
    assert guard.failure is None
    assert len(guard.left_out) == 2


@pytest.mark.slow
def test_the_fix_is_tried_before_anything_is_compiled(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recompute_scan", "run", "--steps", "2", "--timing-steps"]
    command += ["3", "--warmup", "2", "--verify", "-o", str(tmp_path), str(_LAYERS), "--twice"]
    subprocess.run(command, capture_output=True, text=True, check=True)
    result = analyse([tmp_path])
    assert (result.verdict, result.recompute_per_backward) == ("doubled", 2.0)
    verified = present(from_json((tmp_path / "result.json").read_bytes()).verified)
    assert present(verified.after).recompute_per_backward == 1.0
    assert verified.losses_equal
    assert [one.options for one in verified.removed] == [()]  # the one around compiled code
    for gradients in (verified.gradients, verified.gradients_with_fix):
        assert gradients is not None
        assert gradients.status in ("equal", "rounding")


@pytest.mark.parametrize(
    "place", ["/p/ lib/model.py:8", "/p/ model.py:8", " /site-packages/x/model.py:8"]
)
def test_a_compiled_checkpoint_has_the_short_name_of_its_file(place: str) -> None:
    site = Checkpoint(depth=0, variant=None, call_site=place.replace(" ", ""))
    (shown,) = with_call_sites(regions(1, 1.0, site), ("model.py:5", "lib/model.py:12"), ())
    assert shown.checkpoints[0].call_site == place.partition(" ")[2]
