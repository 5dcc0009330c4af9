"""Recomputes of each block in each step, held against a model that counts its own forward runs."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

import recompute_scan as rs

STEPS, LAYERS = 4, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


def asked(step: int, layer: int) -> int:
    """How many checkpoints are around a layer in a step."""
    return 2 if layer == 0 and step % 2 else layer % 2


def recorded(
    folder: Path, asked: Callable[[int, int], int], kind: type[Layer] = Layer
) -> tuple[Path, list[list[int]]]:
    """A plain trace of four steps, and the layers' own counts of recomputes: one row a layer."""
    torch.manual_seed(0)
    layers = [kind() for _ in range(LAYERS)]
    head = nn.Linear(64, 1)
    model = nn.ModuleList([*layers, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trace = folder / "trace.json"
    counted: list[list[int]] = [[] for _ in layers]

    def train(step: int) -> None:
        x = torch.randn(32, 64, requires_grad=True)
        for number, layer in enumerate(layers):
            layer.runs = 0
            run = layer
            for _ in range(asked(step, number)):
                run = lambda x, inner=run: checkpoint(inner, x, use_reentrant=True)  # type: ignore[assignment]  # noqa: E731
            x = run(x)
        head(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for number, layer in enumerate(layers):
            counted[number].append(layer.runs - 1)

    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
    ) as profiler:
        for step in range(-1, STEPS):
            train(step)
            profiler.step()
    return trace, [row[1:] for row in counted]


def test_every_step_has_its_own_count(tmp_path: Path) -> None:
    trace, counted = recorded(tmp_path, asked)
    result = rs.analyze(trace).result
    assert counted == [[0, 2, 0, 2], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert len(result.steps) == STEPS
    assert [list(region.recomputes_by_step) for region in result.regions] == counted


def test_steps_that_recompute_nothing_make_it_partial(tmp_path: Path) -> None:
    trace, counted = recorded(tmp_path, lambda step, _: 1 - step % 2)
    assert counted == [[1, 0, 1, 0]] * LAYERS
    assert rs.analyze(trace).result.verdict == "partial"


class ChangedView(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        result: Tensor = x + self.down(self.up(x).view(32, -1).relu_())
        return result


def test_a_view_that_is_changed_in_place_is_sound(tmp_path: Path) -> None:
    trace, counted = recorded(tmp_path, lambda *_: 1, ChangedView)
    assert counted == [[1] * STEPS] * LAYERS
    assert "AsStridedBackward0" in trace.read_text()
    result = rs.analyze(trace).result
    assert (result.verdict, result.confidence) == ("full", "high")
    assert "numbers_astray" not in result.health


def test_a_block_s_recomputes_are_the_mean_of_its_steps() -> None:
    traces = Path(__file__).parents[2] / "traces"
    for name in ("doubled_llama_fsdp", "plain_none", "public/mi300x-resnet-checkpointed.json.gz"):
        result = rs.analyze(traces / name).result
        assert result.regions
        for region in result.regions:
            known = [value for value in region.recomputes_by_step if value is not None]
            assert len(region.recomputes_by_step) == len(result.steps)
            assert region.recompute_runs_per_backward == sum(known) / len(known)
