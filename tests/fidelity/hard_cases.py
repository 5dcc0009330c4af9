"""Trainings that are hard to judge: what looks wrong and is right, and what looks right and is not.

In the same form as :mod:`tests.fidelity.cases`; their labels are measured likewise.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint as apply
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from tests.fidelity.cases import Case, D, Mlp, Net, Own, adding_to, caller, net

HARD: list[Case] = []


right, wrong = adding_to(HARD)


def own(then: Callable[[Own, torch.Tensor], torch.Tensor], **options: Any) -> Any:
    """Builds a net of layers that do this after a product."""
    return net(lambda: Own(then), **options)


KEPT: dict[str, Any] = {"use_reentrant": False}
DROPPED: dict[str, Any] = {"preserve_rng_state": False}

# Drawn, and of no consequence


def _noise_for_a_log(layer: Any, x: torch.Tensor) -> Any:
    layer.log = float(torch.rand_like(x).sum())
    return x.sin()


def _noise_hidden(_: Any, x: torch.Tensor) -> Any:
    return torch.where(torch.ones_like(x, dtype=torch.bool), x, torch.rand(x.shape))


def _noise_into_a_log(layer: Any, x: torch.Tensor) -> Any:
    noisy = x + torch.rand(x.shape)
    layer.log = float(noisy.detach().mean())
    return x.sin()


def _argmax_of_noise(layer: Any, x: torch.Tensor) -> Any:
    layer.log = int((x + torch.rand(x.shape)).argmax())
    return x.sin()


right("noise like the input, for a log")(own(_noise_for_a_log, **DROPPED))
right("noise that a mask hides")(own(_noise_hidden, **DROPPED))
right("a noisy result for a log")(own(_noise_into_a_log, **DROPPED))
right("the largest of a noisy result for a log")(own(_argmax_of_noise, **DROPPED))

# A small part of a large tensor


def _one_column(_: Any, x: torch.Tensor) -> Any:
    scale = torch.ones(x.shape)
    scale[:, 1] = torch.rand(x.shape[0]) * 8
    return x * scale


def _one_row(_: Any, x: torch.Tensor) -> Any:
    scale = torch.ones(x.shape)
    scale[5] = torch.rand(x.shape[1]) * 200
    return x * scale


def _some_rows(_: Any, x: torch.Tensor) -> Any:
    return x[torch.randperm(x.shape[0])[: x.shape[0] // 2]].repeat(2, 1)


def _masked_scores(_: Any, x: torch.Tensor) -> Any:
    scores = x.masked_fill(torch.arange(D) < 3, float("-inf"))
    scale = torch.ones(x.shape)
    scale[:, 5] = torch.rand(x.shape[0]) * 8
    return (scores * scale).softmax(-1)


wrong("noise in one column", "aten.rand", "layers")(own(_one_column, **DROPPED), shape=(8192, D))
wrong("noise in one row", "aten.rand", "layers")(own(_one_row, **DROPPED), shape=(1000, D))
wrong("rows in another order", "aten.randperm", "layers")(
    own(_some_rows, **DROPPED), shape=(4096, D)
)
wrong("noise beside a mask", "aten.rand", "layers")(own(_masked_scores, **DROPPED), shape=(8192, D))

# Functions with a backward of their own, and operators of a library


class Noisy(torch.autograd.Function):
    """Dropout, written by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        mask = (torch.rand(x.shape) < 0.5) * 2.0
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class Straight(torch.autograd.Function):
    """Rounds forward, and backward scales by a random factor that it keeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(torch.rand(()) + 0.5)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class Last(nn.Module):
    """A product, and a function as the last of all."""

    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        self.lin, self.then = nn.Linear(D, D), then

    def forward(self, x: torch.Tensor) -> Any:
        return self.then(self.lin(x))


wrong("dropout by hand, last", "aten.rand")(net(lambda: Last(Noisy.apply), **DROPPED))
right("dropout by hand, state kept")(net(lambda: Last(Noisy.apply)))
wrong("dropout by hand, last, reentrant", "aten.rand")(
    net(lambda: Last(Noisy.apply), use_reentrant=True, **DROPPED)
)
wrong("a factor kept for the backward", "aten.rand")(net(lambda: Last(Straight.apply), **DROPPED))


@torch.library.custom_op("hard::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Noise of numpy's."""
    return x * torch.from_numpy(np.random.rand(*x.shape)).to(x)


