"""Models without attention, as kernels alone show them: by what their layers are made of.

Each layer is two parts, which stand for ``attention`` and ``mlp`` in the truth. `UNSEEN` were made
and labelled before the rules for kernels met them, and no rule was changed for them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .case import Build, Case, TrainingStep, doubled, full, none
from .loops import updated
from .model import NON_REENTRANT, REENTRANT, Oracle, Variant, run
from .watch import unwatched, watch

N, R = NON_REENTRANT, REENTRANT
Parts = Callable[[], tuple[nn.Module, nn.Module]]
WIDTH, LAYERS = 16, 4
IMAGE, ROWS = (2, WIDTH, 12, 12), (4, 8, WIDTH)


class Layer(nn.Module):
    """Two parts one after the other; ``inner`` is a checkpoint that the layer asks for."""

    def __init__(self, parts: Parts, inner: Variant | None, residual: bool) -> None:
        super().__init__()
        self.first, self.second = parts()
        self.inner, self.residual = inner, residual

    def forward(self, x: Tensor) -> Tensor:
        return run(self.inner, self.compute, x)

    def compute(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return x + result if self.residual else result


def trained(
    parts: Parts,
    shape: tuple[int, ...],
    outer: Variant | None = None,
    inner: Variant | None = None,
    *,
    layers: frozenset[int] = frozenset(range(LAYERS)),
    residual: bool = False,
    hook: Callable[[Tensor], object] | None = None,
    twice: bool = False,
) -> Build:
    """A stack of such layers on random inputs.

    Args:
        parts: Makes both parts of a layer.
        shape: Of the input.
        outer: Checkpoint around each layer of ``layers``.
        inner: The layers' own.
        layers: Which are checkpointed from outside.
        residual: Whether the input is added to each layer's output.
        hook: Called in a gradient hook with what the layer computes of its input once more.
        twice: The gradient's norm is part of the loss.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        stack = nn.ModuleList(Layer(parts, inner, residual) for _ in range(LAYERS)).to(device)
        for number, layer in enumerate(stack):
            assert isinstance(layer, Layer)
            watch(oracle, layer.first, f"layers.{number}", "attention")
            watch(oracle, layer.second, f"layers.{number}", "mlp")
        inputs = torch.randn(shape, device=device, requires_grad=True)

        def probed(layer: nn.Module, x: Tensor, y: Tensor) -> None:
            if hook is not None and torch._C._current_graph_task_id() == -1:
                given = x.detach()

                def probe(gradient: Tensor) -> None:
                    with unwatched(oracle), torch.no_grad():
                        hook(layer(given))

                y.register_hook(probe)

        def gradients() -> None:
            x = inputs
            for number, layer in enumerate(stack):
                y = run(outer if number in layers else None, layer, x)
                probed(layer, x, y)
                x = y
            loss = x.square().mean()
            if twice:
                (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
                loss = loss + slope.square().sum()
            loss.backward()
            inputs.grad = None

        return updated(stack.parameters(), gradients)

    return build


def conv_relu() -> tuple[nn.Module, nn.Module]:
    """As VGG: no norm."""
    return tuple(  # type: ignore[return-value]
        nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()) for _ in range(2)
    )


def conv_norm_silu() -> tuple[nn.Module, nn.Module]:
    """As EfficientNet and YOLO."""
    first, second = (
        nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.SiLU())
        for _ in range(2)
    )
    return first, second


def mlp_relu() -> tuple[nn.Module, nn.Module]:
    """Products and ReLUs alone."""
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU()), nn.Linear(4 * WIDTH, WIDTH)


def mlp_gelu() -> tuple[nn.Module, nn.Module]:
    """A transformer's MLP."""
    first = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
    return first, nn.Linear(4 * WIDTH, WIDTH)


class Gated(nn.Module):
    """A recurrence in a loop, as Mamba's without its fused kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        decay, value = self.gate(x).sigmoid(), F.silu(self.into(x))
        state = torch.zeros_like(value[:, 0])
        states = []
        for place in range(x.shape[1]):
            state = decay[:, place] * state + value[:, place]
            states.append(state)
        return torch.stack(states, 1)


def recurrent() -> tuple[nn.Module, nn.Module]:
    """A gated recurrence and a product."""
    return nn.Sequential(nn.LayerNorm(WIDTH), Gated()), nn.Linear(WIDTH, WIDTH)


class Cell(nn.Module):
    """A GRU cell over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.new = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        states = []
        for place in range(x.shape[1]):
            reset, keep = self.gates(torch.cat([x[:, place], state], -1)).sigmoid().chunk(2, -1)
            new = self.new(torch.cat([x[:, place], reset * state], -1)).tanh()
            state = keep * state + (1 - keep) * new
            states.append(state)
        return torch.stack(states, 1)


