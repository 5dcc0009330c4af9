"""``recompute-scan plan`` on scripts, against bytes that the benchmark's oracle counts."""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from recompute_scan.advise.settings import listed, setting_for
from recompute_scan.cost.arrangement import OFFLOAD
from recompute_scan.cost.plan import Planner, Wish, arm_of_way, arrangements
from recompute_scan.progress import Pieces
from recompute_scan.record import verify as proving
from recompute_scan.record.arrange import draws
from recompute_scan.record.options import RunOptions
from recompute_scan.record.rehearsal import arm_of, counts, steps_needed
from recompute_scan.result import Checkpoint, PlannedModule, PlanProof, from_json
from recompute_scan.result.run_record import (
    ArmMeasured,
    ArmWanted,
    Rehearsal,
    write_rehearsal,
)
from tests.plan.device import Device
from tests.plan.oracle import peak_of
from tests.plan.rehearsed import SCRIPT, all_choices, arranged, some_choices
from tests.plan.scripts import CASES, arrange, build
from tests.present import present
from tests.record.runs import tool
from tests.report import sample_results

ROOT = Path(__file__).resolve().parents[2]


def plan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["plan", "--timing-steps", "3", "--steps", "1", "-o", str(folder / "out"), *arguments]
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    return tool(Path.cwd(), *command, COLUMNS="80", PYTHONPATH=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "memory"),
    [("towers-half", "120%"), ("moe", "180%"), ("post-norm", "180%"), ("lora-none", "60%")],
)
def test_a_plan_keeps_its_budget_and_holds_what_was_said(
    name: str, memory: str, tmp_path: Path
) -> None:
    today = CASES[name].today
    done = plan(tmp_path, "--memory", memory, str(SCRIPT), name)
    assert done.returncode == 0, done.stderr
    made = present(from_json((tmp_path / "out" / "result.json").read_bytes()).plan)
    model, step = build(CASES[name])
    assert [one.module for one in made.modules] == model.names()
    arrange(model, today)
    step()
    assert made.today.peak_bytes == peak_of(model, step)
    on = [name + "~" * one.selective for one in made.modules for name in one.checkpointed_names]
    assert on
    arrange(model, ",".join(on))
    peak = peak_of(model, step)
    assert peak <= present(made.budget_bytes)
    assert made.plan.peak_bytes == pytest.approx(peak, rel=0.001)
    assert made.proof.peak_bytes == peak
    assert made.proof.outcome in ("fits", "helps", "no-gain", "slower", "unclear")
    proven = made.proof.outcome in ("fits", "helps")
    assert ("Setting to change" if proven else "Keep what you have") in done.stdout
    assert 'id="plan"' in (tmp_path / "out" / "report.html").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "mlp-uneven", "lora", "bfloat16"])
def test_every_choice_holds_what_was_said(name: str, tmp_path: Path) -> None:
    """All three for all modules, mixtures of them, and parts alone, against the oracle's count."""
    model = all_choices(name, tmp_path)
    script, step = build(CASES[name])
    step()
    for choices in some_choices(model):
        arrange(script, arranged(model, choices))
        assert model.peak(choices) == peak_of(script, step)


@pytest.mark.slow
def test_what_the_script_does_today_is_not_measured_again(tmp_path: Path) -> None:
    done = plan(tmp_path, str(SCRIPT), "mlp")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "The script already does this." in said
    made = present(from_json((tmp_path / "out" / "result.json").read_bytes()).plan)
    assert made.as_today
    kept = sorted(one.name for one in (tmp_path / "out" / "plan").iterdir())
    assert kept == ["rehearsal-1", "rehearsal-2"]


@pytest.mark.slow
def test_a_limit_that_nothing_keeps(tmp_path: Path) -> None:
    done = plan(tmp_path, "--memory", "1KB", str(SCRIPT), "mlp")
    assert done.returncode == 3
    assert "No arrangement of checkpoints keeps to 1000 B. [E332]" in done.stderr
    least = int(done.stderr.partition("[E332]")[2].partition("(")[2].partition(" bytes")[0])
    model, step = build(CASES["mlp"])
    arrange(model, "all")
    step()
    assert least == peak_of(model, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("raise RuntimeError('no data')", 1, "The script raised RuntimeError"),
        (
            "import torch\nm = torch.nn.Linear(8, 8)\no = torch.optim.SGD(m.parameters(), 0.1)\n"
            "for _ in range(1000):\n    m(torch.randn(4, 8)).sum().backward()\n    o.step()\n",
            3,
            "[E331]",
        ),
    ],
    ids=["crash", "nothing to plan"],
)
def test_scripts_without_a_plan(text: str, status: int, said: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text, encoding="utf-8")
    done = plan(tmp_path, "--no-verify", str(script))
    assert done.returncode == status
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr or "no data" in done.stderr


