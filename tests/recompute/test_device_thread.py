"""The cases on a device whose backward pass autograd runs on a thread of its own.

They run in processes of their own, which have the device from the beginning.
"""

import os
from pathlib import Path

import pytest
import torch

from recompute_scan import trace
from recompute_scan.recompute.roles import Role
from recompute_scan.recompute.study import study
from recompute_scan.result import from_json
from tests.cases import device
from tests.cases.nesting import CASES
from tests.present import present
from tests.record.runs import run_within

ROOT = Path(__file__).parents[2]
# The seven ways to put two checkpoints, or one, around a layer.
SEVEN = ("r_outside", "n_outside", "r_in_r", "n_in_r", "r_in_n", "n_in_n", "n_in_n_no_early_stop")
QUICK = ("r_in_n", "n_in_r")

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < device.FEWEST,
    reason="torch takes no backend in Python before 2.13",
)


def run(*command: str | Path, timeout: float = 600) -> str:
    return run_in(ROOT, *command, timeout=timeout)


def run_in(folder: Path, *command: str | Path, timeout: float = 600) -> str:
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    done = run_within(timeout, folder, "-W", "ignore", *command, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def right(output: str) -> None:
    """Did the table say that every answer is the truth?"""
    last = output.splitlines()[-1]
    number, _, every, _ = last.split()
    assert number == every != "0", output


def test_the_backward_pass_is_on_a_thread_of_its_own(tmp_path: Path) -> None:
    """What such a device is there for: threads, numbers and thread ids as on a GPU."""
    right(run("-m", "benchmarks", "accuracy", *QUICK, "--group", "core", "--device", device.NAME,
              "--times", "ns", "--keep", tmp_path))  # fmt: skip
    for name in QUICK:
        facts = study(trace.load(tmp_path / f"{name}.json.gz"))
        calls, structure = facts.calls, facts.structure
        forward = calls.thread[structure.rows(Role.FORWARD)]
        roots = calls.thread[structure.roots]
        assert len(set(roots.tolist())) == 1
        assert set(forward.tolist()).isdisjoint(roots.tolist())
        # A reentrant recompute's numbers are those of the thread that ran it.
        assert facts.judgement.verdict == "doubled"


@pytest.mark.slow
@pytest.mark.parametrize(
    "group",
    ["core", "huggingface", "architectures", "bystanders", "schedules", "places", "equal",
     "functions"],
)  # fmt: skip
def test_every_case_there(group: str) -> None:
    right(run("-m", "benchmarks", "accuracy", "--group", group, "--device", device.NAME,
              "--times", "ns", timeout=1800))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVEN)
def test_recorded_by_run(name: str, tmp_path: Path) -> None:
    """Hooks, annotations and step timing of ``run``, whose recorder follows that thread too."""
    (case,) = (case for case in CASES if case.name == name)
    script = tmp_path / "train.py"
    script.write_text(
        "from tests.cases import device\n"
        "where = device.install()\n"
        "from tests.cases.model import Oracle\n"
        "from tests.cases.nesting import CASES\n"
        f"step = next(c for c in CASES if c.name == {name!r}).build(Oracle(), where)\n"
        "for _ in range(30):\n"
        "    step()\n"
    )
    run("-m", "recompute_scan", "run", "--steps", "3", "--warmup", "1", "--timing-steps", "3",
        "--output", tmp_path / "out", script)  # fmt: skip
    result = from_json((tmp_path / "out" / "result.json").read_bytes())
    assert (result.verdict, result.evidence_level) == (case.verdict, "annotated")
    assert result.confidence == "high"
    assert present(result.cost).step_source == "timed"
    assert present(result.fidelity).why_not_compared is None


# A script on the device; what records it follows, then its loop.
_HEAD = """\
from tests.cases import device
where = device.install()
from tests.cases.model import Oracle
from tests.cases.nesting import CASES
step = next(c for c in CASES if c.name == "r_in_n").build(Oracle(), where)
"""
_RECORD = """\
import recompute_scan as rs
with rs.record(steps=2, warmup=1, timing_steps=2, folder="out") as recording:
    for _ in range(8):
        step()
        recording.step()
"""
_CALLBACK = """\
from recompute_scan.integrations import RecomputeScanCallback
callback = RecomputeScanCallback(steps=2, warmup=1, timing_steps=2, folder="out")
callback.on_train_begin()
for _ in range(8):
    step()
    callback.on_step_end()
callback.on_train_end()
assert callback.scan.verdict == "doubled"
"""
_LLAMA = """\
from tests.cases import device
where = device.install()
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=2, use_cache=False)
model = LlamaForCausalLM(config).to(where)
model.gradient_checkpointing_enable({"use_reentrant": True})
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, 64, (2, 8)).to(where)
for _ in range(30):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("loop", [_RECORD, _CALLBACK], ids=["record", "callback"])
def test_recorded_from_inside(loop: str, tmp_path: Path) -> None:
    """``record()``, and a callback of a framework's trainer."""
    (tmp_path / "train.py").write_text(_HEAD + loop)
    run_in(tmp_path, "train.py")
    result = from_json((tmp_path / "out" / "result.json").read_bytes())
    assert (result.verdict, result.recompute_per_backward) == ("doubled", 2)
    assert result.evidence_level == "annotated"


@pytest.mark.slow
def test_the_fix_is_verified_there(tmp_path: Path) -> None:
    """Steps with and without the fix, their gradients compared, on such a device."""
    (tmp_path / "train.py").write_text(_HEAD + "for _ in range(60):\n    step()\n")
    run_in(tmp_path, "-m", "recompute_scan", "run", "--steps", "2", "--warmup", "1",
           "--timing-steps", "2", "--verify", "-o", "out", "train.py")  # fmt: skip
    result = from_json((tmp_path / "out" / "result.json").read_bytes())
    assert result.verdict == "doubled"
    assert present(present(result.verified).gradients).status == "equal"


@pytest.mark.slow
def test_llama_of_hugging_face(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_LLAMA)
    run_in(tmp_path, "-m", "recompute_scan", "run", "--steps", "2", "--warmup", "1",
           "--timing-steps", "2", "-o", "out", "train.py")  # fmt: skip
    result = from_json((tmp_path / "out" / "result.json").read_bytes())
    assert (result.verdict, result.confidence) == ("full", "high")
    assert present(result.fidelity).why_not_compared is None
    assert all(not region.differences for region in present(result.fidelity).regions)
