"""Device activity of training steps whose recomputes are known, because they are laid out here.

The layout knows how checkpoints work and nothing of the analyser: a backward pass goes through
the layers from the last to the first, and at the last layer of each checkpointed group it runs
that group's forward again, outer groups first. How often a layer ran again is how many
groups hold it.

Kernel names are real ones, see ``test_attention_kernels``.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.cases.kernel_names import ATTENTION

Group = tuple[int, int]  # first and last layer
Event = dict[str, Any]
Kind = Literal["forward", "recompute", "backward"]


@dataclass(frozen=True)
class Names:
    """Main kernels and helpers of one family."""

    forward: str
    backward: str
    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()


def _names(kernels: tuple[str, tuple[str, ...]]) -> Names:
    """Of several kernels of a backward call the second is the main one."""
    forward, backward = kernels
    main = min(1, len(backward) - 1)
    return Names(forward, backward[main], backward[:main], backward[main + 1 :])


ALL = {
    "flash_attention_2": _names(ATTENTION["flash_2"]),
    "flash_attention_3": _names(ATTENTION["flash_3"]),
    "cudnn_attention": _names(ATTENTION["cudnn"]),
    "efficient_attention": _names(ATTENTION["efficient"]),
    "aiter_attention": Names(
        "aiter::fmha_fwd_hd128_bf16_causal",
        "aiter::fmha_bwd_hd128_bf16_causal_a32_rtna_psskddv",
        before=("aiter::fmha_bwd_hd128_odo_bf16",),
        behind=("aiter::fmha_bwd_hd128_dq_convert_bf16",),
    ),
    "triton_attention": _names(ATTENTION["aotriton"]),
}
FLASH_2 = ALL["flash_attention_2"]


def each_layer(layers: int, levels: int = 1) -> list[Group]:
    """So many checkpoints around each layer."""
    return [(layer, layer) for layer in range(layers)] * levels


def backward_pass(layers: int, groups: Iterable[Group]) -> list[Kind]:
    """Attention in one backward pass, in order."""
    groups = sorted(groups, key=lambda each: each[0] - each[1])
    events: list[Kind] = []
    for layer in reversed(range(layers)):
        for first, last in groups:
            if last == layer:
                events += ["recompute"] * (last - first + 1)
        events.append("backward")
    return events


def multiplicity(layers: int, groups: Iterable[Group]) -> list[int]:
    """The truth: how often each layer runs again."""
    held = list(groups)
    return [sum(first <= layer <= last for first, last in held) for layer in range(layers)]


@dataclass(frozen=True)
class Layout:
    """How a recording looks.

    Attributes:
        layers: Attention layers.
        groups: Checkpointed groups.
        names: Family of the kernels.
        steps: How many.
        micro_batches: Per step.
        evaluations: Forward passes without a backward, at the end of each step.
        threads: ``two``: autograd launches from its own thread; ``one``: from the forward's;
            ``none``: no record of any launch.
        graphs: Launch each pass (``passes``) or each step (``steps``) as one graph.
        annotations: Name of the range around each step, with the number in it; empty for none.
        missing: Kernels at the beginning whose launch was not recorded.
    """

    layers: int
    groups: Sequence[Group] = ()
    names: Names = FLASH_2
    steps: int = 3
    micro_batches: int = 1
    evaluations: int = 0
    threads: Literal["two", "one", "none"] = "two"
    graphs: Literal["", "passes", "steps"] = ""
    annotations: str = "ProfilerStep#{}"
    missing: int = 0


def recorded(layout: Layout) -> list[Event]:
    """The events of such a recording, GEMMs between the attention kernels."""
    recording = _Recording(layout)
    for number in range(layout.steps):
        recording.step(number)
    return recording.events


class _Recording:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.events: list[Event] = []
        self._clock = itertools.count(1000, 20)
        self._correlation = itertools.count(1)
        self._left_out = layout.missing

    def step(self, number: int) -> None:
        layout = self.layout
        begin = next(self._clock)
        graph = next(self._correlation) if layout.graphs == "steps" else None
        if graph is not None:
            self._launch("cudaGraphLaunch", graph, 1)
        for _ in range(layout.micro_batches):
            self._pass(["forward"] * layout.layers, graph)
            self._pass(backward_pass(layout.layers, layout.groups), graph)
        for _ in range(layout.evaluations):
            self._pass(["forward"] * layout.layers, graph)
        end = next(self._clock)
        if layout.annotations:
            self._add(
                "user_annotation", layout.annotations.format(number + 7), 1, begin, end - begin
            )

    def _pass(self, kinds: Sequence[Kind], graph: int | None) -> None:
        own = "backward" in kinds and self.layout.threads == "two"
        thread = 2 if own else 1
        if self.layout.graphs == "passes":
            graph = next(self._correlation)
            self._launch("cudaGraphLaunch", graph, thread)
        for kind in kinds:
            for name in self._kernels(kind):
                correlation = next(self._correlation) if graph is None else graph
                if graph is None:
                    self._launch("cudaLaunchKernel", correlation, thread)
                self._add(
                    "kernel", name, 7, next(self._clock) + 9, 8, pid=0,
                    args={"correlation": correlation, "stream": 7},
                )  # fmt: skip

    def _kernels(self, kind: Kind) -> Iterator[str]:
        names = self.layout.names
        yield "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"
        if kind == "backward":
            yield from (*names.before, names.backward, *names.behind)
        else:
            yield names.forward
        yield "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn"

    def _launch(self, name: str, correlation: int, thread: int) -> None:
        if self.layout.threads == "none":
            return
        if self._left_out:
            self._left_out -= 1
            return
        args = {"correlation": correlation}
        self._add("cuda_runtime", name, thread, next(self._clock), 2, args=args)

    def _add(
        self, category: str, name: str, thread: int, start: int, length: int, pid: int = 100,
        args: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": thread}
            | {"ts": start, "dur": length, "args": args or {}}
        )
