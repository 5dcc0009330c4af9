"""Scripts that do as real ones do: under the recorder they see, print and end as without it."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.record.runs import LAYERS, QUICK, forked_tool, run_plain, script_lines, write_script

# A package run with -m: relative import, own arguments, another folder, signal handlers, a timer
# that interrupts, a thread that computes, data-loader workers, and an exit status of its own.
TRAIN = """\
import argparse, os, signal, threading, time
from .model import Block, checkpoint, nn, torch, sys

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("-o")
    options = parser.parse_args()
    print(sys.argv[1:], __name__, __package__, os.path.basename(__file__))
    os.makedirs(options.o, exist_ok=True)
    os.chdir(options.o)
    heard = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, lambda number, _: heard.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    over = threading.Event()
    def compute():
        while not over.is_set():
            torch.ones(4, 4) @ torch.ones(4, 4)
            time.sleep(0.001)
    worker = threading.Thread(target=compute, name="computes")
    worker.start()
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    data = [torch.full((8,), float(n)) for n in range(4 * options.steps)]
    for x in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
        loss = checkpoint(model, x.requires_grad_(), use_reentrant=True).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), sorted(t.name for t in threading.enumerate()))
    os.kill(os.getpid(), signal.SIGTERM)
    signal.setitimer(signal.ITIMER_REAL, 0)
    over.set()
    worker.join()
    print(signal.SIGTERM in heard, signal.SIGALRM in heard, os.listdir())
    sys.exit(3)

if __name__ == "__main__":
    main()
"""
MODEL = (
    LAYERS
    + """\
class Block(Layer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)
"""
)
# Trains in a thread, and ends without cleaning up, as scripts do that fear a hanging exit.
ABRUPT = (
    MODEL
    + """\
import os, threading

def train():
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(6):
        x = torch.randn(4, 8, requires_grad=True)
        checkpoint(model, x, use_reentrant=True).sum().backward()
        optimizer.step()

thread = threading.Thread(target=train)
thread.start()
thread.join()
print("trained", flush=True)
os._exit(int(sys.argv[1]))
"""
)


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return forked_tool(folder, "run", *QUICK, "--steps", "2", "-o", "out", *command)


def verdict(folder: Path) -> tuple[str, int]:
    result = json.loads((folder / "out" / "result.json").read_text())
    return result["verdict"], len(result["steps"])


@pytest.mark.slow
def test_a_package_with_all_that_scripts_do(tmp_path: Path) -> None:
    write_script(tmp_path / "pkg", "", "__init__.py")
    write_script(tmp_path / "pkg", MODEL, "model.py")
    write_script(tmp_path / "pkg", TRAIN, "train.py")
    own = ["-m", "pkg.train", "--steps", "8", "-o", "mine"]
    plain = run_plain(tmp_path, *own)
    assert plain.returncode == 3, plain.stderr
    done = run(tmp_path, "--keep-going", *own)
    assert done.returncode == 3
    assert done.stdout.startswith(plain.stdout)
    assert script_lines(done.stderr) == plain.stderr.splitlines()
    assert verdict(tmp_path) == ("doubled", 2)


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 7])
def test_an_exit_without_cleaning_up_still_gets_its_report(tmp_path: Path, status: int) -> None:
    write_script(tmp_path, ABRUPT)
    done = run(tmp_path, "--keep-going", "train.py", str(status))
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith("trained\n")
    assert "Verdict: doubled" in done.stdout
    assert ("The script ended itself with a failure." in done.stdout) == (status == 7)
    assert verdict(tmp_path) == ("doubled", 2)
