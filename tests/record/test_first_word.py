"""After the second step `run` says how often blocks ran again, before it has recorded anything."""

import json
import re
from pathlib import Path

import pytest

from recompute_scan import analyze
from recompute_scan.result.run_record import Counted
from tests.present import present
from tests.record.runs import LAYERS, record_script

# Each step prints how often a layer ran again for each run in the forward pass.
SCRIPT = (
    LAYERS
    + """\
layers = nn.ModuleList(Layer() for _ in range(4))
optimizer = torch.optim.SGD(layers.parameters(), 0.01)

def inside(layer, reentrant):
    return lambda x: checkpoint(layer, x, use_reentrant=reentrant)

def forward(x):
    for layer in layers:
        {body}
    return x

for step in range(30):
    RUNS.update(forward=0, in_backward=0)
    for _ in range({micro_batches}):
        forward(torch.randn(2, 8, requires_grad=True)).sum().backward()
    print("ran again", RUNS["in_backward"] / RUNS["forward"], flush=True)
    optimizer.step()
    optimizer.zero_grad()
"""
)
ONCE = "x = checkpoint(layer, x, use_reentrant={})"
BOTH = "x = checkpoint(inside(layer, {1}), x, use_reentrant={0})"
HALF = "x = checkpoint(layer, x, use_reentrant=False) if layer is layers[1] else layer(x)"
# As guided-diffusion's; with a block that it looks up itself, no hook can wrap it.
OWN = """\
from functools import partial

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return LOOKED_UP.get(block, block)(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            again = LOOKED_UP.get(ctx.block, ctx.block)(x)
        torch.autograd.backward(again, grad)
        return None, x.grad

LOOKED_UP = {}

"""
COPIES = """\
    import copy, pickle
    both = copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))
    print("apart", *(one[0].forward.__self__ is one[0] for one in both))
"""
BODIES = {
    "none": "x = layer(x)",
    "reentrant": ONCE.format(True),
    "non-reentrant": ONCE.format(False),
    "R in N": BOTH.format(False, True),
    "N in R": BOTH.format(True, False),
    "R in R": BOTH.format(True, True),
    "N in N": BOTH.format(False, False),
    "default": "x = checkpoint(lambda y, layer=layer: layer(y), x, use_reentrant=False)",
}
WORDS = {0.0: "no checkpoint was seen", 1.0: "run again once", 2.0: "run again twice"}


def script(body: str, micro_batches: int = 1) -> str:
    return SCRIPT.replace("{body}", body).replace("{micro_batches}", str(micro_batches))


def own(body: str) -> str:
    return script(body).replace("layers =", f"{OWN}layers =", 1)


def said(told: str) -> str:
    (line,) = [line for line in told.splitlines() if line.startswith("recompute-scan: step")]
    return line


FEW = (("N in R", 3), ("default", 1))
REST = [(name, number) for name in BODIES for number in (1, 3) if (name, number) not in FEW]


@pytest.mark.parametrize(
    ("name", "micro_batches"), [*FEW, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST)]
)
def test_it_is_what_the_layers_counted(name: str, micro_batches: int, tmp_path: Path) -> None:
    text = script(BODIES[name], micro_batches)
    recorded = record_script(tmp_path, text, warmup=3, steps=1, fidelity=False)
    (counted,) = set(re.findall(r"ran again (\S+)", recorded.stdout))
    line = said(recorded.told)
    assert WORDS[float(counted)] in line
    assert name == "none" or "all 4 checkpointed blocks" in line
    assert "(counted by hooks); about" in line


@pytest.mark.parametrize(("steps", "given"), [(1, "layer.forward"), (1, "layer"), (3, "layer")])
def test_a_checkpoint_function_of_the_script_counts(steps: int, given: str, tmp_path: Path) -> None:
    """The script ends before a step is profiled, so hooks give the verdict too. It copies and
    pickles its layers within a step.
    """
    inside = f"checkpoint(partial(Own.apply, {given}), x, use_reentrant=True)"
    text = own(f"x = {inside}").replace("range(30)", f"range({steps})")
    ours = 'print("ours", hasattr(Own.forward, "__wrapped__"))'
    text = text.replace("    optimizer.step()", f"    {ours}\n{COPIES}    optimizer.step()")
    recorded = record_script(tmp_path, text, warmup=steps, steps=1, timing_steps=4)
    assert "ran again 2.0" in recorded.stdout
    assert recorded.stdout.count("ours True") == min(steps, 2)  # the third is timed
    assert recorded.stdout.count("apart True True") == steps
    assert WORDS[2.0] in said(recorded.told)
    result = analyze(recorded.output).result
    assert (result.evidence_level, result.verdict) == ("hooks", "doubled")


