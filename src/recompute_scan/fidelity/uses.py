"""What the backward pass uses of a recompute: only a difference in that changes a gradient.

A non-reentrant checkpoint keeps the forward's nodes, and hands them the tensors that those of the
recompute save, one for one and in order. The backward pass uses those that it asks for. So a
difference counts where the n-th tensor saved differs from the forward's n-th, and is asked for.

A reentrant one runs backward through the recompute's own nodes. There a difference counts where a
node below an output that gets a gradient has saved what differs, or was itself called differently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from msgspec import Struct, field

from recompute_scan.fidelity.fingerprint import unseen
from recompute_scan.fidelity.operators import tensors

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


class Saving(Protocol):
    """A run that wants to know of the tensors that its nodes save."""

    def saved(self, tensor: torch.Tensor, place: int) -> None:
        """The next tensor is saved."""


class Handed(Struct):
    """What one run of a non-reentrant checkpoint saves, in order.

    Attributes:
        run: Who wants to know of it.
        count: Tensors so far.
        used: Numbers of those that the backward pass has asked for.
    """

    run: Saving | None = None
    count: int = 0
    used: set[int] = field(default_factory=set)

    def pack(self, original: Pack, tensor: torch.Tensor) -> tuple[int, Any]:
        """In place of the checkpoint's own hook, which may end the recompute by an exception."""
        place = self.count
        self.count += 1
        if self.run is not None:
            self.run.saved(tensor, place)
        return place, original(tensor)

    def unpack(self, original: Unpack, packed: tuple[int, Any]) -> torch.Tensor:
        """In place of the checkpoint's other hook."""
        place, inner = packed
        self.used.add(place)
        return original(inner)


def hook_classes() -> Iterator[type[torch.autograd.graph.saved_tensors_hooks]]:
    """Those by which torch's non-reentrant checkpoint sees what is saved, where it has them."""
    for name in ("_checkpoint_hook", "_recomputation_hook"):
        found = getattr(torch.utils.checkpoint, name, None)
        if isinstance(found, type) and issubclass(found, torch.autograd.graph.saved_tensors_hooks):
            yield found


def see_what_is_handed(hooks: torch.autograd.graph.saved_tensors_hooks) -> Handed:
    """Let both hooks, about to be put in place, tell what passes."""
    handed = Handed()
    hooks.pack_hook = functools.partial(handed.pack, hooks.pack_hook)
    hooks.unpack_hook = functools.partial(handed.unpack, hooks.unpack_hook)
    return handed


class Graph(Struct, frozen=True):
    """The recomputed nodes that the gradient of one output runs through.

    Attributes:
        nodes: Their numbers.
        saved: What they have saved.
        unknown: Whether some of that could not be seen.
    """

    nodes: frozenset[int]
    saved: tuple[torch.Tensor, ...]
    unknown: bool


def graphs_below(outputs: Sequence[torch.Tensor], first: int) -> list[Graph]:
    """The graph below each output, of nodes with this number or a later one."""
    known: dict[Any, list[torch.Tensor] | None] = {}
    return [_graph_below(output.grad_fn, first, known) for output in outputs]


def _graph_below(root: Any, first: int, known: dict[Any, list[torch.Tensor] | None]) -> Graph:
    nodes: set[Any] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes or node._sequence_nr() < first:
            continue
        nodes.add(node)
        if node not in known:
            known[node] = _saved_by(node)
        waiting += [following for following, _ in node.next_functions]
    saved = [known[node] for node in nodes]
    return Graph(
        frozenset(node._sequence_nr() for node in nodes),
        tuple(tensor for some in saved for tensor in some or ()),
        unknown=None in saved,
    )


def _saved_by(node: Any) -> list[torch.Tensor] | None:
    """What a node has saved; ``None`` where it does not let that be seen."""
    if node.name() == "CopySlices":  # around another node, which nobody can ask for
        return None
    found = tensors(tuple(getattr(node, "__dict__", {}).values()))

    def see(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    kind: Any = type(node)
    for name in _slots(kind):
        held = getattr(node, name)
        for one in held if isinstance(held, (list, tuple)) else (held,):
            try:
                one.register_hooks(see, _as_it_is)
            except RuntimeError as error:
                # Either there is none, or hooks of the script's, or of a checkpoint, have it.
                if "already been set" in str(error):
                    return None
    return found


class Arrives:
    """Whether an output gets a gradient that is not zero."""

    def __init__(self, output: torch.Tensor) -> None:
        self._seen = False
        output.register_hook(self._see)  # type: ignore[no-untyped-call]

    def __call__(self) -> bool:
        return self._seen

    def _see(self, gradient: torch.Tensor) -> None:
        self._seen = self._seen or bool(unseen(torch.any, gradient))


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@functools.lru_cache(maxsize=1024)
def _slots(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
