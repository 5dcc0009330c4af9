"""Compiled trainings with and without checkpoints, each beside its plain twin.

A twin is the same model, neither compiled nor checkpointed: what a compiled step runs beyond it
ran again.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Backend = Literal["aot_eager", "inductor", "eager"]

Verdict = Literal["none", "partial", "full", "doubled", "inconclusive"]
_WIDTH, _TOKENS, _LAYERS = 32, 48, 3


@dataclass(frozen=True)
class Step:
    """One forward pass to the loss, the module whose weights it uses, and its backward pass."""

    run: Callable[[], Tensor]
    model: nn.Module
    backward: Callable[[Tensor], None] = torch.Tensor.backward

    def __call__(self) -> Tensor:
        return self.run()


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name: What tells it from the others.
        verdict: What the words of the design call it.
        make: Makes the step, compiled by the backend.
        plain: Makes the step of the twin.
        backend: What compiles it.
        settings: Settings of ``torch._functorch.config`` while it compiles.
        breaks: What the reason of a graph break has in it; empty where there is none.
        alone: The verdict from the compiler's log alone, where that is another.
    """

    name: str
    verdict: Verdict
    make: Callable[[str], Step]
    plain: Callable[[], Step]
    backend: Backend = "aot_eager"
    settings: tuple[tuple[str, Any], ...] = ()
    breaks: str = ""
    alone: Verdict | None = None


