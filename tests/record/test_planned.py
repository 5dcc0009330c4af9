"""`run --verify` with a plan of RS301: single layers lose their checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.record import verify
from recompute_scan.record.children import run_trial
from recompute_scan.record.options import RemovalOptions, RunOptions
from recompute_scan.record.rehearsal import free_bytes
from recompute_scan.result import Finding, Memory, MemoryPlan, Result
from tests.present import present
from tests.record.runs import LAYERS, write_script
from tests.report import sample_results

pytestmark = pytest.mark.slow

# Four layers that print for every step how often each of them ran in the backward pass.
SCRIPT = (
    LAYERS
    + """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout=0.2) for _ in range(4))
        for number, layer in enumerate(self.layers):
            layer.number = number
            layer.register_forward_pre_hook(count)

    def forward(self, x):
        for layer in self.layers:
            x = run(layer, x)
        return x

AGAIN = [0] * 4
def count(layer, _):
    AGAIN[layer.number] += torch._C._current_graph_task_id() != -1

def inner(layer, x):
    return checkpoint(layer, x, use_reentrant=True)

def outer(layer, x):
    return checkpoint(functools.partial(inner, layer), x, use_reentrant=False)

def plain(layer, x):
    return checkpoint(layer, x, use_reentrant=False)

def one_line(layer, x):
    layer = functools.partial(Layer.__call__, layer)
    for _ in range(2):
        layer = functools.partial(checkpoint, layer, use_reentrant=True)
    return layer(x)
"""
)
TRAIN = """\
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(9):
    model(torch.randn(4, 8, requires_grad=True)).square().mean().backward()
    print(json.dumps(AGAIN), flush=True)
    AGAIN[:] = [0] * 4
    optimizer.step()
    optimizer.zero_grad()
"""
SOME = ("layers.1", "layers.2")


def script(how: str) -> str:
    return f"{SCRIPT}run = {how}\n{TRAIN}"


def site(call: str, how: str) -> str:
    """``train.py:N`` of the line with this call in it."""
    lines = script(how).splitlines()
    (line,) = [at for at, text in enumerate(lines, 1) if call in text]
    return f"train.py:{line}"


def options(folder: Path, **chosen: object) -> RunOptions:
    run = RunOptions("train.py", False, (), folder / "out", 2, 2, 4, measure=True)
    return replace(run, **chosen)


def counted(output: Path) -> list[list[int]]:
    """What the script printed, each different line once."""
    lines = output.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in dict.fromkeys(lines)]


@pytest.mark.parametrize(
    ("how", "call", "variant", "depth", "expected"),
    [
        ("plain", "checkpoint(layer, x, use_reentrant=False)", "non-reentrant", None, [1, 0, 0, 1]),
        ("inner", "checkpoint(layer, x, use_reentrant=True)", "reentrant", None, [1, 0, 0, 1]),
        # The outer one stays, and its recompute calls the inner one.
        ("outer", "checkpoint(layer, x, use_reentrant=True)", "reentrant", None, [2, 1, 1, 2]),
        ("outer", "partial(inner, layer), x", "non-reentrant", None, [2, 1, 1, 2]),
        # In the recompute of the outer one, of which no module is known, nothing on the stack tells
        # of the inner one.
        ("one_line", "return layer(x)", "reentrant", 1, [2, 1, 1, 2]),
    ],
)
def test_of_four_layers_two_are_not_recomputed(
    inside: Path, how: str, call: str, variant: str, depth: int | None, expected: list[int]
) -> None:
    write_script(inside, script(how))
    removal = RemovalOptions("torch-checkpoint", site(call, how), variant, depth, SOME)
    chosen = options(inside, steps=0, removals=(removal,))
    assert run_trial(chosen, None, inside / "printed.txt") == 0
    assert counted(inside / "printed.txt") == [expected]


def with_plan(result: Result, *ordinals: int) -> Result:
    """The result with a plan that RS301 would have chosen on a GPU."""
    plan = MemoryPlan(ordinals, 1.0, 2 << 30)
    memory = Memory("gpu", 1 << 30, 1 << 30, 4 << 30, 1 << 30, 3 << 30, (), (plan,), chosen=0)
    found = Finding("RS301", "memory-headroom", "info", "high", "", "", (), None, 1.0, 1.0)
    return replace(result, memory=memory, findings=(*result.findings, found))


def test_the_plan_is_run_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer has two checkpoints: the fix takes one from all, the plan both from two."""
    write_script(tmp_path, script("outer"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify, "_MOST_SWITCHING", 0)  # how long it takes does not matter here
    monkeypatch.setattr(verify, "_MOST_ROUNDS", 2)
    chosen = options(tmp_path)
    assert run_trial(chosen, None, tmp_path / "printed.txt") == 0
    result = with_plan(analyse([chosen.output]), 1, 2)
    assert len(verify.to_remove(result)) == 1
    section = present(verify.verify(result, chosen, None, without_checkpointing=False).verified)

    runs = chosen.output / "verify"
    assert {run.name: counted(run / "output.txt") for run in runs.iterdir()} == {
        "first-step-unchanged-1": [[2, 2, 2, 2]],
        "first-step-without-checkpointing-1": [[0, 0, 0, 0]],
        "unchanged-2": [[2, 2, 2, 2]],
        "with-the-fix-1": [[1, 1, 1, 1]],
        "with-the-fix-2": [[1, 1, 1, 1]],
        "with-the-plan-1": [[1, 0, 0, 1]],
        "with-the-plan-2": [[1, 0, 0, 1]],
    }
    assert section.with_plan is not None
    assert section.with_plan.modules == SOME
    arm = present(section.with_plan.arm)
    assert (arm.status, arm.runs, arm.timed_steps) == ("measured", 2, 8)
    assert arm.step_ms is not None
    assert (section.with_plan.losses.status, section.with_plan.losses.compared) == ("equal", 6)


def test_no_plan_is_tried_whose_layers_names_do_not_tell() -> None:
    result = with_plan(sample_results.full(), 1, 2)
    assert [region.ordinal for region in verify.planned_regions(result)] == [1, 2]
    assert verify.planned_regions(replace(result, findings=())) == ()
    first, second, *others = result.regions
    for name in (None, second.module):
        regions = (replace(first, module=name), second, *others)
        in_plan = with_plan(replace(result, findings=(), regions=regions), 0)
        assert verify.planned_regions(in_plan) == ()


def test_what_torch_keeps_of_a_larger_arrangement_counts_as_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gib = 1 << 30
    # 80 GiB, of which others have 2; today's step takes 30, another took 68 that torch keeps.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 68 * gib)
    assert free_bytes("cuda", 30 * gib) == 48 * gib
    assert free_bytes("cuda", 90 * gib) == 0
