"""`run --verify` against scripts that count their own forward runs and print their losses."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recompute_scan.cli import main
from recompute_scan.result import Result, Verified, from_json
from recompute_scan.verification import Trial, Trials, verified
from tests.present import present
from tests.record.runs import LAYERS, record_script, tool, write_script
from tests.report import sample_results
from tests.result_schema import validate

pytestmark = pytest.mark.slow

# Trains three layers in which every forward run takes 50 ms more, and prints for every step how
# often they ran in the backward pass, and the loss to its last bit.
HEAD = (
    LAYERS
    + """\
import time

SEED = None

class Slow(Layer):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)

def inner(layer, x):
    return checkpoint(layer, x, use_reentrant=True)

def outer(layer, x):
    return checkpoint(functools.partial(inner, layer), x, use_reentrant=False)
"""
)
TAIL = """\
layers = nn.ModuleList(Slow(dropout=0.2) for _ in range(3))
optimizer = torch.optim.SGD(layers.parameters(), 0.1)
for step in range(99):
    x = torch.randn(4, 8, requires_grad=True)
    for layer in layers:
        x = forward(layer, x)
    before = RUNS["in_backward"]
    loss = x.square().mean()
    loss.backward()
    print(json.dumps([RUNS["in_backward"] - before, loss.item().hex()]), flush=True)
    optimizer.step()
    optimizer.zero_grad()
"""
DOUBLED = HEAD + "forward = outer\n" + TAIL


@dataclass(frozen=True)
class Verification:
    """What a run with ``--verify`` said, wrote and let the script print."""

    status: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def result(self) -> Result:
        text = (self.folder / "result.json").read_text(encoding="utf-8")
        validate(json.loads(text))
        return from_json(text)

    @property
    def verified(self) -> Verified:
        return present(self.result.verified)

    def printed(self, run: str) -> list[Any]:
        text = (self.folder / "verify" / run / "output.txt").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines() if line.startswith("[")]


def verify(folder: Path, text: str, *options: str) -> Verification:
    write_script(folder, text)
    steps = ["--warmup", "2", "--timing-steps", "6", "--steps", "2", "-o", "out"]
    done = tool(folder, "run", "-v", "--verify", *steps, *options, "train.py")
    return Verification(done.returncode, done.stdout, done.stderr, folder / "out")


def test_the_fix_is_applied_and_measured(tmp_path: Path) -> None:
    done = verify(tmp_path, DOUBLED, "--without-checkpointing")
    assert (done.status, done.stderr) == (0, "")
    section = done.verified

    # What the script itself counted: the fix takes out one recompute of each layer, no more.
    runs = {
        name: {count for count, _ in done.printed(name)}
        for name in ("unchanged-2", "with-the-fix-1", "with-the-fix-2", "without-checkpointing-1")
    }
    assert runs == {
        "unchanged-2": {6},
        "with-the-fix-1": {3},
        "with-the-fix-2": {3},
        "without-checkpointing-1": {0},
    }
    (removed,) = section.removed
    lines = (tmp_path / "train.py").read_text().splitlines()
    site = int(present(removed.call_site).rpartition(":")[2])
    assert (removed.variant, lines[site - 1].strip()) == (
        "reentrant",
        "return checkpoint(layer, x, use_reentrant=True)",
    )

    # Three runs of 50 ms each are saved; and again as many without any checkpoint.
    assert section.outcome == "helps"
    assert section.saving_ms is not None
    assert 120 < section.saving_ms < 300
    assert section.before_step_ms is not None
    assert section.after_step_ms is not None
    assert section.saving_pct == pytest.approx(100 * section.saving_ms / section.before_step_ms)
    assert section.more_time_pct == pytest.approx(100 * section.saving_ms / section.after_step_ms)
    before, after, without = section.before, present(section.after), section.without_checkpointing
    assert without is not None
    assert 120 < section.after_step_ms - present(without.step_ms) < 300
    counted = [arm.recompute_per_backward for arm in (before, after, without)]
    assert counted == [2.0, 1.0, 0.0]
    assert [arm.verdict for arm in (before, after, without)] == ["doubled", "full", "none"]
    assert [arm.timed_steps for arm in (before, after, without)] == [12, 12, 12]

    # The losses that the script printed are those that were compared.
    printed = [
        [loss for _, loss in done.printed(f"{name}-2")] for name in ("unchanged", "with-the-fix")
    ]
    assert printed[0] == printed[1]
    assert section.losses_equal is True
    assert section.losses.compared == len(printed[0]) == 8
    # It seeds torch in its third line.
    assert section.losses.seeded_by_script is True

    # Hundreds of megabytes of torch, and never as much as this machine has.
    assert section.before_peak_bytes == before.peak_rss_bytes
    assert 100 * 2**20 < present(before.peak_rss_bytes) < 4 * 2**30
    assert before.peak_allocated_bytes is None

    flat = " ".join(done.stdout.split())
    assert "measured with the fix applied" in flat
    assert "all 8 losses are equal to the last bit" in flat
    assert done.result.headline in flat
    assert "of the step is wasted, measured." in done.result.headline
    page = (done.folder / "report.html").read_text(encoding="utf-8")
    assert "Measured with the fix applied" in page


def test_of_two_on_one_line_one_goes(tmp_path: Path) -> None:
    """Both are reentrant, of one line; the script seeds nothing."""
    script = HEAD.replace("torch.manual_seed(0)\n", "") + (
        "def forward(layer, x):\n"
        "    for _ in range(2):\n"
        "        layer = functools.partial(checkpoint, layer, use_reentrant=True)\n"
        "    return layer(x)\n"
    )
    done = verify(tmp_path, script + TAIL)
    assert (done.status, done.stderr) == (0, "")
    assert {count for count, _ in done.printed("unchanged-2")} == {6}
    assert {count for count, _ in done.printed("with-the-fix-1")} == {3}
    section = done.verified
    assert (section.outcome, section.losses_equal) == ("helps", True)
    assert section.losses.seeded_by_script is False
    assert "sets no seed;" in " ".join(done.stdout.split())


CHANGED = DOUBLED.replace(
    "return super().forward(x)",
    "return super().forward(x) * (1 + 1e-3 * (RUNS['in_backward'] % 5))",
)


def test_a_fix_that_changes_the_losses_is_said(tmp_path: Path) -> None:
    done = verify(tmp_path, CHANGED)
    section = done.verified
    one, other = (
        [float.fromhex(loss) for _, loss in done.printed(f"{name}-2")]
        for name in ("unchanged", "with-the-fix")
    )
    largest = max(abs(a - b) for a, b in zip(one, other, strict=True))
    assert largest > 0
    assert (section.outcome, section.losses_equal) == ("losses-differ", False)
    assert section.losses.largest_difference == largest
    assert "changes the losses" in done.result.headline


NO_ROOM = """\
import resource
class Wide(nn.Module):
    def forward(self, x):
        for _ in range(16):
            x = x * x
        return x
