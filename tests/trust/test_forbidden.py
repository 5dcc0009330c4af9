"""Reading a trace imports no torch, unpickles nothing, runs nobody's code, opens no connection."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from recompute_scan.cli import NAMES

ROOT = Path(__file__).resolve().parents[2]
FORBID = Path(__file__).parent / "forbid.py"
# Commands that run the user's own script, and what only prints what is installed.
RUN_SCRIPTS = {"run", "plan", "doctor"}
# For each other command: arguments that make it do all it can. PROJECT is a stranger's folder.
COMMANDS = {
    "analyze": ["analyze", "PROJECT", "--html", "page.html", "--format", "json"],
    "report": ["report", "PROJECT/result.json", "--html", "page.html"],
    "bundle": ["bundle", "PROJECT", "-o", "share.zip"],
    "check": ["check", "PROJECT", "--format", "sarif", "--write-baseline", "baseline.json"],
    "compare": ["compare", "PROJECT", "PROJECT"],
    "fix": ["fix", "PROJECT"],
    "explain": ["explain", "RS001"],
    "lint": ["lint", "PROJECT", "--format", "sarif"],
    "runs": ["runs"],
    "completion": ["completion", "bash"],
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
    # Python's own cache of what it imports is no file of the command's.
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "arguments",
    [COMMANDS[name] for name in COMMANDS if name in NAMES] + MORE,
    ids=" ".join,
)
def test_a_command_does_nothing_else(arguments: list[str], project: Path, tmp_path: Path) -> None:
    done = forbidding(project, tmp_path, *arguments)
    assert done.returncode in (0, 1), done.stderr
    assert "FORBIDDEN" not in done.stderr
    assert not list(project.glob("**/owned"))


# What our own processes, and those that they start, import: of Python's, of packages, of hooks.
SHADOWS = (
    *("torch", "numpy", "click", "msgspec", "isal", "zstandard", "jinja2", "pandas", "plotly"),
    *("highspy", "fsspec", "aiohttp", "yaml", "distributed", "traceinsight", "hta", "wrapt"),
    *("json", "socket", "pickle", "tempfile", "sqlite3", "multiprocessing", "concurrent", "ast"),
    *("sitecustomize", "usercustomize", "conftest", "recompute_scan_step"),
)


STARTED = [
    ["doctor"],
    ["analyze", "run", "--workers", "2"],
    ["analyze", "run/trace-rank0.json.gz", "--html", "page.html"],
    ["check", "run", "--format", "sarif"],
    ["compare", "run", "run"],
    ["report", "result.json", "--html", "again.html"],
    ["bundle", "run", "-o", "share.zip"],
    ["lint", "."],
    ["explain", "RS001"],
]


# With -m the folder itself comes first, and a PYTHONPATH that ends in a colon names it. Of both,
# nothing is left once the command begins; one that starts processes hands the variable on.
@pytest.mark.parametrize(
    ("start", "arguments"),
    [
        *(("-m", words) for words in STARTED),
        *(("colon", words) for words in STARTED[:3]),
        *(pytest.param("colon", words, marks=pytest.mark.slow) for words in STARTED[3:]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_nothing_is_imported_from_where_a_command_is_started(
    arguments: list[str], start: str, project: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    for rank in (0, 1):
        shutil.copy(project / "trace-rank0.json.gz", tmp_path / f"run/trace-rank{rank}.json.gz")
    shutil.copy(project / "result.json", tmp_path)
    # Python itself imports two of them with such a PYTHONPATH, before any of our code runs.
    for name in SHADOWS if start == "-m" else (name for name in SHADOWS if "custom" not in name):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / name)!r} + '.ran', 'w')\n")
    program = [str(Path(sys.executable).with_name("recompute-scan"))]
    env = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    if start == "-m":
        program = [sys.executable, "-m", "recompute_scan"]
    else:
        env["PYTHONPATH"] = "/nowhere:"
    done = subprocess.run(
        [*program, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode in (0, 1), done.stderr
    assert not list(tmp_path.glob("*.ran"))
    if arguments == ["doctor"]:
        assert f"torch {version('torch')}" in done.stdout


def test_every_command_is_among_them() -> None:
    assert set(NAMES) - RUN_SCRIPTS <= set(COMMANDS)


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
