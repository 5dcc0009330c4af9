"""The examples of docs/ci.md, run as they stand there."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from recompute_scan.cli.ci import check

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


WORKFLOW, HOOKS = (yaml.safe_load(block) for block in blocks("yaml"))


@pytest.mark.parametrize(("twin", "status"), [("doubled", 1), ("repaired", 0)])
def test_the_hook(twin: str, status: int, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "traces" / f"{twin}_llama_fsdp", tmp_path / "out")
    (hook,) = HOOKS["repos"][0]["hooks"]
    program, *arguments = shlex.split(hook["entry"])
    assert program == "recompute-scan"
    command = [sys.executable, "-m", "recompute_scan", *arguments]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == status


def test_the_workflow_gives_what_the_action_takes() -> None:
    action: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    steps = WORKFLOW["jobs"]["recompute"]["steps"]
    (own,) = [step for step in steps if "recompute-scan@" in step.get("uses", "")]
    assert set(own["with"]) <= set(action["inputs"])
    assert "package" in own["with"]


def test_options_of_the_page_are_those_of_the_command() -> None:
    options = {name for option in check.params for name in option.opts}
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert named
    assert named <= options


def test_the_fixture_of_the_page(tmp_path: Path) -> None:
    (block,) = blocks("python")
    model = (
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embedding = torch.nn.Embedding(4, 8)\n"
        "    def forward(self, batch, labels):\n"
        "        return type('Output', (), {'loss': self.embedding(batch).sum()})\n"
        "tiny_config = None\n"
        "def build_model(config):\n"
        "    return Model()\n"
    )
    (tmp_path / "test_page.py").write_text(model + block)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "recompute_scan.pytest_plugin"],
        cwd=tmp_path,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
