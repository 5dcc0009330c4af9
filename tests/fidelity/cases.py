"""Small trainings whose recompute is, or is not, the computation that it repeats.

Each is built twice from the same seeds, with its checkpoints and without them. Their gradients and
buffers after one step are the truth; nothing of the tool has part in it.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

D = 32
Layer = Callable[[Any], Any]


class Net(nn.Module):
    """An input projection, layers each behind a checkpoint of some kind, and a head."""

    def __init__(self, layers: list[nn.Module], call: Callable[..., Any]) -> None:
        super().__init__()
        self.embed = nn.Linear(D, D)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(D, 1)
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x).square().mean()


class Mlp(nn.Module):
    """Two products with something between them and something behind."""

    def __init__(self, between: nn.Module | None = None, behind: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.between = between or nn.GELU()
        self.behind = behind or nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.behind(self.down(self.between(self.up(x))))


class Own(nn.Module):
    """A product, and then a function of the case's own; ``self.n`` counts nothing by itself."""

    def __init__(self, then: Callable[[Own, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.then = then
        self.n = 0

    def forward(self, x: torch.Tensor) -> Any:
        return self.then(self, self.lin(x)).tanh()


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name: What is special about it.
        wrong: What its author expects; the truth is measured.
        build: Makes the model, with checkpoints or without.
        operator: The operator that shows it, where it is wrong.
        module: The innermost module around that.
        shape: Of the input.
        around: Entered around the step, with and without checkpoints.
        buffers: Whether what is wrong is the buffers, and not the gradients.
    """

    name: str
    wrong: bool
    build: Callable[[bool], nn.Module]
    operator: str = ""
    module: str = ""
    shape: tuple[int, ...] = (8, D)
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    buffers: bool = False


def caller(on: bool, **options: Any) -> Callable[..., Any]:
    """Calls a layer behind torch's checkpoint, or as it is."""
    options.setdefault("use_reentrant", False)
    if not on:
        return lambda layer, *args: layer(*args)
    return lambda layer, *args: checkpoint(layer, *args, **options)


def net(
    make: Callable[[], nn.Module], count: int = 3, **options: Any
) -> Callable[[bool], nn.Module]:
    """Builds a :class:`Net` of such layers."""
    return lambda on: Net([make() for _ in range(count)], caller(on, **options))


BOTH = {"non-reentrant": False, "reentrant": True}
CASES: list[Case] = []


def adding_to(cases: list[Case]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Add cases as ``right(NAME)(BUILD, …)`` and as ``wrong(NAME, OPERATOR, MODULE)(BUILD, …)``."""

    def case(wrong: bool, name: str, operator: str = "", module: str = "") -> Callable[..., None]:
        return lambda build, **how: cases.append(Case(name, wrong, build, operator, module, **how))

    return functools.partial(case, False), functools.partial(case, True)


right, wrong = adding_to(CASES)


# Random numbers

for variant, reentrant in BOTH.items():
    options = {"use_reentrant": reentrant, "preserve_rng_state": False}
    wrong(f"dropout, state dropped, {variant}", "aten.bernoulli_", "behind")(
        net(lambda: Mlp(behind=nn.Dropout(0.5)), **options)
    )
    right(f"dropout, state kept, {variant}")(
        net(lambda: Mlp(behind=nn.Dropout(0.5)), use_reentrant=reentrant)
    )
    right(f"dropout off by eval, state dropped, {variant}")(
        net(lambda: Mlp(behind=nn.Dropout(0.5).eval()), **options)
    )
    wrong(f"BatchNorm in training, {variant}", "", "behind")(
        net(lambda: Mlp(behind=nn.BatchNorm1d(D)), use_reentrant=reentrant), buffers=True
    )
    right(f"BatchNorm in eval, {variant}")(
        net(lambda: Mlp(behind=nn.BatchNorm1d(D).eval()), use_reentrant=reentrant)
    )
right("dropout, check off, state kept")(
    net(lambda: Mlp(behind=nn.Dropout(0.5)), determinism_check="none")
)
wrong("dropout between, state dropped: later layers differ too", "aten.bernoulli_", "between")(
    net(lambda: Mlp(between=nn.Dropout(0.3)), preserve_rng_state=False)
)
wrong("RReLU, state dropped", "aten.rrelu_with_noise", "between")(
    net(lambda: Mlp(between=nn.RReLU()), preserve_rng_state=False)
)
right("RReLU, state kept")(net(lambda: Mlp(between=nn.RReLU())))


def _own_generator() -> Callable[[Own, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return lambda _, x: x * torch.rand(x.shape, generator=generator)


def _python_random(_: Own, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def _numpy_noise(_: Own, x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(np.random.rand(*x.shape)).to(x)


def _stochastic_depth(_: Own, x: torch.Tensor) -> torch.Tensor:
    return x.relu() if random.random() < 0.5 else x.sin() * 3


def _alternates(layer: Own, x: torch.Tensor) -> torch.Tensor:
    layer.n += 1
    return x.relu() if layer.n % 2 else x.sigmoid() * 4


def _scales_by_counter(layer: Own, x: torch.Tensor) -> torch.Tensor:
    layer.n += 1
    return x * (0.5 * layer.n)


def _only_counts(layer: Own, x: torch.Tensor) -> torch.Tensor:
    layer.n += 1
    return x * 0.5


wrong("a generator of one's own", "aten.rand", "layers")(net(lambda: Own(_own_generator())))
wrong("random.random() as a factor", "aten.mul", "layers")(net(lambda: Own(_python_random)))
wrong("numpy noise", "aten._to_copy", "layers")(net(lambda: Own(_numpy_noise)))
wrong("a layer left out at random", "", "layers")(net(lambda: Own(_stochastic_depth), 6))
wrong("another branch each time", "aten.sigmoid", "layers")(net(lambda: Own(_alternates)))
wrong("a Python counter as a factor", "aten.mul", "layers")(net(lambda: Own(_scales_by_counter)))
right("a Python counter that nothing depends on")(net(lambda: Own(_only_counts)))


# Buffers


class Counter(nn.Module):
    """Counts tokens, as a router does; an average where asked for, and used where asked for."""

    tokens: torch.Tensor

    def __init__(self, used: bool, once: bool = False) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.used, self.once = used, once
        self.register_buffer("tokens", torch.zeros(D))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.lin(x)
        with torch.no_grad():
            if self.once:
                self.tokens.copy_(y.abs().mean(0))
            else:
                self.tokens.add_(y.abs().sum(0))
        return (y * self.tokens.mean()).sin() if self.used else y.relu()


class Ema(nn.Module):
    """Normalises by a moving average that it replaces instead of writing it."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.lin(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return (y - self.mean).tanh()


wrong("token counter, not used", "", "tokens")(net(lambda: Counter(False)), buffers=True)
wrong("token counter, used", "", "tokens")(net(lambda: Counter(True)))
right("a buffer that is written anew each time")(net(lambda: Counter(False, once=True)))
wrong("moving average, replaced and used", "", "layers")(net(Ema))
wrong("BatchNorm in training, momentum 0", "", "num_batches_tracked")(
    net(lambda: Mlp(behind=nn.BatchNorm1d(D, momentum=0.0))), buffers=True
)
right("BatchNorm without statistics")(
    net(lambda: Mlp(behind=nn.BatchNorm1d(D, track_running_stats=False)))
)
wrong("spectral norm in training", "", "behind")(
    net(lambda: Mlp(behind=nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))))
)


# Types and precision


class HandWritten(torch.autograd.Function):
    """A checkpoint of one's own that forgets the state around it."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: torch.Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def hand_written(make: Callable[[], nn.Module], count: int = 3) -> Callable[[bool], nn.Module]:
    """Like :func:`net`, with the hand-written checkpoint."""

    def call(layer: nn.Module, x: torch.Tensor) -> Any:
        return HandWritten.apply(layer, x)

    return lambda on: Net([make() for _ in range(count)], call if on else caller(False))


def _autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


right("autocast, non-reentrant")(net(Mlp), around=_autocast)
right("autocast, reentrant")(net(Mlp, use_reentrant=True), around=_autocast)


class Widened(Mlp):
    """Takes and gives float32 whatever it works in."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.float()).float()


wrong("autocast forgotten by a hand-written checkpoint", "aten.addmm", "up")(
    hand_written(Widened), around=_autocast
)
wrong("dropout in a hand-written checkpoint", "aten.bernoulli_", "behind")(
    hand_written(lambda: Mlp(behind=nn.Dropout(0.5)))
)
right("a hand-written checkpoint that is right")(hand_written(Mlp))


class WithType(nn.Module):
    """Works in the type that a flag says; somebody changes it between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.low = True

    def forward(self, x: torch.Tensor) -> Any:
        if self.low:
            y = x.bfloat16() @ self.lin.weight.bfloat16()
            return y.float().tanh()
        return (x @ self.lin.weight).float().tanh()


class ForgetsType(Net):
    """The flag is a context around the forward, gone in the backward, as FP8 recipes are."""

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers.children():
            vars(layer)["low"] = True
        loss = super().forward(x)
        if self.call is not _plain:
            for layer in self.layers.children():
                vars(layer)["low"] = False
        return loss


def _plain(layer: Any, *args: Any) -> Any:
    return layer(*args)


wrong("a low-precision context that ends before the backward", "aten.mm", "layers")(
    lambda on: ForgetsType(
        [WithType() for _ in range(3)], caller(True, use_reentrant=True) if on else _plain
    )
)

# Inputs


class InPlace(Net):
    """Edits the input of a layer after it has run."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            y = self.call(layer, x)
            with torch.no_grad():
                x.data.mul_(1.5)
            x = y
        return self.head(x).square().mean()


wrong("an input that is edited behind autograd's back", "aten.addmm", "up")(
    lambda on: InPlace([Mlp() for _ in range(3)], caller(on) if on else _plain)
)


class Cache(nn.Module):
    """Puts each call's keys behind those of the calls before, as a KV cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        y = self.lin(x)
        self.kept.append(y.detach())
        return (y * torch.cat(self.kept).sum(0)).sin()


class Scaled(Net):
    """A factor in a dictionary that the training changes before it goes backward."""

    def forward(self, x: torch.Tensor) -> Any:
        factor: Any = self.factor
        factor.data.fill_(1.0)
        loss = super().forward(x)
        factor.data.fill_(2.0)
        return loss


def _scaled(on: bool) -> nn.Module:
    factor = torch.ones(())
    model = Scaled([Own(lambda _, x: x * factor) for _ in range(3)], caller(on))
    model.factor = factor
    return model


class Watched(Cache):
    """The same, and only the mean is used, which stays as it is."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.lin(x)
        self.kept.append(y.detach())
        return (y * torch.cat(self.kept).mean(0)).sin()


class Logged(nn.Module):
    """Draws a number that is for its log only."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.log: list[float] = []

    def forward(self, x: torch.Tensor) -> Any:
        y = self.lin(x).tanh()
        place = torch.randint(0, D, (1,))
        self.log.append(float((y.detach()[0, place] * 2).sum()))
        return y.sin()


right("a number drawn for a log")(net(Logged, preserve_rng_state=False))
right("a cache of which only the mean is used")(
    net(Watched, determinism_check="none", use_reentrant=False)
)
wrong("a cache that grows", "aten.cat", "layers")(net(Cache, determinism_check="none"))
wrong("a factor that changes before the backward", "aten.mul", "layers")(_scaled)


class Frozen(Net):
    """The first layer's input needs no gradient, and its weights do."""

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x).square().mean()


wrong("reentrant without an input that needs a gradient", "", "layers.0")(
    lambda on: Frozen([Mlp() for _ in range(2)], caller(on, use_reentrant=True))
)


class NoGradBackward(HandWritten):
    """Forgets to switch autograd on in the recompute, and gives the gradient of a constant."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.run(x)
        return None, grad


wrong("a hand-written checkpoint without autograd in its recompute", "aten.addmm", "up")(
    lambda on: Net([Mlp() for _ in range(3)], NoGradBackward.apply if on else _plain)
)


class Conditioned(nn.Module):
    """A layer that gets a second tensor by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, cond: torch.Tensor) -> Any:
        return (self.lin(x) * cond).tanh()


