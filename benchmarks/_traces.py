"""Traces of about a wanted size: recorded, or made longer out of a recorded one.

    python -m benchmarks._traces TRACE.json MEGABYTES [stacks | SHORT.json]

Recorded is a transformer of eight blocks with a reentrant checkpoint around each block and
non-reentrant ones inside, trained by AdamW one parameter at a time: many short operators, deep
nesting, few names, as real traces have them. On the CPU, so without kernels.

torch.profiler holds a trace in memory until it is written, so that a small machine records no long
ones. A longer one is a recorded one's steps over and over, with times and running numbers moved on,
as a longer recording would have them: first all operators in order of time, then all Python frames.
"""

import math
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

WIDTH, BLOCKS = 16, 8
_MB = 10**6
# Steps of the recording that tells how many bytes a step takes.
_TRIAL_STEPS = 4
_PIECE = 1 << 20
# One event's end with the next one's beginning, and what stands between the two.
_BORDER, _GAP = b"\n  },\n  {", b",\n  "
_FIRST = re.compile(rb'\{\s*"ph": "X",\s*"cat": "(?:user_annotation|cpu_op)"')
_FRAME = re.compile(rb'\{\s*"ph": "X",\s*"cat": "python_function"')
_END = re.compile(rb'\{\s*"ph": "X",\s*"cat": "Trace"')
# Numbers that go on from round to round; what has the same name counts together.
_RUNNING = re.compile(
    rb'"(ts|id|Sequence number|External id|Record function id|Ev Idx|Python id|Python parent id)"'
    rb': (\d+)|"name": "(ProfilerStep)#(\d+)'
)
_TOGETHER = {b"Python parent id": b"Python id"}
# Nobody looks at them, and in these traces they are all 0.
_ALWAYS_ZERO = b"Record function id"

Numbers = npt.NDArray[np.int64]


class Block(nn.Module):
    """Attention and MLP, checkpointed each, and together once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = checkpoint(self.both, x, use_reentrant=True)
        return whole

    def both(self, x: Tensor) -> Tensor:
        x = checkpoint(self.attend, x, use_reentrant=False)
        again: Tensor = checkpoint(self.widen, x, use_reentrant=False)
        return again

    def attend(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        attended: Tensor = self.heads(normed, normed, normed, need_weights=False)[0]
        return x + attended

    def widen(self, x: Tensor) -> Tensor:
        widened: Tensor = self.mlp(self.second(x))
        return x + widened


def record(trace: Path, megabytes: float, *, stacks: bool) -> None:
    """Train as many steps as it takes, and write their trace."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / "trial.json"
        _train(trial, _TRIAL_STEPS, stacks)
        step_bytes = trial.stat().st_size / _TRIAL_STEPS
    _train(trace, math.ceil(megabytes * _MB / step_bytes), stacks)


def _train(trace: Path, steps: int, stacks: bool) -> None:
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(trace)),
        record_shapes=True,
        with_stack=stacks,
    ) as profiler:
        for _ in range(steps + 1):
            optimizer.zero_grad()
            model(torch.randn(2, 8, WIDTH, requires_grad=True)).pow(2).mean().backward()
            optimizer.step()
            profiler.step()


class Section:
    """A section of whole events, taken apart into text and running numbers.

    Attributes:
        highest: The highest number of each name.
        lowest: The lowest.
    """

    def __init__(self, data: bytes) -> None:
        self.highest: dict[bytes, int] = {}
        self.lowest: dict[bytes, int] = {}
        self._pieces = [self._take_apart(piece) for piece in _pieces(data)]

    def _take_apart(self, data: bytes) -> tuple[bytes, list[bytes], Numbers]:
        names: list[bytes] = []
        values: list[int] = []
        text: list[bytes] = []
        position = 0
        for found in _RUNNING.finditer(data):
            name, group = (found[1], 2) if found[1] else (found[3], 4)
            if name == _ALWAYS_ZERO:
                continue
            name = _TOGETHER.get(name, name)
            text += data[position : found.start(group)].replace(b"%", b"%%"), b"%d"
            position = found.end(group)
            names.append(name)
            values.append(int(found[group]))
        text.append(data[position:].replace(b"%", b"%%"))
        for name, value in zip(names, values, strict=True):
            self.highest[name] = max(self.highest.get(name, value), value)
            self.lowest[name] = min(self.lowest.get(name, value), value)
        return b"".join(text), names, np.array(values, np.int64)

    def write(self, target: IO[bytes], number: int, shifts: dict[bytes, int]) -> None:
        """Write the section so many times, with its numbers moved on each time."""
        by_piece = [
            (text, values, np.array([shifts[name] for name in names], np.int64))
            for text, names, values in self._pieces
        ]
        for turn in range(number):
            for at, (text, values, shift) in enumerate(by_piece):
                target.write(_GAP if turn or at else b"")
                target.write(text % tuple((values + turn * shift).tolist()))


def lengthen(short: Path, long: Path, megabytes: float) -> None:
    """Write a trace of at least that size, made of one of a single host thread."""
    size = megabytes * _MB
    data = short.read_bytes()
    first = _start(_FIRST, data)
    frames, end = _start(_FRAME, data), _start(_END, data)
    cuts = (first, frames, end) if frames >= 0 else (first, end)
    sections = [Section(data[begin : until - len(_GAP)]) for begin, until in pairwise(cuts)]
    names = {name for section in sections for name in section.highest}
    highest = {n: max(s.highest.get(n, 0) for s in sections) for n in names}
    lowest = {n: min(s.lowest.get(n, highest[n]) for s in sections) for n in names}
    # A ms more, so that the last step of a round ends before the next begins.
    shifts = {n: highest[n] - lowest[n] + (1000 if n == b"ts" else 1) for n in names}
    fixed = len(data) - (end - first)
    number = max(1, -int(-(size - fixed) // (end - first)))
    with long.open("wb") as target:
        target.write(data[:first])
        for section in sections:
            section.write(target, number, shifts)
            target.write(_GAP)
        target.write(data[end:])


def _start(pattern: re.Pattern[bytes], data: bytes) -> int:
    found = pattern.search(data)
    return found.start() if found else -1


def _pieces(data: bytes) -> Iterator[bytes]:
    """The events in pieces of about 1 MB, without the separators between pieces."""
    position = 0
    while position < len(data):
        border = data.find(_BORDER, position + _PIECE)
        end = border + _BORDER.index(b",") if border >= 0 else len(data)
        yield data[position:end]
        position = end + len(_GAP)


if __name__ == "__main__":
    made, megabytes, *how = sys.argv[1:]
    if how and how[0] != "stacks":
        lengthen(Path(how[0]), Path(made), float(megabytes))
    else:
        record(Path(made), float(megabytes), stacks=bool(how))
