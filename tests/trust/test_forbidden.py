"""Reading a trace imports no torch, unpickles nothing, runs nobody's code, opens no connection."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recompute_scan.cli import cli

ROOT = Path(__file__).resolve().parents[2]
FORBID = Path(__file__).parent / "forbid.py"
# Commands that run the user's own script, and what only prints what is installed.
RUN_SCRIPTS = {"run", "doctor"}
# For each other command: arguments that make it do all it can. PROJECT is a stranger's folder.
COMMANDS = {
    "analyze": ["analyze", "PROJECT", "--html", "page.html", "--format", "json"],
    "report": ["report", "PROJECT/result.json", "--html", "page.html"],
    "bundle": ["bundle", "PROJECT", "-o", "share.zip"],
    "check": ["check", "PROJECT", "--format", "sarif", "--write-baseline", "baseline.json"],
    "compare": ["compare", "PROJECT", "PROJECT"],
    "explain": ["explain", "RS001"],
    "lint": ["lint", "PROJECT", "--format", "sarif"],
}
MORE = [
    ["analyze", "PROJECT/trace-rank0.json.gz", "--format", "markdown", "--output", "out.md"],
    ["analyze", "PROJECT/trace-public.json.gz"],
    ["bundle", "PROJECT", "--show", "--strict"],
    *(["check", "PROJECT", "--format", style] for style in ("text", "json", "github", "junit")),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stranger's folder: a recorded run, among code and pickles that must stay untouched."""
    folder = tmp_path_factory.mktemp("stranger")
    for name in ("trace-rank0.json.gz", "run-rank0.json"):
        shutil.copy(ROOT / "traces" / "doubled_llama_fsdp" / name, folder)
    public = ROOT / "traces" / "public" / "mi300x-resnet-checkpointed.json.gz"
    shutil.copy(public, folder / "trace-public.json.gz")
    (folder / "examples").mkdir()
    bomb = "raise SystemExit('this code was run')\n"
    for name in (
        "examples/doubled_llama_fsdp.py", "sitecustomize.py", "conftest.py", "torch.py",
        "recompute_scan.py", "numpy.py", "__init__.py", "setup.py",
    ):  # fmt: skip
        (folder / name).write_text(bomb)
    (folder / "model.pt").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    (folder / "data.pkl").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    out = folder / "result.json"
    arguments = ["analyze", str(folder / "trace-rank0.json.gz"), "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "recompute_scan", *arguments, "--output", str(out)], cwd=ROOT
    )
    assert done.returncode == 0
    return folder


def forbidding(project: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FORBID), str(project)]
    command += [text.replace("PROJECT", str(project)) for text in arguments]
    env = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "arguments",
    [COMMANDS[name] for name in COMMANDS if name in cli.commands] + MORE,
    ids=" ".join,
)
def test_a_command_does_nothing_else(arguments: list[str], project: Path, tmp_path: Path) -> None:
    done = forbidding(project, tmp_path, *arguments)
    assert done.returncode in (0, 1), done.stderr
    assert "FORBIDDEN" not in done.stderr
    assert not list(project.glob("**/owned"))


def test_every_command_is_among_them() -> None:
    assert set(cli.commands) - RUN_SCRIPTS <= set(COMMANDS)


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import socket; socket.getaddrinfo('localhost', 80)",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
        "import pickle; pickle.loads(b'cos\\nsystem\\n(S\"true\"\\ntR.')",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import torch",
        "import wrapt",
        "import sys; sys.path.insert(0, sys.argv[1]); import conftest",
        "import sys; open(sys.argv[1] + '/setup.py').read()",
        "import sys, runpy; runpy.run_path(sys.argv[1] + '/examples/doubled_llama_fsdp.py')",
        "open('/tmp/somewhere-else', 'w')",
    ],
)
def test_the_hook_sees_what_it_is_there_for(attempt: str, project: Path, tmp_path: Path) -> None:
    done = forbidding(project, tmp_path, "--try", attempt)
    assert done.returncode == 99, done.stderr
    assert "FORBIDDEN" in done.stderr
