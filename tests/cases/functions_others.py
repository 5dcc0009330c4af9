"""Checkpoint functions in the ways of libraries and of people who train on one machine.

Each is written after what public code does: an input that is brought to the host through a buffer,
one that waits quantised, one that the node of the layer above fetches, tiles of an MLP half, a
recompute that another function's node or a gradient hook starts, hooks on saved tensors by hand.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .case import Case, doubled, full, partial
from .frameworks import Function, Layers, Under, layered, under
from .functions import family, named, parameters_of, plain, torchs
from .functions_more import HALF_KEPT
from .model import NON_REENTRANT, REENTRANT, Layer

N, R = torchs(NON_REENTRANT), torchs(REENTRANT)


def _again(ctx: Any, x: Tensor, gradient: Tensor) -> Any:
    """Runs the block once more and goes backward through it; gradients of ``apply``'s arguments."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        output = ctx.function(x)
    torch.autograd.backward(output, gradient)
    return None, x.grad


class _Buffered(torch.autograd.Function):
    """Its input is written to a buffer on the host, and from there to one on the device."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        kept = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        kept.copy_(x, non_blocking=True)
        ctx.save_for_backward(kept)
        ctx.function, ctx.device = function, x.device
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        x = torch.empty(kept.shape, dtype=kept.dtype, device=ctx.device)
        x.copy_(kept, non_blocking=True)
        return _again(ctx, x, gradient)


class _Afterwards(torch.autograd.Function):
    """Its input goes to the host when the block has run."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        with torch.no_grad():
            output = function(x)
        ctx.function, ctx.kept, ctx.device = function, x.detach().clone().to("cpu"), x.device
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _again(ctx, ctx.kept.to(ctx.device).clone(), gradient)


class _Quantised(torch.autograd.Function):
    """Its input waits as whole numbers, with a scale for each row."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
        ctx.save_for_backward((x / scale).round().clamp(-127, 127).to(torch.int8), scale)
        ctx.function = function
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        whole, scale = ctx.saved_tensors
        return _again(ctx, whole.to(scale.dtype) * scale, gradient)


class _Fetches(torch.autograd.Function):
    """Each node fetches the input of the one that comes next."""

    @staticmethod
    def forward(ctx: Any, waiting: list[Any], function: Function, x: Tensor) -> Tensor:
        ctx.kept, ctx.fetched = x.to("cpu", copy=True), None
        ctx.function, ctx.device, ctx.waiting = function, x.device, waiting
        waiting.append(ctx)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.waiting.remove(ctx)
        x = ctx.kept.to(ctx.device, copy=True) if ctx.fetched is None else ctx.fetched
        if ctx.waiting:
            following = ctx.waiting[-1]
            following.fetched = following.kept.to(following.device, copy=True)
        return None, *_again(ctx, x, gradient)


class _Inference(torch.autograd.Function):
    """Its first run is in inference mode, so that autograd sees nothing of it."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.inference_mode():
            output = function(x.detach())
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _again(ctx, ctx.saved_tensors[0], gradient)


