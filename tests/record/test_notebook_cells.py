"""In IPython and Jupyter, call sites are cells, and ``%%recompute`` records one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from tests.record.residue import left_behind
from tests.record.runs import run_plain

SHELL = """\
import sys
from IPython.core.interactiveshell import InteractiveShell
if sys.argv[1] == "jupyter":
    from ipykernel.compiler import XCachingCompiler
    InteractiveShell.compiler_class = XCachingCompiler
shell = InteractiveShell.instance()
for cell in sys.argv[2:]:
    shell.run_cell(cell, store_history=True).raise_error()
"""
MODEL = """\
import torch, recompute_scan as rs
from torch.utils.checkpoint import checkpoint
layer = torch.nn.Linear(8, 8)

def inner(x):
    return checkpoint(layer, x, use_reentrant=True)
"""
LOOP = """\
with rs.record(steps=1, warmup=1, timing_steps=0) as recording:
    while not recording.done:
        x = torch.ones(2, 8, requires_grad=True)
        y = checkpoint(inner, x, use_reentrant=True)
        y.sum().backward()
        recording.step()
"""
PRINT = """\
import json
result = recording.scan.result
asked = result.regions[0].checkpoints
print(json.dumps([[one.call_site for one in asked], [one.source for one in asked]]))
"""


@pytest.mark.parametrize("shell", [pytest.param("ipython", marks=pytest.mark.slow), "jupyter"])
def test_a_call_site_is_a_cell(tmp_path: Path, shell: str) -> None:
    cells = (MODEL, LOOP, PRINT)
    done = run_plain(tmp_path, "-c", SHELL, shell, *cells, IPYTHONDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    sites, sources = json.loads(done.stdout.splitlines()[-1])
    assert sites == ["In[2]:4", "In[1]:6"]
    assert sources == [
        "y = checkpoint(inner, x, use_reentrant=True)",
        "return checkpoint(layer, x, use_reentrant=True)",
    ]


COUNTED = """\
import torch
from torch.utils.checkpoint import checkpoint

class Layer(torch.nn.Linear):
    runs = [0, 0]

    def forward(self, x):
        self.runs[torch._C._current_graph_task_id() != -1] += 1
        return super().forward(x)

def run(layer, x, depth):
    return checkpoint(run, layer, x, depth - 1, use_reentrant=True) if depth else layer(x)

layers = torch.nn.ModuleList(Layer(16, 16) for _ in range(3))
optimizer = torch.optim.SGD(layers.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
seen = []
"""
TRAIN = """\
for step in range(6):
    x = torch.ones(4, 16, requires_grad=True)
    for layer in layers:
        x = run(layer, x, DEPTH)
    x.sum().backward()
    optimizer.step(), scheduler.step(), optimizer.zero_grad()
    seen.append(step)
"""
OPTIONS = "--steps 1 --warmup 2 --timing-steps 1"


@pytest.fixture(scope="module")
def _nothing_is_left() -> Iterator[None]:
    before = left_behind()
    yield
    assert left_behind() == before


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _nothing_is_left: None
) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = InteractiveShell.instance(
        config=Config(HistoryManager={"enabled": False}, InteractiveShell={"colors": "nocolor"})
    )
    for cell in ("%load_ext recompute_scan", COUNTED):
        shell.run_cell(cell).raise_error()
    yield shell
    shell.run_cell("%unload_ext recompute_scan").raise_error()
    assert not [kind for kind in shell.magics_manager.magics.values() if "recompute" in kind]
    for plain in ("%%recompute\n1", "%recompute"):
        with capture_output():
            assert not shell.run_cell(plain).success, "the magic has gone"
    InteractiveShell.clear_instance()


def named(shell: InteractiveShell) -> set[str]:
    return {name for name in shell.user_ns if not name.startswith("_")}


@pytest.mark.parametrize(("depth", "verdict"), [(0, "none"), (1, "full"), (2, "doubled")])
def test_the_magic_finds_what_the_layers_count(
    shell: InteractiveShell, depth: int, verdict: str
) -> None:
    own = vars(shell.user_ns["optimizer"])["step"]
    names = named(shell)
    with capture_output() as shown:
        done = shell.run_cell(
            f"%%recompute found {OPTIONS}\n{TRAIN}step".replace("DEPTH", str(depth))
        )
    assert (done.success, done.result) == (True, 5)
    forward, backward = shell.user_ns["Layer"].runs
    scan = shell.user_ns["found"]
    assert (scan.verdict, scan.recompute_per_backward) == (verdict, backward / forward)
    assert shown.outputs[0].data["text/html"] == scan._repr_html_()
    if depth:
        line = (
            "return checkpoint(run, layer, x, depth - 1, use_reentrant=True) if depth else layer(x)"
        )
        assert scan.result.regions[0].checkpoints[-1].source == line
    assert named(shell) - names == {"found", "step", "x", "layer"}
    assert vars(shell.user_ns["optimizer"])["step"] is own


def test_an_exception_of_the_cell_is_its_own(shell: InteractiveShell) -> None:
    cell = TRAIN.replace("DEPTH", "2") + "    step < 4 or 1 / 0\n"
    with capture_output() as plain:
        assert not shell.run_cell(f"pass\n{cell}").success
    with capture_output() as shown:
        done = shell.run_cell(f"%%recompute found {OPTIONS}\n{cell}")
    assert isinstance(done.error_in_exec, ZeroDivisionError)
    assert plain.stdout.partition("line 9")[2] == shown.stdout.partition("line 9")[2]
    assert "line 9" in plain.stdout
    assert shell.user_ns["seen"] == [0, 1, 2, 3, 4] * 2
    assert shell.user_ns["found"].verdict == "doubled", "what was recorded is shown"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--steps 0", "At least 1 warm-up step"),
        ("--device tpu", "invalid choice"),
        ("no-name", "cannot be the name"),
        ("", "The cell made no optimizer step"),
    ],
)
def test_what_cannot_be_recorded_is_said(shell: InteractiveShell, line: str, said: str) -> None:
    with capture_output() as shown:
        done = shell.run_cell(f"%%recompute {line}\nran = True")
    assert said in shown.stdout + shown.stderr
    assert "Traceback" not in shown.stdout + shown.stderr
    assert done.success == ("ran" in shell.user_ns) == (not line)
