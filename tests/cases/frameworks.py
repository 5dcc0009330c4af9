"""Checkpoint functions of other libraries, alone and nested with torch's and with themselves.

The libraries are no dependency of the tests: a case is there where its library is. How to get
them stands in ``benchmarks/results/correctness.md``.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Build, Case, TrainingStep
from .discarded import DiscardingMlp, discarded
from .loops import batch, next_token_loss, updated
from .model import LAYERS, NON_REENTRANT, REENTRANT, Layer, Model, Oracle, run

Function = Callable[[Tensor], Tensor]
# A function under a checkpoint.
Under = Callable[[Function], Function]
Layers = Callable[[list[Layer]], list[Function]]


def _torch_reentrant(function: Function) -> Function:
    return lambda x: run(REENTRANT, function, x)


def _torch_non_reentrant(function: Function) -> Function:
    return lambda x: run(NON_REENTRANT, function, x)


def _deepspeed(function: Function) -> Function:
    deepspeed: Any = importlib.import_module("deepspeed")
    return lambda x: deepspeed.checkpointing.checkpoint(function, x)


def _deepspeed_non_reentrant(function: Function) -> Function:
    name = "deepspeed.runtime.activation_checkpointing.checkpointing"
    checkpointing: Any = importlib.import_module(name)
    return lambda x: checkpointing.non_reentrant_checkpoint(function, x)


def _megatron(function: Function) -> Function:
    random = _megatron_without_cuda()
    return lambda x: random.checkpoint(function, False, x)


def _megatron_without_cuda() -> Any:
    """Its module of random states; on a CPU it would ask the GPU for its."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    if not torch.cuda.is_available():
        state = torch.zeros(0)
        random._get_cuda_rng_state = lambda *args, **kwargs: state
        random._set_cuda_rng_state = lambda *args, **kwargs: None
    return random


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _fairscale(function: Function) -> Function:
    checkpoint: Any = importlib.import_module("fairscale.nn.checkpoint")
    wrapped: Function = checkpoint.checkpoint_wrapper(_Module(function))
    return wrapped


def layered(layers: Layers, micro_batches: int = 1) -> Build:
    """The ordinary step, with what ``layers`` makes of the model's."""

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        model = Model(oracle).to(device)
        functions = layers([layer for layer in model.layers if isinstance(layer, Layer)])
        tokens = [batch(device) for _ in range(micro_batches)]

        def gradients() -> None:
            for some in tokens:
                x: Tensor = model.embedding(some)
                for function in functions:
                    x = function(x)
                next_token_loss(model.logits(x), some).backward()

        return updated(model.parameters(), gradients)

    return build


def under(*checkpoints: Under) -> Build:
    """The ordinary step, with these checkpoints around each layer, outermost first."""

    def within(function: Function) -> Function:
        for checkpoint in reversed(checkpoints):
            function = checkpoint(function)
        return function

    return layered(lambda layers: [within(layer) for layer in layers])


class _Discarding:
    """One call of Megatron-core's selective checkpoint."""

    def __init__(self, function: Function, x: Tensor) -> None:
        self._checkpoint = _megatron_without_cuda().CheckpointWithoutOutput(fp8=None)
        self.given: Tensor = self._checkpoint.checkpoint(function, x)

    def discard(self, later: Tensor) -> None:
        self._checkpoint.discard_output_and_register_recompute(later)


class _MegatronMlp(DiscardingMlp):
    discarding = _Discarding


def _cases(name: str, own: Under, once: tuple[str, ...] = ()) -> tuple[Case, ...]:
    """That function alone, and with torch's and itself; all pairs double, but for those named."""
    n, r = _torch_non_reentrant, _torch_reentrant
    pairs = {
        "round_r": ("Around torch's reentrant one.", under(own, r)),
        "round_n": ("Around torch's other one.", under(own, n)),
        "in_r": ("In torch's reentrant one.", under(r, own)),
        "in_n": ("In torch's other one.", under(n, own)),
        "twice": ("Round itself.", under(own, own)),
    }
    return (
        Case(name, "Around each layer.", "full", under(own)),
        *(
            Case(f"{name}_{pair}", about, "full" if pair in once else "doubled", build)
            for pair, (about, build) in pairs.items()
        ),
    )


# By the package that they need. DeepSpeed's functions keep their inputs as they are, so that
# what holds one of them is not asked to recompute.
FRAMEWORKS: dict[str, tuple[Case, ...]] = {
    "deepspeed": (
        *_cases("deepspeed", _deepspeed, once=("in_n",)),
        *_cases("deepspeed_n", _deepspeed_non_reentrant, once=("in_n", "twice")),
    ),
    "megatron": (
        *_cases("megatron", _megatron),
        Case(
            "megatron_discarded",
            "Its selective checkpoint, in each MLP half.",
            None,
            discarded(range(LAYERS), _MegatronMlp),
        ),
    ),
    "fairscale": _cases("fairscale", _fairscale),
}
INSTALLED = tuple(
    case
    for package, cases in FRAMEWORKS.items()
    if importlib.util.find_spec(package)
    for case in cases
)
