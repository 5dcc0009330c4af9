"""The diff of RS001, applied to a copy of an example, leaves one recompute and the same losses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from recompute_scan.result import Result, from_json
from tests.present import present
from tests.record.runs import forked_tool

pytestmark = pytest.mark.slow

# Both of its modules that hold others are layers to transformers, which checkpoint themselves.
SWIN = """\
import torch
from transformers import SwinConfig, SwinForImageClassification

torch.manual_seed(0)
config = SwinConfig(
    image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
)
model = SwinForImageClassification(config)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
CHANGE
model.train()
sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
pixels, labels = torch.randn(2, 3, 16, 16), torch.tensor([0, 1])
for step in range(12):
    loss = model(pixel_values=pixels, labels=labels).loss
    loss.backward()
    sgd.step()
    sgd.zero_grad()
    print("step", step, loss.item().hex())
"""
# It counts its own recomputes: calls of its blocks inside backward passes, for each one outside.
COUNTING = """\
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
calls, inside = {True: 0, False: 0}, False

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        calls[inside] += 1
        return x + self.b(torch.nn.functional.gelu(self.a(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = CALL
        return x

model = Net()
SETUP
sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(12):
    loss = model(torch.randn(8, 32, requires_grad=True)).square().mean()
    inside = True
    loss.backward()
    inside = False
    sgd.step()
    sgd.zero_grad()
    print("step", step, loss.item().hex())
print("recomputes", calls[True] / calls[False])
"""
WRAPPERS = """\
wrappers.apply_activation_checkpointing(
    model, checkpoint_wrapper_fn=wrappers.checkpoint_wrapper, check_fn=CHECK
)
""".replace("CHECK", "lambda module: isinstance(module, Block)")
EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--steps", "12", "--batch-size", "2", "--sequence-length", "32")


def scanned(folder: Path, script: str, *args: str) -> tuple[Result, list[str]]:
    """The result of a whole run, and the losses that the script printed."""
    options = ["--steps", "2", "--warmup", "2", "--timing-steps", "2", "--keep-going", "-o", "out"]
    done = forked_tool(folder, "run", *options, script, *args)
    assert done.returncode == 0, done.stderr
    losses = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    return from_json((folder / "out" / "result.json").read_text()), losses


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("doubled_llama_fsdp.py", SMALL),
        ("plain_pytorch.py", (*SMALL, "--checkpoint", "twice")),
    ],
)
def test_the_diff_changes_the_verdict_and_not_the_losses(
    tmp_path: Path, name: str, args: tuple[str, ...]
) -> None:
    source = (EXAMPLES / name).read_text()
    exact = source.replace("{loss.item():.4f}", "{loss.item().hex()}")
    assert exact != source
    (tmp_path / name).write_text(exact)
    before, losses_before = scanned(tmp_path, name, *args)
    assert (before.verdict, before.recompute_per_backward) == ("doubled", 2.0)
    (finding,) = [finding for finding in before.findings if finding.code == "RS001"]
    assert present(finding.fix).diff is not None
    subprocess.run(["git", "apply", "--check", "out/fix.patch"], cwd=tmp_path, check=True)
    assert forked_tool(tmp_path, "fix", "out", "--apply", "--yes").returncode == 0
    after, losses_after = scanned(tmp_path, name, *args)
    assert not (tmp_path / "out" / "fix.patch").exists()
    assert (after.verdict, after.recompute_per_backward) == ("full", 1.0)
    assert after.findings == ()
    assert len(losses_before) > 2
    assert all("0x1." in line for line in losses_before)
    assert losses_after == losses_before
    assert forked_tool(tmp_path, "fix", "out", "--revert").returncode == 0
    assert (tmp_path / name).read_text() == exact


def test_a_model_that_doubles_by_itself_is_told_how_not_to(tmp_path: Path) -> None:
    modeling = pytest.importorskip("transformers.models.swin.modeling_swin")
    layers = pytest.importorskip("transformers.modeling_layers").GradientCheckpointingLayer
    if not all(issubclass(one, layers) for one in (modeling.SwinStage, modeling.SwinLayer)):
        pytest.skip("here one of the two alone checkpoints itself")
    (tmp_path / "swin.py").write_text(SWIN.replace("CHANGE", ""))
    before, losses_before = scanned(tmp_path, "swin.py")
    assert (before.verdict, before.recompute_per_backward) == ("doubled", 2.0)
    fix = present(next(finding.fix for finding in before.findings if finding.code == "RS001"))
    told = present(re.search(r"set gradient_checkpointing = False on each (\w+) ", fix.summary))
    change = (
        f"for one in model.modules():\n    if type(one).__name__ == {told[1]!r}:\n"
        "        one.gradient_checkpointing = False"
    )
    (tmp_path / "swin.py").write_text(SWIN.replace("CHANGE", change))
    after, losses_after = scanned(tmp_path, "swin.py")
    assert (after.verdict, after.recompute_per_backward) == ("full", 1.0)
    assert losses_after == losses_before
    assert len(losses_before) == 12


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_the_script_itself_counts_one_recompute_after_the_fix(tmp_path: Path, ends: str) -> None:
    call = "checkpoint(block, x, use_reentrant=True)"
    text = COUNTING.replace("CALL", call).replace("SETUP\n", WRAPPERS).replace("\n", ends)
    (tmp_path / "train.py").write_bytes(text.encode())

    def counted() -> tuple[float, list[str]]:
        words = [sys.executable, "train.py"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        *losses, last = done.stdout.splitlines()
        return float(last.split()[1]), losses

    twice, losses = counted()
    assert twice == 2
    before, _ = scanned(tmp_path, "train.py")
    assert before.verdict == "doubled"
    assert forked_tool(tmp_path, "fix", "out", "--apply", "--yes").returncode == 0
    assert counted() == (1, losses)
    after, _ = scanned(tmp_path, "train.py")
    assert (after.verdict, after.recompute_per_backward) == ("full", 1.0)
    assert forked_tool(tmp_path, "fix", "out", "--revert").returncode == 0
    assert (tmp_path / "train.py").read_bytes() == text.encode()