def test_the_setting_makes_the_arrangement() -> None:
    """Run as a reader would: only the named layers are wrapped, and no more is saved."""
    case = CASES["mlp-uneven"]
    model, step = build(case)
    arrange(model, "layers.0,layers.2,layers.4")
    step()
    wanted = peak_of(model, step)
    arrange(model, "none")
    modules = [
        PlannedModule(name, "Mlp", False, name[-1] in "024", 1.0, 1) for name in model.names()
    ]
    words, code = setting_for(modules, ())
    assert "once the model is made" in words[0]
    exec(code, {"model": model})
    wrapped = [
        n
        for n, layer in enumerate(model.get_submodule("layers").children())
        if "Checkpoint" in type(layer).__name__
    ]
    assert wrapped == [0, 2, 4]
    assert peak_of(model, step) == wanted


def test_the_setting_recomputes_parts() -> None:
    """Attention in all layers but one, the MLP in two, one layer whole: no more is saved."""
    model, step = build(CASES["deep"])
    parts = {n: ("attention",) if n > 2 else ("attention", "mlp") for n in range(1, 16)}
    names = [f"layers.{n}.{part}" for n, each in parts.items() for part in each]
    arrange(model, ",".join(["layers.0", *names]))
    step()
    wanted = peak_of(model, step)
    arrange(model, "none")
    modules = [
        PlannedModule(name, "Block", False, n == 0, 1.0, 1, parts=parts.get(n, ()))
        for n, name in enumerate(model.names())
    ]
    words, code = setting_for(modules, ())
    assert "once the model is made" in words[0]
    assert code.splitlines()[8] == '        *(f"layers.{n}.attention" for n in range(1, 16)),'
    exec(code, {"model": model})
    wrapped = [name for name, one in model.named_modules() if "Checkpoint" in type(one).__name__]
    assert wrapped == ["layers.0", *sorted(names, key=lambda name: int(name.split(".")[1]))]
    assert peak_of(model, step) == wanted


def test_parts_that_are_checkpointed_today_stay_so() -> None:
    """There is nothing to change where the plan recomputes the same parts."""
    shown = sample_results.regions(2, 1, Checkpoint(0, "non-reentrant"))
    regions = [replace(one, module=f"layers.{one.ordinal}.attention") for one in shown]
    modules = [
        PlannedModule(
            f"layers.{n}", "Block", False, False, 1.0, 1, parts=("attention",),
            parts_today=("attention",),
        )
        for n in range(2)
    ]  # fmt: skip
    assert setting_for(modules, regions)[0][0].startswith("The script already does this")
    more = [*modules, PlannedModule("layers.2", "Block", False, True, 1.0, 1)]
    words, code = setting_for(more, regions)
    assert words[-1].startswith("Add this")
    assert (
        "        'layers.0.attention',\n        'layers.1.attention',\n        'layers.2',\n"
        in code
    )


@pytest.mark.parametrize("spelt", ["gradient", "activation"])
def test_the_switch_is_named_as_the_script_spells_it(spelt: str) -> None:
    """Transformers 5.23 knows it by both names."""
    source = f"model.{spelt}_checkpointing_enable()"
    one = Checkpoint(0, "non-reentrant", "hf-gradient-checkpointing", "train.py:12", source)
    modules = [PlannedModule(f"layers.{n}", "Layer", True, n > 0, 1.0, 1) for n in range(2)]
    words, _ = setting_for(modules, sample_results.regions(2, 1, one))
    assert f"{spelt}_checkpointing_enable(…) call at train.py:12" in " ".join(words)


