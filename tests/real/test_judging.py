"""How real scripts are judged: the counter, and what it takes for equal and for right."""

import json
from pathlib import Path

import pytest

from tests.real.judging import agrees, last_line, same_losses
from tests.real.rows import COUNTER, ROWS, SOURCES, Row, put
from tests.record.runs import forked_script

TRAINING = """
import sys, torch
from torch.utils.checkpoint import checkpoint
torch.manual_seed(7)
layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
optimizer = torch.optim.SGD(layers.parameters())
depth = int(sys.argv[1])

def run(layer, x, levels):
    # A local function for each level: how often it runs is known without any count.
    return checkpoint(run, layer, x, levels - 1, use_reentrant=True) if levels else layer(x)

for _ in range(3):
    x = torch.ones(2, 4, requires_grad=True)
    for number, layer in enumerate(layers):
        x = run(layer, x, depth if number else 0)
    loss = x.sum()
    loss.backward()
    optimizer.step()
print(f"loss: {loss.item():.4f}")
"""


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_counter(tmp_path: Path, depth: int) -> None:
    """Three of four layers run once more in each backward pass for each level of checkpoints."""
    script, out = tmp_path / "train.py", tmp_path / "counts.json"
    script.write_text(TRAINING)
    ran = forked_script(COUNTER, str(out), str(script), str(depth))
    assert ran.returncode == 0, ran.stderr
    counted = json.loads(out.read_text())
    assert counted["modules"] == 4
    assert counted["most"] == depth
    assert counted["share"] == (0.75 if depth else 0)
    assert len(counted["step_s"]) == 2


OWN_FUNCTION = """
import torch
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer, ctx.x = layer, x.detach()
        return layer(x)
    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            result = ctx.layer(x)
        result.backward(gradient)
        return None, x.grad
layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
teacher = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layers.parameters())
for _ in range(3):
    with torch.no_grad():
        wanted = teacher(torch.ones(2, 4))
    x = layers[0](torch.ones(2, 4))
    for layer in layers[1:]:
        x = Again.apply(layer, x)
    (x - wanted).sum().backward()
    optimizer.step()
"""


def test_the_counter_sees_an_autograd_function_that_recomputes(tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "counts.json"
    script.write_text(OWN_FUNCTION)
    ran = forked_script(COUNTER, str(out), str(script))
    assert ran.returncode == 0, ran.stderr
    counted = json.loads(out.read_text())
    assert (counted["modules"], counted["most"], counted["share"]) == (4, 1, 0.75)


@pytest.mark.parametrize(
    ("most", "verdict", "per_backward", "right"),
    [
        (0, "none", 0.0, True),
        (0, "partial", 0.2, False),
        (0, "inconclusive", None, False),
        (1, "full", 1.0, True),
        (1, "none", 0.0, False),
        (1, "doubled", 2.0, False),
        (2, "doubled", 2.0, True),
        (2, "doubled", 3.0, False),
        (2, "full", 1.0, False),
    ],
)
def test_a_verdict_beside_the_count(
    most: float, verdict: str, per_backward: float | None, *, right: bool
) -> None:
    said = {"verdict": verdict, "recompute_per_backward": per_backward}
    assert agrees(said, {"most": most}) is right


def printed(*losses: str, prefix: str = "loss: ") -> str:
    return "\n".join(f"{prefix}{loss}" for loss in losses)


def test_losses_are_compared_to_the_last_digit() -> None:
    one = printed("2.5", "2.4031")
    assert same_losses(one, one, printed("2.5", "2.4031", "9.9")) == ("same 2, last 2.4031", True)
    assert not same_losses(one, one, printed("2.5", "2.4032"))[1]
    assert not same_losses(one, one, printed())[1]
    assert same_losses(one, printed("2.5", "2.3"), printed("1.0"))[0].startswith("differ")
    assert same_losses(printed(), printed(), printed())[0] == "none printed"


@pytest.mark.parametrize("prefix", ["{'loss': '", "loss train: ", "\x1b[32mloss:  ", "1|10|Loss: "])
def test_losses_as_frameworks_print_them(prefix: str) -> None:
    one = printed("3.356", prefix=prefix)
    assert same_losses(one, one, one) == ("same 1, last 3.356", True)


def test_the_error_and_not_what_torchrun_says_of_it() -> None:
    ran = "[rank0]: RuntimeError: no accelerator\nx.errors.ChildFailedError: \n===="
    assert last_line(ran) == "RuntimeError: no accelerator"


def test_every_row_is_pinned() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) >= 14
    for row in ROWS:
        assert not row.source or (len(SOURCES[row.source].commit) == 40 and row.paths)


def test_a_row_brings_its_data_and_changes_its_script(tmp_path: Path) -> None:
    inputs, folder = tmp_path / "inputs", tmp_path / "work"
    (inputs / "llama").mkdir(parents=True)
    (inputs / "llama" / "config.json").write_text("{}")
    folder.mkdir()
    (folder / "train.py").write_text("load('bert')\nload('bert')\nstep()\n")
    row = Row(
        "a row",
        ("train.py",),
        copies={"llama": "models/tiny"},
        files={"data/one.txt": "text\n"},
        change=[
            ["train.py", "step()", "steps()"],
            ["train.py", "'bert'", "'{in}/bert'", "every"],
            ["train.py", "not there", "", "every"],
        ],
    )
    put(row, folder, inputs)
    assert (folder / "models/tiny/config.json").exists()
    assert (folder / "data/one.txt").read_text() == "text\n"
    load = f"load('{inputs}/bert')\n"
    assert (folder / "train.py").read_text() == f"{load}{load}steps()\n"
    with pytest.raises(ValueError, match="not the version"):
        put(Row("a row", (), change=[["train.py", "no such line", ""]]), folder, inputs)


def test_a_row_like_another_has_its_command_and_more() -> None:
    rows = {row.name: row for row in ROWS}
    plain, more = rows["TRL SFT"], rows["TRL SFT, reentrant"]
    assert more.command[: len(plain.command)] == plain.command
    given = more.command[len(plain.command) :]
    assert given == ("--gradient_checkpointing_kwargs", '{"use_reentrant": true}')
    assert not any("{trl}" in part or "{trainer}" in part for part in plain.command)
