"""The annotations in a trace agree with what ran, and change nothing."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.utils.checkpoint as torch_checkpoint

from recompute_scan.record.checkpoint_calls import Probe
from tests.record.runs import LAYERS, Trace, record_script, record_target, run_plain

pytestmark = pytest.mark.slow

# Runs 2 + 3 steps of four layers and prints, in the order of the cases, how often each
# layer's forward ran in one step: in the forward pass, and inside the backward pass.
NESTING = (
    LAYERS
    + """\
case = sys.argv[1]
outer, inner = case.split("-")

def wrapped(function, kind):
    if kind == "none":
        return function
    return functools.partial(checkpoint, function, use_reentrant=kind == "R")

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = wrapped(wrapped(layer, inner), outer)(x)
        return x

model, data = Model(), torch.randn(4, 8, requires_grad=True)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(5):
    before = dict(RUNS)
    loss = model(data).sum()
    with torch.profiler.record_function("backward"):
        loss.backward()
    counts = [RUNS[name] - before[name] for name in RUNS]
    optimizer.step()
print(json.dumps(counts))
"""
)


def runs_of_layers(trace: Trace) -> tuple[int, int]:
    """How often layers ran in the forward pass and in recomputes, read off the annotations.

    A run of a layer is an innermost range that holds its relu. (An outer non-reentrant recompute
    around a non-reentrant region stops as soon as the inner one is entered, and holds nothing.)
    """
    annotations, relus = trace.ranges("recompute_scan."), trace.ranges("aten::relu")
    runs = [
        annotation
        for annotation in annotations
        if any(holds(annotation, relu) for relu in relus)
        and not any(holds(annotation, other) for other in annotations if other is not annotation)
    ]
    in_backward = [run for run in runs if any(holds(e, run) for e in trace.ranges("backward"))]
    return len(runs) - len(in_backward), len(in_backward)


def holds(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    return bool(
        outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    )


@pytest.mark.parametrize(
    ("case", "in_backward"),
    [("none-N", 4), ("R-none", 4), ("R-R", 8), ("R-N", 8), ("N-R", 8), ("N-N", 4)],
)
def test_marks_count_what_ran(tmp_path: Path, case: str, in_backward: int) -> None:
    recorded = record_script(tmp_path, NESTING, case, steps=1, keep_going=True)
    assert (recorded.status, recorded.stderr) == (0, "")
    assert json.loads(recorded.stdout) == [4, in_backward]
    assert runs_of_layers(recorded.trace()) == (4, in_backward)

    regions = {annotation.call: annotation for annotation in recorded.trace().regions}
    assert len(regions) == len(recorded.trace().regions), "a call has one number and one range"
    assert set(recorded.trace().recomputes) <= set(regions)
    kinds = {"R": "reentrant", "N": "non-reentrant"}
    expected = {
        (d, kinds[k]) for d, k in enumerate(case.replace("none-", "").split("-")[:2]) if k in kinds
    }
    assert {(annotation.depth, annotation.variant) for annotation in regions.values()} == expected
    assert {one.module for one in regions.values()} == {f"layers.{i}" for i in range(4)}
    assert {annotation.module_class for annotation in regions.values()} == {"Layer"}
    if case == "R-N":
        # Per layer: the outer region once; the inner one in the forward pass, and as a new call in
        # the outer one's recompute.
        depths = Counter(one.depth for one in regions.values())
        assert depths == {0: 4, 1: 8}
        recomputed = Counter(regions[call].depth for call in recorded.trace().recomputes)
        assert recomputed == {0: 4, 1: 4}


@pytest.mark.parametrize("reentrant", [True, False])
def test_losses_are_equal_to_the_last_bit(tmp_path: Path, reentrant: bool) -> None:
    script = LAYERS + (
        "model = nn.Sequential(*(Layer(dropout=0.3) for _ in range(3)))\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(9):\n"
        "    x = torch.randn(4, 8, requires_grad=True)\n"
        "    for layer in model:\n"
        f"        x = checkpoint(layer, x, use_reentrant={reentrant})\n"
        "    loss = x.square().sum()\n"
        "    loss.backward()\n"
        "    grads = [p.grad.double().sum().item().hex() for p in model.parameters()]\n"
        "    print(loss.item().hex(), grads)\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    (tmp_path / "train.py").write_text(script)
    plain = run_plain(tmp_path, "train.py")
    recorded = record_target(
        tmp_path, "train.py", steps=3, warmup=1, timing_steps=1, keep_going=True
    )
    assert recorded.info.status == "complete"
    assert len(recorded.trace().recomputes) == 9
    assert plain.stdout.count("0x1.") > 9
    assert recorded.stdout == plain.stdout


def test_a_region_that_raises_leaves_the_marks_in_order(tmp_path: Path) -> None:
    script = LAYERS + (
        "class Flaky(Layer):\n"
        "    def forward(self, x):\n"
        "        if RUNS['forward'] % 2 == 0:\n"
        "            RUNS['forward'] += 1\n"
        "            raise ArithmeticError('once more')\n"
        "        return super().forward(x)\n"
        "model, data = Flaky(), torch.randn(4, 8, requires_grad=True)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 1e-3)\n"
        "for step in range(99):\n"
        "    for reentrant in (True, False):\n"
        "        RUNS['forward'] = 0\n"
        "        for attempt in (1, 2):\n"
        "            try:\n"
        "                out = checkpoint(model, data, use_reentrant=reentrant)\n"
        "            except ArithmeticError:\n"
        "                continue\n"
        "        RUNS['forward'] = 1\n"
        "        out.sum().backward()\n"
        "    optimizer.step()\n"
    )
    recorded = record_script(tmp_path, script, steps=2)
    assert (recorded.status, recorded.stderr) == (0, "")
    trace = recorded.trace()
    assert [annotation.depth for annotation in trace.regions] == [0] * 8
    tried = [(annotation.variant, annotation.call) for annotation in trace.regions]
    assert [variant for variant, _ in tried] == (["reentrant"] * 2 + ["non-reentrant"] * 2) * 2
    # Of two attempts at a region the second came through, and it alone was recomputed.
    assert trace.recomputes == [call for _, call in tried[1::2]]


def test_a_selective_checkpoint_never_sees_the_marks(tmp_path: Path) -> None:
    script = LAYERS + (
        "from torch.utils.checkpoint import (\n"
        "    CheckpointPolicy, create_selective_checkpoint_contexts)\n"
        "SEEN = set()\n"
        "def policy(context, op, *args, **kwargs):\n"
        "    SEEN.add(str(op))\n"
        "    return CheckpointPolicy.MUST_SAVE\n"
        "contexts = functools.partial(create_selective_checkpoint_contexts, policy)\n"
        "model, data = Layer(), torch.randn(4, 8, requires_grad=True)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 1e-3)\n"
        "for step in range(9):\n"
        "    checkpoint(model, data, use_reentrant=False, context_fn=contexts).sum().backward()\n"
        "    optimizer.step()\n"
        "print([name for name in SEEN if 'profiler' in name], len(SEEN) > 2)\n"
    )
    recorded = record_script(tmp_path, script, steps=2, keep_going=True)
    assert (recorded.status, recorded.stdout, recorded.stderr) == (0, "[] True\n", "")
    assert len(recorded.trace().recomputes) == 2


def test_compiled_regions_still_compile(tmp_path: Path) -> None:
    script = LAYERS + (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers:\n"
        "            x = checkpoint(layer, x, use_reentrant=False)\n"
        "        return x\n"
        "model = Model()\n"
        "whole = torch.compile(model, backend='aot_eager', fullgraph=True)\n"
        "part = torch.compile(nn.Linear(8, 8), backend='aot_eager')\n"
        "both = [*model.parameters(), *part.parameters()]\n"
        "optimizer = torch.optim.SGD(both, 1e-3)\n"
        "for step in range(9):\n"
        "    x = torch.randn(4, 8)\n"
        "    checkpoint(part, whole(x), use_reentrant=False).sum().backward()\n"
        "    optimizer.step()\n"
        "print(torch._dynamo.utils.counters['graph_break'])\n"
    )
    recorded = record_script(tmp_path, script, steps=2, keep_going=True)
    assert (recorded.status, recorded.stdout) == (0, "Counter()\n"), recorded.stderr
    assert recorded.info.environment["torch_compile"] == "used"
    # Only the checkpoint around the compiled layer is a call; the others are in the graph.
    assert [annotation.module_class for annotation in recorded.trace().regions] == ["Linear"] * 2


def test_options_of_a_compiled_checkpoint_are_the_scripts_alone(tmp_path: Path) -> None:
    """Without a backend that takes the graph apart, the compiler calls checkpoint itself, with
    early stop off and a policy that keeps nothing.
    """
    policy = "functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])"
    for given, options in (("", ""), (f", context_fn={policy}", "selective")):
        script = LAYERS + (
            "from torch.utils.checkpoint import create_selective_checkpoint_contexts\n"
            "layer = Layer()\n"
            "def model(x):\n"
            f"    return checkpoint(layer, x, use_reentrant=False{given})\n"
            "compiled = torch.compile(model, backend='eager')\n"
            "optimizer = torch.optim.SGD(layer.parameters(), 1e-3)\n"
            "for step in range(9):\n"
            "    compiled(torch.randn(4, 8)).sum().backward()\n"
            "    optimizer.step()\n"
        )
        recorded = record_script(tmp_path / (options or "none"), script, steps=1)
        (region,) = recorded.trace().regions
        lines = script.splitlines()
        assert (
            lines[int(region.site.rpartition(":")[2]) - 1].lstrip().startswith("return checkpoint")
        )
        assert region.options == options


def test_a_torch_without_the_patched_names_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch_checkpoint, "CheckpointFunction")
    monkeypatch.delattr(torch_checkpoint, "_checkpoint_without_reentrant_generator")
    probe = Probe(tmp_path)
    probe.install()
    probe.remove()
    assert [text.partition(" has no ")[2].split()[0] for text in probe.warnings] == [
        "reentrant",
        "non-reentrant",
    ]


def test_removing_the_probe_restores_torch(tmp_path: Path) -> None:
    before = torch_checkpoint._checkpoint_without_reentrant_generator
    forward = torch_checkpoint.CheckpointFunction.forward
    probe = Probe(tmp_path)
    probe.install()
    assert torch_checkpoint._checkpoint_without_reentrant_generator is not before
    assert torch_checkpoint.CheckpointFunction.forward is not forward
    probe.remove()
    assert torch_checkpoint._checkpoint_without_reentrant_generator is before
    assert torch_checkpoint.CheckpointFunction.forward is forward
    assert probe.warnings == []
