"""In IPython and Jupyter, call sites are cells, as their own tracebacks name them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.record.runs import plain_environment

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
    done = subprocess.run(
        [sys.executable, "-c", SHELL, shell, MODEL, LOOP, PRINT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**plain_environment(), "IPYTHONDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    sites, sources = json.loads(done.stdout.splitlines()[-1])
    assert sites == ["In[2]:4", "In[1]:6"]
    assert sources == [
        "y = checkpoint(inner, x, use_reentrant=True)",
        "return checkpoint(layer, x, use_reentrant=True)",
    ]
