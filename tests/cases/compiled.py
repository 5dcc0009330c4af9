"""``torch.compile`` around the whole model or around each layer, with checkpoints and without.

A compiled graph runs no Python of the model, so the truth comes from the graphs themselves: the
backend below notes how many attention operators of the forward each graph holds, and counts
them when the graph runs. All layers are counted together, as ``layers``; attention alone is
counted, since a compiler recomputes cheap operators of its own accord.

``CompiledFunctionBackward`` holds recompute and true backward together. What is recomputed
there is declared open: the answer may say that it cannot tell, for that reason, or be right.
"""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

from .case import Build, Case, TrainingStep, doubled, full, none
from .loops import batch, next_token_loss, updated
from .model import NON_REENTRANT, REENTRANT, Checkpoints, Model, Oracle, Variant, run

N, R = NON_REENTRANT, REENTRANT
# As the CPU and each backend of a GPU have it.
_ATTENTION = tuple(
    f"_scaled_dot_product_{one}.default"
    for one in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
    )
)

Graph = Callable[[list[Any]], Any]


class _Silent(Oracle):
    """Counts nothing: the compiler is to see the model alone."""

    def enter(self, layer: str, part: str, training: bool) -> None:
        return None


class CountingBackend:
    """The ``aot_eager`` backend, with graphs that tell the oracle what they run."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._compile = aot_autograd(
            fw_compiler=self._count, partition_fn=min_cut_rematerialization_partition
        )

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return self._compile(graph, inputs)

    def _count(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Graph:
        times = sum(_is_attention(node) for node in graph.graph.nodes)

        def call(arguments: list[Any]) -> Any:
            for _ in range(times):
                self._oracle.enter("layers", "attention", training=True)
            return torch.fx.Interpreter(graph).boxed_run(arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _is_attention(node: torch.fx.Node) -> bool:
    # In a checkpoint it is an argument of an operator that keeps the random state.
    names = (str(node.target), *(str(argument) for argument in node.args))
    return any(name.endswith(_ATTENTION) for name in names)


class _Checkpointed(nn.Module):
    """A module under a checkpoint that the compiler can look into."""

    def __init__(self, module: nn.Module, variant: Variant) -> None:
        super().__init__()
        self.module = module
        self.variant = variant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.module, x, use_reentrant=self.variant == REENTRANT)
        return result


class _Compiled(nn.Module):
    """A layer compiled, with a checkpoint around the compiled code."""

    def __init__(self, layer: nn.Module, backend: CountingBackend, around: Variant | None) -> None:
        super().__init__()
        self.compiled = torch.compile(layer, backend=backend)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        return run(self.around, self.compiled, x)


What = Literal["model", "layers"]


def compiled(
    what: What,
    inside: tuple[Variant, ...] = (),
    around: Variant | None = None,
    outside: Variant | None = None,
) -> Build:
    """The ordinary step, compiled.

    Args:
        what: Compile the whole model, or each layer for itself.
        inside: Checkpoints around each layer, within what is compiled, inner first.
        around: Checkpoint around each compiled layer.
        outside: A second one around the same.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        torch._dynamo.reset()
        backend = CountingBackend(oracle)
        model = Model(_Silent())
        for variant in inside:
            model.layers = nn.ModuleList(_Checkpointed(layer, variant) for layer in model.layers)
        model.to(device)
        forward: Callable[[Tensor], Tensor] = model
        if what == "model":
            forward = torch.compile(model, backend=backend)
        else:
            layers = (_Compiled(layer, backend, around) for layer in model.layers)
            model.layers = nn.ModuleList(layers)
            model.asked = Checkpoints(outer=outside)
        tokens = batch(device)

        def gradients() -> None:
            with warnings.catch_warnings():
                # While it compiles, torch warns of what it looks at itself.
                warnings.simplefilter("ignore")
                next_token_loss(forward(tokens), tokens).backward()

        return updated(model.parameters(), gradients)

    return build


def whole_step(asked: Checkpoints | None = None) -> Build:
    """The step is compiled, the update with it; the model is not: it has something in it that the
    compiler leaves to Python. Forward and backward pass then stand in a range of the compiler's.
    """

    def build(oracle: Oracle, device: torch.device) -> TrainingStep:
        torch._dynamo.reset()
        model = Model(oracle, asked).to(device)
        adamw = torch.optim.AdamW(model.parameters())
        tokens = batch(device)
        in_python = torch._dynamo.disable(model)

        def train() -> None:
            next_token_loss(in_python(tokens), tokens).backward()
            adamw.step()
            adamw.zero_grad()

        compiled_step = torch.compile(train, backend="eager")

        def step() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled_step()

        return step

    return build


COMPILED = (
    none("compiled_step_none", "The whole step, around a model in Python.", whole_step()),
    full("compiled_step_n", "The same, checkpointed once.", whole_step(Checkpoints(outer=N))),
    Case("compiled_model_none", "One graph.", None, compiled("model")),
    Case(
        "compiled_model_n",
        "One graph with checkpointed layers in it.",
        None,
        compiled("model", (N,)),
    ),
    Case(
        "compiled_model_n_in_n",
        "The same, checkpointed twice: the compiler makes one of two.",
        None,
        compiled("model", (N, N)),
    ),
    Case(
        "compiled_model_r_in_n",
        "The same pair as reported, in one graph.",
        None,
        compiled("model", (R, N)),
    ),
    Case("compiled_layers_none", "A graph per layer.", None, compiled("layers")),
    Case(
        "compiled_layers_n_inside",
        "A graph per layer, with a checkpoint in it.",
        None,
        compiled("layers", (N,)),
    ),
    full(
        "compiled_layers_n",
        "A non-reentrant checkpoint around each compiled layer.",
        compiled("layers", around=N),
    ),
    full(
        "compiled_layers_r",
        "A reentrant checkpoint around each compiled layer.",
        compiled("layers", around=R),
    ),
    doubled(
        "compiled_layers_r_in_n",
        "Both around each compiled layer.",
        compiled("layers", around=R, outside=N),
    ),
    doubled(
        "compiled_layers_n_in_r", "The other way about.", compiled("layers", around=N, outside=R)
    ),
    full("compiled_layers_n_in_n", "Non-reentrant twice.", compiled("layers", around=N, outside=N)),
    Case(
        "compiled_layers_n_inside_n",
        "A checkpoint in each compiled layer and another around it: half of it is out of sight.",
        None,
        compiled("layers", (N,), around=N),
    ),
)
