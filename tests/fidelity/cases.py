"""Small trainings whose recompute is, or is not, the computation that it repeats.

Each is built twice from the same seeds, with its checkpoints and without them. Their gradients and
buffers after one step are the truth; nothing of the tool has part in it.
"""

from __future__ import annotations

import contextlib
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


def case(*args: Any, **kwargs: Any) -> None:
    """Adds a case."""
    CASES.append(Case(*args, **kwargs))


# Random numbers

for variant, reentrant in BOTH.items():
    options = {"use_reentrant": reentrant, "preserve_rng_state": False}
    case(
        f"dropout, state dropped, {variant}",
        True,
        net(lambda: Mlp(behind=nn.Dropout(0.5)), **options),
        "aten.bernoulli_",
        "behind",
    )
    case(
        f"dropout, state kept, {variant}",
        False,
        net(lambda: Mlp(behind=nn.Dropout(0.5)), use_reentrant=reentrant),
    )
    case(
        f"dropout off by eval, state dropped, {variant}",
        False,
        net(lambda: Mlp(behind=nn.Dropout(0.5).eval()), **options),
    )
    case(
        f"BatchNorm in training, {variant}",
        True,
        net(lambda: Mlp(behind=nn.BatchNorm1d(D)), use_reentrant=reentrant),
        module="behind",
        buffers=True,
    )
    case(
        f"BatchNorm in eval, {variant}",
        False,
        net(lambda: Mlp(behind=nn.BatchNorm1d(D).eval()), use_reentrant=reentrant),
    )
case(
    "dropout, check off, state kept",
    False,
    net(lambda: Mlp(behind=nn.Dropout(0.5)), determinism_check="none"),
)
case(
    "dropout between, state dropped: later layers differ too",
    True,
    net(lambda: Mlp(between=nn.Dropout(0.3)), preserve_rng_state=False),
    "aten.bernoulli_",
    "between",
)
case(
    "RReLU, state dropped",
    True,
    net(lambda: Mlp(between=nn.RReLU()), preserve_rng_state=False),
    "aten.rrelu_with_noise",
    "between",
)
case("RReLU, state kept", False, net(lambda: Mlp(between=nn.RReLU())))


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


case("a generator of one's own", True, net(lambda: Own(_own_generator())), "aten.rand", "layers")
case("random.random() as a factor", True, net(lambda: Own(_python_random)), "aten.mul", "layers")
case("numpy noise", True, net(lambda: Own(_numpy_noise)), "aten._to_copy", "layers")
case("a layer left out at random", True, net(lambda: Own(_stochastic_depth), 6), "", "layers")
case("another branch each time", True, net(lambda: Own(_alternates)), "aten.sigmoid", "layers")
case(
    "a Python counter as a factor", True, net(lambda: Own(_scales_by_counter)), "aten.mul", "layers"
)
case("a Python counter that nothing depends on", False, net(lambda: Own(_only_counts)))


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


case("token counter, not used", True, net(lambda: Counter(False)), module="tokens", buffers=True)
case("token counter, used", True, net(lambda: Counter(True)), module="tokens")
case("a buffer that is written anew each time", False, net(lambda: Counter(False, once=True)))
case("moving average, replaced and used", True, net(Ema), "", "layers")
case(
    "BatchNorm in training, momentum 0",
    True,
    net(lambda: Mlp(behind=nn.BatchNorm1d(D, momentum=0.0))),
    module="num_batches_tracked",
    buffers=True,
)
case(
    "BatchNorm without statistics",
    False,
    net(lambda: Mlp(behind=nn.BatchNorm1d(D, track_running_stats=False))),
)
case(
    "spectral norm in training",
    True,
    net(lambda: Mlp(behind=nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)))),
    "",
    "behind",
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


case("autocast, non-reentrant", False, net(Mlp), around=_autocast)
case("autocast, reentrant", False, net(Mlp, use_reentrant=True), around=_autocast)