class _Products(TorchDispatchMode):
    """Counts matrix products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def _products(step: Callable[[], None]) -> int:
    with _Products() as counted:
        step()
    return int(counted.number)


def test_the_setting_keeps_what_heavy_operators_make() -> None:
    model, step = build(CASES["mlp-uneven"])
    arrange(model, "none")
    nothing = _products(step)
    arrange(model, "layers.0,layers.2~,layers.4~")
    wanted = _products(step)
    arrange(model, "layers.0,layers.2,layers.4")
    whole = _products(step)
    assert nothing < wanted < whole
    arrange(model, "none")
    modules = [
        PlannedModule(name, "Mlp", False, name[-1] in "024", 1.0, 1, name[-1] in "24")
        for name in model.names()
    ]
    _, code = setting_for(modules, (), operators=("aten.addmm.default",))
    exec(code, {"model": model})
    assert _products(step) == wanted


def test_the_setting_offloads() -> None:
    """What those layers save is nowhere but on the host, and gradients stay the same."""
    case = CASES["mlp-uneven"]
    model, step = build(case)
    arrange(model, "none")
    whole = peak_of(model, step)
    step()
    wanted = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    modules = [
        PlannedModule(name, "Mlp", False, False, 1.0, 1, False, name[-1] in "024")
        for name in model.names()
    ]
    _, code = setting_for(modules, ())
    exec(code, {"model": model})
    layers = list(model.get_submodule("layers").children())
    on_host = [n for n, layer in enumerate(layers) if "Offload" in type(layer).__name__]
    assert on_host == [0, 2, 4]
    assert 0 < peak_of(model, step) < whole
    step()
    found = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.slow
def test_a_rehearsal_offloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose tensors these are not: what is offloaded, no hook sees saved."""
    options = RunOptions(str(SCRIPT), False, ("mlp",), tmp_path, timing_steps=2, measure=True)
    monkeypatch.setattr(
        proving, "run_records_in", lambda _: [SimpleNamespace(device="cuda", message="")]
    )
    runs = proving.Rehearsals(options, None, Pieces(3))
    (shown,) = ranks = runs.rehearse()
    outside = [one for one in shown.storages if all(hold.run < 0 for hold in one.holds)]
    assert 0 < sum(one.size for one in outside) == arm_of_way(shown.arms, "offload").saved_bytes
    planner = Planner(ranks, Wish("bytes", 0, ""))
    most = planner.arrangements.peak(planner.arrangements.everything)
    chosen = present(planner.arrangements.solve(budget=most - 1))
    names = [one.module for one, how in zip(shown.candidates, chosen, strict=True) if how]
    assert set(chosen[chosen > 0]) == {OFFLOAD}  # the copies are a fraction of the recomputes here
    arms = ArmWanted("today"), ArmWanted("chosen", offloaded=tuple(names))
    (proof,) = runs.run("proof", arms)
    peak = present(arm_of_way(proof.arms, "chosen").saved_bytes)
    assert peak <= planner.arrangements.peak(chosen) < most


_SHARING = """
import torch
from torch import nn

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Part(), Part()
    def forward(self, x):
        return self.mlp(self.attention(x))

layers = nn.ModuleList(Layer() for _ in range(3))
optimizer = torch.optim.SGD(layers.parameters(), 0.01)
for _ in range(60):
    x = torch.randn(64, 32)
    for layer in layers:
        x = layer(x)
    layers[1].mlp(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_part_that_something_else_calls_too_is_not_recomputed_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SHARING, encoding="utf-8")
    options = RunOptions(str(script), False, (), tmp_path / "out", timing_steps=2, timeout_s=300)
    (shown,) = proving.Rehearsals(options, None, Pieces(3)).rehearse()
    elsewhere = [run.candidate for run in shown.runs if run.part_of < 0]
    names = [one.module for one in shown.candidates]
    assert [names[place] for place in elsewhere] == ["0", "1", "2", "1.mlp"]
    longer = {"recompute": 8.0, "parts": 6.0}
    arms = (replace(arm, steps_ms=(10.0 + longer.get(arm.way, 0.0),) * 8) for arm in shown.arms)
    candidates = tuple(
        replace(one, again_ms=2.0 if one.part_of < 0 else 1.0) for one in shown.candidates
    )
    model = arrangements(replace(shown, arms=tuple(arms), candidates=candidates))
    assert {names[n] for n in model.parts} == {
        "0.attention",
        "0.mlp",
        "1.attention",
        "2.attention",
        "2.mlp",
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("says", [True, False], ids=["says which", "ends"])
@pytest.mark.parametrize("failing", [{"keep"}, {"parts"}, {"keep", "selective", "offload"}])
def test_only_what_fails_is_left_out(
    failing: set[str], says: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[Any]] = []

    def run_trial(options: RunOptions, *_: Any) -> int:
        ways = [arm.way for arm in options.arms]
        failed = next((way for way in ways if way in failing), None)
        tried.append(ways)
        arms = tuple(ArmMeasured(way, () if failed else (1.0,), 0) for way in ways)
        shown = Rehearsal(0, "cuda", (), (), (), arms, failed=failed)
        if says or failed is None:
            write_rehearsal(options.output, shown)
        return int(failed is not None)

    monkeypatch.setattr(
        proving, "run_records_in", lambda _: [SimpleNamespace(device=device, message="")]
    )
    monkeypatch.setattr(proving, "run_trial", run_trial)
    options = RunOptions(str(SCRIPT), False, ("mlp",), tmp_path)
    (shown,) = proving.Rehearsals(options, None, Pieces(3)).rehearse()
    ways = [
        *("today", "keep", "recompute", "parts", "selective"),
        *["offload"] * (device == "cuda"),
    ]
    left = [way for way in ways if way not in failing] if says else ["today", "recompute"]
    assert tried[-1] == [arm.way for arm in shown.arms] == left
    assert len(tried) == (1 + len(failing & set(ways)) if says else 2)


_TIGHT = """
import sys
from tests.plan.device import Device
from tests.plan.scripts import CASES, build