noisy.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward((output / inputs[0]).detach()),
)


@torch.library.custom_op("hard::two", mutates_args=())
def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A result, and a random one."""
    return x * 2, torch.rand(x.shape)


two.register_autograd(lambda ctx, grad, _: grad * 2)


@torch.library.custom_op("hard::pair", mutates_args=())
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A result, and a random one."""
    return x * 2, x * torch.rand(x.shape)


@torch.library.custom_op("hard::rounding", mutates_args=())
def rounding(x: torch.Tensor) -> torch.Tensor:
    """As if by atomics."""
    return x * (1 + 1e-7 * torch.from_numpy(np.random.rand(*x.shape)).to(x))


rounding.register_autograd(lambda ctx, grad: grad)


@torch.library.custom_op("hard::fill_in", mutates_args={"out"})
def fill_in(x: torch.Tensor, out: torch.Tensor) -> None:
    """Writes another tensor."""
    out.copy_(x * torch.rand(x.shape))


def _second(_: Any, x: torch.Tensor) -> Any:
    y, mask = two(x)
    return y * mask


def _mutating(_: Any, x: torch.Tensor) -> Any:
    out = torch.empty(x.shape)
    fill_in(x.detach(), out)
    return x * out


wrong("an operator of numpy's noise", "hard.noisy", "layers")(net(lambda: Last(noisy)))
wrong("the second result of an operator", "hard.two", "layers")(own(_second, **DROPPED))
right("the second result, state kept")(own(_second))
right("an operator that rounds by chance")(own(lambda _, x: rounding(x)))
wrong("an operator that writes", "hard.fill_in", "layers")(own(_mutating, **DROPPED))
right("an operator that writes, state kept")(own(_mutating))

# The step around
NONE: Any = None


class Micro(Net):
    """All micro-batches forward, then all backward, in one order or the other."""

    order: Callable[[Any], Any] = reversed

    def forward(self, x: torch.Tensor) -> Any:
        run = functools.partial(super().forward)
        losses = [run(part) for part in x.chunk(4)]
        for one in list(self.order(losses))[:-1]:
            one.backward()
        return list(self.order(losses))[-1]


class Fifo(Micro):
    order = list


class Shared(Net):
    """Each layer twice."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for layer in [*self.layers, *self.layers]:
            x = self.call(layer, x)
        return self.head(x).square().mean()


class Penalty(Net):
    """A penalty on the gradient of the input."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x.requires_grad_()
        loss = super().forward(x)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.square().sum()


class TwiceBack(Net):
    """Goes backward twice."""

    def forward(self, x: torch.Tensor) -> Any:
        loss = super().forward(x)
        loss.backward(retain_graph=True)
        return loss


def of(kind: type[Net], layer: Callable[[], nn.Module], **options: Any) -> Any:
    """Builds a net of this kind."""
    return lambda on: kind([layer() for _ in range(3)], caller(on, **options))


def _dropping() -> nn.Module:
    return Mlp(behind=nn.Dropout(0.3))


for reentrant in (False, True):
    how = "reentrant" if reentrant else "non-reentrant"
    right(f"micro-batches, last first, {how}")(of(Micro, _dropping, use_reentrant=reentrant))
    right(f"micro-batches, first first, {how}")(of(Fifo, _dropping, use_reentrant=reentrant))
    right(f"layers used twice, {how}")(of(Shared, _dropping, use_reentrant=reentrant))
right("a gradient penalty")(of(Penalty, lambda: Mlp(nn.Tanh())))
wrong("a gradient penalty, dropout, state dropped", "aten.bernoulli_")(
    of(Penalty, _dropping, **DROPPED)
)
right("backward twice")(of(TwiceBack, _dropping))
wrong("backward twice, dropout, state dropped", "aten.bernoulli_")(
    of(TwiceBack, _dropping, **DROPPED)
)
right("FLOPs counted")(net(_dropping), around=lambda: FlopCounterMode(display=False))
right("saved on the CPU around")(net(_dropping), around=torch.autograd.graph.save_on_cpu)


