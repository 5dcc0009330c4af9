"""`run` on a BERT whose checkpoints drop the random state of its dropout, and on its repair."""

import shutil
import subprocess
from pathlib import Path

import pytest

from recompute_scan.cli import main
from recompute_scan.result import Result, from_json
from tests.present import present
from tests.record.runs import QUICK, forked_tool

EXAMPLE = Path(__file__).parents[2] / "examples" / "dropout_bert.py"


def run(folder: Path, *options: str) -> Result:
    """What ``run`` says of ``train.py`` in a folder."""
    done = forked_tool(folder, "run", *QUICK, "-o", "out", *options, "train.py")
    assert done.returncode == 0, done.stderr
    return from_json((folder / "out" / "result.json").read_bytes())


@pytest.mark.slow
def test_the_fault_is_named_measured_and_repaired_by_the_diff(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "train.py")
    wrong = run(tmp_path, "--verify")
    (finding,) = [one for one in wrong.findings if one.code == "RS401"]
    assert "sdpa_attention.py" in finding.detail
    assert "attention.self" in finding.detail
    gradients = present(present(wrong.verified).gradients)
    assert gradients.status == "different"
    assert any((one.distance or 0) > 0.1 for one in gradients.worst)
    diff = present(present(finding.fix).diff)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    right = run(tmp_path, "--verify")
    assert not [one for one in right.findings if one.wrong_gradients]
    assert present(present(right.verified).gradients).status == "equal"
    assert all(not one.differences for one in present(right.fidelity).regions)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    ["plain_pytorch.py", "doubled_llama_fsdp.py", "repaired_llama_fsdp.py", "compiled_fsdp2.py"],
)
def test_every_other_example_of_ours_is_faithful_or_was_not_compared(
    tmp_path: Path, example: str
) -> None:
    shutil.copy(EXAMPLE.parent / example, tmp_path / "train.py")
    found = run(tmp_path)
    assert [one.code for one in found.findings if one.code.startswith("RS4")] == []
    assert found.fidelity is not None
    assert not any(one.differences or one.states or one.lost for one in found.fidelity.regions)
    compared = sum(one.recomputes for one in found.fidelity.regions)
    assert bool(found.fidelity.untold) == (example == "compiled_fsdp2.py")
    assert (compared > 0) != bool(found.fidelity.untold)


@pytest.mark.slow
def test_the_step_can_be_left_out(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "train.py")
    assert run(tmp_path, "--no-fidelity").fidelity is None


TWO_LAYERS = """
import torch
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(9):
    out = checkpoint(net, torch.randn(4, 8), use_reentrant={reentrant}, preserve_rng_state={keep})
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step)
"""


def test_alone_it_compares_one_step_and_ends_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWO_LAYERS.format(reentrant=False, keep=False))
    done = forked_tool(tmp_path, "run", "--fidelity", "--warmup", "2", "-o", "out", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0\n1\nIs the recomputed forward the same? No:")
    found = from_json((tmp_path / "out" / "result.json").read_bytes())
    assert [one.code for one in found.findings] == ["RS401"]
    assert found.steps == ()
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == [
        "fix.patch",
        "report.html",
        "result.json",
        "run-rank0.json",
    ]


def test_alone_it_does_nothing_else(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (inside / "train.py").write_text("")
    for option in (["--verify"], ["--steps", "2"], ["--timing-steps", "0"], ["--guard"]):
        assert main(["run", "--fidelity", *option, "train.py"]) == 2
        assert f"{option[0]} does not go with it. [E236]" in capsys.readouterr().err
    assert [one.name for one in inside.iterdir()] == ["train.py"]