model, step = build(CASES["mlp"])
with Device(*model.parameters(), limit=int(sys.argv[1])):
    for _ in range(1000):
        step()
"""


@pytest.mark.slow
def test_a_script_that_fits_only_with_checkpoints(tmp_path: Path) -> None:
    """What no step could show is as the oracle counts it, who has memory enough."""
    model, step = build(CASES["mlp"])
    with Device(*model.parameters()) as device:
        step()
        with_all = device.most()
        arrange(model, "none")
        step()
        limit = (3 * with_all + device.most()) // 4
    most = peak_of(model, step)
    script = tmp_path / "train.py"
    script.write_text(_TIGHT, encoding="utf-8")
    few = ("-v", "--timing-steps", "2")
    done = plan(tmp_path, *few, "--memory", "300%", str(script), str(limit))
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    assert "The script failed in a step without checkpoints." in printed
    assert "Rejected: the script ran out of memory with it." in printed
    made = present(from_json((tmp_path / "out" / "result.json").read_bytes()).plan)
    assert made.proof == PlanProof("does-not-fit")
    assert made.most.peak_bytes == most
    assert made.most.step_ms < made.plan.step_ms
    arrange(model, ",".join(one.module for one in made.modules if one.recompute))
    assert made.plan.peak_bytes == peak_of(model, step)


def test_nothing_recomputed_and_everything() -> None:
    layers = [PlannedModule(f"layers.{n}", "Block", False, True, 1.0, 1) for n in range(6)]
    assert "isinstance(module, Block)" in setting_for(layers, ())[1]
    some = [one for one in layers if one.module != "layers.3"]
    kept = PlannedModule("layers.3", "Block", False, False, 1.0, 1)
    assert "for n in (0, 1, 2, 4, 5)" in setting_for([*some, kept], ())[1]
    assert listed(["layers.0", "layers.1", "layers.2", "layers.5"]) == "layers[0 to 2, 5]"
    assert json.dumps(setting_for([kept], ())[1]) == '""'


def test_an_operator_that_draws_random_numbers_is_never_kept() -> None:
    """Without it a recompute would draw others behind it than the forward did."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.empty(1, 1, 2, 4)
    assert draws(attention, (q, q, q, 0.1), {})
    assert draws(attention, (q, q, q), {"dropout_p": 0.1})
    assert not draws(attention, (q, q, q), {"is_causal": True})
    assert not draws(torch.ops.aten.mm.default, (q[0, 0], q[0, 0].T), {})


@pytest.mark.parametrize("arms", [2, 3, 4])
def test_a_step_that_counts_comes_behind_one_of_its_own(arms: int) -> None:
    counted = [step for step in range(steps_needed(9, arms)) if counts(step)]
    assert all(arm_of(step - 1, arms) == arm_of(step, arms) for step in counted)
    assert Counter(arm_of(step, arms) for step in counted) == dict.fromkeys(range(arms), 10)
    # In turn and back again: none is later than another on the whole.
    places = [median([step for step in counted if arm_of(step, arms) == n]) for n in range(arms)]
    assert max(places) - min(places) <= 2 * arms * 3


@pytest.mark.slow
def test_a_result_that_is_written_into_is_not_kept(tmp_path: Path) -> None:
    """torch refuses to keep it, so the script fails where a selective checkpoint is tried."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "block = lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Linear(32, 8))\n"
        "model = nn.Sequential(block(), block(), block())\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(1000):\n"
        "    model(torch.randn(4, 8)).sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n",
        encoding="utf-8",
    )
    done = plan(tmp_path, "--no-verify", "--memory", "95%", str(script))
    assert done.returncode == 0, done.stderr
    made = present(from_json((tmp_path / "out" / "result.json").read_bytes()).plan)
    assert len(made.modules) == 3
    assert not any(one.selective for one in made.modules)
    said = (tmp_path / "out" / "plan" / "rehearsal-1" / "output.txt").read_text("utf-8")
    assert "has been mutated" in said