class _TwoGradients(torch.autograd.Function):
    """Goes through its second run twice: for the input's gradient, then for the parameters'."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.parameters = function, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        (into,) = torch.autograd.grad(output, x, gradient, retain_graph=True)
        return None, into, *torch.autograd.grad(output, ctx.parameters, gradient)


class _AddsItself(torch.autograd.Function):
    """Adds its parameters' gradients up by itself."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor, parameters: tuple[Tensor, ...]) -> Tensor:
        ctx.function, ctx.parameters, ctx.x = function, parameters, x.detach()
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        into, *found = torch.autograd.grad(output, (x, *ctx.parameters), gradient)
        for parameter, one in zip(ctx.parameters, found, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.add_(one)
        return None, into, None


class _Tree(torch.autograd.Function):
    """Takes arguments by name and gives a dictionary's values back; what is no tensor passes by."""

    @staticmethod
    def forward(ctx: Any, function: Any, names: tuple[str, ...], *values: Any) -> Any:
        ctx.function, ctx.names = function, names
        ctx.others = [None if isinstance(one, Tensor) else one for one in values]
        ctx.save_for_backward(*(one for one in values if isinstance(one, Tensor)))
        with torch.no_grad():
            return tuple(function(**dict(zip(names, values, strict=True))).values())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensors = iter(ctx.saved_tensors)
        values = [
            next(tensors).detach().requires_grad_() if one is None else one for one in ctx.others
        ]
        with torch.enable_grad():
            given = ctx.function(**dict(zip(ctx.names, values, strict=True))).values()
        pairs = [
            (one, gradient)
            for one, gradient in zip(given, gradients, strict=True)
            if isinstance(one, Tensor) and one.requires_grad
        ]
        torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
        return None, None, *(one.grad if isinstance(one, Tensor) else None for one in values)


class _ByVjp(torch.autograd.Function):
    """Asks ``torch.func.vjp`` for what goes backward."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, names: list[str], x: Tensor, *rest: Tensor) -> Tensor:
        ctx.module, ctx.names = module, names
        ctx.save_for_backward(x, *rest)
        with torch.no_grad():
            result: Tensor = module(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *rest = (one.detach() for one in ctx.saved_tensors)

        def call(y: Tensor, *values: Tensor) -> Tensor:
            given = dict(zip(ctx.names, values, strict=True))
            result: Tensor = torch.func.functional_call(ctx.module, given, (y,))
            return result

        with torch.enable_grad():
            made: Any = torch.func.vjp(call, x, *rest)
            return None, None, *made[1](gradient)


class _Tiles(torch.autograd.Function):
    """Goes through its input in pieces along the sequence, forward and backward."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([function(part) for part in x.chunk(4, dim=1)], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach()
        found = []
        for part, one in zip(x.chunk(4, dim=1), gradient.chunk(4, dim=1), strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                output = ctx.function(leaf)
            torch.autograd.backward(output, one)
            found.append(leaf.grad)
        return None, torch.cat(found, dim=1)


class _Looks(torch.autograd.Function):
    """Runs its block once more without gradients, to see that it gives the same, and then with."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        ctx.function = function
        with torch.no_grad():
            output = function(x)
        ctx.save_for_backward(x, output.sum())
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, total = ctx.saved_tensors
        with torch.no_grad():
            torch.allclose(ctx.function(x).sum(), total, rtol=1e-2, atol=1e-2)
        return _again(ctx, x, gradient)


class _Reverses(torch.autograd.Function):
    """Works like a reversible layer: its node first turns the output back, without gradients.

    What a real one works out of its output alone stays here, for any block; the work is the same.
    """

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor, turns: int) -> Tensor:
        ctx.function, ctx.turns = function, turns
        with torch.no_grad():
            output = function(x)
        ctx.save_for_backward(x, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, output = ctx.saved_tensors
        with torch.no_grad():
            for _ in range(ctx.turns):
                x = x + 0.0 * (output - ctx.function(x))
        return *_again(ctx, x, gradient), None


class _Held:
    """What one call of a function shares with what runs its block again."""

    def __init__(self, function: Function, x: Tensor) -> None:
        self.function = function
        self.input = x.detach().requires_grad_()
        self.output: Tensor | None = None

    def run_again(self) -> None:
        with torch.enable_grad():
            self.output = self.function(self.input)


class _GoesThrough(torch.autograd.Function):
    """Its node goes backward through a run that something else made before."""

    @staticmethod
    def forward(ctx: Any, held: _Held, x: Tensor) -> Tensor:
        ctx.held = held
        with torch.no_grad():
            return held.function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        torch.autograd.backward(ctx.held.output, gradient)
        return None, ctx.held.input.grad


class _RunsFirst(torch.autograd.Function):
    """Passes its input on; its node runs the block before it, as in pipelines on one machine."""

    @staticmethod
    def forward(ctx: Any, held: _Held, x: Tensor) -> Tensor:
        ctx.held = held
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.held.run_again()
        return None, gradient


def _reversing(name: str, turns: int) -> Under:
    kind = named(name, _Reverses)
    return lambda function: lambda x: kind.apply(function, x, turns)


def _fetching(name: str) -> Under:
    kind, waiting = named(name, _Fetches), list[Any]()

    def checkpoint(function: Function) -> Function:
        # Nobody comes back to what runs without gradients.
        return lambda x: kind.apply(waiting if torch.is_grad_enabled() else [], function, x)

    return checkpoint


def _two_gradients(name: str) -> Under:
    kind = named(name, _TwoGradients)
    return lambda function: lambda x: kind.apply(function, x, *parameters_of(function))


def _adding(name: str) -> Under:
    kind = named(name, _AddsItself)
    return lambda function: lambda x: kind.apply(function, x, parameters_of(function))


def _tree(name: str) -> Under:
    kind = named(name, _Tree)

    def checkpoint(function: Function) -> Function:
        def block(*, hidden: Tensor, scale: float, use_cache: bool) -> dict[str, Any]:
            return {"hidden": function(hidden), "scale": scale, "cache": use_cache}

        def call(x: Tensor) -> Tensor:
            result: Tensor = kind.apply(block, ("hidden", "scale", "use_cache"), x, 1.0, False)[0]
            return result

        return call

    return checkpoint


def _by_vjp(name: str) -> Under:
    kind = named(name, _ByVjp)

    def checkpoint(function: Function) -> Function:
        assert isinstance(function, nn.Module)
        names = [name for name, _ in function.named_parameters()]
        return lambda x: kind.apply(function, names, x, *function.parameters())

    return checkpoint


def _in_two(name: str, first: str) -> Under:
    """Two functions for one checkpoint."""
    through, before = named(name, _GoesThrough), named(first, _RunsFirst)

    def checkpoint(function: Function) -> Function:
        def call(x: Tensor) -> Tensor:
            held = _Held(function, x)
            result: Tensor = before.apply(held, through.apply(held, x))
            return result

        return call

    return checkpoint


def _by_hook(name: str) -> Under:
    """A hook on the output's gradient runs the block again."""
    kind = named(name, _GoesThrough)

    def checkpoint(function: Function) -> Function:
        def call(x: Tensor) -> Tensor:
            held = _Held(function, x)
            result: Tensor = kind.apply(held, x)
            if result.requires_grad:
                result.register_hook(lambda _: held.run_again())
            return result

        return call

    return checkpoint


@contextmanager
def _keeping(function: Function, x: Tensor) -> Iterator[None]:
    """Numbers wait instead of saved tensors; who asks for one gets it from another run."""
    kept: list[Tensor] = []
    packed = [0]

    def pack(tensor: Tensor) -> int:
        del tensor
        packed[0] += 1
        return packed[0] - 1

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return tensor.detach()

    def unpack(number: int) -> Tensor:
        if not kept:
            with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
                function(x.detach().requires_grad_())
        return kept[number]

    with saved_tensors_hooks(pack, unpack):
        yield


def _by_hand(function: Function) -> Function:
    """Hooks on saved tensors: a checkpoint without a function."""

    def call(x: Tensor) -> Tensor:
        with _keeping(function, x):
            return function(x)

    return call


class _Chain(nn.Module):
    def __init__(self, functions: list[Function]) -> None:
        super().__init__()
        self.functions = functions
        self.held = nn.ModuleList(one for one in functions if isinstance(one, nn.Module))

    def forward(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x


def _segments(outer: Under, inner: Under, length: int) -> Layers:
    """One checkpoint around so many layers, another around each."""

    def made(layers: list[Layer]) -> list[Function]:
        inside = [inner(layer) for layer in layers]
        return [
            outer(_Chain(inside[begin : begin + length])) for begin in range(0, len(layers), length)
        ]

    return made


def _halves(outer: Under | None, attention: Under | None, mlp: Under | None) -> Layers:
    """One checkpoint around each layer, others around its halves."""

    def made(layers: list[Layer]) -> list[Function]:
        found: list[Function] = []
        for layer in layers:
            parts = [
                part if own is None else own(part)
                for part, own in ((layer.attention, attention), (layer.mlp, mlp))
            ]
            chain = _Chain(parts)
            found.append(chain if outer is None else outer(chain))
        return found

    return made


def _every_second(outer: Under, inner: Under) -> Layers:
    return lambda layers: [
        outer(layer if place % 2 else inner(layer)) for place, layer in enumerate(layers)
    ]


BUFFERED = plain("PinnedStash", _Buffered)
AFTERWARDS = plain("KeptLater", _Afterwards)
QUANTISED = plain("Int8Input", _Quantised)
FETCHES = _fetching("Prefetching")
INFERENCE = plain("ColdRun", _Inference)
TWO_GRADIENTS = _two_gradients("TwoGrads")
ADDING = _adding("AddsItself")
TREE = _tree("TreeKept")
VJP = _by_vjp("ByVjp")
LENGTHWISE = plain("TiledPart", _Tiles)
LOOKS = plain("LooksTwice", _Looks)
REVERSES, ITERATES = _reversing("Invertible", 1), _reversing("FixedPoint", 3)
IN_TWO = _in_two("HeldBlock", "RunsFirst")
BY_HOOK = _by_hook("HookedBlock")
BY_HAND: Under = _by_hand


OTHERS = (
    *family("buffered", "Through buffers to the host.", BUFFERED),
    *family("afterwards", "To the host behind the run.", AFTERWARDS),
    *family("int8", "Waits quantised.", QUANTISED),
    *family("prefetch", "Fetched by the node above.", FETCHES),
    *family("cold", "First in inference mode.", INFERENCE),
    *family("two_gradients", "Two passes through one run.", TWO_GRADIENTS, round_r=False),
    # Around itself the outer one would find no parameter used.
    *family("adds_itself", "Adds gradients by itself.", ADDING, round_r=False)[:-1],
    *family("tree", "Names and dictionaries.", TREE),
    *family("in_two", "Another function's node runs again.", IN_TWO),
    *family("hooked_block", "A hook on its output runs again.", BY_HOOK),
    *family("half_kept", "In half precision.", HALF_KEPT)[1:],
    full("vjp", "By torch.func.", under(VJP)),
    doubled("vjp_in_r", "In torch's reentrant one.", under(R, VJP)),
    Case("vjp_in_n", "In torch's other one.", None, under(N, VJP)),
    full("looks_twice", "Once to see that it is the same.", under(LOOKS), by_design=1),
    doubled("looks_in_r", "In torch's reentrant one.", under(R, LOOKS), by_design=1),
    Case("looks_in_n", "In torch's other one.", None, under(N, LOOKS), by_design=1),
    full(
        "looks_accumulated",
        "Two micro-batches.",
        layered(lambda layers: [LOOKS(layer) for layer in layers], 2),
        micro_batches=2,
        by_design=1,
    ),
    full("reverses", "Inverts first.", under(REVERSES), by_design=1),
    doubled("reverses_in_r", "In torch's reentrant one.", under(R, REVERSES), by_design=1),
    Case("reverses_in_n", "In torch's other one.", None, under(N, REVERSES), by_design=1),
    doubled("reverses_in_own", "In a function.", under(BUFFERED, REVERSES), by_design=1),
    full(
        "reverses_pairs",
        "Two layers each.",
        layered(_segments(REVERSES, lambda f: f, 2)),
        by_design=1,
    ),
    full("reverses_slowly", "Inverts by iteration.", under(ITERATES), by_design=3),
    full("by_hand", "Hooks on saved tensors.", under(BY_HAND)),
    doubled("by_hand_in_r", "In torch's reentrant one.", under(R, BY_HAND)),
    doubled("by_hand_round_r", "Around torch's reentrant one.", under(BY_HAND, R)),
    doubled("by_hand_in_own", "In a function.", under(BUFFERED, BY_HAND)),
    doubled("by_hand_round_own", "Around a function.", under(BY_HAND, BUFFERED)),
    full("by_hand_twice", "The inner one hides it all.", under(BY_HAND, BY_HAND)),
    doubled("buffered_round_int8", "Two functions.", under(BUFFERED, QUANTISED)),
    doubled("int8_round_buffered", "The other way.", under(QUANTISED, BUFFERED)),
    doubled("fetch_round_tree", "Two functions.", under(FETCHES, TREE)),
    doubled("in_two_round_cold", "Two functions.", under(IN_TWO, INFERENCE)),
    doubled("own_n_own", "Torch's between two.", under(BUFFERED, N, QUANTISED)),
    doubled("own_r_own", "The other between two.", under(BUFFERED, R, QUANTISED)),
    doubled("r_own_own", "Two in torch's.", under(R, BUFFERED, QUANTISED)),
    doubled("own_own_n", "Two around torch's.", under(BUFFERED, QUANTISED, N)),
    doubled("pairs_own", "Two layers, and each.", layered(_segments(BUFFERED, QUANTISED, 2))),
    full("pairs_own_once", "Two layers.", layered(_segments(BUFFERED, lambda f: f, 2))),
    doubled("pairs_own_r", "Two layers, torch's inside.", layered(_segments(BUFFERED, R, 2))),
    doubled("pairs_own_n", "The other inside.", layered(_segments(BUFFERED, N, 2))),
    doubled("pairs_r_own", "Torch's around two.", layered(_segments(R, BUFFERED, 2))),
    doubled("stack_own_r", "All layers, torch's in each.", layered(_segments(TREE, R, 4))),
    doubled("stack_own_own", "All layers, and each.", layered(_segments(TREE, TREE, 4))),
    doubled("stack_n_own", "Torch's around all.", layered(_segments(N, TREE, 4))),
    full("halves_own", "Both halves.", layered(_halves(None, TREE, TREE))),
    doubled("halves_in_own", "A layer and its halves.", layered(_halves(TREE, TREE, TREE))),
    doubled("mlp_in_own", "A layer and one half.", layered(_halves(TREE, None, BUFFERED))),
    doubled("mlp_own_in_n", "Torch's and one half.", layered(_halves(N, None, BUFFERED))),
    doubled("mlp_n_in_own", "The other way.", layered(_halves(BUFFERED, None, N))),
    partial("tiled_mlp", "Tiles of one half.", layered(_halves(None, None, LENGTHWISE))),
    full(
        "r_round_tiled_mlp", "In torch's.", layered(_halves(R, None, LENGTHWISE)), by_design=(0, 1)
    ),
    full(
        "tiled_mlp_in_n", "In the other.", layered(_halves(N, None, LENGTHWISE)), by_design=(0, 1)
    ),
    full(
        "tiled_mlp_in_own",
        "In a function.",
        layered(_halves(TREE, None, LENGTHWISE)),
        by_design=(0, 1),
    ),
    doubled("some_own_in_r", "Every second twice.", layered(_every_second(R, BUFFERED))),
    doubled("some_own_in_own", "Every second twice.", layered(_every_second(TREE, BUFFERED))),
    doubled("some_r_in_own", "Every second twice.", layered(_every_second(BUFFERED, R))),
    doubled(
        "own_in_r_accumulated",
        "Two micro-batches.",
        layered(lambda layers: [R(BUFFERED(layer)) for layer in layers], 2),
        micro_batches=2,
    ),
    doubled(
        "own_own_accumulated",
        "Two micro-batches.",
        layered(lambda layers: [TREE(QUANTISED(layer)) for layer in layers], 2),
        micro_batches=2,
    ),
)

# What runs the block again is no function that `run` marks, or holds marked ones whose marks do not
# tell that: annotations and operators disagree there, and confidence may not be high.
UNMARKED = frozenset(
    "in_two_round_r in_two_round_n hooked_block_round_r hooked_block_round_n by_hand_in_r "
    "by_hand_round_r by_hand_in_own pairs_own_r pairs_own_n mlp_n_in_own".split()
)