def cells() -> tuple[nn.Module, nn.Module]:
    """Cells in a loop, then a product."""
    return Cell(), nn.Linear(WIDTH, WIDTH)


class Rnn(nn.Module):
    """The states of torch's GRU: one operator, with one for each place inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.cells(x)[0]
        return result


def rnn() -> tuple[nn.Module, nn.Module]:
    """One operator, which early stop interrupts."""
    return nn.Identity(), Rnn()


class ChannelsLast(nn.Module):
    """ConvNeXt's second half: a norm and an MLP over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.permute(0, 2, 3, 1))
        result: Tensor = self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        return result


def conv_next() -> tuple[nn.Module, nn.Module]:
    """A convolution per channel, then an MLP."""
    return nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH), ChannelsLast()


def products_only() -> tuple[nn.Module, nn.Module]:
    """No kernel here tells its direction."""
    return nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)


class Mixing(nn.Module):
    """MLP-Mixer's first half: over places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.over = nn.LayerNorm(WIDTH), nn.Linear(ROWS[1], ROWS[1])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = F.gelu(self.over(self.norm(x).transpose(1, 2))).transpose(1, 2)
        return x + result


def mixer() -> tuple[nn.Module, nn.Module]:
    """Over places, then over channels."""
    return Mixing(), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())


class SwiGlu(torch.autograd.Function):
    """It computes its activation again in its own gradient, as fused ones do."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        again = F.silu(gate)
        return torch.ops.aten.silu_backward(gradient * up, gate), gradient * again


class Fused(nn.Module):
    """An MLP with it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = SwiGlu.apply(self.gate(x), self.up(x))
        return result


def fused() -> tuple[nn.Module, nn.Module]:
    """By design the activation runs again, and nothing else."""
    return nn.Sequential(nn.LayerNorm(WIDTH), Fused()), nn.Linear(2 * WIDTH, WIDTH)


def _all(name: str, parts: Parts, shape: tuple[int, ...], *, residual: bool = False) -> list[Case]:
    def case(suffix: str, verdict: Any, **asked: Any) -> Case:
        return Case(
            f"{name}_{suffix}", parts.__doc__ or "", verdict,
            trained(parts, shape, residual=residual, **asked)
        )  # fmt: skip

    return [
        case("none", "none"),
        case("n", "full", outer=N),
        case("r", "full", outer=R),
        case("r_in_n", "doubled", outer=N, inner=R),
        case("n_in_r", "doubled", outer=R, inner=N),
        case("n_some", "partial", outer=N, layers=frozenset({0, 1})),
    ]


def _hooked(name: str, parts: Parts, shape: tuple[int, ...], hook: Any) -> Case:
    about = f"{parts.__doc__} A gradient hook runs each layer once more."
    return Case(f"{name}_hooked", about, "none", trained(parts, shape, hook=hook))


SEEN = (
    *_all("vgg", conv_relu, IMAGE),
    *_all("mlp_relu", mlp_relu, ROWS),
    *_all("recurrent", recurrent, ROWS, residual=True),
    *_all("products", products_only, ROWS),
    *_all("swiglu", fused, ROWS, residual=True),
    _hooked("mlp_relu", mlp_relu, ROWS, lambda y: y.norm()),
    _hooked("vgg", conv_relu, IMAGE, lambda y: y.abs().amax()),
    none("vgg_twice", "A gradient penalty.", trained(conv_relu, IMAGE, twice=True)),
)
UNSEEN = (
    *_all("yolo", conv_norm_silu, IMAGE),
    *_all("mlp_gelu", mlp_gelu, ROWS, residual=True),
    *_all("cells", cells, ROWS),
    *_all("convnext", conv_next, IMAGE, residual=True),
    *_all("mixer", mixer, ROWS),
    _hooked("mlp_gelu", mlp_gelu, ROWS, lambda y: y.std()),
    _hooked("yolo", conv_norm_silu, IMAGE, lambda y: y.isfinite().all()),
    _hooked("mixer", mixer, ROWS, lambda y: F.cosine_similarity(y, y.roll(1, 0), -1).mean()),
    none("mixer_twice", "A gradient penalty.", trained(mixer, ROWS, twice=True)),
)
# Kernels alone do not show them.
RNNS = (
    full("rnn_n", "One operator.", trained(rnn, ROWS, outer=N)),
    doubled("rnn_n_in_r", "One operator.", trained(rnn, ROWS, outer=R, inner=N)),
)
