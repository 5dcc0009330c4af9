"""Training loops that copy between host and device, recorded on the ``rig``, with what they copied.

    python -m tests.cost.offloads FOLDER [NAME…]

Operators, hooks, nodes and threads are torch's own (``tests/cases/device.py``). Each copy between
the two devices is counted where it is made, by the phase that the loop itself is in, and marked in
the recording by a range that :func:`with_copies` makes into what a GPU's recording has in its
place: a call and its copy.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.checkpoint import checkpoint

from tests.cases import device as rig
from tests.cases.kernel_names import Event
from tests.cases.shaped import SHAPES, shaped

STEPS, LAYERS, BATCH, WIDTH = 3, 6, 512, 512
# The mark of a copy: direction, bytes, host memory.
MARK = "host copy {} {} {}"
_MARKED = re.compile(r"host copy (to-host|to-device) (\d+) (\w+)$")
_NAMES = {
    "to-host": "Memcpy DtoH (Device -> {})",
    "to-device": "Memcpy HtoD ({} -> Device)",
}

Step = Callable[[], None]


class Counting:
    """Which phase the loop is in, and what it copied in each."""

    def __init__(self) -> None:
        self.phase = "rest"
        self.memory = "Pageable"
        self.copied: Counter[str] = Counter()

    def note(self, target: Tensor, source: Tensor) -> str | None:
        """Count a copy between two devices; its mark."""
        if target.device.type == source.device.type:
            return None
        direction = "to-host" if source.device.type == rig.NAME else "to-device"
        return self.add(direction, source.numel() * source.element_size())

    def add(self, direction: str, size: int) -> str:
        for what, number in (("count", 1), ("bytes", size)):
            self.copied[f"{direction} {self.phase} {what}"] += number
        return MARK.format(direction, size, self.memory)


COUNTING = Counting()


def watch_copies() -> None:
    """Have every copy between the devices counted and marked; before the rig is installed."""

    def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        mark = COUNTING.note(target, source)
        if mark is None:
            return rig._copy(target, source, non_blocking)
        with record_function(mark), rig._unseen(kernel=False):
            rig._to_cpu(target).copy_(rig._to_cpu(source))
        return target

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        copy_(target, source)
        return target

    def item(tensor: Tensor) -> Any:
        with record_function(COUNTING.add("to-host", tensor.element_size())):
            return rig._item(tensor)

    rig._OWN.update({"copy_": copy_, "_copy_from": copy_from, "_local_scalar_dense": item})


class Loop:
    """A stack of layers and its optimizer; what is special about it overrides a part of a step."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
        self.layers = nn.ModuleList(layers).to(device)
        self.stem, self.head = nn.Linear(WIDTH, WIDTH).to(device), nn.Linear(WIDTH, 8).to(device)
        self.given = torch.randn(BATCH, WIDTH)
        self.x = self.given.to(device)
        modules = (self.stem, self.layers, self.head)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.01)

    def batch(self) -> Tensor:
        return self.x

    def layer(self, number: int, x: Tensor) -> Tensor:
        result: Tensor = self.layers[number](x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number in range(LAYERS):
            x = self.layer(number, x)
        result: Tensor = self.head(x)
        return result

    def after_backward(self) -> None:
        """Between the backward pass and the update."""

    def after_update(self) -> None:
        """At the end of the step."""

    def passes(self) -> None:
        COUNTING.phase = "rest"
        x = self.batch()
        COUNTING.phase = "forward"
        loss = self.forward(x).square().mean()
        COUNTING.phase = "backward"
        loss.backward()
        COUNTING.phase = "rest"

    def step(self) -> None:
        self.passes()
        self.after_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_update()


class SavedOnCpu(Loop):
    """torch's own: whatever is saved, weights among it, tensor by tensor."""

    def layer(self, number: int, x: Tensor) -> Tensor:
        with save_on_cpu():
            return super().layer(number, x)


class SavedAroundCheckpoint(SavedOnCpu):
    """The inputs of checkpoints go to the host."""

    def layer(self, number: int, x: Tensor) -> Tensor:
        with save_on_cpu():
            result: Tensor = checkpoint(self.layers[number], x, use_reentrant=False)
        return result


class Accumulated(SavedOnCpu):
    """Two micro-batches a step."""

    def step(self) -> None:
        self.passes()
        super().step()


class Stashed(Loop):
    """As torchtune does it: no weights, nothing small, and what was sent last is not read back."""

    def forward(self, x: Tensor) -> Tensor:
        sent: dict[int, tuple[Tensor, Tensor]] = {}
        weights = {weight.data_ptr() for weight in self.layers.parameters()}
        COUNTING.memory = "Pinned"

        def pack(tensor: Tensor) -> int | Tensor:
            if tensor.data_ptr() in weights or tensor.numel() < 1024:
                return tensor
            sent[len(sent)] = tensor.cpu(), tensor
            return len(sent) - 1

        def unpack(packed: int | Tensor) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            there, here = sent[packed]
            return here if packed >= len(sent) - 3 else there.to(self.device)

        x = self.stem(x)
        with saved_tensors_hooks(pack, unpack):
            for number in range(LAYERS):
                x = self.layer(number, x)
        result: Tensor = self.head(x)
        return result


class _Offloaded(torch.autograd.Function):
    """As Unsloth does it: a checkpoint of its own, whose input waits on the host."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer, ctx.device = layer, x.device
        ctx.save_for_backward(x.cpu())
        with torch.no_grad():
            result: Tensor = layer(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        (there,) = ctx.saved_tensors
        x = there.to(ctx.device).detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.layer(x)
        torch.autograd.backward(result, gradient)
        return None, x.grad


class OffloadedCheckpoints(Loop):
    """Checkpoints' inputs on the host, by a function of their own."""

    def layer(self, number: int, x: Tensor) -> Tensor:
        result: Tensor = _Offloaded.apply(self.layers[number], x)
        return result


class BatchUploaded(Loop):
    """The batch comes from the host at the beginning of a step."""

    def batch(self) -> Tensor:
        return self.given.to(self.device)


class Watched(Loop):
    """Scalars go to the host in the forward pass, come back as scalars, and go after the update."""

    def layer(self, number: int, x: Tensor) -> Tensor:
        scale = x.abs().max().item()
        return super().layer(number, x) * torch.tensor(1.0 + 0 * scale).to(self.device)

    def after_update(self) -> None:
        self.head.weight.norm().item()


class OffloadedOptimizer(Loop):
    """As ZeRO-Offload: gradients leave in the backward pass, weights come in after the update."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.masters = [weight.detach().cpu() for weight in self.layers.parameters()]
        for weight in self.layers.parameters():
            weight.register_post_accumulate_grad_hook(self._leave)

    def _leave(self, weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.cpu()
        weight.grad = None

    def after_update(self) -> None:
        with torch.no_grad():
            for weight, master in zip(self.layers.parameters(), self.masters, strict=True):
                weight.copy_(master)


class _Fetch(torch.autograd.Function):
    """Before a layer's backward pass its weights come in once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fetch: Step) -> Tensor:
        ctx.fetch = fetch
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.fetch()
        return gradient, None


class OffloadedWeights(Loop):
    """As FSDP's CPU offloading: weights come in for both passes, gradients leave after the second.

    Nothing ever leaves in a forward pass.
    """

    swapped = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.masters = [weight.detach().cpu() for weight in self.layers.parameters()]

    def _fetch(self, number: int) -> None:
        with torch.no_grad():
            for place, weight in enumerate(self.layers[number].parameters()):
                if self.swapped:
                    weight.detach().cpu()
                weight.data.copy_(self.masters[2 * number + place])

    def layer(self, number: int, x: Tensor) -> Tensor:
        self._fetch(number)
        result: Tensor = _Fetch.apply(super().layer(number, x), lambda: self._fetch(number))
        return result

    def after_backward(self) -> None:
        for weight in self.layers.parameters():
            assert weight.grad is not None
            weight.grad.cpu()


class SwappedBlocks(OffloadedWeights):
    """Blocks of weights change places in both passes: one leaves where another comes in."""

    swapped = True


class WeightsAndActivations(OffloadedWeights):
    """Weights live on the host, and activations go there."""

    def layer(self, number: int, x: Tensor) -> Tensor:
        weights = {weight.data_ptr() for weight in self.layers.parameters()}

        def pack(tensor: Tensor) -> tuple[Tensor, bool]:
            leaves = tensor.data_ptr() not in weights
            return (tensor.cpu() if leaves else tensor), leaves

        def unpack(packed: tuple[Tensor, bool]) -> Tensor:
            return packed[0].to(self.device) if packed[1] else packed[0]

        with saved_tensors_hooks(pack, unpack):
            return super().layer(number, x)


class OutputsKept(Loop):
    """What layers return goes to the host to be looked at, and never comes back."""

    def layer(self, number: int, x: Tensor) -> Tensor:
        result = super().layer(number, x)
        result.detach().cpu()
        return result


LOOPS: dict[str, type[Loop]] = {
    "plain": Loop,
    "saved_on_cpu": SavedOnCpu,
    "saved_around_checkpoint": SavedAroundCheckpoint,
    "accumulated": Accumulated,
    "stashed": Stashed,
    "offloaded_checkpoints": OffloadedCheckpoints,
    "batch_uploaded": BatchUploaded,
    "watched": Watched,
    "offloaded_optimizer": OffloadedOptimizer,
    "offloaded_weights": OffloadedWeights,
    "swapped_blocks": SwappedBlocks,
    "weights_and_activations": WeightsAndActivations,
    "outputs_kept": OutputsKept,
}


def recorded(name: str, device: torch.device, folder: Path) -> tuple[Event, dict[str, int]]:
    """A loop's recording, and what a step copied."""
    loop = LOOPS[name](device)
    counted: list[Counter[str]] = []
    path = folder / "recording.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda one: one.export_chrome_trace(str(path)),
        record_shapes=True,
    ) as profiler:
        for _ in range(1 + STEPS):
            COUNTING.copied.clear()
            loop.step()
            counted.append(COUNTING.copied.copy())
            profiler.step()
    assert all(one == counted[-1] for one in counted[-STEPS:]), "the steps differ"
    recording: Event = json.loads(path.read_bytes())
    path.unlink()
    return recording, dict(counted[-1])