forward = inner
layers, weight = [Wide() for _ in range(12)], nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], 0.1)
(weight * weight).sum().backward()
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
# A layer keeps 16 tensors of 8 MiB. One at a time fits into this, twelve do not.
room = now + 800 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (room, room))
for step in range(99):
    x = weight * torch.ones(2 * 2**20)
    for layer in layers:
        x = forward(layer, x)
    x.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_does_not_fit_without_checkpoints_is_known(tmp_path: Path) -> None:
    """With its checkpoints it ran to its end, in the room that it gave itself."""
    fits, not_fits = (
        record_script(
            tmp_path / name,
            HEAD + NO_ROOM,
            timing_steps=2,
            steps=0,
            measure=True,
            without_checkpointing=name == "without",
        )
        for name in ("with", "without")
    )
    assert fits.status == 0, fits.stderr
    assert fits.info.status == "complete"
    assert not_fits.status == 1
    result = sample_results.full()
    trials = [Trial((run.info,), run.status) for run in (fits, not_fits)]
    section = present(verified(result, (), Trials(trials[:1], without=trials[1:])).verified)
    assert section.outcome == "not-tried"
    assert section.before.status == "measured"
    assert present(section.without_checkpointing).status == "out-of-memory"


# How fast the machine is depends on how often the script has been started.
VARIES = DOUBLED.replace(
    "import time\n",
    """import pathlib, time
with open("starts", "a") as file:
    file.write(".")
SPEEDS = {4: 1.6, 5: 0.4}
SPEED = SPEEDS.get(pathlib.Path("starts").stat().st_size, 1.0)
""",
).replace("time.sleep(0.05)", "time.sleep(0.02 * SPEED)")


def test_the_fix_is_switched_on_and_off_where_runs_differ(tmp_path: Path) -> None:
    done = verify(tmp_path, VARIES, "--without-checkpointing")
    assert (done.status, done.stderr) == (0, "")
    section = done.verified
    # Two steps to warm up, one each way; then twice the six to be timed, each way in turn.
    for name in ("switching-the-fix-1", "switching-the-fix-2"):
        assert [count for count, _ in done.printed(name)] == [3, 6, *3 * [6, 3, 3, 6]]
    assert (section.switching_runs, section.pairs) == (2, 12)
    assert not (done.folder / "verify" / "unchanged-3").exists()
    assert (section.outcome, section.losses_equal) == ("helps", True)
    # Three runs of 20 ms each, of nine and of six.
    assert 40 < present(section.saving_low_ms) <= present(section.saving_high_ms) < 120
    assert section.before.timed_steps == present(section.after).timed_steps == 12
    flat = " ".join(done.stdout.split())
    assert "2 times with the fix switched on and off from step to step" in flat
    assert "12 pairs of neighbouring steps" in flat


def test_two_ranks(tmp_path: Path) -> None:
    gather = "torch.distributed.init_process_group('gloo')\nforward = outer\n"
    sync = "    for p in layers.parameters():\n        torch.distributed.all_reduce(p.grad)\n"
    script = TAIL.replace("    optimizer.step()\n", sync + "    optimizer.step()\n")
    script = HEAD + gather + script.replace("print(", "torch.distributed.get_rank() or print(")
    done = verify(tmp_path, script, "--nproc-per-node", "2")
    assert done.status == 0, done.stderr
    section = done.verified
    assert (section.outcome, section.losses_equal) == ("helps", True)
    assert section.losses.compared == 8
    assert [rank.rank for rank in done.result.ranks] == [0, 1]
    assert {count for count, _ in done.printed("with-the-fix-2")} == {3}


@pytest.mark.parametrize(
    ("options", "environment", "code"),
    [
        (("--without-checkpointing",), {}, "E220"),
        (("--verify",), {"RANK": "1", "WORLD_SIZE": "2"}, "E221"),
        (("--verify", "--timing-steps", "0"), {}, "E222"),
        (("--verify", "--warmup", "0"), {}, "E204"),
    ],
)
def test_wrong_use(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    environment: dict[str, str],
    code: str,
) -> None:
    monkeypatch.chdir(write_script(tmp_path, "print('never')\n").parent)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["run", *options, "train.py"]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[0].endswith(f"[{code}]")