class Widened(Mlp):
    """Takes and gives float32 whatever it works in."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.float()).float()


case(
    "autocast forgotten by a hand-written checkpoint",
    True,
    hand_written(Widened),
    "aten.addmm",
    "up",
    around=_autocast,
)
case(
    "dropout in a hand-written checkpoint",
    True,
    hand_written(lambda: Mlp(behind=nn.Dropout(0.5))),
    "aten.bernoulli_",
    "behind",
)
case("a hand-written checkpoint that is right", False, hand_written(Mlp))


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


case(
    "a low-precision context that ends before the backward",
    True,
    lambda on: ForgetsType(
        [WithType() for _ in range(3)],
        caller(True, use_reentrant=True) if on else _plain,
    ),
    "aten.mm",
    "layers",
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


case(
    "an input that is edited behind autograd's back",
    True,
    lambda on: InPlace([Mlp() for _ in range(3)], caller(on) if on else _plain),
    "aten.addmm",
    "up",
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


case("a number drawn for a log", False, net(Logged, preserve_rng_state=False))
case(
    "a cache of which only the mean is used",
    False,
    net(Watched, determinism_check="none", use_reentrant=False),
)
case(
    "a cache that grows",
    True,
    net(Cache, determinism_check="none"),
    "aten.cat",
    "layers",
)
case("a factor that changes before the backward", True, _scaled, "aten.mul", "layers")


class Frozen(Net):
    """The first layer's input needs no gradient, and its weights do."""

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x).square().mean()


case(
    "reentrant without an input that needs a gradient",
    True,
    lambda on: Frozen([Mlp() for _ in range(2)], caller(on, use_reentrant=True)),
    "",
    "layers.0",
)


class NoGradBackward(HandWritten):
    """Forgets to switch autograd on in the recompute, and gives the gradient of a constant."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.run(x)
        return None, grad


case(
    "a hand-written checkpoint without autograd in its recompute",
    True,
    lambda on: Net(
        [Mlp() for _ in range(3)],
        NoGradBackward.apply if on else _plain,
    ),
    "aten.addmm",
    "up",
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


case("keyword tensors that lose their gradient", True, Keyword, "aten.mul", "layers")


# Looks odd, and is right


def _keep_products(*_: Any) -> Any:
    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        keep = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


case("a policy that keeps products", False, net(Mlp, context_fn=_keep_products))
case(
    "a policy, and dropout with its state",
    False,
    net(lambda: Mlp(behind=nn.Dropout(0.5)), context_fn=_keep_products),
)
case(
    "a policy, and dropout without its state",
    True,
    net(lambda: Mlp(behind=nn.Dropout(0.5)), context_fn=_keep_products, preserve_rng_state=False),
    "aten.bernoulli_",
    "behind",
)


def _twice(on: bool, inner: bool, outer: bool) -> nn.Module:
    first, second = caller(on, use_reentrant=inner), caller(on, use_reentrant=outer)

    def call(layer: nn.Module, x: torch.Tensor) -> Any:
        return second(lambda y: first(layer, y), x)

    return Net([Mlp(behind=nn.Dropout(0.4)) for _ in range(3)], call if on else _plain)


for inner in (False, True):
    for outer in (False, True):
        case(
            f"nested, {inner=}, {outer=}".replace("True", "reentrant").replace(
                "False", "non-reentrant"
            ),
            False,
            lambda on, inner=inner, outer=outer: _twice(on, inner, outer),
        )


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


case("mixture of experts", False, net(Routed))
case("mixture of experts, reentrant", False, net(Routed, use_reentrant=True))
case("LoRA with dropout", False, net(Lora))
case(
    "LoRA with dropout, state dropped",
    True,
    net(Lora, preserve_rng_state=False),
    "aten.bernoulli_",
    "drop",
)
case("memory that is filled part by part", False, net(Partial))
case(
    "attention layers of torch, with dropout",
    False,
    net(lambda: nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True)),
    shape=(4, 6, D),
)
case(
    "attention layers of torch, reentrant",
    False,
    net(lambda: nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True), use_reentrant=True),
    shape=(4, 6, D),
)
case(
    "attention layers of torch, fused where gradients are off",
    False,
    net(
        lambda: nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True).eval(),
        use_reentrant=True,
    ),
    shape=(4, 6, D),
)
case(
    "attention layers of torch, state dropped",
    True,
    net(
        lambda: nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True), preserve_rng_state=False
    ),
    "",
    "layers",
    shape=(4, 6, D),
)


class Recurrent(nn.Module):
    """An LSTM over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(D, D, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rnn(x)[0]


case("LSTM", False, net(Recurrent), shape=(4, 6, D))


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


case("convolutions", False, net(Image), shape=(4, 6, D))
case("convolutions, reentrant", False, net(Image, use_reentrant=True), shape=(4, 6, D))


def _without_early_stop() -> contextlib.AbstractContextManager[Any]:
    return set_checkpoint_early_stop(False)


case(
    "without early stop",
    False,
    net(lambda: Mlp(behind=nn.Dropout(0.2))),
    around=_without_early_stop,
)


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


case("a table that is computed once and kept", False, net(Rotary))
case("a table that is computed once and kept, reentrant", False, net(Rotary, use_reentrant=True))
