"""Checkpoint functions that people write themselves, under names of their own.

Each is a ``torch.autograd.Function`` whose forward runs the block without gradients and whose
backward runs it again with them, and then a backward pass of its own. What makes a checkpoint is
that, and not what it is called: the same function is made here under several names, with
arguments and gradients handed over in the ways that public code has. Beside them stand functions
that look like one and recompute nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .case import Build, Case, TrainingStep, doubled, full, none, partial
from .frameworks import Function, Under, under
from .loops import batch, next_token_loss, stepping, updated
from .model import NON_REENTRANT, REENTRANT, Model, Oracle, run


def parameters_of(function: Any) -> tuple[Tensor, ...]:
    """The parameters of a module, or of the modules that a function made by ``under`` holds."""
    if isinstance(function, nn.Module):
        return tuple(function.parameters())
    cells = getattr(function, "__closure__", None) or ()
    return tuple(p for cell in cells for p in parameters_of(cell.cell_contents))


class _PassesParameters(torch.autograd.Function):
    """Parameters are arguments and ``torch.autograd.grad`` gives their gradients.

    As in diffusion models: the block's inputs need no gradient for it to work.
    """

    @staticmethod
    def forward(ctx: Any, function: Function, number: int, *tensors: Tensor) -> Tensor:
        ctx.function = function
        ctx.inputs, ctx.parameters = list(tensors[:number]), list(tensors[number:])
        with torch.no_grad():
            return function(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            copies = [x.view_as(x) for x in ctx.inputs]
            output = ctx.function(*copies)
        found = torch.autograd.grad(
            output, ctx.inputs + ctx.parameters, gradients, allow_unused=True
        )
        return (None, None, *found)


class _RunsBackward(torch.autograd.Function):
    """Parameters get their gradients from ``torch.autograd.backward``, as torch's own does it."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            output = ctx.function(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


class _Offloads(torch.autograd.Function):
    """Its input waits in another memory (here: a copy), and the output comes as a tuple."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Any:
        kept = x.clone()
        with torch.no_grad():
            output = function(x)
        ctx.save_for_backward(kept)
        ctx.function = function
        return (output,)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        x = kept.clone().detach()
        x.requires_grad = True
        with torch.enable_grad():
            (output,) = (ctx.function(x),)
        torch.autograd.backward(output, gradient)
        return None, x.grad


class _ToHost(torch.autograd.Function):
    """Its input waits on the host, as where long sequences are fine-tuned on one GPU."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor, *others: Tensor) -> Any:
        kept = x.to("cpu")
        with torch.no_grad():
            output = function(x, *others)
        ctx.save_for_backward(kept)
        ctx.function, ctx.others, ctx.device = function, others, x.device
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        x = kept.to(ctx.device).detach()
        x.requires_grad_(True)
        with torch.enable_grad():
            output = ctx.function(x, *ctx.others)
        torch.autograd.backward(output, gradient)
        return (None, x.grad) + (None,) * len(ctx.others)


class _KeepsRandomState(torch.autograd.Function):
    """Puts the random state back for the second run, and restores it afterwards."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        ctx.function, ctx.state = function, torch.get_rng_state()
        with torch.no_grad():
            output = function(x)
        ctx.save_for_backward(x)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs = tuple(x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors)
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            output = ctx.function(*inputs)
        torch.set_rng_state(now)
        torch.autograd.backward((output,), (gradient,))
        return (None, *(x.grad for x in inputs))


def named(name: str, base: type[Any]) -> Any:
    """The same function under another name; autograd calls its node after it."""
    return type(name, (base,), {})


def passing_parameters(name: str) -> Under:
    kind = named(name, _PassesParameters)

    def checkpoint(function: Function) -> Function:
        parameters = parameters_of(function)
        return lambda x: kind.apply(function, 1, x, *parameters)

    return checkpoint


def plain(name: str, base: type[Any]) -> Under:
    """A function of one argument under that name, which may give a tuple of one back."""
    kind = named(name, base)

    def checkpoint(function: Function) -> Function:
        def call(x: Tensor) -> Tensor:
            output = kind.apply(function, x)
            result: Tensor = output[0] if isinstance(output, tuple) else output
            return result

        return call

    return checkpoint


def torchs(variant: Any) -> Under:
    return lambda function: lambda x: run(variant, function, x)


def family(stem: str, about: str, own: Under, *, round_r: bool = True) -> tuple[Case, ...]:
    """The function alone, in and around each of torch's, and around itself."""
    n, r = torchs(NON_REENTRANT), torchs(REENTRANT)
    over_r = doubled(f"{stem}_round_r", "Around torch's reentrant one.", under(own, r))
    return (
        Case(stem, about, "full", under(own)),
        doubled(f"{stem}_in_r", "In torch's reentrant one.", under(r, own)),
        Case(f"{stem}_in_n", "In torch's other one.", None, under(n, own)),
        *((over_r,) if round_r else ()),
        doubled(f"{stem}_round_n", "Around torch's other one.", under(own, n)),
        doubled(f"{stem}_twice", "Round itself.", under(own, own)),
    )


def _run_coupling(x: Tensor, y: Tensor, f: Function, g: Function) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        x = x + f(y)
        return x, y + g(x)