def _saved(_: Any, x: torch.Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return x.sin() * x.cos()


right("saved on the CPU inside")(own(_saved))


class Sequential(Net):
    """Checkpointed in two parts."""

    call: Any

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        run = nn.Sequential(*self.layers)
        x = checkpoint_sequential(run, 2, x, use_reentrant=False) if self.call else run(x)
        return self.head(x).square().mean()


right("in two parts")(
    lambda on: Sequential([_dropping() for _ in range(4)], caller(True) if on else NONE)
)


def _composable(on: bool) -> nn.Module:
    model = Net([_dropping() for _ in range(3)], lambda layer, x: layer(x))
    for layer in model.layers:
        if on:
            apply(layer)
    return model


right("composable checkpoints")(_composable)

# Inside


def _vmapped(layer: Any, x: torch.Tensor) -> Any:
    return torch.func.vmap(lambda row: (row * row.sum()).sin())(x)


def _vmapped_random(layer: Any, x: torch.Tensor) -> Any:
    return torch.func.vmap(lambda r: r * torch.rand(r.shape), randomness="different")(x)


def _functional(layer: Any, x: torch.Tensor) -> Any:
    weights = {name: p * 1.1 for name, p in layer.lin.named_parameters()}
    return x + torch.func.functional_call(layer.lin, weights, (x,))


def _func_grad(layer: Any, x: torch.Tensor) -> Any:
    return torch.func.grad(lambda y: y.sin().sum())(x) * x


def _caught(layer: Any, x: torch.Tensor) -> Any:
    with contextlib.suppress(RuntimeError):
        x = x @ torch.ones(3, 3)
    return x.sin()


def _in_place(layer: Any, x: torch.Tensor) -> Any:
    y = x.sin()
    y[:, 1:3].mul_(2)
    y.view(-1)[::5].add_(1)
    return y.cos()


def _sparse(layer: Any, x: torch.Tensor) -> Any:
    return torch.sparse.mm(torch.eye(x.shape[0]).to_sparse(), x)


def _sparse_noise(layer: Any, x: torch.Tensor) -> Any:
    return torch.sparse.mm((torch.eye(x.shape[0]) * torch.rand(x.shape[0])).to_sparse(), x)


def _complex(layer: Any, x: torch.Tensor) -> Any:
    return torch.fft.irfft(torch.fft.rfft(x) * (0.5 + 0.5j), n=D)


def _complex_noise(layer: Any, x: torch.Tensor) -> Any:
    return torch.fft.irfft(torch.fft.rfft(x) * torch.rand(D // 2 + 1, dtype=torch.complex64), n=D)


def _float8(layer: Any, x: torch.Tensor) -> Any:
    return x * x.detach().to(torch.float8_e4m3fn).float()


def _inner_step(layer: Any, x: torch.Tensor) -> Any:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(y.sin().sum(), y)
    return x * grad


def _inference(layer: Any, x: torch.Tensor) -> Any:
    with torch.inference_mode():
        layer.seen = float((x * 2).sum())
    return x.sin()


def _new_parameter(layer: Any, x: torch.Tensor) -> Any:
    layer.scale = torch.full((D,), 1.5)
    return x * layer.scale


def _threads(layer: Any, x: torch.Tensor) -> Any:
    out: dict[int, torch.Tensor] = {}

    def run(n: int) -> None:
        out[n] = x * (n + 1)

    ts = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for t in ts:
        t.start()
    for t in ts:
        t.join()
    return out[0] + out[1]


def _from_numpy(layer: Any, x: torch.Tensor) -> Any:
    for n in range(6):
        x = x * torch.from_numpy(np.full(x.shape, 1.0 + 0.1 * n, dtype=np.float32))
    return x


def _own_mode(layer: Any, x: torch.Tensor) -> Any:
    with FlopCounterMode(display=False):
        return x @ layer.lin.weight


def _nested(layer: Any, x: torch.Tensor) -> Any:
    t = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 8]))
    return (t.sin() * 2).values()


def _nested_noise(layer: Any, x: torch.Tensor) -> Any:
    t = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 8]))
    return torch.nn.functional.dropout(t, 0.5).values()


def _ties(layer: Any, x: torch.Tensor) -> Any:
    place = (x > 0).float().topk(4, dim=-1).indices
    return x.scatter(1, place, 0.0)


def _sdpa(layer: Any, x: torch.Tensor) -> Any:
    y = x.view(1, 2, -1, D // 2)
    return nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.4).reshape(x.shape)