class Keyword(Net):
    """A condition that is learned, passed by keyword past a hand-written checkpoint."""

    def __init__(self, on: bool) -> None:
        super().__init__([Conditioned() for _ in range(3)], _plain)
        self.cond = nn.Linear(D, D)
        self.on = on

    def forward(self, x: torch.Tensor) -> Any:
        cond = self.cond(x)
        x = self.embed(x)
        for layer in self.layers:
            if self.on:
                x = HandWritten.apply(_detaching(layer, {"cond": cond}), x)
            else:
                x = layer(x, cond=cond)
        return self.head(x).square().mean()


def _detaching(layer: nn.Module, given: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """Calls the layer with keywords as they are, and detached when it is recomputed."""
    ran = False

    def run(x: torch.Tensor) -> Any:
        nonlocal ran
        now = {key: value.detach() if ran else value for key, value in given.items()}
        ran = True
        return layer(x, **now)

    return run


wrong("keyword tensors that lose their gradient", "aten.mul", "layers")(Keyword)


# Looks odd, and is right


def _keep_products(*_: Any) -> Any:
    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        keep = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


right("a policy that keeps products")(net(Mlp, context_fn=_keep_products))
right("a policy, and dropout with its state")(
    net(lambda: Mlp(behind=nn.Dropout(0.5)), context_fn=_keep_products)
)
wrong("a policy, and dropout without its state", "aten.bernoulli_", "behind")(
    net(lambda: Mlp(behind=nn.Dropout(0.5)), context_fn=_keep_products, preserve_rng_state=False)
)


def _twice(on: bool, inner: bool, outer: bool) -> nn.Module:
    first, second = caller(on, use_reentrant=inner), caller(on, use_reentrant=outer)

    def call(layer: nn.Module, x: torch.Tensor) -> Any:
        return second(lambda y: first(layer, y), x)

    return Net([Mlp(behind=nn.Dropout(0.4)) for _ in range(3)], call if on else _plain)


for inner in (False, True):
    for outer in (False, True):
        right(
            f"nested, {inner=}, {outer=}".replace("True", "reentrant").replace(
                "False", "non-reentrant"
            )
        )(lambda on, inner=inner, outer=outer: _twice(on, inner, outer))


class Routed(nn.Module):
    """A mixture of experts: each token goes to the expert with the highest score."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.router(x).softmax(-1)
        weight, chosen = scores.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return x + out


class Lora(nn.Module):
    """A frozen product and a low-rank one beside it, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.a, self.b = nn.Linear(D, 4, bias=False), nn.Linear(4, D, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.b(self.a(self.drop(x)))


class Partial(nn.Module):
    """Fills memory that nobody has initialised, part by part."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.lin(x)
        out = torch.empty_like(y)
        mask = y > 0
        out[mask] = y[mask].sin()
        out[~mask] = y[~mask].cos()
        return out


right("mixture of experts")(net(Routed))
right("mixture of experts, reentrant")(net(Routed, use_reentrant=True))
right("LoRA with dropout")(net(Lora))
wrong("LoRA with dropout, state dropped", "aten.bernoulli_", "drop")(
    net(Lora, preserve_rng_state=False)
)
right("memory that is filled part by part")(net(Partial))
right("attention layers of torch, with dropout")(
    net(lambda: nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True)), shape=(4, 6, D)
)
right("attention layers of torch, reentrant")(
    net(lambda: nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True), use_reentrant=True),
    shape=(4, 6, D),
)
right("attention layers of torch, fused where gradients are off")(
    net(
        lambda: nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True).eval(), use_reentrant=True
    ),
    shape=(4, 6, D),
)
wrong("attention layers of torch, state dropped", "", "layers")(
    net(
        lambda: nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True), preserve_rng_state=False
    ),
    shape=(4, 6, D),
)


class Recurrent(nn.Module):
    """An LSTM over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(D, D, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rnn(x)[0]


right("LSTM")(net(Recurrent), shape=(4, 6, D))


class Image(nn.Module):
    """Convolution, group norm, upsampling: kernels that fold their inputs by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.back = nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(self.conv(x.unsqueeze(1))).relu()
        y = nn.functional.interpolate(y, scale_factor=2.0, mode="bilinear")
        return x + self.back(nn.functional.avg_pool2d(y, 2)).squeeze(1)


right("convolutions")(net(Image), shape=(4, 6, D))
right("convolutions, reentrant")(net(Image, use_reentrant=True), shape=(4, 6, D))


def _without_early_stop() -> contextlib.AbstractContextManager[Any]:
    return set_checkpoint_early_stop(False)


right("without early stop")(net(lambda: Mlp(behind=nn.Dropout(0.2))), around=_without_early_stop)


class Rotary(nn.Module):
    """A table of angles that is computed when it is first needed, and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        if self.table is None:
            self.table = torch.arange(D).float().cos()
        return self.lin(x) * self.table


right("a table that is computed once and kept")(net(Rotary))
right("a table that is computed once and kept, reentrant")(net(Rotary, use_reentrant=True))