def test_other_code_that_differentiates_in_a_backward_pass_leaves_it_open(tmp_path: Path) -> None:
    looked_up = "LOOKED_UP[id(layer)] = layer; x = Own.apply(id(layer), x)"
    text = own(f"{looked_up}; x = checkpoint(nn.Tanh(), x, use_reentrant=False)")
    # Compiled functions and pickles know them by identity.
    kept = (
        "before = torch.autograd.grad, torch.autograd.backward\nfor step in range(3):\n    assert "
    )
    kept += "before == (torch.autograd.grad, torch.autograd.backward)"
    text = text.replace("for step in range(30):", kept)
    recorded = record_script(tmp_path, text, warmup=3, steps=1)
    assert "nested backward passes of other code: 4)" in said(recorded.told)
    result = analyze(recorded.output).result
    assert (result.evidence_level, result.verdict) == ("hooks", "inconclusive")
    assert "may have run forward work again" in present(result.reason)


def test_a_forward_pass_without_a_backward_pass_is_counted_apart() -> None:
    word = "all 3 checkpointed blocks run 5 times, 4 again in backward (counted by hooks)"
    assert Counted(1, ((5, 4),) * 3).described == word


def test_a_block_among_others_and_its_event(tmp_path: Path) -> None:
    stream = tmp_path / "events.jsonl"
    recorded = record_script(tmp_path, script(HALF), warmup=3, steps=1, events=str(stream))
    assert "the checkpointed block runs again once" in said(recorded.told)
    told = [json.loads(line) for line in stream.read_text().splitlines()]
    assert any("runs again once" in one.get("text", "") for one in told)


def test_a_warm_up_of_one_step_is_counted_itself(tmp_path: Path) -> None:
    recorded = record_script(tmp_path, script(BODIES["R in N"]), warmup=1, steps=1)
    assert "step 1 of 4: all 4 checkpointed blocks run again twice" in said(recorded.told)
    counted = present(recorded.info.counted)
    assert (counted.step, counted.ratios, counted.others) == (1, (2.0,) * 4, 0)


def test_a_container_of_blocks_is_no_block_itself(tmp_path: Path) -> None:
    made = "nn.ModuleList(Layer() for _ in range(4))"
    nested = "nn.Sequential(*(nn.Sequential(Layer()) for _ in range(4)))"
    text = script(ONCE.format(False)).replace(made, nested)
    counts = 'print("counts", hasattr(torch.autograd.graph._engine_run_backward, "__wrapped__"))'
    text = text.replace("    optimizer.step()", f"    {counts}\n    optimizer.step()")
    recorded = record_script(tmp_path, text, warmup=2)
    assert recorded.info.counted == Counted(1, ((1, 1),) * 4, 0, (1,) * 4)
    assert "counts True" not in recorded.stdout  # no step that is profiled is counted


def test_each_of_several_backward_passes_counts_alone(tmp_path: Path) -> None:
    twice = "    loss = forward(torch.randn(2, 8, requires_grad=True)).sum()\n" + " " * 8
    twice += "loss.backward(retain_graph=True); loss.backward()"
    for name, ratio in (("N in R", 2.0), ("non-reentrant", 1.0)):
        once = "    forward(torch.randn(2, 8, requires_grad=True)).sum().backward()"
        recorded = record_script(
            tmp_path / name, script(BODIES[name]).replace(once, twice), warmup=3, steps=1
        )
        assert f"ran again {2 * ratio}" in recorded.stdout
        assert f"{WORDS[ratio]} in each of up to 2 backward passes" in said(recorded.told)
        assert present(recorded.info.counted).ratios == (ratio,) * 4
        result = analyze(recorded.output).result
        assert [one.backward_passes for one in result.regions] == [2.0] * 4
        assert result.recompute_per_backward == ratio
        assert ("in each of up to 2 backward passes" in result.headline) == (ratio == 1.0)


EVALUATES = """\
    with torch.no_grad():
        forward(torch.randn(2, 8, requires_grad=True))
"""


def test_an_evaluation_between_steps_does_not_count(tmp_path: Path) -> None:
    for name, ratio in (("N in R", 2.0), ("non-reentrant", 1.0)):  # both variants are among them
        text = script(BODIES[name]).replace("    RUNS.update", EVALUATES + "    RUNS.update")
        recorded = record_script(tmp_path / name, text, warmup=2, steps=1, quiet=True)
        counted = present(recorded.info.counted)
        assert "recompute-scan: " not in recorded.told  # counted, and not printed
        assert counted.ratios == (ratio,) * 4


def test_it_counts_under_the_script_own_profiler(tmp_path: Path) -> None:
    text = script(BODIES["N in R"]).replace(
        "for step in range(30):",
        "from torch.profiler import ProfilerActivity, profile\n"
        "prof = profile(activities=[ProfilerActivity.CPU])\nprof.start()\nfor step in range(30):",
    )
    recorded = record_script(tmp_path, f"{text}\nprof.stop()\n", warmup=3, steps=1)
    assert WORDS[2.0] in said(recorded.told)