for name, then in {
    "vmap": _vmapped,
    "vmap that draws": _vmapped_random,
    "functional_call": _functional,
    "torch.func.grad": _func_grad,
    "an exception that is caught": _caught,
    "views written in place": _in_place,
    "a sparse product": _sparse,
    "complex": _complex,
    "float8": _float8,
    "a gradient inside": _inner_step,
    "inference mode inside": _inference,
    "an attribute replaced": _new_parameter,
    "threads inside": _threads,
    "numpy arrays one after the other": _from_numpy,
    "a mode inside": _own_mode,
    "nested tensors": _nested,
    "nested tensors, dropout": _nested_noise,
    "ties": _ties,
    "attention with dropout": _sdpa,
}.items():
    for reentrant in (False, True):
        how = "reentrant" if reentrant else "non-reentrant"
        if not reentrant and then in (_func_grad, _nested, _nested_noise):
            continue  # torch refuses these by itself
        right(f"{name}, {how}")(own(then, use_reentrant=reentrant))
wrong("vmap that draws, state dropped", "aten.rand")(own(_vmapped_random, **DROPPED))
wrong("a sparse product with noise", "aten.rand")(own(_sparse_noise, **DROPPED))
wrong("complex noise", "aten.rand")(own(_complex_noise, **DROPPED))
wrong("attention with dropout, state dropped")(own(_sdpa, **DROPPED))


class Wrap(torch.Tensor):
    """A tensor around a tensor."""

    inner: Any

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = tree_map_only(Wrap, lambda t: t.inner, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return tree_map_only(torch.Tensor, Wrap, out)


class InWrap(nn.Module):
    """Works in a subclass; its factor grows each time where asked for."""

    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.weight, self.grows = nn.Parameter(torch.randn(D, D) / 6), grows
        self.factor = [1.0]

    def forward(self, x: torch.Tensor) -> Any:
        w = WrapIt.apply(self.weight)
        y = torch.mm(WrapIt.apply(x), w)
        if self.grows:
            self.factor.append(1.0)
            y = y * WrapIt.apply(torch.tensor(float(len(self.factor))))
        return UnwrapIt.apply(y.sin())


class WrapIt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return Wrap(x.detach())

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g.inner if isinstance(g, Wrap) else g


class UnwrapIt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.inner.detach()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return Wrap(g)


right("a wrapper subclass")(net(lambda: InWrap(False)))
wrong("a wrapper subclass, a factor that grows", "aten.mul")(net(lambda: InWrap(True)))


class Attends(nn.Module):
    """Attention whose weights are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.MultiheadAttention(D, 4, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        y, weights = self.at(x, x, x, need_weights=True)
        return y * weights.sum()


class Rnn(nn.Module):
    """LSTM with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(D, D, 2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rnn(x)[0]


right("attention with weights")(net(Attends), shape=(4, 6, D))
wrong("attention with weights, state dropped", "", "at")(net(Attends, **DROPPED), shape=(4, 6, D))
right("LSTM with dropout")(net(Rnn), shape=(4, 6, D))
wrong("LSTM with dropout, state dropped", "", "rnn")(net(Rnn, **DROPPED), shape=(4, 6, D))
right("weight norm")(net(lambda: Last(nn.utils.parametrizations.weight_norm(nn.Linear(D, D)))))
right("orthogonal")(net(lambda: Last(nn.utils.parametrizations.orthogonal(nn.Linear(D, D)))))
right("autocast with its cache inside")(
    net(
        lambda: Own(
            lambda s, x: torch.autocast("cpu", torch.bfloat16)(
                lambda y: (s.lin(y) + s.lin(y * 2)).float()
            )(x)
        )
    )
)


class Structured(Net):
    """Inputs in structures and by keyword."""

    call: Any

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        mask = (x.detach() > 0).float()
        for layer in self.layers:

            def run(given: Any, *, extra: Any, layer: nn.Module = layer) -> Any:
                return {"y": [layer(given["x"][0]) * extra["mask"]]}

            if not self.call:
                x = run({"x": [x]}, extra={"mask": mask})["y"][0]
            else:
                x = checkpoint(run, {"x": [x]}, extra={"mask": mask}, use_reentrant=False)["y"][0]
        return self.head(x).square().mean()


right("structures and keywords")(
    lambda on: Structured([_dropping() for _ in range(3)], caller(True) if on else NONE)
)


@contextlib.contextmanager
def anomaly() -> Iterator[None]:
    with torch.autograd.detect_anomaly(check_nan=False):
        yield


right("anomaly mode")(net(_dropping), around=anomaly)