class Block(nn.Module):
    """A feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.gelu(self.down(functional.gelu(self.up(self.norm(x)))))


class Attending(nn.Module):
    """A layer with attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.rest = Block()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mix(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.rest(x + self.out(mixed.transpose(1, 2).flatten(2)))
        return result


class Breaking(Block):
    """A layer in the middle of which the compiler leaves to Python."""

    def forward(self, x: Tensor) -> Tensor:
        inside = functional.gelu(self.up(self.norm(x)))
        torch._dynamo.graph_break()
        return x + functional.gelu(self.down(inside))


class Stack(nn.Module):
    """Layers one after the other, each called by what is given for it."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.calls: list[Callable[[Tensor], Tensor]] = list(layers)

    def forward(self, x: Tensor) -> Tensor:
        for call in self.calls:
            x = call(x)
        return x


def layers(kind: type[nn.Module] = Block, number: int = _LAYERS) -> list[nn.Module]:
    """Layers of that kind."""
    torch.manual_seed(0)
    return [kind() for _ in range(number)]


def under(call: Callable[..., Any], *, reentrant: bool = False, **more: Any) -> Any:
    """The call under a checkpoint."""
    return lambda x: checkpoint(call, x, use_reentrant=reentrant, **more)


def train(
    call: Callable[[Tensor], Tensor], model: nn.Module, lengths: tuple[int, ...] = (_TOKENS,)
) -> Step:
    """A step of that model; batches of several lengths take turns."""
    batches = [torch.randn(2, length, _WIDTH, requires_grad=True) for length in lengths]
    turn = iter(range(1 << 30))
    return Step(lambda: call(batches[next(turn) % len(batches)]).pow(2).mean(), model)


@dataclass(frozen=True)
class Compiler:
    """``torch.compile`` with the case's backend and with these options."""

    options: tuple[tuple[str, Any], ...] = ()

    def compile(self, call: Any, backend: str) -> Any:
        """The call, compiled."""
        return torch.compile(call, backend=backend, **dict(self.options))


COMPILE = Compiler()
Around = Callable[[Any], Any] | Compiler


def stacked(
    *around: Around,
    kind: type[nn.Module] = Block,
    second: tuple[Around, ...] | None = None,
    whole: tuple[Around, ...] = (),
    lengths: tuple[int, ...] = (_TOKENS,),
) -> Callable[[str], Step]:
    """A stack whose layers are each put under these, inner first; then the whole stack.

    Every second layer is under ``second`` instead, where that is given.
    :data:`COMPILE` among them compiles what is inside.
    """

    def make(backend: str) -> Step:
        def wrap(call: Any, every: tuple[Around, ...]) -> Any:
            for one in every:
                call = one.compile(call, backend) if isinstance(one, Compiler) else one(call)
            return call

        stack = Stack(layers(kind))
        stack.calls = [
            wrap(layer, around if second is None or place % 2 == 0 else second)
            for place, layer in enumerate(stack.layers)
        ]
        return train(wrap(stack, whole), stack, lengths)

    return make


def plainly(kind: type[nn.Module] = Block) -> Callable[[], Step]:
    """The twin of a stack."""

    def make() -> Step:
        stack = Stack(layers(kind))
        return train(stack, stack)

    return make


def case(name: str, verdict: Verdict) -> Callable[..., Case]:
    """A stack and its twin; what comes next is as :func:`stacked` and :class:`Case` have it."""

    def of(
        *around: Around,
        kind: type[nn.Module] = Block,
        backend: Backend = "aot_eager",
        settings: tuple[tuple[str, Any], ...] = (),
        breaks: str = "",
        alone: Verdict | None = None,
        **stack: Any,
    ) -> Case:
        make = stacked(*around, kind=kind, **stack)
        return Case(name, verdict, make, plainly(kind), backend, settings, breaks, alone)

    return of


def once(call: Any) -> Any:
    """A non-reentrant checkpoint."""
    return under(call)


def reentrant(call: Any) -> Any:
    """A reentrant checkpoint."""
    return under(call, reentrant=True)


def keeping_products(call: Any) -> Any:
    """A checkpoint whose policy keeps matrix products."""

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        keep = operator in products
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return under(call, context_fn=lambda: create_selective_checkpoint_contexts(policy))


_STACKS = (
    case("model", "none")(whole=(COMPILE,)),
    case("model, checkpoints in it", "full")(once, whole=(COMPILE,)),
    case("model, every second layer", "partial")(once, second=(), whole=(COMPILE,)),
    case("model, reentrant in it", "full")(reentrant, whole=(COMPILE,)),
    case("model, two in it", "full")(once, once, whole=(COMPILE,)),
    case("model, policy keeps products", "partial")(keeping_products, whole=(COMPILE,)),
    case("model, checkpoint around it", "full")(whole=(COMPILE, once)),
    case("model, in it and around it", "doubled")(once, whole=(COMPILE, once)),
    case("layers", "none")(COMPILE),
    case("layers, checkpoint in each", "full")(once, COMPILE),
    case("layers, checkpoint around each", "full")(COMPILE, once),
    case("layers, reentrant around each", "full")(COMPILE, reentrant),
    case("layers, in and around", "doubled")(once, COMPILE, once),
    case("layers, in and reentrant around", "doubled")(once, COMPILE, reentrant),
    case("layers, two around", "doubled")(COMPILE, reentrant, once),
    case("layers, around every second", "partial")(COMPILE, once, second=(COMPILE,), alone="full"),
    case("layers, in every second", "partial")(once, COMPILE, second=(COMPILE,)),
    case("half compiled, checkpoints everywhere", "full")(once, COMPILE, second=(once,)),
    case("half compiled, those doubled", "doubled")(once, COMPILE, once, second=(once,)),
    case("graph break in each layer", "none")(
        kind=Breaking, whole=(COMPILE,), breaks="graph_break"
    ),
    case("graph break under each checkpoint", "full")(
        once, kind=Breaking, whole=(COMPILE,), alone="inconclusive", breaks="graph_break"
    ),
    case("attention, checkpoints in the model", "full")(once, kind=Attending, whole=(COMPILE,)),
    case("attention, layers doubled", "doubled")(once, COMPILE, once, kind=Attending),
)


def keeping_nothing_random(call: Any) -> Any:
    """A checkpoint whose policy keeps attention."""

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = "scaled_dot_product" in str(operator)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return under(call, context_fn=lambda: create_selective_checkpoint_contexts(policy))


def as_torchtitan(call: Any) -> Any:
    """A checkpoint that keeps attention and every second product, to the end of its block."""

    def contexts() -> Any:
        met: Counter[bool] = Counter()

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            keep = "scaled_dot_product" in str(operator)
            if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                met[context.is_recompute] += 1
                keep = met[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return under(call, context_fn=contexts, early_stop=False)


class Dropping(Block):
    """A layer that ends with a dropout, whose mask is all that gradients ask for there."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))))
        return result


class Averaging(torch.autograd.Function):
    """An autograd function of the script's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, (x.flatten(0, 1).T @ gradient.flatten(0, 1))


class Own(nn.Module):
    """A layer with an autograd function of the script's own, a dropout and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_WIDTH, _WIDTH) / 8)
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.linear.register_forward_hook(lambda *given: given[2] * 2)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = Averaging.apply(x, self.weight)
        result: Tensor = x + self.drop(functional.silu(self.linear(mixed)))
        return result


def compiled_backward(make: Callable[[str], Step]) -> Callable[[str], Step]:
    """The same steps with compiled autograd."""

    def again(backend: str) -> Step:
        step = make(backend)
        compiler = torch.compile(backend=backend)

        def backward(loss: Tensor) -> None:
            with compiled_autograd._enable(compiler):
                loss.backward()

        return replace(step, backward=backward)

    return again


def data_parallel(call: Any) -> Any:
    """DDP with small buckets, so that the compiler divides its graphs."""
    if not dist.is_initialized():
        dist._DEFAULT_FIRST_BUCKET_BYTES = 8192
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return DistributedDataParallel(call, bucket_cap_mb=0.01)


_FORMS = (
    Case(
        "compiled autograd, checkpoints in the model",
        "full",
        compiled_backward(stacked(once, whole=(COMPILE,))),
        plainly(),
    ),
    Case(
        "compiled autograd, layers doubled",
        "doubled",
        compiled_backward(stacked(once, COMPILE, once)),
        plainly(),
    ),
    case("DDP, model", "none")(whole=(data_parallel, COMPILE)),
    case("DDP, checkpoints in the model", "full")(once, whole=(data_parallel, COMPILE)),
    case("DDP, checkpoint around each compiled layer", "full")(
        COMPILE, once, whole=(data_parallel,)
    ),
    case("reduce-overhead, checkpoints in the model", "full")(
        once, whole=(Compiler((("mode", "reduce-overhead"),)),), backend="inductor"
    ),
    case("own autograd function, layers doubled", "doubled")(once, COMPILE, once, kind=Own),
    case("own autograd function, checkpoints in the model", "full")(
        once, kind=Own, whole=(COMPILE,)
    ),
    case("attention, policy keeps it", "partial")(
        keeping_nothing_random, kind=Attending, whole=(COMPILE,)
    ),
    case("as torchtitan, each layer", "partial")(as_torchtitan, COMPILE, kind=Attending),
    case("as torchtitan, checkpoint around each", "doubled")(
        as_torchtitan, COMPILE, once, kind=Attending
    ),
    case("dropout last, checkpoints in the model", "full")(
        once, kind=Dropping, whole=(COMPILE,), backend="inductor"
    ),
    case("attention, model", "none")(kind=Attending, whole=(COMPILE,)),
    case("lengths that change, checkpoints in the model", "full")(
        once, whole=(COMPILE,), lengths=(_TOKENS, 40, 56)
    ),
    case("lengths that change, layers doubled", "doubled")(
        once, COMPILE, once, lengths=(_TOKENS, 40, 56)
    ),
    case("backend eager, checkpoints in the model", "full")(
        once, whole=(COMPILE,), backend="eager", alone="inconclusive"
    ),
    case("backend eager, around each layer", "full")(
        COMPILE, once, backend="eager", alone="inconclusive"
    ),
    case("memory budget of 0", "partial")(
        kind=Attending, whole=(COMPILE,), settings=(("activation_memory_budget", 0.0),)
    ),
    case("memory budget of 0.5", "partial")(
        kind=Attending, whole=(COMPILE,), settings=(("activation_memory_budget", 0.5),)
    ),
)


def hugging_face(kind: str, *, switch: bool, inner: bool = False) -> Callable[[str], Step]:
    """A small model of transformers' from its configuration.

    Args:
        kind: ``llama``, ``bert`` or ``vit``.
        switch: Whether its own checkpoints are switched on.
        inner: Whether each layer is compiled, and not the model.
    """

    def make(backend: str) -> Step:
        model, batch = _model(kind)
        if switch:
            model.gradient_checkpointing_enable()
        if backend and inner:
            for layer in _layers_of(model):
                layer.forward = torch.compile(layer.forward, backend=backend)
        call = torch.compile(model, backend=backend) if backend and not inner else model
        return Step(lambda: call(**batch)[0].pow(2).mean(), model)

    return make


def _layers_of(model: Any) -> Any:
    for path in ("layers", "encoder.layer", "encoder.layers", "layer"):
        with suppress(AttributeError):
            return model.get_submodule(path)
    raise LookupError(type(model).__name__)


def _model(kind: str) -> tuple[Any, dict[str, Tensor]]:
    import transformers as hf  # noqa: PLC0415 - takes seconds

    torch.manual_seed(0)
    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    tokens = torch.randint(0, 90, (2, 24))
    if kind == "llama":
        llama = hf.LlamaModel(hf.LlamaConfig(vocab_size=90, use_cache=False, **small))
        return llama.train(), {"input_ids": tokens}
    # A part that gets no gradient has products in a compiled backward pass, and none otherwise.
    small |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "bert":
        bert = hf.BertModel(hf.BertConfig(vocab_size=90, **small), add_pooling_layer=False)
        return bert.train(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    vit = hf.ViTModel(hf.ViTConfig(image_size=32, patch_size=8, **small), add_pooling_layer=False)
    return vit.train(), {"pixel_values": torch.randn(2, 3, 32, 32)}


def _plain(kind: str) -> Callable[[], Step]:
    return lambda: hugging_face(kind, switch=False)("")


# A rotary embedding and the activation of a gate are cheaper worked out again than kept.
_UNCHECKED: dict[str, Verdict] = {"llama": "partial", "bert": "none", "vit": "none"}
_MODELS = tuple(
    case
    for kind, verdict in _UNCHECKED.items()
    for case in (
        Case(kind, verdict, hugging_face(kind, switch=False), _plain(kind)),
        Case(f"{kind}, checkpoints in it", "full", hugging_face(kind, switch=True), _plain(kind)),
        Case(
            f"{kind}, layers compiled under checkpoints",
            "full",
            hugging_face(kind, switch=True, inner=True),
            _plain(kind),
        ),
    )
)

_BY_INDUCTOR: dict[str, Verdict] = {
    "model": "partial",  # norms and activations, for free
    "model, checkpoints in it": "full",
    "model, every second layer": "partial",
    "model, policy keeps products": "partial",
    "model, in it and around it": "doubled",
    "layers, checkpoint in each": "full",
    "layers, checkpoint around each": "full",
    "layers, reentrant around each": "full",
    "layers, in and around": "doubled",
    "graph break under each checkpoint": "full",
}
_INDUCTOR = tuple(
    replace(case, name=f"{case.name}, inductor", backend="inductor", verdict=verdict)
    for case in _STACKS
    if (verdict := _BY_INDUCTOR.get(case.name)) is not None
)
CASES: tuple[Case, ...] = (*_STACKS, *_FORMS, *_MODELS, *_INDUCTOR)