def _rebuild_coupling(
    f: Function, g: Function, x: Tensor, y: Tensor, dx: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inputs of a coupling, from its outputs, and the gradients of both."""
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        of_x = g(x)
    torch.autograd.backward(of_x, dy)
    assert x.grad is not None
    with torch.no_grad():
        y, dx = y - of_x, dx + x.grad
    with torch.enable_grad():
        y = y.detach().requires_grad_(True)
        of_y = f(y)
    torch.autograd.backward(of_y, dx)
    assert y.grad is not None
    with torch.no_grad():
        return x - of_y, y, dx, dy + y.grad


class _ReversibleBlock(torch.autograd.Function):
    """One coupling block that keeps its output only: its backward rebuilds the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, f: Function, g: Function) -> Any:
        outputs = _run_coupling(x, y, f, g)
        ctx.save_for_backward(*outputs)
        ctx.functions = f, g
        return outputs

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dy: Tensor) -> Any:
        (x, y), (f, g) = ctx.saved_tensors, ctx.functions
        _, _, dx, dy = _rebuild_coupling(f, g, x, y, dx, dy)
        return dx, dy, None, None


class _ReversibleChain(torch.autograd.Function):
    """All blocks in one function, rebuilt from the last to the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, blocks: Sequence[tuple[Any, Any]]) -> Any:
        for f, g in blocks:
            x, y = _run_coupling(x, y, f, g)
        ctx.blocks = blocks
        ctx.save_for_backward(x, y)
        return x, y

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dy: Tensor) -> Any:
        x, y = ctx.saved_tensors
        for f, g in reversed(ctx.blocks):
            x, y, dx, dy = _rebuild_coupling(f, g, x, y, dx, dy)
        return dx, dy, None


def _reversible(forward: Callable[[Any, Tensor, Tensor], Tensor]) -> Build:
    def backward(model: Model, tokens: Tensor) -> None:
        x: Tensor = model.embedding(tokens)
        next_token_loss(model.logits(forward(model, x, x.clone())), tokens).backward()

    return stepping(backward)


def reversible_blocks(name: str) -> Build:
    kind = named(name, _ReversibleBlock)

    def forward(model: Any, x: Tensor, y: Tensor) -> Tensor:
        for layer in model.layers:
            x, y = kind.apply(x, y, layer.attention, layer.mlp)
        return x + y

    return _reversible(forward)


def reversible_chain(name: str) -> Build:
    kind = named(name, _ReversibleChain)

    def forward(model: Any, x: Tensor, y: Tensor) -> Tensor:
        x, y = kind.apply(x, y, [(layer.attention, layer.mlp) for layer in model.layers])
        return x + y

    return _reversible(forward)


class _GradientInForward(torch.autograd.Function):
    """Works out gradients while it runs forward: a nested backward pass, and nothing again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf, heavy = x.detach().requires_grad_(True), weight.detach().requires_grad_(True)
            loss = F.cross_entropy(F.linear(leaf, heavy), labels)
            ctx.gradients = torch.autograd.grad(loss, (leaf, heavy))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (*(gradient * each for each in ctx.gradients), None)


class _RecomputesItself(torch.autograd.Function):
    """A gated product whose formula works out its own activation again, without gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.silu(F.linear(x, weight)) * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gate = F.linear(x, weight)
        sigmoid = torch.sigmoid(gate)
        slope = gradient * x * sigmoid * (1 + gate * (1 - sigmoid))
        into = gradient * F.silu(gate) + F.linear(slope, weight.t())
        return into, slope.flatten(0, -2).t() @ x.flatten(0, -2)


def _with(own: Callable[[Tensor, Tensor, Tensor], Tensor], checkpoint: Under | None) -> Build:
    """The ordinary step, whose last hidden state and head go through ``own`` for the loss."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(oracle).to(device)
        layers: list[Function] = list(model.layers)
        if checkpoint is not None:
            layers = [checkpoint(layer) for layer in layers]
        square = nn.Parameter(torch.eye(model.norm.normalized_shape[0], device=device))
        tokens = batch(device)

        def gradients() -> None:
            x: Tensor = model.embedding(tokens)
            for layer in layers:
                x = layer(x)
            own(model.norm(x), square, model.head.weight).backward()

        return updated([*model.parameters(), square], gradients)

    return build


def _loss_in_forward(x: Tensor, square: Tensor, head: Tensor) -> Tensor:
    labels = torch.zeros(x.shape[0] * x.shape[1], dtype=torch.long, device=x.device)
    loss: Tensor = _GradientInForward.apply((x @ square).flatten(0, 1), head, labels)
    return loss


def _loss_of_gate(x: Tensor, square: Tensor, head: Tensor) -> Tensor:
    gated: Tensor = _RecomputesItself.apply(x, square)
    return F.linear(gated, head).square().mean()


def reversible_cases(stem: str, name: str) -> tuple[Case, ...]:
    return (
        partial(f"{stem}_blocks", "A function per block.", reversible_blocks(name)),
        partial(f"{stem}_chain", "One function for all blocks.", reversible_chain(name)),
    )


FUNCTIONS = (
    *family("grad_ckpt", "Parameters as arguments.", passing_parameters("GradCkpt"), round_r=False),
    *family("remat", "As torch's own, by another name.", plain("_Remat", _RunsBackward)),
    *family("run_twice", "Keeps the random state.", plain("RunTwice", _KeepsRandomState)),
    *family("stash", "Offloads its input.", plain("HiddenStash", _Offloads)),
    *family("to_host", "Its input waits on the host.", plain("ToHost", _ToHost)),
    *reversible_cases("reversible", "ReverseCouple"),
    none("gradient_in_forward", "Nothing runs again.", _with(_loss_in_forward, None)),
    full(
        "gradient_in_forward_once",
        "The same behind checkpointed layers.",
        _with(_loss_in_forward, passing_parameters("BlockSaver")),
    ),
    none("recomputes_itself", "A formula's own work.", _with(_loss_of_gate, None)),
)
