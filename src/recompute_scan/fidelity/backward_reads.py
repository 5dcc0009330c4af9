"""The tensors of a recompute that the backward pass uses: only these can change a gradient.

A non-reentrant checkpoint keeps the forward's nodes, and gives them the tensors that the nodes of
the recompute save, one for one and in order. The backward pass asks for some of them. So a
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

from recompute_scan.fidelity.operators import tensors
from recompute_scan.fidelity.tensors import unseen

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
# Makes a function of one of torch's and one of ours around it, which cannot fail for the script.
Around = Callable[..., Callable[..., Any]]
# Returns its argument. A method of a dictionary: in a Python function something could go wrong.
AS_IT_IS: Callable[[torch.Tensor], Any] = functools.partial(dict[None, Any]().get, None)


class Saving(Protocol):
    """A run that wants to know of the tensors that its nodes save."""

    def saved(self, tensor: torch.Tensor, place: int) -> None:
        """The next tensor is saved."""


class HandedTensors(Struct):
    """The tensors that one run of a non-reentrant checkpoint saves, in order.

    Attributes:
        run: The run that sees each of them.
        count: Tensors so far.
        used: Numbers of the tensors that the backward pass has asked for.
    """

    run: Saving | None = None
    count: int = 0
    used: set[int] = field(default_factory=set)
    _places: dict[int, int] = field(default_factory=dict)

    def pack(self, call: Pack, tensor: torch.Tensor) -> Any:
        """Around the checkpoint's own hook, which may end the recompute by an exception."""
        place = self.count
        self.count += 1
        if self.run is not None:
            self.run.saved(tensor, place)
        packed = call(tensor)
        if not isinstance(packed, torch.Tensor):  # a forward's: what backward asks with
            self._places[id(packed)] = place  # each is noted, so an older one's is overwritten
        return packed

    def unpack(self, call: Unpack, packed: Any) -> torch.Tensor:
        """Around the checkpoint's other hook."""
        if not isinstance(packed, torch.Tensor) and id(packed) in self._places:
            self.used.add(self._places[id(packed)])
        return call(packed)


def hook_classes() -> Iterator[type[torch.autograd.graph.saved_tensors_hooks]]:
    """The classes of torch's non-reentrant checkpoint for the tensors that are saved, if any."""
    for name in ("_checkpoint_hook", "_recomputation_hook"):
        found = getattr(torch.utils.checkpoint, name, None)
        if isinstance(found, type) and issubclass(found, torch.autograd.graph.saved_tensors_hooks):
            yield found


def see_what_is_handed(
    hooks: torch.autograd.graph.saved_tensors_hooks, around: Around
) -> HandedTensors:
    """Note the tensors that pass both hooks, which are about to be put in place."""
    handed = HandedTensors()
    hooks.pack_hook = around(hooks.pack_hook, handed.pack, named=False)
    hooks.unpack_hook = around(hooks.unpack_hook, handed.unpack, named=False)
    return handed


class SavedGraph(Struct, frozen=True):
    """The recomputed nodes that the gradient of one output runs through.

    Attributes:
        nodes: Their numbers.
        saved: The tensors that they have saved.
        unknown: Whether some of these could not be seen.
    """

    nodes: frozenset[int]
    saved: tuple[torch.Tensor, ...]
    unknown: bool


def graphs_below(outputs: Sequence[torch.Tensor], first: int) -> list[SavedGraph]:
    """The graph below each output, of nodes with this number or a later one."""
    seeing = _Seeing()
    try:
        return [_graph_below(output.grad_fn, first, seeing) for output in outputs]
    finally:
        seeing.forget()


def _graph_below(root: Any, first: int, seeing: _Seeing) -> SavedGraph:
    nodes: dict[Any, int] = {}
    saved: list[torch.Tensor] = []
    unknown = False
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes or (number := node._sequence_nr()) < first:
            continue
        nodes[node] = number
        found = seeing.saved_by(node)
        unknown = unknown or found is None
        saved += found or ()
        waiting += [following for following, _ in node.next_functions]
    return SavedGraph(frozenset(nodes.values()), tuple(saved), unknown)


class _Seeing:
    """Sees the tensors that nodes have saved, each node once."""

    def __init__(self) -> None:
        self._found: list[torch.Tensor] = []
        self._known: dict[Any, list[torch.Tensor] | None] = {}

    def saved_by(self, node: Any) -> list[torch.Tensor] | None:
        """The tensors that a node has saved; ``None`` where they cannot be seen."""
        if node not in self._known:
            self._known[node] = self._look(node)
        return self._known[node]

    def forget(self) -> None:
        """Hold no node and no tensor any more: a hook on a saved tensor holds this."""
        self._found = []
        self._known.clear()

    def _look(self, node: Any) -> list[torch.Tensor] | None:
        if node.name() == "CopySlices":  # around another node, which cannot be reached
            return None
        kind: Any = type(node)
        own = isinstance(node, torch.autograd.function.BackwardCFunction)
        self._found = found = tensors(tuple(vars(node).values())) if own else []
        for name in _slots(kind):
            held = getattr(node, name)
            for one in held if isinstance(held, (list, tuple)) else (held,):
                if hasattr(one, "unpack_hook"):
                    # Looked at only: behind hooks torch no longer sees it written in place.
                    if one.unpack_hook is not None:  # of the script's, or of a checkpoint
                        return None
                    if one.data is not None:
                        found.append(one.data)
                    continue
                try:  # an older torch's
                    one.register_hooks(self._pack, AS_IT_IS)
                except RuntimeError as error:
                    # Either nothing is saved, or hooks have it.
                    if "already been set" in str(error):
                        return None
        return found

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Called at once, and never again."""
        self._found.append(tensor)
        return tensor


class Arrives:
    """Whether an output gets a gradient that is not zero."""

    def __init__(self, output: torch.Tensor, around: Around) -> None:
        self._seen = False
        output.register_hook(around(AS_IT_IS, self._see, named=False))  # type: ignore[no-untyped-call]

    def __call__(self) -> bool:
        return self._seen

    def _see(self, call: Pack, gradient: torch.Tensor) -> Any:
        self._seen = self._seen or bool(unseen(torch.any, gradient))
        return call(gradient)


@functools.lru_cache(maxsize=1024)
def _slots(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
