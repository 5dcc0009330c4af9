"""Layers of different widths that note what autograd keeps, and the trace of a step of them."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    """Ends in an addition, which saves nothing: its result belongs to the next layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


WIDTHS = (64, 256, 96, 512, 128)


class Training:
    """Layers of different widths; those in ``stopped`` are not checkpointed."""

    def __init__(self, stopped: Iterable[int], reentrant: bool) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width) for width in WIDTHS)
        self.stopped, self.reentrant = set(stopped), reentrant
        self.x = torch.randn(64, 32, requires_grad=True)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=1e-3)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        y = self.x
        for place, layer in enumerate(self.layers):
            if place in self.stopped:
                y = layer(y)
            else:
                y = checkpoint(layer, y, use_reentrant=self.reentrant)
        y.square().mean().backward()
        self.optimizer.step()

    def saved_by_autograd(self, layer: int) -> int:
        """Bytes that autograd keeps for one layer, beside its input and its parameters."""
        module = self.layers[layer]
        x = self.x.detach().requires_grad_()
        known = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = module(x)
        del result
        return sum(kept.values())


def record_step(file: Path, stopped: Iterable[int], reentrant: bool) -> list[int]:
    """Write the trace of one step, in which the layers ``stopped`` are not checkpointed.

    Returns:
        Bytes that autograd keeps for each layer.
    """
    training = Training(stopped, reentrant)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True
    ) as profiler:
        training.step()
    profiler.export_chrome_trace(str(file))
    return [training.saved_by_autograd(layer) for layer in range(len(WIDTHS))]
