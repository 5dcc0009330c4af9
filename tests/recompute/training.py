"""Forward and backward passes of small layers, checkpointed or not, for synthetic traces."""

from collections.abc import Sequence
from typing import Any

from recompute_scan.annotations import RegionAnnotation, recompute_name, region_name
from recompute_scan.recompute.study import RecomputeFacts
from tests.trace_builder import Call, Thread, annotation, node, op, optimizer, step, studied, thread

LAYER = ("layer_norm", "linear", "gelu", "linear")
NODES = {
    "layer_norm": "NativeLayerNormBackward0",
    "linear": "AddmmBackward0",
    "gelu": "GeluBackward0",
    "relu": "ReluBackward0",
    "embedding": "EmbeddingBackward0",
    "mse_loss": "MseLossBackward0",
}
SHAPE = [[2, 8]]


def run(first: int, names: Sequence[str] = LAYER, dims: Any = SHAPE) -> list[Call]:
    """Operators in a row with gradients on, numbered from ``first``; each has one inside it."""
    return [
        op(f"aten::{name}", op(f"aten::_{name}"), seq=first + place, dims=dims)
        for place, name in enumerate(names)
    ]


def no_grad(calls: Sequence[Call]) -> list[Call]:
    """The same operators run without gradients."""
    return [call.again() for call in calls]


def gradients(calls: Sequence[Call], recompute: Sequence[Call] = ()) -> list[Call]:
    """The nodes of these operators, last one first; a recompute stands in the first to run."""
    nodes = []
    for place, call in enumerate(reversed(calls)):
        name = NODES[str(call.name).removeprefix("aten::")]
        before = recompute if place == 0 else ()
        nodes.append(node(name, *before, op("aten::mm"), seq=call.args["Sequence number"]))
    return nodes


def reentrant(number: int, calls: Sequence[Call]) -> Call:
    """A reentrant checkpoint's forward: the operators without gradients, inside its function."""
    return op("CheckpointFunction", *no_grad(calls), seq=number)


def reentrant_backward(number: int, recompute: Sequence[Call]) -> Call:
    """Its backward: the operators again with gradients, then a backward pass of their own."""
    return node("CheckpointFunctionBackward", *recompute, *gradients(recompute), seq=number)


def training_step(number: int, *calls: Call) -> Call:
    return step(number, *calls, optimizer(op("aten::add_")))


def plain_step(number: int, layers: int = 3) -> Call:
    """Nothing is checkpointed."""
    passes = [run(1000 * number + 10 * place) for place in range(layers)]
    forward = [call for one in passes for call in one]
    return training_step(number, *forward, *gradients(forward))


def checkpointed_step(
    number: int, layers: int = 3, recomputes: dict[int, int] | None = None
) -> Call:
    """Layers under non-reentrant checkpoints; each runs again once, or as ``recomputes`` says."""
    base = 1000 * number
    passes = [run(base + 10 * place) for place in range(layers)]
    backward: list[Call] = []
    for place in reversed(range(layers)):
        again = [
            call
            for turn in range((recomputes or {}).get(place, 1))
            for call in run(base + 500 + 100 * place + 10 * turn)
        ]
        backward += gradients(passes[place], again)
    return training_step(number, *(call for one in passes for call in one), *backward)


def marked_step(
    number: int,
    recomputes: int,
    variants: tuple[str, str] = ("non-reentrant", "reentrant"),
    marked: int | None = None,
    options: str = "",
) -> Call:
    """Three layers, each under two checkpoints that the run wrapper marked.

    Each layer runs again ``recomputes`` times; the first ``marked`` of them (all by default) bear
    annotations. ``options`` are those of the outer call.
    """
    forward: list[Call] = []
    backward: list[Call] = []
    for layer in range(3):
        own = run(10 * layer)
        first, module = 2 * layer + 1, (f"layers.{layer}", "Layer")
        outer = RegionAnnotation(
            first, 0, variants[0], *module, "fsdp-wrapper", "train.py:31", options
        )
        inner = RegionAnnotation(
            first + 1, 1, variants[1], *module, "hf-gradient-checkpointing", "train.py:24"
        )
        forward.append(annotation(region_name(outer), annotation(region_name(inner), *own)))
        again: list[Call] = []
        for turn in range(recomputes):
            calls = run(500 + 100 * layer + 10 * turn)
            bears = marked is None or turn < marked
            again += [annotation(recompute_name(first + turn), *calls)] if bears else calls
        backward = [*gradients(own, again), *backward]
    return training_step(number, *forward, *backward)


def study_step(*calls: Call, others: Sequence[Thread] = ()) -> RecomputeFacts:
    """What the program finds in a trace of one step that consists of these calls."""
    return studied(thread(training_step(0, *calls)), *others)


def recompute_counts(facts: RecomputeFacts) -> list[int]:
    """How often each forward operator that has a backward ran again, in forward order."""
    return [int(times) for times in facts.counts.runs[facts.counts.counted]]
