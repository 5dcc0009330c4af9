"""Backward passes that go through a part of a block, recomputes unlike their forward pass, and two
levels of checkpoints, each against what hooks and live storages count.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.cost.memory import levels_of
from recompute_scan.recompute.study import study
from recompute_scan.result import Result
from recompute_scan.trace import load
from tests.cases.marked import annotating
from tests.plan.device import Device

# Inside a reentrant checkpoint the first run has no gradients, and torch warns of the inner one.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
STEPS = 2
WIDTH = 48
# So many that weights and their gradients are small beside what blocks save.
ROWS = 1024


class Block(nn.Module):
    """Counts the passes of the engine that ran it again, and how often each did."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ran: Counter[int] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        if (task := torch._C._current_graph_task_id()) >= 0:
            self.ran[task] += 1
        return self.work(x)

    def work(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.b(torch.tanh(self.a(x))))

    @property
    def m(self) -> float:
        return sum(self.ran.values()) / len(self.ran) if self.ran else 0.0


class Once(Block):
    """Checkpoints itself."""

    def forward(self, x: Tensor) -> Tensor:
        return once(super().forward, x)


Blocks = list[Block]


def once(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


def twice(block: nn.Module, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False, early_stop=False)  # type: ignore[no-any-return]

    return checkpoint(inner, x, use_reentrant=False, early_stop=False)  # type: ignore[no-any-return]


def run(blocks: Blocks, x: Tensor, around: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    for block in blocks:
        x = around(block, x)
    return x


def last_weight(blocks: Blocks, around: Any, place: int = -1) -> None:
    loss = run(blocks, torch.randn(8, WIDTH), around).square().mean()
    torch.autograd.grad(loss, blocks[place].b.weight, retain_graph=True)
    loss.backward()


middle_weight = partial(last_weight, place=1)


def each_weight(blocks: Blocks, around: Any) -> None:
    loss = run(blocks, torch.randn(8, WIDTH), around).square().mean()
    for block in blocks[::-1]:
        torch.autograd.grad(loss, block.b.bias, retain_graph=True)
    loss.backward()


def three_tasks(blocks: Blocks, around: Any) -> None:
    x = run(blocks, torch.randn(8, WIDTH), around)
    losses = [x[:, n].square().mean() for n in range(3)]
    norms = [
        torch.autograd.grad(loss, blocks[-1].b.weight, create_graph=True)[0] for loss in losses
    ]
    (sum(losses) + sum(norm.square().sum() for norm in norms)).backward()  # type: ignore[union-attr]


def saliency(blocks: Blocks, around: Any) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    loss = run(blocks, x, around).square().mean()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def micro_batches(blocks: Blocks, around: Any) -> None:
    for _ in range(2):
        last_weight(blocks, around)


def trained(
    step: Callable[[Blocks, Any], None],
    around: Any,
    trace: Path,
    blocks: Blocks | None = None,
    *,
    marked: bool = False,
) -> tuple[Blocks, Result]:
    torch.manual_seed(0)
    blocks = blocks if blocks is not None else [Block() for _ in range(3)]
    sgd = torch.optim.SGD([p for block in blocks for p in block.parameters()], 0.01)

    def one() -> None:
        step(blocks, around)
        sgd.step()
        sgd.zero_grad()

    def record() -> None:
        one()
        for block in blocks:
            block.ran.clear()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            for _ in range(STEPS):
                one()
                profiler.step()
        profiler.export_chrome_trace(str(trace))

    if marked:
        with annotating():
            record()
    else:
        record()
    return blocks, analyse([trace])


@pytest.mark.parametrize(
    "step", [last_weight, middle_weight, each_weight, three_tasks, saliency, micro_batches]
)
@pytest.mark.parametrize(("around", "m"), [(once, 1.0), (twice, 2.0)])
def test_each_pass_is_counted_for_itself(step: Any, around: Any, m: float, tmp_path: Path) -> None:
    blocks, result = trained(step, around, tmp_path / "trace.json", marked=True)
    assert {block.m for block in blocks} == {m}
    if m == 1:
        assert (result.verdict, result.recompute_per_backward) == ("full", 1.0)
    else:
        assert result.verdict == "doubled"


class Branching(Block):
    """Another way to the same numbers where no gradient is wanted."""

    def work(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        if torch.is_grad_enabled():
            return torch.as_tensor(self.b(x))
        return nn.functional.linear(x, self.b.weight) + self.b.bias


class Normed(Block):
    """A norm that keeps no statistics where no gradient is wanted, as fairscale has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def work(self, x: Tensor) -> Tensor:
        self.norm.track_running_stats = torch.is_grad_enabled()
        mean = self.norm.running_mean if torch.is_grad_enabled() else None
        var = self.norm.running_var if torch.is_grad_enabled() else None
        x = nn.functional.batch_norm(self.a(x), mean, var, training=True)
        return torch.as_tensor(self.b(torch.relu(x)))


class Doubled(Branching):
    """Two products for one where no gradient is wanted."""

    def work(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return torch.as_tensor(self.b(torch.relu(self.a(x))))
        parts = [self.b(torch.relu(self.a(part))) for part in x.chunk(2)]
        return torch.cat(parts)


class InPlace(Branching):
    """Writes in place where no gradient is wanted."""

    def work(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if torch.is_grad_enabled():
            return torch.as_tensor(self.b(torch.relu(x) * 2 + 1))
        return torch.addmm(self.b.bias, x.relu_().mul_(2).add_(1), self.b.weight.T)


class Baddbmm(Branching):
    """One product of a batch where no gradient is wanted."""

    def work(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return torch.as_tensor(self.b(torch.relu(self.a(x))))
        x = torch.relu(torch.baddbmm(self.a.bias[None, None], x[None], self.a.weight.T[None]))
        return torch.baddbmm(self.b.bias[None, None], x, self.b.weight.T[None])[0]


class Attention(Branching):
    """Attention in one operator where no gradient is wanted, and written out where one is."""

    def work(self, x: Tensor) -> Tensor:
        q, k, v = self.a(x)[None], x[None], torch.tanh(x)[None]
        if torch.is_grad_enabled():
            y = (q @ k.mT / WIDTH**0.5).softmax(-1) @ v
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v)
        return torch.as_tensor(self.b(y[0]))


def plain(blocks: Blocks, around: Any) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    run(blocks, x, around).square().mean().backward()


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Branching, Normed, Doubled, InPlace, Baddbmm, Attention])
def test_marks_count_what_takes_another_way(kind: type[Block], tmp_path: Path) -> None:
    blocks, result = trained(
        plain, reentrant, tmp_path / "trace.json", [kind() for _ in range(3)], marked=True
    )
    assert {block.m for block in blocks} == {1.0}
    assert (result.verdict, result.recompute_per_backward) == ("full", 1.0)
    if result.cost is None:
        assert result.confidence == "medium"
        assert any("annotations" in warning for warning in result.warnings)


def test_a_row_of_checkpoints_in_each_layer_leaves_the_rest_of_it(tmp_path: Path) -> None:
    def rows(block: nn.Module, x: Tensor) -> Any:
        x = x.sigmoid() if x.is_leaf else x
        return block(torch.cat([once(lambda x: x.exp() @ x.t() @ x, y) for y in x.chunk(4)]))

    assert trained(plain, rows, tmp_path / "trace.json")[1].verdict == "partial"


class Tiles(torch.autograd.Function):
    """In shards along one axis, and in its gradient along another, as DeepSpeed's is."""

    @staticmethod
    def forward(ctx: Any, work: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.work = work
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([work(part) for part in x.chunk(2, 1)], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), gradients = ctx.saved_tensors, []
        for part, grad in zip(
            x.flatten(0, 1).chunk(2), grads[0].flatten(0, 1).chunk(2), strict=True
        ):
            shard = part.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.work(shard)
            torch.autograd.backward(y, grad)
            gradients.append(shard.grad)
        return None, torch.cat(gradients).view_as(x), *[None] * (len(ctx.needs_input_grad) - 2)


class Whole(Tiles):
    """In one piece, and in its gradient in shards."""

    @staticmethod
    def forward(ctx: Any, work: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.work = work
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.as_tensor(work(x))


@pytest.mark.parametrize("tiles", [Tiles, Whole])
@pytest.mark.parametrize(
    ("around", "verdict"), [(lambda tiled, x: tiled(x), "partial"), (once, "full")]
)
def test_tiles_are_by_design_whatever_their_shapes(
    tiles: Any, around: Any, verdict: str, tmp_path: Path
) -> None:
    def step(blocks: Blocks, around: Any) -> None:
        x = torch.randn(4, 8, WIDTH, requires_grad=True)
        for block in blocks:
            x = around(lambda x, b=block: tiles.apply(b, x, *b.parameters()), x)
        x.square().mean().backward()

    _, result = trained(step, around, tmp_path / "trace.json")
    assert (result.verdict, result.recompute_per_backward) == (verdict, 1.0)


def test_without_marks_it_stays_open_what_took_another_way(tmp_path: Path) -> None:
    _, result = trained(plain, reentrant, tmp_path / "trace.json", [Branching() for _ in range(3)])
    assert result.verdict in ("full", "inconclusive")
    assert result.confidence != "high" or result.recompute_per_backward == 1.0


def test_a_model_that_is_called_twice_has_its_layers_once(tmp_path: Path) -> None:
    def twice_called(blocks: Blocks, around: Any) -> None:
        x = torch.randn(8, WIDTH, requires_grad=True)
        (run(blocks, x, around).mean() + run(blocks, -x, around).mean()).backward()

    model = Stage()
    _, result = trained(
        twice_called,
        once,
        tmp_path / "trace.json",
        list(model.layers),  # type: ignore[arg-type]
        marked=True,
    )
    modules = [region.module for region in result.regions]
    assert len(modules) == len(set(modules)) == 3
    assert [region.forward_runs_per_step for region in result.regions] == [2.0] * 3


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = once(block, x)
        return x


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_micro_batches_ahead_of_the_first_backward_are_no_layers(
    ahead: int, marked: bool, tmp_path: Path
) -> None:
    """Pipeline schedules: 1F1B on the last rank and on the one before it, and GPipe."""
    stage = Stage()

    def schedule(*__: Any) -> None:
        held: list[Tensor] = []
        for _ in range(4):
            if len(held) == ahead:
                held.pop(0).backward()
            held.append(once(stage, torch.randn(8, WIDTH)).square().mean())
        for loss in held:
            loss.backward()

    blocks: Blocks = list(stage.layers)  # type: ignore[arg-type]
    _, result = trained(schedule, once, tmp_path / "trace.json", blocks, marked=marked)
    counted = [region.recompute_runs_per_backward for region in result.regions]
    assert counted == [block.m for block in blocks] == [2.0, 2.0, 1.0]
    assert [len(block.ran) / STEPS for block in blocks] == [4.0] * 3
    assert [region.forward_runs_per_step for region in result.regions] == [4.0] * 3
    assert {step.micro_batches for step in result.steps} == {4}


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(("layers", "segments"), [(6, 3), (7, 3), (8, 4)])
def test_segments_of_several_layers_are_no_layers(
    layers: int, segments: int, marked: bool, tmp_path: Path
) -> None:
    """The last segment has no checkpoint of its own; its layers have."""
    net = nn.Sequential(*[Once() for _ in range(layers)])

    def step(_: Blocks, __: Any) -> None:
        x = torch.randn(8, WIDTH, requires_grad=True)
        checkpoint_sequential(net, segments, x, use_reentrant=True).square().mean().backward()

    blocks: Blocks = list(net)  # type: ignore[arg-type]
    _, result = trained(step, once, tmp_path / "trace.json", blocks, marked=marked)
    counted = [region.recompute_runs_per_backward for region in result.regions]
    # A reentrant checkpoint goes backward in a pass of its own: all runs of a step belong together.
    assert counted == [sum(block.ran.values()) / STEPS for block in blocks]
    assert f"{counted.count(2)} of {layers} blocks" in result.headline
    assert 0 < counted.count(2.0) < layers == counted.count(1.0) + counted.count(2.0)


def test_segments_are_not_counted_as_blocks(tmp_path: Path) -> None:
    """Four of six layers run twice again, in two segments that no layer's checkpoint divides."""
    net = nn.Sequential(*[Block() for _ in range(6)])

    def step(_: Blocks, __: Any) -> None:
        def segments(x: Tensor) -> Tensor:
            return checkpoint_sequential(net, 3, x, use_reentrant=True)  # type: ignore[no-any-return]

        x = torch.randn(8, WIDTH, requires_grad=True)
        checkpoint(segments, x, use_reentrant=False, early_stop=False).square().mean().backward()

    blocks: Blocks = list(net)  # type: ignore[arg-type]
    _, result = trained(step, once, tmp_path / "trace.json", blocks, marked=True)
    assert [sum(block.ran.values()) / STEPS for block in blocks] == [2.0] * 4 + [1.0] * 2
    assert "2 of 3 segments run their forward 2 more times" in result.headline
    assert [f.title[:15] for f in result.findings if f.code == "RS001"] == ["2 of 3 segments"]


class Wide(Block):
    """Saves much beside its input."""

    def work(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(self.a(x))
        return torch.as_tensor(self.b(torch.relu(x)))


class Within(Block):
    """Half of its work is outside of the inner checkpoint."""

    before = True


class Narrow(Block):
    """Saves little beside its input."""

    def work(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.a.weight)


def _levels(blocks: Blocks, stage: int, outer: Any, inner: Any) -> Callable[[Blocks, Any], None]:
    def step(_: Blocks, __: Any) -> None:
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        for first in range(0, len(blocks), stage):
            part = blocks[first : first + stage]

            def through(x: Tensor, part: Blocks = part) -> Tensor:
                for block in part:
                    for _ in range(4 * hasattr(block, "before")):
                        x = torch.tanh(x)
                    x = inner(block, x) if inner else block(x)
                return x

            x = outer(through, x) if outer else through(x)
        x.square().mean().backward()

    return step


def _peak(blocks: Blocks, stage: int, outer: Any, inner: Any) -> int:
    step = _levels(blocks, stage, outer, inner)
    step(blocks, None)
    for block in blocks:
        block.zero_grad()
    device = Device()
    with device:
        step(blocks, None)
    return device.most()


@pytest.mark.parametrize(
    ("kind", "stages", "stage", "around"),
    [
        (Wide, 2, 8, reentrant),
        (Wide, 2, 6, once),
        (Wide, 3, 4, reentrant),
        (Wide, 8, 2, reentrant),
        (Narrow, 12, 2, once),
        (Within, 12, 2, once),
        (Within, 8, 3, reentrant),
        (Narrow, 10, 3, reentrant),
    ],
)
def test_the_cheaper_of_two_levels_is_told_by_shapes(
    kind: type[Block], stages: int, stage: int, around: Any, tmp_path: Path
) -> None:
    blocks: Blocks = [kind() for _ in range(stages * stage)]
    both = _peak(blocks, stage, around, around)
    without_inner = _peak(blocks, stage, around, None) - both
    without_outer = _peak(blocks, stage, None, around) - both
    trace = tmp_path / "trace.json"
    _, result = trained(_levels(blocks, stage, around, around), None, trace, blocks, marked=True)
    assert result.verdict in ("doubled", "full")  # early stop hides the inner one's in part
    levels = levels_of(study(load(trace)))
    assert levels is not None
    if abs(without_inner - without_outer) > 0.2 * both:
        assert (levels.without_inner < levels.without_outer) is (without_inner < without_outer)
    # By shapes alone, and at the moment that needs most: half as much or twice as much is near.
    more = max(levels.without_inner, levels.without_outer)
    assert 0.4 * max(without_inner, without_outer) < more < 2.5 * max(without_inner, without_outer)


def test_one_level_has_nothing_to_choose(tmp_path: Path) -> None:
    blocks: Blocks = [Wide() for _ in range(4)]
    trace = tmp_path / "trace.json"
    trained(_levels(blocks, 1, reentrant, reentrant), None, trace, blocks, marked=True)
    assert levels_of(study(load(trace))) is None
