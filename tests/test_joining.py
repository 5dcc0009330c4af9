"""Which processes below a launcher take part, and that nothing changes for the others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recompute_scan.startup import MAIN, VARIABLE, joined
from tests.record.runs import run_plain

OPTIONS = '{"steps": 2, "output": "a b"}'
TOOLS = ["/venv/bin", "/venv/lib/python3.11"]
RUN = [MAIN, "run", "--handed-on", OPTIONS]


@pytest.mark.parametrize(
    ("argv", "new"),
    [
        (["python", "train.py"], [*RUN, "train.py"]),
        (["python", "-u", "train.py", "-c", "x"], ["-u", *RUN, "train.py", "-c", "x"]),
        (
            ["/venv/bin/python", "-X", "dev", "-Wignore", "-W", "error", "a/b.py"],
            ["-X", "dev", "-Wignore", "-W", "error", *RUN, "a/b.py"],
        ),
        (["python", "-m", "pkg.train", "-m", "y"], [*RUN, "-m", "pkg.train", "-m", "y"]),
        (["python", "-um", "pkg.train"], ["-u", *RUN, "-m", "pkg.train"]),
        (["python", "-mpkg.train", "1"], [*RUN, "-m", "pkg.train", "1"]),
        (["python", "."], [*RUN, "."]),
    ],
)
def test_a_script_takes_part_with_all_its_arguments(argv: list[str], new: list[str]) -> None:
    assert joined(argv, OPTIONS, TOOLS) == new


@pytest.mark.parametrize(
    "argv",
    [
        ["python"],
        ["python", "-"],
        ["python", "-i"],
        ["python", "-c", "import x; x.main()", "--multiprocessing-fork"],
        ["python", "-Bc", "print()"],
        ["/venv/bin/python", "/venv/bin/torchrun", "--nproc-per-node", "2", "train.py"],
        ["/venv/bin/python", "-u", "/venv/bin/accelerate", "launch", "train.py"],
        ["python", "-m", "torch.distributed.run", "train.py"],
        ["python", "-u", "-m", "deepspeed.launcher.launch", "train.py"],
        ["python", "-m", "accelerate.commands.launch", "train.py"],
        ["python", "/venv/lib/python3.11/site-packages/torch/_inductor/compile_worker/__main__.py"],
        ["python", "-m", "recompute_scan", "run", "train.py"],
        ["python", MAIN, "run", "train.py"],
        ["python", "-m"],
    ],
)
def test_tools_and_helpers_run_on_as_they_are(argv: list[str]) -> None:
    assert joined(argv, OPTIONS, TOOLS) is None


@pytest.mark.parametrize("left", ["", "left", '{"target": 1}', "[]", "\udcff"])
def test_a_variable_that_another_run_has_left_changes_nothing(left: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys\nprint(sys.argv, os.environ.get('A'))\n")
    command = ("-u", "train.py", "--steps", "2")
    done = run_plain(tmp_path, *command, **{VARIABLE: left})
    assert (done.returncode, done.stdout) == (0, "['train.py', '--steps', '2'] None\n")
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]


def test_the_line_at_start_up_does_nothing_without_the_variable() -> None:
    line = (Path(__file__).parents[1] / "src" / "recompute_scan.pth").read_text()
    code = f"import sys; before = set(sys.modules); exec({line!r}); " + (
        "print(sorted(set(sys.modules) - before))"
    )
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (printed.stdout, printed.stderr) == ("[]\n", "")