def with_copies(document: Event, *, stream: int = 30) -> Event:
    """The document with each marked range as a call and a copy, on a stream of their own."""
    events, copies, free = [], [], 0.0
    number = 10**6
    for event in sorted(document["traceEvents"], key=lambda event: float(event["ts"])):
        mark = _MARKED.match(event["name"])
        if mark is None:
            events.append(event)
            continue
        direction, size, memory = mark.groups()
        number += 1
        free = max(free, event["ts"] + 4) + 1 + int(size) / 20_000
        args = {"correlation": number}
        events.append({**event, "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "args": args})
        args |= {"device": 0, "stream": stream, "bytes": int(size)}
        copies.append({"ph": "X", "cat": "gpu_memcpy", "name": _NAMES[direction].format(memory)}
            | {"pid": 0, "tid": stream, "ts": free - 1 - int(size) / 20_000}
            | {"dur": int(size) / 20_000, "args": args})  # fmt: skip
    return document | {"traceEvents": events + copies}


def main(arguments: Sequence[str]) -> None:
    """Leave each loop's trace in the folder, and what a step of it copied."""
    folder, *names = arguments
    watch_copies()
    device = rig.install(launches=True)
    shape = next(one for one in SHAPES if one.name == "mixed")
    for name in names or LOOPS:
        COUNTING.memory = "Pageable"
        recording, copied = recorded(name, device, Path(folder))
        document = with_copies(shaped(recording, shape).document)
        (Path(folder) / f"{name}.json.gz").write_bytes(
            gzip.compress(json.dumps(document).encode(), 1)
        )
        (Path(folder) / f"{name}.copied.json").write_text(json.dumps(copied))


if __name__ == "__main__":
    main(sys.argv[1:])
