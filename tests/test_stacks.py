"""Python frames of a plain profile name the call site of each checkpoint."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from recompute_scan.analysis import inputs
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.frameworks.pytorch import GENERATORS
from recompute_scan.result import Result
from tests.record.runs import LAYERS, record_script, run_plain, write_script

pytestmark = pytest.mark.slow

SCRIPT = (
    LAYERS
    + """\
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.direct = Layer(32)
        self.reentrant = Layer(48)
        self.wrapped = checkpoint_wrapper(Layer(32))
        self.hooked = composable(Layer(32))
        self.parts = nn.Sequential(Layer(32), Layer(32), Layer(32), Layer(32))
        self.grow, self.shrink = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):  # FORWARD
        x = checkpoint(self.direct, x, use_reentrant=False)
        x = checkpoint(self.reentrant, self.grow(x), use_reentrant=True)
        x = self.hooked(self.wrapped(torch.sigmoid(self.shrink(x))))
        return checkpoint_sequential(self.parts, 2, torch.tanh(x), use_reentrant=False)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
def step():
    model(torch.randn(4, 32, requires_grad=True)).sum().backward()
    optimizer.step()
step()
with torch.profiler.profile(with_stack=True) as profiler:
    step()
    step()
profiler.export_chrome_trace(sys.argv[1])
"""
)
DOUBLED = """\
import sys, torch, warnings
warnings.simplefilter("ignore")
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing, checkpoint_wrapper)
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, use_cache=False,
))
model.gradient_checkpointing_enable({"use_reentrant": True})
apply_activation_checkpointing(
    model, checkpoint_wrapper, lambda module: isinstance(module, LlamaDecoderLayer))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
tokens = torch.randint(0, 32, (2, 8))
def step():
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
step()
with torch.profiler.profile(with_stack=True) as profiler:
    step()
    step()
profiler.export_chrome_trace(sys.argv[1])
"""


def profiled(folder: Path, script: str) -> Result:
    write_script(folder, script)
    done = run_plain(folder, "train.py", "trace.json")
    assert done.returncode == 0, done.stderr
    return analyse([folder / "trace.json"])


@pytest.fixture(params=[500_000, 0], ids=["few frames", "many frames"])
def frames(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All frames are read where they are few, those of one step where they are many."""
    monkeypatch.setattr(inputs, "_FEW_FRAMES", request.param)


@pytest.mark.usefixtures("frames")
def test_every_way_of_torchs_own(tmp_path: Path) -> None:
    result = profiled(tmp_path, SCRIPT)
    line = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if text.endswith("# FORWARD"))
    here = f"train.py:{line}"
    found = [
        (c.mechanism, c.variant, c.call_site, region.module_class)
        for region in result.regions
        for c in region.checkpoints
    ]
    torch_call = [("torch-checkpoint", "non-reentrant", here, "Layer")]
    assert found[:2] == [*torch_call, ("torch-checkpoint", "reentrant", here, "Layer")]
    assert [row[:2] for row in found[2:]] == [
        ("fsdp-wrapper", "non-reentrant"),
        ("composable-checkpoint", "non-reentrant"),
        ("checkpoint-sequential", "non-reentrant"),
    ]
    assert {region.recompute_runs_per_backward for region in result.regions[:5]} == {1.0}
    assert result.evidence_level == "autograd"
    assert any("come from Python frames" in warning for warning in result.warnings)
    trace, (since_2_14, before) = tmp_path / "trace.json", GENERATORS
    trace.write_text(trace.read_text().replace(f'{before}"', f'{since_2_14}"'))
    renamed = [c.variant for region in analyse([trace]).regions for c in region.checkpoints]
    assert renamed == [row[1] for row in found]


@pytest.mark.usefixtures("frames")
def test_a_doubled_model_names_both(tmp_path: Path) -> None:
    result = profiled(tmp_path, DOUBLED)
    assert (result.verdict, result.recompute_per_backward) == ("doubled", 2.0)
    stacks = Counter(
        tuple((c.depth, c.mechanism, c.variant) for c in region.checkpoints)
        for region in result.regions
    )
    assert stacks == {
        (
            (0, "fsdp-wrapper", "non-reentrant"),
            (1, "hf-gradient-checkpointing", "reentrant"),
        ): 2
    }
    (finding,) = [finding for finding in result.findings if finding.code == "RS001"]
    assert finding.fix is not None
    assert finding.fix.summary.startswith("Keep PyTorch's checkpoint wrapper; delete the gradient")
    assert finding.fix.diff is None


def test_the_step_with_stacks_helps_where_no_mark_was_left(tmp_path: Path) -> None:
    script = SCRIPT.partition("def step()")[0] + (
        "for _ in range(9):\n"
        "    model(torch.randn(4, 32, requires_grad=True)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    recorded = record_script(tmp_path, script, steps=2)
    marked = analyse([recorded.output])
    for name in ("trace-rank0.json.gz", "stacks-rank0.json.gz"):
        without_marks(recorded.output / name)
    framed = analyse([recorded.output])
    assert framed.evidence_level == "autograd"
    names = [
        [[(c.mechanism, c.variant) for c in region.checkpoints] for region in one.regions]
        for one in (marked, framed)
    ]
    assert names[0] == names[1]
    # Without the other file nobody can tell.
    (recorded.output / "stacks-rank0.json.gz").unlink()
    unnamed = analyse([recorded.output])
    assert {c.mechanism for region in unnamed.regions for c in region.checkpoints} == {None}


def without_marks(path: Path) -> None:
    """As a version of torch would leave it in which checkpoints cannot be watched."""
    with gzip.open(path) as file:
        document = json.load(file)
    document["traceEvents"] = [
        event
        for event in document["traceEvents"]
        if not str(event.get("name", "")).startswith("recompute_scan.")
    ]
    path.write_bytes(gzip.compress(json.dumps(document).encode()))


def test_a_trace_without_stacks_is_read_once(tmp_path: Path) -> None:
    script = SCRIPT.replace("with_stack=True", "with_stack=False")
    write_script(tmp_path, script)
    assert run_plain(tmp_path, "train.py", "trace.json").returncode == 0
    lines: list[str] = []
    result = analyse([tmp_path / "trace.json"], lines.append)
    assert lines == ["reading trace.json"]
    assert not any("Python frames" in warning for warning in result.warnings)
