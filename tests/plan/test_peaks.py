"""Peaks that a plan says, against those of a simulated device on which the script runs with its own
switch.
"""

import functools
import gc
import gzip
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recompute_scan.cost.arrangement import PART, SELECTIVE, Arrangements, Choices
from recompute_scan.cost.plan import arrangements
from recompute_scan.record import arrange as arranging_module
from recompute_scan.record import rehearsal as rehearsing_module
from recompute_scan.record import saved_tensors
from recompute_scan.record.isolation import Guard
from recompute_scan.result.run_record import ArmWanted, Way, read_rehearsals
from tests.plan.device import Device
from tests.plan.rehearsed import arranged
from tests.plan.scripts import CASES, Block, Convolution, Mlp, Stack, Switched, arrange, build

Step = Callable[[], None]


class Up(nn.Module):
    """A layer of a U-Net on the way up: what comes from below, and what was put aside."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out)

    def forward(self, x: Tensor, aside: Tensor) -> Tensor:
        both = torch.cat([F.interpolate(x, scale_factor=2.0), aside], 1)
        return F.silu(self.norm(self.conv(both)))


class UNet(Switched):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.down = nn.ModuleList(Convolution(n, 2 * n, 2) for n in (8, 16, 32))
        self.up = nn.ModuleList(Up(3 * n, n) for n in (32, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        aside = []
        for n, layer in enumerate(self.down):
            aside.append(x)
            x = self._one(f"down.{n}", layer, x)
        for n, layer in enumerate(self.up):
            x = self._one(f"up.{n}", layer, x, aside.pop())
        out: Tensor = self.head(x)
        return out

    def _one(self, name: str, layer: nn.Module, *args: Tensor) -> Any:
        on = name in self.on
        return checkpoint(layer, *args, use_reentrant=False) if on else layer(*args)


class Loud(nn.Module):
    """Needs more while its forward runs than it saves."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mlp = Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x.repeat(1, 1, 32) * 2).mean()
        y: Tensor = self.mlp(x) + 0 * scale
        return y


def _trained(model: Switched, shape: tuple[int, ...], *, early: bool = False) -> tuple[Any, Step]:
    """Gradients of the step before go before this one's backward, or else behind its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.rand(shape) if len(shape) > 2 else torch.randint(0, 256, shape)

    def step() -> None:
        loss = model(inputs).square().mean()
        if early:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not early:
            optimizer.zero_grad()

    return model, step


MADE: dict[str, Callable[[], tuple[Any, Step]]] = {
    "u-net": lambda: _trained(UNet(), (2, 3, 32, 32)),
    "loud": lambda: _trained(Stack([Loud(48, 96) for _ in range(3)], 48), (2, 32), early=True),
    "weights": lambda: _trained(Stack([Mlp(96, 384) for _ in range(3)], 96), (1, 8)),
    "few": lambda: _trained(Stack([Block(64, n) for n in (64, 512, 128)], 64), (4, 48)),
    "pyramid": functools.partial(build, CASES["pyramid"]),
}


def _rehearsed(
    model: Switched, step: Step, device: Device, folder: Path, patch: pytest.MonkeyPatch
) -> Arrangements:
    """What a rehearsal on such a device shows; of recomputes only that they take something."""
    patch.setattr(rehearsing_module, "most_since", device.most)
    patch.setattr(rehearsing_module, "free_bytes", lambda *_: None)
    # Whatever other tests of this process have compiled.
    patch.setattr(arranging_module, "compiled_something", lambda: False)
    for module in (arranging_module, saved_tensors):
        patch.setattr(module, "root_modules", lambda: [model])
    # In the warm-up the device to record is not settled yet.
    warming = SimpleNamespace(device="cpu", timed_ms=())
    recorder: Any = SimpleNamespace(timed=None, device="cuda", kept=warming)
    arranging = arranging_module.Arranging(Guard())
    arranging.install()
    ways: dict[Way, float] = {"today": 10.0, "recompute": 20.0, "parts": 19.0, "selective": 12.0}
    arms = [ArmWanted(way) for way in ways]
    rehearsing = rehearsing_module.Rehearsing(arranging, recorder, arms)
    for _ in range(len(arms) + 1):
        gc.collect()
        step()
        rehearsing.settle()
        rehearsing.next()
        device.most()
    rehearsing.write(folder, 0, failed=False)
    arranging.remove()
    (shown,) = read_rehearsals(folder)
    return arrangements(
        replace(
            shown,
            arms=tuple(replace(one, steps_ms=(ways[one.way],) * 8) for one in shown.arms),
            candidates=tuple(
                replace(one, again_ms=0.5 if one.part_of >= 0 else 2.0, selective_ms=0.4)
                for one in shown.candidates
            ),
        )
    )


def _drawn(model: Arrangements, *, selective: bool) -> list[Choices]:
    number = len(model.candidates)
    random = np.random.default_rng(1)
    drawn = [model.nothing, model.everything]
    drawn += [random.integers(0, 2 + selective, number, np.int8) for _ in range(2)]
    half = model.everything
    half[: number // 2] = 0
    alone = model.nothing
    alone[sorted(model.parts)[::2]] = PART
    return [model.followed(one) for one in (*drawn, half, alone)]


@pytest.mark.parametrize("name", MADE)
def test_peaks_are_those_of_the_allocator(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, step = MADE[name]()
    with Device(*model.parameters()) as device:
        arrange(model, "all")
        step()
        planned = _rehearsed(model, step, device, tmp_path, monkeypatch)
        for choices in _drawn(planned, selective=name not in ("u-net", "loud")):
            arrange(model, arranged(planned, choices))
            step()
            device.most()
            step()
            assert planned.peak(choices) == pytest.approx(device.most(), rel=0.002)


# Rehearsals on an H100: Llama-2-7B's shape, which fails there without checkpoints, and a model that
# fits, of which a selective checkpoint was not worth planning. Each arm says what torch allocated.
H100 = Path(__file__).parents[2] / "traces" / "gpu" / "h100-plan"
MEASURED = {
    "llama-7b": {"recompute", "parts", "selective"},
    "llama-12-layers": {"recompute", "parts", "keep"},
}


@pytest.mark.parametrize(("name", "ways"), MEASURED.items())
def test_peaks_are_those_of_an_h100(name: str, ways: set[str], tmp_path: Path) -> None:
    rehearsal = gzip.decompress((H100 / f"{name}.json.gz").read_bytes())
    (tmp_path / "rehearsal-rank0.json").write_bytes(rehearsal)
    (shown,) = read_rehearsals(tmp_path)
    planned = arrangements(shown)
    parts, selective = planned.nothing, np.full_like(planned.nothing, SELECTIVE)
    parts[sorted(planned.parts)] = PART
    chosen = {"keep": planned.nothing, "recompute": planned.everything}
    chosen |= {"parts": planned.followed(parts), "selective": planned.followed(selective)}
    measured = {arm.way: arm.allocated_bytes for arm in shown.arms if arm.way in ways}
    assert measured.keys() == ways
    for way, taken in measured.items():
        assert planned.peak(chosen[way]) == pytest.approx(taken, rel=1e-5), way
