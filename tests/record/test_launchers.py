"""`run -- LAUNCHER …`: the scripts that a launcher starts take part, and nothing else does."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recompute_scan.startup import VARIABLE
from tests.record.runs import LAYERS, QUICK, TORCHRUN, forked_tool, tool, write_script
from tests.record.test_launch import FSDP

ALONE = (
    LAYERS
    + """\
import os
print("argv", sys.argv[1:], os.environ.get("RECOMPUTE_SCAN_JOIN"))
class Block(Layer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)

def main():
    model = nn.Sequential(*(Block() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loader = torch.utils.data.DataLoader(
        [torch.randn(8) for _ in range(64)], num_workers=1, multiprocessing_context="spawn"
    )
    for x in loader:
        checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""
)


def scan(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return tool(folder, "run", *QUICK, "-o", "out", "--", *command, PATH=path)


def answer(folder: Path) -> tuple[str, float, list[int]]:
    result = json.loads((folder / "out" / "result.json").read_text())
    ranks = [rank["rank"] for rank in result["ranks"]]
    return result["verdict"], result["recompute_per_backward"], ranks


@pytest.mark.slow
def test_both_processes_of_torchrun_take_part(tmp_path: Path) -> None:
    write_script(tmp_path, FSDP)
    done = scan(tmp_path, *TORCHRUN, "train.py")
    assert done.returncode == 0, done.stderr
    assert answer(tmp_path) == ("doubled", 2.0, [0, 1])
    assert done.stdout.count("Verdict: doubled") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        (
            *("accelerate", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1"),
            *("--mixed_precision", "no", "--dynamo_backend", "no"),
        ),
        ("bash", "-c", '"$0" "$@"', sys.executable, "-u"),
        ("env", "A=B", sys.executable),
    ],
    ids=lambda launcher: launcher[0],
)
def test_one_process_and_its_data_loader(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    write_script(tmp_path, ALONE)
    done = scan(tmp_path, *launcher, "train.py", "--steps", "a b")
    assert done.returncode == 0, done.stderr
    assert answer(tmp_path) == ("doubled", 2.0, [0])
    # once: the data loader's worker reads the script again, under another name
    assert done.stdout.splitlines()[0] == "argv ['--steps', 'a b'] None"
    assert {path.name for path in (tmp_path / "out").glob("run-*")} == {"run-rank0.json"}


@pytest.mark.parametrize(("words", "status"), [("true", 3), ("bash -c 'exit 7'", 7)])
def test_a_launcher_that_starts_no_script(words: str, status: int, tmp_path: Path) -> None:
    done = forked_tool(tmp_path, "run", *QUICK, "-o", "out", "--", *shlex.split(words))
    assert (done.returncode, done.stdout) == (status, "")
    assert "E319" in done.stderr


def test_what_the_launcher_starts_itself_cannot_be_started_twice(tmp_path: Path) -> None:
    done = forked_tool(tmp_path, "run", "--nproc-per-node", "2", "--", "true")
    assert done.returncode == 2
    assert "E223" in done.stderr


def test_two_dashes_before_a_script_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit(5)")
    done = scan(tmp_path, "train.py")
    assert done.returncode == 5
    assert VARIABLE not in done.stderr
